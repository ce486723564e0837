"""Metrics of whole trainings, equal on every number of ranks and under every technique, and those of scored rows."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import f1_score, matthews_corrcoef, roc_auc_score

from ringmaster.tasks.evaluation.scores import MetricRows, estimate
from ringmaster.techniques import EvaluationSpec, OptimizerSpec
from ringmaster.techniques.context_parallel import ContextParallel
from ringmaster.techniques.metric import metric_named
from ringmaster.techniques.processes.gang_events import EvaluationReported
from ringmaster.techniques.scoring import score_together
from tests.integration.workbench import LLAMA, VIT, Layout
from tests.matrix import matrix

VARIED = replace(VIT, config={**VIT.config, "initializer_range": 0.5})  # predicts several classes at once
CLASSES = ("f1", "matthews", "auroc", "accuracy")
TOKENS = ("exact_match", "rouge_l", "accuracy")


def metrics_of(trained):
    assert trained.outcome.status == "done", trained.outcome
    return trained.outcome.result.metrics


@pytest.mark.parametrize(
    "layout",
    matrix(
        [
            Layout("ddp", 2, {"micro_batch": 2}),
            Layout("ddp", 3, {"micro_batch": 3}),
            Layout("fsdp", 2, {"reshard": True}),
            Layout("zero1", 4),
        ],
        quick=[Layout("ddp", 2, {"micro_batch": 2})],
    ),
)
def test_metrics_of_classes(bench, tmp_path, layout):
    """50 held-out rows are four global batches and two rows, of which a rank of three or four has none."""
    data = replace(bench.job(VARIED).data, held_out=0.03)
    evaluation = EvaluationSpec(metrics=CLASSES, max_batches=9)
    optimizer = OptimizerSpec(name="sgd", lr=1e-3)
    job = bench.job(VARIED, data=data, global_batch_size=12, num_steps=2, optimizer=optimizer, evaluation=evaluation)
    one = bench.reference(job)
    assert metrics_of(bench.train(job, layout, tmp_path)) == pytest.approx(metrics_of(one), rel=1e-4)

    scores = score_together({"it": Path(one.order.model_dir)}, job=job, cache_dir=bench.cache_dir).scores["it"].arrays
    true, predicted = scores["column.labels"], scores["predictions"]
    wanted = {
        "f1": f1_score(true, predicted, average="macro", zero_division=0),
        "matthews": matthews_corrcoef(true, predicted),
        "auroc": roc_auc_score(true, scores["probabilities"], multi_class="ovr", average="macro"),
        "accuracy": np.mean(true == predicted),
    }
    assert len(true) == 50
    assert metrics_of(one) == pytest.approx(wanted, rel=1e-5)
    for name in CLASSES:
        metric = metric_named(name)
        told = estimate(MetricRows(metric, {key: scores[key] for key in metric.sums}))
        assert told.value == pytest.approx(wanted[name], rel=1e-5)
        assert told.low < told.value < told.high


def test_jobs_with_other_batch_sizes_are_evaluated_on_the_same_rows(bench, tmp_path):
    """30 rows are not multiple of the batch sizes. A learning rate of 0 leaves the models equal."""
    evaluation = EvaluationSpec(metrics=("accuracy", "loss"), max_rows=30, at_steps=(1,))
    still = bench.job(VARIED, num_steps=2, optimizer=OptimizerSpec(name="sgd", lr=0.0), evaluation=evaluation)
    found = {}
    for size, layout in ((4, Layout("single")), (16, Layout("ddp", 2, {"micro_batch": 4})), (64, Layout("single"))):
        trained = bench.train(replace(still, global_batch_size=size), layout, tmp_path / str(size))
        assert trained.outcome.result.num_rows == 30
        assert [each.num_rows for each in trained.events if isinstance(each, EvaluationReported)] == [30]
        found[size] = metrics_of(trained)
    assert found[16] == pytest.approx(found[4], rel=1e-5)
    assert found[64] == pytest.approx(found[4], rel=1e-5)
    one = bench.reference(replace(still, global_batch_size=4))
    scores = score_together({"it": Path(one.order.model_dir)}, job=still, cache_dir=bench.cache_dir).scores["it"].arrays
    assert len(scores["predictions"]) == 30
    assert np.mean(scores["column.labels"] == scores["predictions"]) == pytest.approx(found[4]["accuracy"])


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        Layout("ddp", 2, {"micro_batch": 2}),
        Layout("tensor", 2, {"sequence_parallel": True, "loss_parallel": False}),
        Layout("pipeline", 2, {"micro_batch": 2, "schedule": "1f1b"}),
    ],
    ids=str,
)
def test_metrics_of_tokens(bench, tmp_path, layout):
    job = bench.job(LLAMA, num_steps=3, evaluation=EvaluationSpec(metrics=TOKENS, max_batches=2))
    one = metrics_of(bench.reference(job))
    assert 0 < one["rouge_l"] < 1
    # Near-equal logits of another order of addition may predict another token.
    assert metrics_of(bench.train(job, layout, tmp_path)) == pytest.approx(one, abs=0.02)


def test_sequences_are_not_divided_where_a_metric_reads_them_whole(bench):
    job = bench.job(LLAMA, evaluation=EvaluationSpec(metrics=("loss",)))
    facts, shape = bench.facts(job), bench.shape(2)
    assert ContextParallel().supports(job, shape, facts) is None
    whole = replace(job, evaluation=EvaluationSpec(metrics=("loss", "exact_match")))
    assert ContextParallel().supports(whole, shape, facts) == (
        "the metric exact_match reads whole rows, and here each rank has some tokens of them"
    )

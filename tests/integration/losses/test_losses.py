"""Losses that jobs name: every technique that claims one trains the weights that `single` trains."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from ringmaster.codec import to_json
from ringmaster.features.adaptation.rewriting import EvaluationOrder
from ringmaster.tasks.cluster import Device
from ringmaster.tasks.evaluation.scores import score_models
from ringmaster.tasks.profiling.preflight_runs import GangEnvironment
from ringmaster.techniques import Adapter, DataSpec, EvaluationSpec, ModelSpec, registry
from ringmaster.techniques.data import prepare
from ringmaster.techniques.estimates.job_preflight import preflight_job, why_no_adaptation
from ringmaster.techniques.estimates.memory import Workload, copies_reference, predict_memory
from ringmaster.techniques.preflight_result import FROM_META_STEP, PreflightOrder
from ringmaster.techniques.training.fused.group_requirements import grouping_obstacle
from tests.integration.evaluating import evaluate_model
from tests.integration.losses.pairs import PAD, VOCAB_SIZE, preferences
from tests.integration.techniques.test_conformance import PLAIN_MESH
from tests.integration.workbench import (
    ADAMW,
    GPT2_WITH_DROPOUT,
    LLAMA,
    SGD,
    SINGLE,
    VIT,
    Layout,
    is_bit_equal,
    largest_difference,
)
from tests.matrix import matrix

PREFERENCES = DataSpec(factory="tests.integration.losses.pairs:preferences")
PASSAGES = DataSpec(factory="tests.integration.losses.pairs:passages")
TEXTS = DataSpec(factory="tests.integration.losses.pairs:texts")
UNPAIRED = DataSpec(factory="tests.integration.losses.pairs:unpaired")
COMPARED = DataSpec(factory="tests.integration.losses.pairs:compared")
TINY = replace(LLAMA, config={**LLAMA.config, "vocab_size": VOCAB_SIZE})
BERT = ModelSpec(
    architecture="BertModel",
    config={
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": VOCAB_SIZE,
    },
)
REWARD_MODEL = ModelSpec(
    architecture="LlamaForSequenceClassification", config={**TINY.config, "num_labels": 1, "pad_token_id": PAD}
)
LORA = Adapter(kind="lora", rank=4, alpha=8)
DEVICE = Device(kind="cpu", index=0, name="cpu", memory_bytes=2**32, cores=())
LAYOUTS = [
    Layout("single", 1, {"micro_batch": 3, "recompute": "full"}),
    Layout("ddp", 2, {"micro_batch": 2}),
    Layout("zero1", 2, {"micro_batch": 2}),
    Layout("zero2", 2, {"bucket_bytes": 1 << 12, "micro_batch": 2}),
    Layout("zero2", 2, {"bucket_bytes": 1 << 14, "micro_batch": 2, "every_micro_batch": True, "recompute": "full"}),
    Layout("fsdp", 2, {"reshard": True, "micro_batch": 2}),
    Layout("fsdp", 2, {"reshard": False, "micro_batch": 2, "recompute": "selective"}),
    Layout("fsdp_static", 2, {"reshard": True, "recompute": "full"}),
    Layout("offload", 1, {"num_slices": 2, "recompute": "full", "host_activations": True, "micro_batch": 4}),
    Layout("tensor", 2, {"micro_batch": 4, "sequence_parallel": True, "loss_parallel": False}),
    Layout("pipeline", 2, {"micro_batch": 2, "schedule": "1f1b"}),
    Layout("pipeline", 2, {"micro_batch": 4, "schedule": "gpipe", "recompute": "full"}),
    Layout("mesh", 4, {"micro_batch": 4, "pp": 1, "dp_shard": 2, "tp": 2, **PLAIN_MESH}),
    Layout("mesh", 4, {"micro_batch": 2, "pp": 2, "dp_shard": 2, "tp": 1, **PLAIN_MESH}),
]
CONTEXT = Layout("context", 2, {"micro_batch": 4, "exchange": "all_gather", "sharded": False})
EXACT = {"sgd": 5e-7, "adamw": 1e-4}
# Tokens that no pair of a step has get gradients near 0, of which AdamW's usual epsilon makes whole steps.
CALM_ADAMW = replace(ADAMW, options={"eps": 1e-6})


def preference_job(bench, loss, *, optimizer=CALM_ADAMW, **changes):
    return bench.job(TINY, data=PREFERENCES, loss=loss, optimizer=optimizer, clip_grad_norm=1.0, **changes)


def assert_trains_the_same(bench, job, layout, folder):
    trained, expected = bench.train(job, layout, folder), bench.reference(job)
    assert largest_difference(trained.weights, expected.weights) <= EXACT[job.optimizer.name]
    assert trained.losses == pytest.approx(expected.losses, rel=0, abs=5e-6)
    assert trained.outcome.result.metrics == pytest.approx(expected.outcome.result.metrics, abs=1e-5)


@pytest.mark.parametrize(
    "optimizer", [pytest.param(SGD, marks=pytest.mark.full), CALM_ADAMW], ids=lambda each: each.name
)
@pytest.mark.parametrize("adapter", matrix([None, LORA], quick=[LORA], ids=["full", "lora"]))
@pytest.mark.parametrize("layout", matrix(LAYOUTS, quick=[LAYOUTS[5]]))
def test_dpo(bench, tmp_path, layout, adapter, optimizer):
    """The reference is a frozen copy, or the model without its adapter."""
    job = preference_job(bench, "dpo", optimizer=optimizer, adapter=adapter, loss_options={"beta": 0.5})
    assert_trains_the_same(bench, job, layout, tmp_path)
    assert bench.reference(job).losses[-1] != bench.reference(job).losses[0]


@pytest.mark.full
@pytest.mark.parametrize("optimizer", [SGD, CALM_ADAMW], ids=lambda each: each.name)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("loss", ["orpo", "simpo"])
def test_losses_without_a_reference(bench, tmp_path, layout, loss, optimizer):
    assert_trains_the_same(bench, preference_job(bench, loss, optimizer=optimizer), layout, tmp_path)


def test_orpo_over_micro_batches_and_ranks(bench, tmp_path):
    assert_trains_the_same(bench, preference_job(bench, "orpo", optimizer=SGD), LAYOUTS[1], tmp_path)


@pytest.mark.parametrize(
    "optimizer", [pytest.param(SGD, marks=pytest.mark.full), CALM_ADAMW], ids=lambda each: each.name
)
@pytest.mark.parametrize("layout", matrix(LAYOUTS, quick=[LAYOUTS[1]]))
def test_rag_sequence(bench, tmp_path, layout, optimizer):
    job = preference_job(bench, "rag-sequence", optimizer=optimizer, loss_options={"num_passages": 2})
    assert_trains_the_same(bench, replace(job, data=PASSAGES), layout, tmp_path)


@pytest.mark.parametrize(
    "optimizer", [pytest.param(SGD, marks=pytest.mark.full), CALM_ADAMW], ids=lambda each: each.name
)
@pytest.mark.parametrize("adapter", matrix([None, LORA], quick=[None], ids=["full", "lora"]))
@pytest.mark.parametrize("layout", matrix(LAYOUTS, quick=[LAYOUTS[1], LAYOUTS[11]]))
def test_kto(bench, tmp_path, layout, adapter, optimizer):
    """The baseline is one number of the whole batch, however it is divided."""
    options = {"beta": 0.5, "desirable_weight": 1.5}
    job = preference_job(bench, "kto", optimizer=optimizer, adapter=adapter, loss_options=options)
    job = replace(job, data=UNPAIRED, evaluation=replace(job.evaluation, metrics=("loss", "preference_accuracy")))
    assert_trains_the_same(bench, job, layout, tmp_path)
    plain = bench.reference(replace(job, loss_options={**options, "loss_type": "apo_zero_unpaired"}))
    assert plain.losses[0] == pytest.approx(bench.reference(job).losses[0], abs=1e-6)  # the divergence begins with 0
    assert plain.losses[-1] != bench.reference(job).losses[-1]


def test_an_evaluation_of_kto_does_not_depend_on_how_its_rows_are_batched(bench, tmp_path):
    """A short row also gets the whole completion of a long row before it, which is in another batch."""
    file = tmp_path / "judged.jsonl"
    texts = ["".join(random.Random(i).choices("abcdefgh", k=2 + 398 * (i % 2))) for i in range(24)]
    rows = [{"prompt": f"why {i} ", "completion": text, "label": True} for i, text in enumerate(texts)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = bench.job(
        replace(LLAMA, config={**LLAMA.config, "vocab_size": 320}),
        data=DataSpec(path=str(file), kind="unpaired-preference", vocab_size=300, held_out=0.5),
        loss="kto",
        optimizer=replace(ADAMW, lr=0.01),
        global_batch_size=4,
        evaluation=EvaluationSpec(metrics=("loss", "preference_accuracy")),
    )
    trained = bench.train(job, SINGLE, tmp_path)
    order = EvaluationOrder(
        job=job,
        data=to_json(prepare(job.data, cache_dir=bench.cache_dir)),
        model_dir=trained.order.model_dir,
        slot=replace(bench.slot(0), cores=()),
        cache_dir=str(bench.cache_dir),
    )
    expected = trained.outcome.result.metrics
    for size in (1, 3, 12):
        found = evaluate_model(replace(order, job=replace(job, global_batch_size=size)))
        assert found == pytest.approx(expected, abs=1e-6)
    without = replace(job, loss_options={"loss_type": "apo_zero_unpaired"})
    assert abs(evaluate_model(replace(order, job=without))["loss"] - expected["loss"]) > 1e-4


@pytest.mark.parametrize(
    "optimizer", [pytest.param(SGD, marks=pytest.mark.full), CALM_ADAMW], ids=lambda each: each.name
)
@pytest.mark.parametrize("adapter", matrix([None, LORA], quick=[None], ids=["full", "lora"]))
@pytest.mark.parametrize("layout", matrix(LAYOUTS, quick=[LAYOUTS[5]]))
def test_reward_models(bench, tmp_path, layout, adapter, optimizer):
    adapter = adapter and replace(adapter, modules_to_save=("score",))
    options = {"center_rewards_coefficient": 0.01}
    job = preference_job(bench, "bradley-terry", optimizer=optimizer, adapter=adapter, loss_options=options)
    evaluation = replace(job.evaluation, metrics=("loss", "reward_accuracy"))
    job = replace(job, model=REWARD_MODEL, data=COMPARED, evaluation=evaluation)
    if layout.technique in ("tensor", "pipeline", "mesh"):
        reason = registry.load(layout.path).supports(job, bench.shape(layout.num_devices), bench.facts(job))
        assert reason is not None
        assert "causal language models" in reason or "architecture" in reason
        return
    assert_trains_the_same(bench, job, layout, tmp_path)
    assert bench.reference(job).losses[-1] < bench.reference(job).losses[0]


@pytest.mark.full
@pytest.mark.parametrize("model", [LLAMA, VIT], ids=["llama", "vit"])
@pytest.mark.parametrize("layout", [*LAYOUTS, CONTEXT], ids=str)
def test_smoothed_cross_entropy(bench, tmp_path, layout, model):
    job = bench.job(model, loss="cross-entropy", loss_options={"label_smoothing": 0.2})
    technique = registry.load(layout.path)
    if technique.supports(job, bench.shape(layout.num_devices), bench.facts(job)) and layout.technique != "offload":
        assert model is VIT
        return
    assert_trains_the_same(bench, job, layout, tmp_path)


def test_contrastive_batches_stay_whole(bench, tmp_path):
    """Negatives come from the whole batch, so that only undivided layouts are offered."""
    job = bench.job(BERT, data=TEXTS, loss="contrastive")
    facts = bench.facts(job)
    assert "dividing a batch changes its gradients" in facts.whole_batch
    for layout in [*LAYOUTS, CONTEXT]:
        reason = registry.load(layout.path).supports(job, bench.shape(layout.num_devices), facts)
        assert (reason is None) == (layout.technique == "single"), (layout, reason)
    single = registry.load(SINGLE.path)
    assert {config["micro_batch"] for config in single.configs(job, bench.shape(1), facts)} == {8}
    trained = bench.train(replace(job, num_steps=20, optimizer=ADAMW), SINGLE, tmp_path)
    assert trained.losses[-1] < trained.losses[0]
    recomputed = Layout("single", 1, {"recompute": "full"})
    found = bench.train(job, recomputed, tmp_path / "recomputed")
    assert largest_difference(found.weights, bench.reference(job).weights) <= EXACT["sgd"]


@pytest.mark.parametrize("adapter", [None, pytest.param(LORA, marks=pytest.mark.full)], ids=["full", "lora"])
def test_a_restored_job_compares_with_its_first_weights(bench, tmp_path, adapter):
    job = preference_job(bench, "dpo", adapter=adapter)
    bench.train(job, SINGLE, tmp_path, last_step=3)
    second = bench.train(job, SINGLE, tmp_path)
    assert second.outcome.result.first_step == 3
    assert second.losses == bench.reference(job).losses[3:]
    assert is_bit_equal(second.weights, bench.reference(job).weights)


@pytest.mark.parametrize(
    "adapter",
    [LORA, *(pytest.param(Adapter(kind=kind), marks=pytest.mark.full) for kind in ("ia3", "prefix"))],
    ids=lambda adapter: adapter.kind,
)
def test_the_first_loss_of_dpo_is_log_2(bench, adapter):
    """Before the first step, the model and its reference are one (a prefix is drawn at random)."""
    job = preference_job(bench, "dpo", adapter=adapter)
    losses = bench.reference(job).losses
    assert losses[0] == pytest.approx(0.693147, abs=1e-5 if adapter.kind != "prefix" else 0.5)
    assert losses[1] != losses[0]


@pytest.mark.full
def test_a_copy_and_the_model_without_its_adapter_are_one_reference(bench, tmp_path):
    job = preference_job(bench, "dpo", adapter=LORA)
    head = replace(LORA, modules_to_save=("model.norm",))
    switched, copied = bench.reference(job), bench.reference(replace(job, adapter=head, optimizer=SGD))
    assert copied.losses[0] == pytest.approx(switched.losses[0], abs=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("precision", ["bf16", "bf16-params"])
@pytest.mark.parametrize("adapter", [None, LORA], ids=["full", "lora"])
def test_half_precision_compares_with_as_rounded_weights(bench, precision, adapter):
    job = preference_job(bench, "dpo", adapter=adapter, precision=precision)
    assert bench.reference(job).losses[0] == pytest.approx(0.693147, abs=1e-5)


def test_dropout_is_off_under_preferences(bench):
    model = replace(GPT2_WITH_DROPOUT, config={**GPT2_WITH_DROPOUT.config, "vocab_size": VOCAB_SIZE})
    job = bench.job(model, data=PREFERENCES, loss="dpo")
    assert not bench.facts(job).has_dropout
    assert bench.reference(job).losses[0] == pytest.approx(0.693147, abs=1e-6)


@pytest.mark.parametrize("adapter", [LORA, pytest.param(None, marks=pytest.mark.full)], ids=["lora", "full"])
def test_an_evaluation_on_request_finds_the_reference(bench, tmp_path, adapter):
    job = preference_job(bench, "dpo", adapter=adapter, optimizer=replace(ADAMW, lr=0.01))
    base = None if adapter is None else bench.reference(preference_job(bench, "simpo")).order.model_dir
    trained = bench.train(job, SINGLE, tmp_path, weights_from=base)
    order = EvaluationOrder(
        job=job,
        data=to_json(prepare(job.data, cache_dir=bench.cache_dir)),
        model_dir=trained.order.model_dir,
        slot=replace(bench.slot(0), cores=()),
        cache_dir=str(bench.cache_dir),
    )
    expected = trained.outcome.result.metrics
    assert abs(expected["loss"] - 0.693147) > 1e-4
    assert evaluate_model(order) == pytest.approx(expected, abs=1e-6)
    if adapter is None:  # the base that the model began with is not known here
        assert math.isnan(evaluate_model(replace(order, job=replace(job, base="another")))["loss"])


@pytest.mark.parametrize("loss", ["dpo", pytest.param("orpo", marks=pytest.mark.full)])
def test_rows_are_scored_by_what_is_known_of_them(bench, tmp_path, loss):
    job = preference_job(bench, loss)
    folder = Path(bench.reference(job).order.model_dir)
    environment = GangEnvironment(server=bench.server, devices=(DEVICE,), cache_dir=bench.cache_dir)
    data = to_json(prepare(job.data, cache_dir=bench.cache_dir))
    found = score_models({"it": folder}, job=job, data=data, environment=environment, device=DEVICE)
    if loss == "dpo":  # nobody knows any more which weights a model without a base began with
        assert "the weights that it began with, which are not known" in found.faults["it"]
        return
    scores = found.scores["it"]
    assert scores.kind == "other"
    assert "loss_sums" in scores.sums
    _, held_out = preferences()
    labelled = [int((held_out[i]["labels"] != -100).sum()) for i in range(scores.num_rows)]
    assert scores.sums["labelled"].tolist() == labelled


def forecasts_of(bench, tmp_path, jobs):
    """Returns the bytes that the memory estimates of jobs predict on one device."""
    order = PreflightOrder(
        jobs=tuple(jobs),
        shapes=(bench.shape(1),),
        techniques={"single": registry.BUILTIN["single"]},
        cache_dir=str(tmp_path),
        forecast_all=True,
    )
    for job in jobs:
        data = prepare(job.data, cache_dir=tmp_path)
        assert [each.shape for each in data.tensors] == [(2, 24), (2, 24)]
        facts = bench.facts(job)
        workload = Workload(
            job=job, data=to_json(data), facts=facts, techniques=order.techniques, cache_dir=str(tmp_path)
        )
        technique = registry.load(SINGLE.path)
        (estimate,) = predict_memory(workload, [(technique, {"micro_batch": 1, "recompute": "none"}, bench.shape(1))])
        assert estimate.source == FROM_META_STEP, estimate.message
        yield estimate.device_bytes


def test_memory_estimates_know_the_frozen_copy(bench, tmp_path):
    model = replace(TINY, config={**TINY.config, "hidden_size": 128, "intermediate_size": 512})
    alone = preference_job(bench, "simpo")
    jobs = [replace(job, model=model) for job in (alone, replace(alone, loss="dpo"))]
    without, beside = forecasts_of(bench, tmp_path, jobs)
    assert beside - without == pytest.approx(bench.facts(jobs[0]).parameter_bytes, rel=0.2)
    assert copies_reference(jobs[1])
    assert not copies_reference(jobs[0])


# What techniques refuse of these jobs is compared with the reasons below, and for `contrastive` above.
@pytest.mark.full
def test_a_batch_of_pairs_is_surveyed(bench, tmp_path):
    jobs = [
        preference_job(bench, "dpo"),
        preference_job(bench, "orpo", adapter=LORA, name="adapted"),
        bench.job(BERT, data=TEXTS, loss="contrastive", name="texts"),
    ]
    order = PreflightOrder(
        jobs=tuple(jobs),
        shapes=(bench.shape(1), bench.shape(2)),
        techniques=registry.dotted_paths(),
        cache_dir=str(tmp_path),
    )
    found = {job.name: {each.technique for each in preflight_job(job, order).candidates} for job in jobs}
    assert {"single", "ddp", "pipeline"} <= found["tiny"]
    assert {"single", "ddp", "pipeline"} <= found["adapted"]
    assert found["texts"] == {"single"}


def test_techniques_refuse_what_they_cannot_train(bench):
    job = preference_job(bench, "dpo")
    context = registry.load(CONTEXT.path)
    assert "the loss dpo reads whole sequences" in context.supports(job, bench.shape(2), bench.facts(job))
    assert "copy of the initial weights" in why_no_adaptation(context, job)
    assert why_no_adaptation(context, replace(job, adapter=LORA)) is None
    smoothed = bench.job(loss="cross-entropy", loss_options={"label_smoothing": 0.1})
    assert context.supports(smoothed, bench.shape(2), bench.facts(smoothed)) is None
    adapted = [replace(job, adapter=LORA, name=name, loss=loss) for name, loss in (("a", "dpo"), ("b", "orpo"))]
    assert "a has the loss dpo, which compares sequences" in grouping_obstacle(adapted, bench.facts(adapted[0]))


@pytest.mark.parametrize(("kind", "loss"), [("preference", "dpo"), ("embedding", "contrastive")])
def test_pairs_of_a_file(bench, tmp_path, kind, loss):
    """The kinds of data that make pairs, of rows of different lengths."""
    keys = ("prompt", "chosen", "rejected") if kind == "preference" else ("anchor", "positive")
    file = tmp_path / "pairs.jsonl"
    lines = [
        {key: " ".join(f"word{(7 * i + j) % 11}" for j in range(2 + (3 * i + len(key)) % 9)) for key in keys}
        for i in range(60)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = replace(LLAMA if kind == "preference" else BERT, config={**BERT.config, "vocab_size": 300})
    data = DataSpec(path=str(file), kind=kind, vocab_size=300)
    job = bench.job(model, data=data, loss=loss, optimizer=CALM_ADAMW)
    facts = bench.facts(job)
    if loss == "contrastive":
        assert "dividing a batch" in facts.whole_batch
        assert bench.reference(job).losses[-1] < bench.reference(job).losses[0]
        return
    assert facts.whole_batch == ""
    assert_trains_the_same(bench, job, Layout("ddp", 2, {"micro_batch": 2}), tmp_path)

"""Composition: jobs that train a common component as one job, under the rule that the documents state."""

import re
from dataclasses import replace

import pytest
import torch
import transformers
from torch.nn import functional

from ringmaster.errors import StepError
from ringmaster.features.composition.batch import composed
from ringmaster.techniques import EvaluationSpec, Job, ModelSpec
from ringmaster.techniques.data import fetch, open_data, prepare, sampler_of, width_of
from ringmaster.techniques.models.build import build_model
from tests.integration.kinds import BERT, spec_of
from tests.integration.techniques.test_conformance import LARGEST_DIFFERENCE
from tests.integration.workbench import ADAMW, SGD, SINGLE, Layout, is_bit_equal, largest_difference
from tests.matrix import matrix

WEIGHTS = (1.0, 0.5)


def two_jobs(folder, *, optimizer=SGD, dropout=0.0, **changes):
    """A classifier of texts with batches of 8, and one of tokens with batches of 4, which have BERT in common."""
    config = {**BERT, "hidden_dropout_prob": dropout}
    kinds = {
        "text-classification": "BertForSequenceClassification",
        "token-classification": "BertForTokenClassification",
    }
    return [
        Job(
            name=name,
            model=ModelSpec(architecture=kinds[kind], config=config),
            data=spec_of(kind, folder),
            optimizer=optimizer,
            num_steps=4,
            global_batch_size=size,
            evaluation=EvaluationSpec(metrics=("loss", "accuracy"), max_batches=1),
            seed=seed,
            **changes,
        )
        for seed, (name, kind, size) in enumerate(
            (("classify", "text-classification", 8), ("tag", "token-classification", 4))
        )
    ]


def composite_of(jobs):
    return composed("encoder", jobs, ["bert.encoder", "bert.encoder"], weights=WEIGHTS)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("rows")


def plain_loop(jobs, cache_dir, *, clip=None):
    """The rule in plain PyTorch: the weights of the composite after its steps, and the losses."""
    data = [prepare(job.data, cache_dir=cache_dir) for job in jobs]
    models = [build_model(job.model, data=own, seed=job.seed) for job, own in zip(jobs, data, strict=True)]
    models[1].bert.encoder = models[0].bert.encoder
    parameters = [*dict.fromkeys(p for model in models for p in model.parameters())]
    lr, name = jobs[0].optimizer.lr, jobs[0].optimizer.name
    optimizer = torch.optim.SGD(parameters, lr=lr) if name == "sgd" else torch.optim.AdamW(parameters, lr=lr)
    samples = [open_data(job.data, cache_dir=cache_dir, prepared=own)[0] for job, own in zip(jobs, data, strict=True)]
    losses = []
    for step in range(jobs[0].num_steps):
        total = 0.0
        for job, model, rows, weight in zip(jobs, models, samples, WEIGHTS, strict=True):
            indices = sampler_of(job, rows).indices(step)
            batch = fetch(rows, indices, width=width_of(rows, indices, multiple_of=8))
            logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits
            total = total + weight * functional.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten())
        losses.append(float(total.detach()))
        total.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        optimizer.zero_grad()
    named = [(f"part{i}.{k}", v) for i, model in enumerate(models) for k, v in model.state_dict().items()]
    return {name: value for name, value in named if not name.startswith("part1.bert.encoder.")}, losses


@pytest.mark.parametrize("optimizer", matrix([SGD, ADAMW], quick=[SGD], ids=["sgd", "adamw"]))
def test_a_composite_trains_what_a_plain_loop_trains(bench, folder, tmp_path, optimizer):
    jobs = two_jobs(folder, optimizer=optimizer, clip_grad_norm=0.5)
    expected, losses = plain_loop(jobs, bench.cache_dir, clip=0.5)
    trained = bench.train(composite_of(jobs), SINGLE, tmp_path)
    assert largest_difference(trained.weights, expected) <= LARGEST_DIFFERENCE[optimizer.name]
    assert trained.losses == pytest.approx(losses, abs=1e-6)


LAYOUTS = [
    Layout("single", 1, {"micro_batch": 2}),
    Layout("ddp", 2, {"micro_batch": 1}),
    Layout("zero1", 2),
    Layout("zero2", 2, {"bucket_bytes": 1 << 14, "micro_batch": 1}),
    Layout("fsdp", 2, {"reshard": True}),
    Layout("fsdp", 2, {"reshard": False, "micro_batch": 1, "recompute": "full"}),
    Layout("fsdp_static", 2, {"reshard": True}),
]


@pytest.mark.parametrize("layout", matrix(LAYOUTS, quick=[LAYOUTS[4]]))
def test_every_layout_trains_the_same_composite(bench, folder, tmp_path, layout):
    job = composite_of(two_jobs(folder, dropout=0.1))
    trained, expected = bench.train(job, layout, tmp_path), bench.reference(job)
    assert largest_difference(trained.weights, expected.weights) <= LARGEST_DIFFERENCE["sgd"]
    assert trained.losses == pytest.approx(expected.losses, abs=1e-6)
    assert trained.outcome.result.metrics == pytest.approx(expected.outcome.result.metrics, abs=1e-5)


# Composites are saved and resumed as all jobs are: see test_conformance.py.
@pytest.mark.full
@pytest.mark.parametrize("layout", [SINGLE, LAYOUTS[4]], ids=str)
def test_a_composite_resumes_bit_equal(bench, folder, tmp_path, layout):
    job = composite_of(two_jobs(folder, optimizer=ADAMW, dropout=0.1))
    whole = bench.train(job, layout, tmp_path / "whole")
    first = bench.train(job, layout, tmp_path / "halves", last_step=2)
    second = bench.train(job, layout, tmp_path / "halves")
    assert first.losses + second.losses == whole.losses
    assert is_bit_equal(second.weights, whole.weights)


def test_each_job_gets_its_model_with_the_common_component(bench, folder, tmp_path):
    composite, *parts = composed("encoder", two_jobs(folder), ["bert.encoder"] * 2, weights=WEIGHTS)
    whole = bench.train(composite, SINGLE, tmp_path / "encoder")
    models = []
    for part in parts:
        extracted = bench.train(
            part, Layout("rewrite"), tmp_path / part.name, weights_from=whole.order.model_dir, last_step=0
        )
        assert extracted.outcome.status == "done", extracted.outcome
        assert extracted.outcome.result.metrics.keys() == {"loss", "accuracy"}
        models.append(getattr(transformers, part.model.architecture).from_pretrained(extracted.order.model_dir))
    classifier, tagger = (model.state_dict() for model in models)
    common = {name for name in classifier if name.startswith("bert.encoder.")}
    assert common and all(torch.equal(classifier[name], tagger[name]) for name in common)
    assert torch.equal(tagger["classifier.weight"], whole.weights["part1.classifier.weight"])
    assert not torch.equal(
        classifier["bert.embeddings.word_embeddings.weight"], tagger["bert.embeddings.word_embeddings.weight"]
    )


def test_components_that_differ_are_refused_with_all_their_faults(folder, bench):
    jobs = two_jobs(folder)
    thin = replace(jobs[1].model, config={**BERT, "intermediate_size": 16})
    for changed, paths, words in (
        (jobs, ["bert.encoder", "bert.missing"], "job tag: its model has no module 'bert.missing'"),
        (jobs, ["bert.encoder", "bert.embeddings"], "it is a BertEmbeddings and not a BertEncoder"),
        (
            [jobs[0], replace(jobs[1], model=thin)],
            ["bert.encoder"] * 2,
            "intermediate.dense.weight is [16, 32], not [64, 32]",
        ),
    ):
        composite = composed("encoder", changed, paths, weights=WEIGHTS)[0]
        with pytest.raises(ValueError, match=re.escape(words)):
            bench.facts(composite)
    counting = replace(jobs[0], loss="cross-entropy", loss_options={"class_weights": (1.0, 2.0, 3.0)})
    composite = composed("encoder", [counting, jobs[1]], ["bert.encoder"] * 2, weights=WEIGHTS)[0]
    with pytest.raises(StepError, match="must know the count before the forward"):
        bench.facts(composite)

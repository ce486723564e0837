"""Composition: jobs that train a common component as one job, under the rule that the documents state."""

import pytest
import torch
from torch.nn import functional

from ringmaster.tasks.batch.shared_components import composed
from ringmaster.techniques import EvaluationSpec, Job, ModelSpec
from ringmaster.techniques.data import fetch, open_data, prepare, sampler_of, width_of
from ringmaster.techniques.models.build import build_model
from tests.integration.kinds import BERT, spec_of
from tests.integration.techniques.test_conformance import LARGEST_DIFFERENCE
from tests.integration.workbench import ADAMW, SGD, SINGLE, Layout, largest_difference

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
        losses.append(float(total))
        total.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        optimizer.zero_grad()
    named = [(f"part{i}.{k}", v) for i, model in enumerate(models) for k, v in model.state_dict().items()]
    return {name: value for name, value in named if not name.startswith("part1.bert.encoder.")}, losses


@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
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


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_trains_the_same_composite(bench, folder, tmp_path, layout):
    job = composite_of(two_jobs(folder, dropout=0.1))
    trained, expected = bench.train(job, layout, tmp_path), bench.reference(job)
    assert largest_difference(trained.weights, expected.weights) <= LARGEST_DIFFERENCE["sgd"]
    assert trained.losses == pytest.approx(expected.losses, abs=1e-6)
    assert trained.outcome.result["metrics"] == pytest.approx(expected.outcome.result["metrics"], abs=1e-5)

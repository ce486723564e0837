"""Distillation and pruning: equal training under every technique that supports them, and refusals of all others."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from ringmaster.features.adaptation.pruning import is_two_of_four
from ringmaster.techniques import AdaptationSpec, Job, registry
from ringmaster.techniques.estimates.job_preflight import why_no_adaptation
from ringmaster.techniques.job import ADAPTATIONS
from ringmaster.techniques.processes.gang_events import TrialMeasured
from tests.integration.workbench import (
    ADAMW,
    LLAMA,
    SGD,
    SINGLE,
    VIT,
    Layout,
    Trained,
    is_bit_equal,
    largest_difference,
)
from tests.matrix import matrix

WIDE = replace(LLAMA, config={**LLAMA.config, "hidden_size": 64, "intermediate_size": 96})
DISTILLED = AdaptationSpec(kind="distilled", teacher="teacher", teacher_model=WIDE, temperature=3.0, weight=0.7)
MAGNITUDE = AdaptationSpec(kind="pruned", method="magnitude", sparsity=0.6)
TWO_OF_FOUR = AdaptationSpec(kind="pruned", method="2:4")
EVERYWHERE = [
    Layout("single", 1, {"micro_batch": 3}),
    Layout("ddp", 2, {"micro_batch": 2}),
    Layout("fsdp", 2, {"reshard": True, "recompute": "full"}),
]
QUANTIZED = [(method, model) for method in ADAPTATIONS["quantized"] for model in (LLAMA, VIT)]
PLAIN_MESH = {"reshard": False, "sequence_parallel": False, "loss_parallel": False}
ELSEWHERE = [
    Layout("zero1", 2),
    Layout("zero2", 2, {"bucket_bytes": 1 << 12, "micro_batch": 2}),
    Layout("fsdp_static", 2, {"reshard": True}),
    Layout("offload", 1, {"num_slices": 2, "recompute": "full", "host_activations": True}),
    Layout("pipeline", 2, {"micro_batch": 2, "schedule": "1f1b"}),
    Layout("tensor", 2, {"micro_batch": 8, "sequence_parallel": True, "loss_parallel": True}),
    Layout("mesh", 4, {"micro_batch": 2, "pp": 2, "dp_shard": 2, "tp": 1, **PLAIN_MESH}),
    Layout("mesh", 4, {"micro_batch": 2, "pp": 1, "dp_shard": 2, "tp": 2, **PLAIN_MESH}),
]
EXACT = {"sgd": 2e-7, "adamw": 1e-4}


class Family:
    """A trained teacher or base, and the jobs that adapt it."""

    def __init__(self, bench, model):
        self.bench = bench
        self.parent = bench.reference(bench.job(model, name="parent"))

    def order(self, job: Job) -> dict:
        folder = self.parent.order.model_dir
        return {"parents": dict.fromkeys(job.parents, folder), "weights_from": folder if job.base else None}

    def train(self, job: Job, layout: Layout, folder, **changes) -> Trained:
        return self.bench.train(job, layout, folder, **self.order(job) | changes)

    def distilled(self, **changes) -> Job:
        return self.bench.job(**{"features": (DISTILLED,), **changes})

    def pruned(self, said: AdaptationSpec, **changes) -> Job:
        return self.bench.job(self.parent.order.job.model, base="parent", features=(said,), **changes)


@pytest.mark.parametrize("optimizer", matrix([SGD, ADAMW], quick=[ADAMW], ids=["sgd", "adamw"]))
@pytest.mark.parametrize("layout", matrix(EVERYWHERE, quick=EVERYWHERE[1:2]))
def test_a_student_learns_the_same_under_every_layout(bench, tmp_path, layout, optimizer):
    family = Family(bench, WIDE)
    job = family.distilled(optimizer=optimizer, clip_grad_norm=0.5)
    expected, found = (family.train(job, each, tmp_path / str(i)) for i, each in enumerate([SINGLE, layout]))
    assert largest_difference(found.weights, expected.weights) <= EXACT[optimizer.name]
    assert found.losses == pytest.approx(expected.losses, rel=0, abs=5e-6)
    assert found.outcome.result.metrics == pytest.approx(expected.outcome.result.metrics, abs=1e-5)


@pytest.mark.parametrize("said", matrix([MAGNITUDE, TWO_OF_FOUR], quick=[TWO_OF_FOUR], ids=lambda said: said.method))
@pytest.mark.parametrize("layout", matrix(EVERYWHERE, quick=EVERYWHERE[2:]))
def test_pruned_weights_stay_zero_and_the_others_learn_the_same(bench, tmp_path, layout, said):
    family = Family(bench, LLAMA)
    optimizer = replace(ADAMW, options={"weight_decay": 0.1})
    job = family.pruned(said, optimizer=optimizer, clip_grad_norm=0.1)
    expected, found = (family.train(job, each, tmp_path / str(i)) for i, each in enumerate([SINGLE, layout]))
    assert largest_difference(found.weights, expected.weights) <= EXACT["adamw"]
    for name, weight in found.weights.items():
        if "proj" in name:
            assert is_two_of_four(weight) == (said.method == "2:4")
            assert (weight == 0).float().mean() == pytest.approx(said.sparsity, abs=1e-3)
            assert torch.equal(weight == 0, expected.weights[name] == 0)
        else:
            assert weight.all()


@pytest.mark.full
@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("layout", ELSEWHERE, ids=str)
def test_other_techniques_teach_the_same(bench, tmp_path, layout, optimizer):
    test_a_student_learns_the_same_under_every_layout(bench, tmp_path, layout, optimizer)


@pytest.mark.full
@pytest.mark.parametrize("said", [MAGNITUDE, TWO_OF_FOUR], ids=lambda said: said.method)
@pytest.mark.parametrize("layout", [each for each in ELSEWHERE if each.technique != "zero2"], ids=str)
def test_other_techniques_keep_zeros_too(bench, tmp_path, layout, said):
    test_pruned_weights_stay_zero_and_the_others_learn_the_same(bench, tmp_path, layout, said)


def test_an_interrupted_student_goes_on_as_if_it_had_not_been(bench, tmp_path):
    family = Family(bench, WIDE)
    job = family.distilled()
    whole = family.train(job, SINGLE, tmp_path / "whole")
    family.train(job, SINGLE, tmp_path / "cut", last_step=2)
    rest = family.train(job, SINGLE, tmp_path / "cut")
    assert rest.outcome.result.first_step == 2
    assert is_bit_equal(rest.weights, whole.weights)


def test_a_student_is_scored_by_the_labels_alone_and_measured_beside_its_teacher(bench, tmp_path):
    family = Family(bench, WIDE)
    trained = family.train(family.distilled(), SINGLE, tmp_path)
    student, teacher = trained.outcome.result.compared
    assert (student["model"], teacher["model"]) == ("tiny", "teacher")
    assert student["metrics"] == pytest.approx(trained.outcome.result.metrics)
    assert teacher["metrics"] == pytest.approx(family.parent.outcome.result.metrics)
    assert student["weight_bytes"] < teacher["weight_bytes"]
    assert all(each["batch_s"] > 0 for each in (student, teacher))


def rewritten(family: Family, said: AdaptationSpec, folder, **changes) -> Trained:
    job = family.bench.job(family.parent.order.job.model, num_steps=0, features=(said,), **changes)
    trained = family.train(job, Layout("rewrite"), folder)
    assert trained.outcome.status == "done", trained.outcome
    assert trained.outcome.result.step == trained.outcome.result.first_step == 0
    return trained


@pytest.mark.skipif(find_spec("torchao") is None, reason="the extra torchao is not installed")
@pytest.mark.parametrize(
    ("method", "model"),
    matrix(QUANTIZED, quick=[QUANTIZED[0]], ids=lambda case: f"{case[0]}-{case[1].architecture}"),
)
def test_a_quantized_model_is_smaller_nearly_as_good_and_not_trained_further(bench, tmp_path, model, method):
    family = Family(bench, model)
    said = AdaptationSpec(kind="quantized", method=method)
    made = rewritten(family, said, tmp_path / "q", base="parent")
    own, parent = made.outcome.result.compared
    assert parent["metrics"] == pytest.approx(family.parent.outcome.result.metrics)
    assert own["metrics"]["loss"] == pytest.approx(parent["metrics"]["loss"], abs=0.01)
    assert own["metrics"] != parent["metrics"]
    assert own["weight_bytes"] < parent["weight_bytes"]
    assert any(tensor.dtype in (torch.int8, torch.int32) for tensor in made.weights.values())

    folder = made.order.model_dir
    again = bench.train(bench.job(model, base="q"), SINGLE, tmp_path / "again", weights_from=folder)
    assert again.outcome.status == "invalid"
    assert "quantize the result" in again.outcome.message
    twice = bench.job(model, num_steps=0, base="q", features=(said,))
    refused = bench.train(twice, Layout("rewrite"), tmp_path / "twice", weights_from=folder)
    assert refused.outcome.status == "invalid"
    assert "not rewritten further" in refused.outcome.message
    assert not (tmp_path / "twice" / "model").exists()


@pytest.mark.full
@pytest.mark.skipif(find_spec("torchao") is None, reason="the extra torchao is not installed")
@pytest.mark.parametrize("precision", ["bf16", "bf16-params"])
@pytest.mark.parametrize("method", ADAPTATIONS["quantized"])
def test_quantized_models_are_measured_in_every_precision(bench, tmp_path, method, precision):
    said = AdaptationSpec(kind="quantized", method=method)
    made = rewritten(Family(bench, LLAMA), said, tmp_path, base="parent", precision=precision)
    own, parent = made.outcome.result.compared
    assert own["metrics"]["loss"] == pytest.approx(parent["metrics"]["loss"], abs=0.02)


def test_pruning_alone_keeps_what_is_left_as_it_was(bench, tmp_path):
    family = Family(bench, LLAMA)
    made = rewritten(family, TWO_OF_FOUR, tmp_path, base="parent")
    own, parent = made.outcome.result.compared
    assert own["sparsity"] > 0.2 > parent["sparsity"] == 0
    for name, weight in made.weights.items():
        before = family.parent.weights[name]
        assert torch.equal(weight[weight != 0], before[weight != 0])
        assert "proj" not in name or is_two_of_four(weight)


NARROWED = [(LLAMA, {"num_hidden_layers": 1}), (LLAMA, {"intermediate_size": 16}), (VIT, {"intermediate_size": 16})]


@pytest.mark.parametrize(
    ("model", "size"),
    matrix(NARROWED, quick=NARROWED[1:2], ids=lambda case: f"{case[0].architecture}-{next(iter(case[1]))}"),
)
def test_a_model_is_narrowed_and_what_is_left_learns_from_it(bench, tmp_path, model, size):
    family = Family(bench, model)
    small = replace(model, config={**model.config, **size})
    said = AdaptationSpec(kind="pruned", method="structured")
    job = bench.job(small, num_steps=0, base="parent", features=(said,))
    made = family.train(job, Layout("rewrite"), tmp_path / "pruned")
    own, parent = made.outcome.result.compared
    assert own["weight_bytes"] < parent["weight_bytes"]
    assert parent["metrics"] == pytest.approx(family.parent.outcome.result.metrics)
    for name, weight in made.weights.items():
        theirs = family.parent.weights[name]
        assert torch.isin(weight, theirs).all(), "each number is one of the larger model's"
    teaches = AdaptationSpec(kind="distilled", teacher="parent", teacher_model=model)
    taught = bench.job(small, base="pruned", features=(teaches,))
    folders = {"pruned": made.order.model_dir, "parent": family.parent.order.model_dir}
    student = bench.train(taught, SINGLE, tmp_path / "s", parents=folders, weights_from=folders["pruned"])
    assert student.outcome.status == "done", student.outcome
    assert student.outcome.result.metrics["loss"] < own["metrics"]["loss"]
    refused = bench.job(replace(model, config={**model.config, "hidden_size": 16}), num_steps=0, features=(said,))
    outcome = family.train(replace(refused, base="parent"), Layout("rewrite"), tmp_path / "refused").outcome
    assert outcome.status == "invalid" and "hidden_size differs" in outcome.message


def test_models_are_merged_and_measured_beside_each(bench, tmp_path):
    family = Family(bench, LLAMA)
    other = bench.reference(bench.job(seed=1))
    folders = {"one": family.parent.order.model_dir, "two": other.order.model_dir}
    said = AdaptationSpec(kind="merged", method="average", parents=tuple(folders), weights=(3.0, 1.0))
    job = bench.job(num_steps=0, features=(said,))
    made = bench.train(job, Layout("rewrite"), tmp_path, parents=folders)
    assert [each["model"] for each in made.outcome.result.compared] == ["tiny", "one", "two"]
    for name, weight in made.weights.items():
        expected = 0.75 * family.parent.weights[name] + 0.25 * other.weights[name]
        assert torch.allclose(weight, expected, atol=1e-7)


def test_parents_that_do_not_fit_are_told(bench, tmp_path):
    folders = {name: bench.reference(bench.job(model)).order.model_dir for name, model in (("a", LLAMA), ("b", WIDE))}
    said = AdaptationSpec(kind="merged", method="average", parents=("a", "b"))
    made = bench.train(bench.job(num_steps=0, features=(said,)), Layout("rewrite"), tmp_path, parents=folders)
    assert made.outcome.status == "invalid"
    assert "does not fit" in made.outcome.message


def test_fresh_weights_never_stand_for_a_parent_that_is_missing(bench, tmp_path):
    folder = bench.reference(bench.job()).order.model_dir
    said = AdaptationSpec(kind="merged", method="average", parents=("a", "b"))
    made = bench.train(bench.job(num_steps=0, features=(said,)), Layout("rewrite"), tmp_path, parents={"a": folder})
    assert made.outcome.status == "invalid"  # which no other try mends
    assert "was not ordered" in made.outcome.message


def test_a_job_without_steps_is_tried_before_its_parents_are_there(bench, tmp_path):
    said = AdaptationSpec(kind="merged", method="average", parents=("a", "b"))

    def steer(gang, event):
        if isinstance(event, TrialMeasured):
            gang.send("stop")

    tried = bench.train(
        bench.job(num_steps=0, features=(said,)), Layout("rewrite"), tmp_path, purpose="trial", on_event=steer
    )
    assert tried.outcome.status == "done", tried.outcome
    (measured,) = tried.said("measured")
    assert all(measured.profile[key] > 0 for key in ("step_s", "export_s", "evaluate_s", "peak_bytes"))


def test_techniques_say_what_they_cannot_adapt(bench):
    def why(technique, job):
        return why_no_adaptation(registry.load(registry.dotted_path(technique)), job)

    student, pruned = bench.job(features=(DISTILLED,)), bench.job(features=(MAGNITUDE,), base="a")
    for technique in ("single", "ddp", "zero1", "fsdp", "fsdp_static", "offload", "pipeline", "tensor", "mesh"):
        assert why(technique, student) is why(technique, pruned) is why(technique, bench.job()) is None
    assert "teacher" in why("context", student)
    assert "masked" in why("zero2", pruned)
    assert "rewrite is for it" in why("single", replace(pruned, num_steps=0))
    rewrite, shape = registry.load(registry.dotted_path("rewrite")), bench.shape(1)
    assert rewrite.supports(replace(pruned, num_steps=0), shape, None) is None
    assert "trains steps" in rewrite.supports(pruned, shape, None)
    assert "one device" in rewrite.supports(replace(pruned, num_steps=0), bench.shape(2), None)

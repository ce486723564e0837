"""On-policy distillation: what a teacher says of a student's completions, and the weights that follow."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ringmaster.codec import to_json
from ringmaster.errors import StepError
from ringmaster.features.loss_teacher.job import LossTeacher
from ringmaster.features.on_policy.rollout import Rollout
from ringmaster.tasks.evaluation.scores import score_models
from ringmaster.tasks.profiling.preflight_runs import GangEnvironment
from ringmaster.techniques import DataSpec, EvaluationSpec, registry
from ringmaster.techniques.data import prepare
from ringmaster.techniques.estimates.job_preflight import preflight_job
from ringmaster.techniques.estimates.memory import Workload, predict_memory
from ringmaster.techniques.job import AdaptationSpec
from ringmaster.techniques.loss import loss_function
from ringmaster.techniques.models.build import build_model
from ringmaster.techniques.preflight_result import FROM_META_STEP, PreflightOrder
from ringmaster.techniques.training.token_sampling import EndTokens
from tests.integration.losses.prompt_rows import LORA, MODEL, prompt_data, repeated_text
from tests.integration.losses.test_losses import DEVICE
from tests.integration.workbench import ADAMW, LLAMA, SINGLE, Layout, is_bit_equal, largest_difference

LARGER = replace(LLAMA, config={**MODEL.config, "hidden_size": 48, "num_attention_heads": 4})
OPTIONS = {"max_new_tokens": 8}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    rows = [{"prompt": f"{repeated_text(i)} {i}:"} for i in range(40)]
    return prompt_data(tmp_path_factory.mktemp("prompts"), rows)


@pytest.fixture(scope="module")
def teacher(bench, prompts, tmp_path_factory):
    """The folder of a teacher with weights that no student begins with, and with the tokens of the prompts."""
    folder = tmp_path_factory.mktemp("teacher")
    prepared = prepare(prompts, cache_dir=bench.cache_dir)
    model = build_model(LARGER, data=prepared, seed=7)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)  # sure of what it says
    model.save_pretrained(folder)
    for file in prepared.tokenizer_dir.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def job_of(bench, prompts, teacher, *, options=None, **changes):
    plain = {"data": prompts, "loss": "on-policy-distillation", "loss_options": {**OPTIONS, **(options or {})}}
    evaluation = EvaluationSpec(max_batches=1, metrics=("loss",))
    job = bench.job(MODEL, **{**plain, "global_batch_size": 4, "optimizer": ADAMW, "evaluation": evaluation, **changes})
    feature = LossTeacher(job="large", model=LARGER)
    if teacher is not None:
        feature = LossTeacher(model=replace(LARGER, architecture=None, config={}, from_pretrained=str(teacher)))
    return job.with_features(feature)


@pytest.mark.parametrize(
    ("loss_type", "share"), [("divergence", 0.8), pytest.param("policy_gradient", 0.95, marks=pytest.mark.full)]
)
def test_the_student_comes_nearer_to_its_teacher(bench, prompts, teacher, loss_type, share):
    changes = {"num_steps": 40, "global_batch_size": 16, "optimizer": replace(ADAMW, lr=0.02)}
    job = job_of(bench, prompts, teacher, options={"loss_type": loss_type}, **changes)
    trained = bench.reference(job)
    assert trained.outcome.status == "done", trained.outcome
    assert sum(trained.losses[-5:]) < share * sum(trained.losses[:5])


@pytest.mark.parametrize(
    "layout",
    [
        Layout("single", 1, {"micro_batch": 1}),
        pytest.param(Layout("single", 1, {"micro_batch": 2, "recompute": "full"}), marks=pytest.mark.full),
        pytest.param(Layout("ddp", 2, {"micro_batch": 1}), marks=pytest.mark.full),
        pytest.param(Layout("zero1", 2, {"micro_batch": 2}), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_other_layouts_give_the_same_weights(bench, prompts, teacher, tmp_path, layout):
    job = job_of(bench, prompts, teacher, options={"beta": 0.5}, optimizer=replace(ADAMW, lr=1e-4))
    trained, expected = bench.train(job, layout, tmp_path), bench.reference(job)
    assert trained.losses == pytest.approx(expected.losses, rel=0, abs=1e-5)
    assert largest_difference(trained.weights, expected.weights) <= 1e-5
    assert trained.outcome.result.metrics == pytest.approx(expected.outcome.result.metrics)


@pytest.mark.full
def test_a_resumed_job_has_the_same_weights(bench, prompts, teacher, tmp_path):
    job = job_of(bench, prompts, teacher)
    bench.train(job, SINGLE, tmp_path, last_step=3)
    second = bench.train(job, SINGLE, tmp_path)
    assert second.losses == bench.reference(job).losses[3:]
    assert is_bit_equal(second.weights, bench.reference(job).weights)


def test_a_job_may_train_the_teacher(bench, prompts, teacher, tmp_path):
    named, pretrained = job_of(bench, prompts, None), job_of(bench, prompts, teacher)
    trained = bench.train(named, SINGLE, tmp_path, parents={"large": str(teacher)})
    assert trained.losses == bench.reference(pretrained).losses
    missing = bench.train(named, SINGLE, tmp_path / "missing")
    assert "the model of job large is not there. To fix: " in str(missing.outcome)


@pytest.mark.parametrize("adapter", [None, pytest.param(LORA, marks=pytest.mark.full)], ids=["full", "lora"])
def test_an_evaluation_afterwards_has_the_loss_of_the_one_in_training(bench, prompts, teacher, adapter, tmp_path):
    evaluation = EvaluationSpec(max_rows=8, metrics=("loss",))
    base = None
    if adapter is not None:
        build_model(MODEL, data=prepare(prompts, cache_dir=bench.cache_dir), seed=3).save_pretrained(tmp_path / "base")
        base = replace(MODEL, from_pretrained=str(tmp_path / "base"), config={})
    job = job_of(bench, prompts, teacher, evaluation=evaluation, adapter=adapter)
    job = job if base is None else replace(job, model=base)
    trained = bench.reference(job)
    environment = GangEnvironment(server=bench.server, devices=(DEVICE,), cache_dir=bench.cache_dir)
    data = to_json(prepare(job.data, cache_dir=bench.cache_dir))
    found = score_models(
        {"it": Path(trained.order.model_dir)}, job=job, data=data, environment=environment, device=DEVICE
    )
    assert not found.faults
    sums = found.scores["it"].sums
    loss = sums["loss_sums"].sum() / sums["loss_counts"].sum()
    assert loss == pytest.approx(trained.outcome.result.metrics["loss"], abs=1e-4)


def test_a_teacher_of_other_tokens_is_refused(bench, prompts, teacher, tmp_path):
    other = tmp_path / "prompts.jsonl"
    other.write_text("".join(json.dumps({"prompt": f"quite {i} other words"}) + "\n" for i in range(40)))
    for named in (None, teacher):
        job = job_of(bench, replace(prompts, path=str(other)), named)
        trained = bench.train(job, SINGLE, tmp_path / str(named is None), parents={"large": str(teacher)})
        assert f"To fix: set data.tokenizer to {teacher}" in str(trained.outcome)


def preflight_of(bench, job, **changes):
    order = PreflightOrder(
        jobs=(job,),
        shapes=(bench.shape(1),),
        techniques=registry.dotted_paths(),
        cache_dir=str(bench.cache_dir),
        **changes,
    )
    return preflight_job(job, order)


def test_a_teacher_of_another_vocabulary_is_refused_before_anything_starts(bench, prompts):
    other = replace(LARGER, config={**LARGER.config, "vocab_size": 400})
    job = job_of(bench, prompts, None).with_features(LossTeacher(job="large", model=other))
    with pytest.raises(ValueError, match="teacher large has a vocabulary of 400 tokens, and the student one of 320"):
        preflight_of(bench, job)


@pytest.mark.parametrize("is_pretrained", [False, pytest.param(True, marks=pytest.mark.full)])
def test_memory_estimates_know_the_teacher_and_its_logits(bench, prompts, teacher, is_pretrained):
    student = job_of(bench, prompts, teacher if is_pretrained else None)
    estimates = []
    for technique in ("divergence", "policy_gradient"):
        job = replace(student, loss_options={**student.loss_options, "loss_type": technique})
        workload = Workload(
            job=job,
            data=to_json(prepare(job.data, cache_dir=bench.cache_dir)),
            facts=bench.facts(job),
            techniques={"single": registry.BUILTIN["single"]},
            cache_dir=str(bench.cache_dir),
        )
        choice = (registry.load(SINGLE.path), {"micro_batch": 4, "recompute": "none"}, bench.shape(1))
        (estimate,) = predict_memory(workload, [choice])
        assert estimate.source == FROM_META_STEP, estimate.message
        estimates.append(estimate.device_bytes)
    assert estimates[0] > estimates[1]  # which reads one number a token
    least = [candidate.least_bytes for candidate in preflight_of(bench, student).candidates]
    without = replace(student, loss="cross-entropy", loss_options={}, features=())
    plain = [candidate.least_bytes for candidate in preflight_of(bench, replace(without, data=bench.prose)).candidates]
    assert min(least) - min(plain) > 10**5


def test_steps_without_completions_of_the_model_are_those_of_distillation_on_data(bench, prompts, teacher, tmp_path):
    """With the forward divergence, the same rows, and no cross entropy."""
    file = tmp_path / "answers.jsonl"
    rows = [{"prompt": f"say {i}:", "completion": "ab" * (1 + i % 3)} for i in range(40)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataSpec(path=str(file), kind="prompt", tokenizer=str(teacher), held_out=0.2)
    job = job_of(bench, data, teacher, options={"lmbda": 0.0, "beta": 0.0})
    found = bench.reference(job)
    assert found.outcome.status == "done", found.outcome
    how = AdaptationSpec(kind="distilled", teacher=str(teacher), teacher_model=LARGER, temperature=1.0, weight=1.0)
    plain = replace(job, data=replace(data, kind="completion"), loss=None, loss_options={}, features=(how,))
    expected = bench.train(plain, SINGLE, tmp_path / "gang", parents={str(teacher): str(teacher)})
    assert found.losses == pytest.approx(expected.losses, abs=1e-5)
    assert largest_difference(found.weights, expected.weights) <= 1e-4


def test_half_of_the_steps_train_on_the_rows_and_rows_without_completions_are_refused(bench, prompts):
    ends = EndTokens(token_ids=(), pad_id=0)
    loss = loss_function("on-policy-distillation", {"lmbda": 0.5})
    unused = dict.fromkeys(("rewards", "tokenizer", "context", "device", "autocast"))
    rollout = Rollout(function=loss, generation=loss.generation, ends=ends, **unused)
    assert 400 < sum(rollout.writes(0, step) for step in range(1000)) < 600
    assert [rollout.writes(0, step) for step in range(50)] != [rollout.writes(1, step) for step in range(50)]
    with pytest.raises(StepError, match=r"a row has no completion\. To fix: give each one"):
        bench.facts(job_of(bench, prompts, None, options={"lmbda": 0.5}))


@pytest.mark.full
def test_predicted_seconds_know_the_completions(bench, prompts):
    """Ten times as many tokens are written one after another."""
    steps_s = []
    for max_new_tokens in (4, 40):
        job = job_of(bench, prompts, None, options={"max_new_tokens": max_new_tokens})
        found = preflight_of(bench, job, slots=(bench.slot(0),)).candidates
        steps_s.append(min(candidate.step_s for candidate in found))
    assert 2 * steps_s[0] < steps_s[1]

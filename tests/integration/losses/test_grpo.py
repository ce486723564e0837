"""GRPO: what a model writes, what it is rewarded with, and the weights that follow."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ringmaster.codec import to_json
from ringmaster.errors import StepError
from ringmaster.tasks.cluster import Device
from ringmaster.tasks.evaluation.scores import score_models
from ringmaster.tasks.profiling.preflight_runs import GangEnvironment
from ringmaster.techniques import DataSpec, EvaluationSpec, registry
from ringmaster.techniques.data import prepare
from ringmaster.techniques.estimates.job_preflight import preflight_job
from ringmaster.techniques.estimates.memory import Workload, predict_memory
from ringmaster.techniques.preflight_result import FROM_META_STEP, PreflightOrder
from tests.integration.losses.prompt_rows import LORA, MODEL, prompt_data, repeated_text
from tests.integration.workbench import ADAMW, SINGLE, Layout, is_bit_equal, largest_difference

REWARDS = "tests.integration.losses.my_rewards"
OPTIONS = {"rewards": [f"{REWARDS}:letter"], "num_generations": 4, "max_new_tokens": 8}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    rows = [{"prompt": f"{repeated_text(i)}:", "wish": "ab"[i % 2], "number": i} for i in range(40)]
    return prompt_data(tmp_path_factory.mktemp("prompts"), rows)


def job_of(bench, prompts, *, options=None, **changes):
    plain = {"data": prompts, "loss": "grpo", "loss_options": {**OPTIONS, **(options or {})}, "global_batch_size": 4}
    evaluation = EvaluationSpec(max_batches=1, metrics=("reward",))
    return bench.job(MODEL, **{**plain, "optimizer": ADAMW, "evaluation": evaluation, **changes})


def test_the_reward_rises(bench, prompts):
    job = job_of(bench, prompts, num_steps=30, optimizer=replace(ADAMW, lr=0.01))
    trained = bench.reference(job)
    assert trained.outcome.status == "done", trained.outcome
    assert trained.outcome.result.metrics["reward"] > 0.3


def test_a_resumed_job_writes_the_same_completions(bench, prompts, tmp_path):
    job = job_of(bench, prompts, options={"scale_rewards": "none"})
    bench.train(job, SINGLE, tmp_path, last_step=3)
    second = bench.train(job, SINGLE, tmp_path)
    assert second.outcome.result.first_step == 3
    assert second.losses == bench.reference(job).losses[3:]
    assert is_bit_equal(second.weights, bench.reference(job).weights)


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
def test_other_layouts_write_the_same_completions_in_fp32(bench, prompts, tmp_path, layout):
    """Rounding may choose another token, but seldom; the random numbers are those of the prompts."""
    job = job_of(bench, prompts, options={"beta": 0.1, "scale_rewards": "batch"}, optimizer=replace(ADAMW, lr=1e-4))
    trained, expected = bench.train(job, layout, tmp_path), bench.reference(job)
    assert trained.losses == pytest.approx(expected.losses, rel=0, abs=1e-5)
    assert largest_difference(trained.weights, expected.weights) <= 1e-5
    assert trained.outcome.result.metrics == pytest.approx(expected.outcome.result.metrics)


@pytest.mark.full
@pytest.mark.parametrize("precision", ["bf16", "bf16-params"])
@pytest.mark.parametrize("adapter", [None, LORA], ids=["full", "lora"])
def test_the_first_divergence_from_the_reference_is_0(bench, prompts, precision, adapter):
    """Rewards that are all equal have no advantages, so that the loss is the divergence alone."""
    options = {"beta": 1.0, "rewards": [f"{REWARDS}:nothing"]}
    job = job_of(bench, prompts, options=options, precision=precision, adapter=adapter)
    assert bench.reference(job).losses[0] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("adapter", [None, LORA], ids=["full", "lora"])
def test_the_divergence_grows_with_training(bench, prompts, adapter):
    job = job_of(bench, prompts, options={"beta": 0.5}, adapter=adapter, optimizer=replace(ADAMW, lr=0.01))
    losses = bench.reference(job).losses
    assert losses[0] == pytest.approx(0, abs=0.3)
    assert all(loss == loss for loss in losses)


def test_conversations_and_columns(bench, tmp_path):
    file = tmp_path / "chats.jsonl"
    rows = [{"prompt": [{"role": "user", "content": f"say {i}"}], "wish": str(i)} for i in range(30)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataSpec(path=str(file), kind="prompt", vocab_size=300)
    options = {"rewards": [f"{REWARDS}:wanted", f"{REWARDS}:some"], "reward_weights": [1.0, 0.1]}
    job = job_of(bench, data, options=options, num_steps=2)
    assert bench.reference(job).outcome.status == "done", bench.reference(job).outcome


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("too_few", "too_few returned 1 values for 16 completions. To fix: return a list with a number"),
        ("words", "words returned 'good' for a completion"),
        ("lacking", "lacking expects target; available columns:"),
    ],
)
def test_wrong_rewards_are_refused_before_anything_starts(bench, prompts, name, said):
    with pytest.raises(StepError, match="To fix") as raised:
        bench.facts(job_of(bench, prompts, options={"rewards": [f"{REWARDS}:{name}"]}))
    assert said in str(raised.value)


def test_too_few_positions_are_refused(bench, prompts):
    model = replace(MODEL, config={**MODEL.config, "max_position_embeddings": 8})
    with pytest.raises(StepError, match=r"prompts and completions have up to \d+ tokens, and the model 8 positions"):
        bench.facts(replace(job_of(bench, prompts), model=model))


def test_other_data_is_refused(bench, prompts):
    with pytest.raises(StepError, match=r"To fix: set data\.kind to prompt|give data of kind prompt"):
        bench.facts(job_of(bench, bench.prose))


def test_techniques_without_the_whole_model_refuse(bench, prompts, tmp_path):
    job = job_of(bench, prompts)
    order = PreflightOrder(
        jobs=(job,),
        shapes=(bench.shape(1), bench.shape(2)),
        techniques=registry.dotted_paths(),
        cache_dir=str(bench.cache_dir),
    )
    found = preflight_job(job, order)
    assert {each.technique for each in found.candidates} == {"single", "ddp"}  # zero1 saves nothing here
    reasons = {refusal.technique: refusal.reason for refusal in found.refusals if refusal.num_devices == 2}
    assert "generates with the whole model on each device, which fsdp has not" in reasons["fsdp"]


def test_memory_estimates_have_the_longest_completions(bench, prompts, tmp_path):
    found = []
    for most in (16, 128):
        job = job_of(bench, prompts, options={"max_new_tokens": most})
        workload = Workload(
            job=job,
            data=to_json(prepare(prompts, cache_dir=bench.cache_dir)),
            facts=bench.facts(job),
            techniques={"single": registry.BUILTIN["single"]},
            cache_dir=str(tmp_path),
        )
        config = {"micro_batch": 2, "recompute": "none"}
        (estimate,) = predict_memory(workload, [(registry.load(SINGLE.path), config, bench.shape(1))])
        assert estimate.source == FROM_META_STEP, estimate.message
        found.append(estimate.device_bytes)
    logits = 2 * 4 * 128 * 320 * 4  # of both prompts' completions, in fp32
    assert found[1] - found[0] > 2 * logits


def test_scored_rows_have_the_trainers_reward(bench, prompts):
    job = job_of(bench, prompts)
    trained = bench.reference(job)
    device = Device(kind="cpu", index=0, name="cpu", memory_bytes=2**32, cores=())
    environment = GangEnvironment(server=bench.server, devices=(device,), cache_dir=bench.cache_dir)
    data = to_json(prepare(prompts, cache_dir=bench.cache_dir))
    folder = Path(trained.order.model_dir)
    scores = score_models({"it": folder}, job=job, data=data, environment=environment, device=device).scores["it"]
    found = scores.sums["reward_sums"].sum() / scores.sums["rewarded"].sum()
    assert found == pytest.approx(trained.outcome.result.metrics["reward"], abs=1e-6)

"""A reward model that an earlier job has trained rewards the completions of a job."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ringmaster.codec import to_json
from ringmaster.features.reward_jobs.job import RewardJobs
from ringmaster.features.reward_jobs.trainer import RewardModel
from ringmaster.tasks.evaluation.scores import score_models
from ringmaster.tasks.profiling.preflight_runs import GangEnvironment
from ringmaster.techniques import DataSpec, EvaluationSpec, ModelSpec, registry
from ringmaster.techniques.data import prepare
from ringmaster.techniques.estimates.memory import Workload, predict_memory
from ringmaster.techniques.preflight_result import FROM_META_STEP
from tests.integration.losses.test_losses import DEVICE
from tests.integration.workbench import ADAMW, LLAMA, SINGLE

JUDGE = ModelSpec(architecture="LlamaForSequenceClassification", config={**LLAMA.config, "num_labels": 1})
REWARD = "ringmaster.features.reward_jobs.trainer:reward_0"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Comparisons in which answers of a are better than those of b, and prompts."""
    folder = tmp_path_factory.mktemp("files")
    pairs = [{"prompt": f"say {i}: ", "chosen": "a" * (i % 4 + 1), "rejected": "b" * (i % 3 + 1)} for i in range(60)]
    prompts = [{"prompt": f"say {i}: "} for i in range(40)]
    for name, rows in (("pairs", pairs), ("prompts", prompts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def judge(bench, files):
    """The folder of a trained reward model."""
    job = bench.job(
        JUDGE,
        data=DataSpec(path=str(files / "pairs.jsonl"), kind="comparison", vocab_size=300, held_out=0.2),
        loss="bradley-terry",
        optimizer=replace(ADAMW, lr=0.01),
        num_steps=20,
        evaluation=EvaluationSpec(max_batches=1, metrics=("reward_accuracy",)),
    )
    trained = bench.reference(job)
    assert trained.outcome.result.metrics["reward_accuracy"] > 0.9
    return Path(trained.order.model_dir)


def policy_job(bench, files, **changes):
    job = bench.job(
        replace(LLAMA, config={**LLAMA.config, "vocab_size": 320}),
        data=DataSpec(path=str(files / "prompts.jsonl"), kind="prompt", vocab_size=300, held_out=0.2),
        loss="grpo",
        loss_options={"rewards": [REWARD], "num_generations": 4, "max_new_tokens": 6},
        optimizer=replace(ADAMW, lr=0.01),
        num_steps=3,
        global_batch_size=4,
        evaluation=EvaluationSpec(max_batches=1, metrics=("reward",)),
        **changes,
    )
    return job.with_features(RewardJobs(jobs=("judge",), models=(JUDGE,)))


@torch.no_grad()
def test_rewards_are_the_outputs_for_the_tokens_of_comparisons(judge):
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(judge), AutoTokenizer.from_pretrained(judge)
    prompts, completions = ["say 1: ", "say 22: ", "say 3: "], ["aab", "b", ""]
    found = RewardModel.read(model, judge, device=torch.device("cpu")).rewards(prompts, completions)
    for prompt, completion, reward in zip(prompts, completions, found, strict=True):
        tokens = tokenizer(f"{prompt}{completion}")["input_ids"]
        tokens += [tokenizer.eos_token_id] * (tokens[-1] != tokenizer.eos_token_id)
        assert reward == pytest.approx(float(model(torch.tensor([tokens])).logits), abs=1e-5)
    assert len(set(found)) == 3


def test_a_job_is_rewarded_by_the_model_of_another(bench, files, judge, tmp_path):
    trained = bench.train(policy_job(bench, files), SINGLE, tmp_path, parents={"judge": str(judge)})
    assert trained.outcome.status == "done", trained.outcome
    assert trained.outcome.result.metrics["reward"] != 0


def test_without_the_model_the_job_says_so(bench, files, tmp_path):
    trained = bench.train(policy_job(bench, files), SINGLE, tmp_path)
    assert trained.outcome.status != "done"
    assert "the model of job judge is not there" in str(trained.outcome)


def test_an_evaluation_without_the_reward_model_says_so(bench, files, judge, tmp_path):
    job = policy_job(bench, files)
    trained = bench.train(job, SINGLE, tmp_path, parents={"judge": str(judge)})
    environment = GangEnvironment(server=bench.server, devices=(DEVICE,), cache_dir=bench.cache_dir)
    data = to_json(prepare(job.data, cache_dir=bench.cache_dir))
    models = {"it": Path(trained.order.model_dir)}
    found = score_models(models, job=job, data=data, environment=environment, device=DEVICE)
    assert "the reward model of another job is there in training alone. To fix: " in found.faults["it"]


def test_memory_estimates_know_the_reward_model(bench, files, tmp_path):
    large = replace(JUDGE, config={**JUDGE.config, "hidden_size": 512, "intermediate_size": 2048})
    plain = policy_job(bench, files).without(RewardJobs)
    judged = plain.with_features(RewardJobs(jobs=("judge",), models=(large,)))
    found = []
    for job in (plain, judged):
        data = prepare(job.data, cache_dir=bench.cache_dir)
        workload = Workload(
            job=job,
            data=to_json(data),
            facts=bench.facts(job),
            techniques={"single": registry.BUILTIN["single"]},
            cache_dir=str(bench.cache_dir),
        )
        choice = (registry.load(SINGLE.path), {"micro_batch": 1, "recompute": "none"}, bench.shape(1))
        (estimate,) = predict_memory(workload, [choice])
        assert estimate.source == FROM_META_STEP, estimate.message
        found.append(estimate.device_bytes)
    assert found[1] - found[0] > 4 * 512 * 2048 * 4

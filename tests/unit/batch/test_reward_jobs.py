"""Rewards that are reward models of other jobs of a batch, in batch files."""

import pytest

from ringmaster.errors import BatchFileError
from ringmaster.features.reward_jobs.job import RewardJobs
from ringmaster.registry import resolve
from ringmaster.tasks.batch import Batch, parse_batch
from ringmaster.tasks.batch.schema import JobEntry

TEXT = """
jobs:
  - name: judge
    model: {{architecture: LlamaForSequenceClassification}}
    data: {{kind: comparison, path: pairs.jsonl}}
    num_steps: 10
    loss: {judged_by}
    {more}
  - name: policy
    model: {{architecture: LlamaForCausalLM}}
    data: {{kind: prompt, path: prompts.jsonl}}
    num_steps: 10
    loss: {{name: grpo, rewards: {rewards}}}
"""


def parse(tmp_path, rewards, *, judged_by="bradley-terry", more=""):
    (tmp_path / "my_rewards.py").write_text("def length(completions):\n    ...\n")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Write a poem"}\n')
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "Write", "chosen": "a", "rejected": "b"}\n')
    text = TEXT.format(rewards=rewards, judged_by=judged_by, more=more)
    return parse_batch(text, folder=tmp_path, name="x.yaml")


@pytest.mark.parametrize("rewards", ["job:judge", '["job:judge"]', '["my_rewards:length", "job:judge", "job:judge"]'])
def test_a_reward_may_be_a_job(tmp_path, rewards):
    judge, policy = parse(tmp_path, rewards).jobs
    feature = policy.feature(RewardJobs)
    assert feature.jobs == policy.parents == ("judge",)
    assert feature.models == (judge.model,)
    of_job = [name for name in policy.loss_options["rewards"] if name != "my_rewards:length"]
    assert len(of_job) == rewards.count("job:")
    assert [resolve(name)(prompts=["a"], completions=["b"]) for name in of_job] == [[0.0]] * len(of_job)
    assert policy.evaluation.metrics == ("reward",)
    renamed = policy.renamed("other", lambda name: f"batch.{name}")
    assert renamed.parents == ("batch.judge",)


def test_a_batch_made_of_its_jobs_is_the_same(tmp_path):
    jobs = parse(tmp_path, "job:judge").jobs
    assert Batch.of(name="x", jobs=jobs, folder=tmp_path).jobs == jobs


def test_what_a_batch_notes_of_rewards_is_no_key_of_files(tmp_path):
    with pytest.raises(BatchFileError, match=r"jobs\[0\].reward_jobs: is an unknown key"):
        parse(tmp_path, "job:judge", more="reward_jobs: {jobs: [judge]}")
    assert RewardJobs.key not in JobEntry.model_fields


@pytest.mark.parametrize(
    ("rewards", "given", "said"),
    [
        ("job:juge", {}, "no job is named 'juge'"),
        ("job:policy", {}, "go round in a circle"),
        ("job:judge", {"judged_by": "simpo"}, "judge trains no reward model. To fix: name a job whose loss is bradley"),
        ("job:judge", {"more": "adapter: {rank: 4, modules_to_save: [score]}"}, "judge trains an adapter"),
    ],
)
def test_rewards_that_are_no_reward_models_are_refused(tmp_path, rewards, given, said):
    with pytest.raises(BatchFileError) as raised:
        parse(tmp_path, rewards, **given)
    assert said in str(raised.value)
    assert "jobs[1].loss.rewards" in str(raised.value)

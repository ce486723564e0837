"""Rewards `job:NAME` in batch files."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ringmaster.features.reward_jobs.job import RewardJobs
from ringmaster.findings import Finding, as_mapping
from ringmaster.tasks.batch.file_hooks import BatchFileHook
from ringmaster.tasks.batch.sections import Section
from ringmaster.techniques.job import Job

PREFIX = "job:"
"""What the names of rewards that are jobs begin with."""
FUNCTIONS = "ringmaster.features.reward_jobs.trainer:reward_"
"""The dotted names of their reward functions, without their numbers."""


class RewardJobsInFiles(BatchFileHook):
    """Rewards that name jobs become reward functions, which read the models of these jobs."""

    def expanded(self, entry: Any, *, folder: Path) -> tuple[Any, Sequence[Finding]]:
        """Returns the entry of a job with its rewards as functions, and with the jobs that they name."""
        loss = as_mapping(as_mapping(entry).get("loss"))
        rewards = loss.get("rewards")
        listed = [rewards] if isinstance(rewards, str) else rewards if isinstance(rewards, list) else []
        names = [each.removeprefix(PREFIX) for each in listed if isinstance(each, str) and each.startswith(PREFIX)]
        if not names:
            return entry, ()
        jobs = list(dict.fromkeys(names))
        functions = {f"{PREFIX}{name}": f"{FUNCTIONS}{number}" for number, name in enumerate(jobs)}
        named = [functions.get(each, each) if isinstance(each, str) else each for each in listed]
        return {**entry, "loss": {**loss, "rewards": named}, RewardJobs.key: {"jobs": jobs}}, ()

    def completed(self, jobs: Sequence[Job], batch: Section) -> Sequence[Job]:
        """Returns the jobs with the models of the jobs that reward them."""
        models = {job.name: job.model for job in jobs}
        return [_with_models(job, models) for job in jobs]


def _with_models(job: Job, models: Mapping[str, Any]) -> Job:
    feature = job.feature(RewardJobs)
    if feature is None or not models.keys() >= {*feature.jobs}:
        return job
    return job.with_features(replace(feature, models=tuple(models[name] for name in feature.jobs)))


BATCH_FILE_HOOKS = (RewardJobsInFiles(),)

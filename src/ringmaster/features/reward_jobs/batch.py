"""Rewards `job:NAME` in batch files."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ringmaster.features.reward_jobs.job import RewardJobs
from ringmaster.findings import Finding, as_list, as_mapping
from ringmaster.tasks.batch.file_hooks import BatchFileHook
from ringmaster.tasks.batch.sections import Section
from ringmaster.techniques.job import Job
from ringmaster.techniques.loss import JOB, job_named

FUNCTIONS = "ringmaster.features.reward_jobs.trainer:reward_"
"""The dotted names of their reward functions, without their numbers."""


class RewardJobsInFiles(BatchFileHook):
    """Rewards that name jobs become reward functions, which read the models of these jobs."""

    def expanded(self, entry: Any, *, folder: Path) -> tuple[Any, Sequence[Finding]]:
        """Returns the entry of a job with a single reward that is a job as a list of one."""
        loss = as_mapping(as_mapping(entry).get("loss"))
        if job_named(loss.get("rewards")) is None:
            return entry, ()
        return {**entry, "loss": {**loss, "rewards": [loss["rewards"]]}}, ()

    def job_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Returns the values of a job with its rewards as functions, and with the jobs that they name."""
        rewards = as_list(as_mapping(fields.get("loss_options")).get("rewards"))
        jobs = list(dict.fromkeys(name for each in rewards if (name := job_named(each)) is not None))
        functions = {f"{JOB}{name}": f"{FUNCTIONS}{number}" for number, name in enumerate(jobs)}
        return {**_with_rewards(fields, functions), RewardJobs.key: {"jobs": jobs}} if jobs else fields

    def entry_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Returns the values of a job's entry with its rewards as jobs."""
        jobs = as_list(as_mapping(fields.get(RewardJobs.key)).get("jobs"))
        names = {f"{FUNCTIONS}{number}": f"{JOB}{name}" for number, name in enumerate(jobs)}
        others = {key: value for key, value in fields.items() if key != RewardJobs.key}
        return _with_rewards(others, names) if jobs else fields

    def completed(self, jobs: Sequence[Job], batch: Section) -> Sequence[Job]:
        """Returns the jobs with the models of the jobs that reward them."""
        models = {job.name: job.model for job in jobs}
        return [_with_models(job, models) for job in jobs]


def _with_rewards(fields: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    options = fields["loss_options"]
    rewards = [names.get(each, each) for each in options["rewards"]]
    return {**fields, "loss_options": {**options, "rewards": rewards}}


def _with_models(job: Job, models: Mapping[str, Any]) -> Job:
    feature = job.feature(RewardJobs)
    if feature is None or not models.keys() >= {*feature.jobs}:
        return job
    return job.with_features(replace(feature, models=tuple(models[name] for name in feature.jobs)))


BATCH_FILE_HOOKS = (RewardJobsInFiles(),)

"""What has to be done about a flow run, given its job: a decision without side effects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from ringmaster.tasks.pool.providers.slurm.commands import SlurmJob, job_number

UNSUBMITTED_S = 90.0  # a run whose worker ended before it had submitted a job is given up after this time


class Verdict(StrEnum):
    """What has to be done about a flow run."""

    NOTHING = "nothing"
    ADOPT = "adopt"  # its job lives, and its number was never stored
    END = "end"  # it is cancelled, and its job runs
    CANCEL_JOB = "cancel job"  # it is cancelled, and its job waits
    CANCELLED = "cancelled"  # it is cancelled, and its job has ended
    CRASHED = "crashed"  # its job has ended, and it has not reported a final state


@dataclass(frozen=True, kw_only=True)
class JobRun:
    """A flow run that has not ended.

    id: the flow run's id.
    infrastructure: the id of its job; empty if it was never stored.
    is_cancelling: whether a person or the pool has cancelled it.
    age_s: seconds since its state has changed.
    """

    id: str
    infrastructure: str = ""
    is_cancelling: bool = False
    age_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A verdict. job: the job that it is about, if there is one. message: the cause, for people."""

    verdict: Verdict
    job: SlurmJob | None = None
    message: str = ""


def jobs_by_run(jobs: Iterable[SlurmJob]) -> Mapping[str, SlurmJob]:
    """Returns, by id of the flow run, the newest job that was submitted for it."""
    return {job.flow_run: job for job in sorted(jobs, key=lambda job: job.id) if job.flow_run}


def decide(run: JobRun, jobs: Mapping[str, SlurmJob]) -> Decision:
    """Decides on a run that was read before the jobs were.

    jobs: see `jobs_by_run`.
    """
    job, number = jobs.get(run.id), job_number(run.infrastructure)
    if job is None and number is None:
        if run.is_cancelling or run.age_s < UNSUBMITTED_S:
            return Decision(verdict=Verdict.NOTHING)
        return Decision(
            verdict=Verdict.CRASHED, message="no Slurm job was submitted for it: its worker ended before it had"
        )
    ended = _ended(job, number)
    if ended:
        verdict = Verdict.CANCELLED if run.is_cancelling else Verdict.CRASHED
        return Decision(verdict=verdict, job=job, message=ended)
    assert job is not None
    if run.is_cancelling and not job.is_completing:
        return Decision(verdict=Verdict.CANCEL_JOB if job.is_waiting else Verdict.END, job=job)
    return Decision(verdict=Verdict.NOTHING if number == job.id else Verdict.ADOPT, job=job)


def _ended(job: SlurmJob | None, number: int | None) -> str:
    """Returns how a job has ended, in words; empty for a job that has not."""
    if job is None:
        return f"Slurm job {number} has ended, and Slurm has forgotten how"
    where = f" on {job.node}" if job.node else ""
    reason = f" ({job.reason})" if job.reason else ""
    if job.num_restarts and not job.is_completing:
        return f"Slurm job {job.id} was requeued{reason}; a node is requested anew instead"
    if job.has_ended:
        return f"Slurm job {job.id} has ended{where}: {job.state}, {job.exit}{reason}"
    return ""

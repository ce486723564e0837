"""Prefect's worker of type `slurm`: submits each flow run as a batch job.

`prefect worker start --type slurm --pool NAME` starts it. It keeps no state of its own: what it needs to know is in
Prefect and in Slurm. Jobs therefore outlive it, and the next worker watches them.
"""

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any
from uuid import UUID

import anyio
import anyio.abc
import httpx
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import InfrastructureNotAvailable, InfrastructureNotFound, ObjectNotFound, PrefectException
from prefect.states import Cancelled, Crashed
from prefect.workers.base import BaseJobConfiguration, BaseVariables, BaseWorker, BaseWorkerResult
from pydantic import BaseModel, Field

from ringmaster.errors import EngineUnavailable, SlurmError
from ringmaster.flows import settings
from ringmaster.tasks.pool.slurm.commands import (
    Slurm,
    SlurmJob,
    comment_of,
    environment_of_jobs,
    infrastructure_of,
    job_number,
    slurm_time,
)

BATCH_SCRIPT = (Path(__file__).parent / "batch_script.sh").read_text()
NOTICE_S = 60
GRACE_S = 60
COMMAND, IS_SHARED = "FLOW_RUN_COMMAND", "JOB_IS_SHARED"
# -P: a file in the working folder with the name of a library must not be imported instead of the library. Prefect's own
# default, `prefect flow-run execute`, starts a second interpreter, which takes seconds more.
DEFAULT_COMMAND = f"{sys.executable} -P -m prefect.engine"


class SlurmOptions(BaseModel):
    """What a work pool, a deployment or a flow run chooses of its job. Each job has one node."""

    partition: str | None = Field(default=None, description="The partition; the cluster's default partition if empty.")
    account: str | None = Field(default=None, description="The account that pays for the job.")
    qos: str | None = Field(default=None, title="QOS", description="The quality of service.")
    time: str | None = Field(
        default=None,
        title="Time limit",
        description="For how long a node is lent: 8h, 30m, or as sbatch reads it: 1-12:00:00. The partition's limit if "
        "empty.",
        examples=["8h"],
    )
    gres: str | None = Field(
        default=None, title="Generic resources", description="The GPUs of the job.", examples=["gpu:8"]
    )
    exclusive: bool = Field(default=True, description="Whether the job has the node to itself.")
    cpus: int | None = Field(default=None, title="CPUs", ge=1, description="CPUs of a job that shares its node.")
    memory: str | None = Field(
        default="0",
        description="Memory of the job, such as 64G; 0 for all memory of an exclusive node.",
        examples=["64G"],
    )
    notice_s: int = Field(
        default=NOTICE_S,
        ge=0,
        title="Notice (seconds)",
        description="How long before the end of the time limit the job is told to end in order. Slurm may be a minute "
        "early.",
    )
    grace_s: int = Field(
        default=GRACE_S,
        ge=0,
        title="Grace (seconds)",
        description="How long a cancelled flow run has to end in order, before its job is cancelled.",
    )
    sbatch_options: list[str] = Field(
        default_factory=list,
        title="Further options of sbatch",
        description="Every user of the cluster can read them: they must hold no passwords.",
        examples=[["--constraint=a100", "--exclude=node7"]],
    )
    working_dir: str | None = Field(default=None, title="Working folder", description="The worker's if empty.")
    log_dir: str | None = Field(
        default=None,
        title="Folder of logs",
        description="Where the output of the jobs is stored, a file each: a folder that nodes and worker share. "
        "By default slurm/ in RINGMASTER_HOME.",
    )
    batch_script: str = Field(default=BATCH_SCRIPT, description="The batch script.", json_schema_extra={"format": "sh"})


class SlurmVariables(SlurmOptions, BaseVariables):
    """The variables of the base job template."""


class SlurmJobConfiguration(SlurmOptions, BaseJobConfiguration):
    """The job of one flow run."""

    def prepare_for_flow_run(self, *arguments: Any, **options: Any) -> None:
        """Sets what depends on the flow run."""
        self.command = self.command or DEFAULT_COMMAND
        super().prepare_for_flow_run(*arguments, **options)

    def arguments(self, *, flow_run: str, log_dir: Path) -> list[str]:
        """Returns the options of sbatch. They are visible to all users of the cluster.

        flow_run: id of the flow run.
        log_dir: the folder for the output of jobs.
        """
        name = re.sub(r"[^\w.-]+", "-", self.name or "flow-run")
        given: dict[str, Any] = {
            "job-name": name,
            "comment": comment_of(flow_run),
            "output": f"{log_dir}/%j.log",
            "open-mode": "append",
            "nodes": 1,
            "ntasks": 1,
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "time": None if self.time is None else slurm_time(self.time),
            "gres": self.gres,
            "cpus-per-task": self.cpus,
            "mem": self.memory if self.exclusive or self.memory != "0" else None,  # all of it would be exclusive, too
            "chdir": self.working_dir,
            "signal": f"B:USR1@{self.notice_s}" if self.notice_s else None,
        }
        options = [f"--{option}={value}" for option, value in given.items() if value is not None and value != ""]
        options += ["--no-requeue", *["--exclusive"] * self.exclusive]
        return [*options, *self.sbatch_options]  # the last ones count

    def environment(self, own: Mapping[str, str]) -> dict[str, str]:
        """Returns the environment of sbatch and the job: the worker's, and that of the flow run.

        It may hold passwords: Slurm keeps it from other users, unlike options.
        """
        given = {name: value for name, value in self.env.items() if value is not None}
        shared = {} if self.exclusive else {IS_SHARED: "1"}
        return {**environment_of_jobs(own), **given, **shared, COMMAND: self.command or DEFAULT_COMMAND}


UNSUBMITTED_S = 90.0  # a run whose worker ended before it had submitted a job is given up after this time

LOOK_EVERY_S = 3.0
RUNS_AT_ONCE = 200  # what Prefect's server returns at most
UNENDED = (StateType.PENDING, StateType.RUNNING, StateType.CANCELLING)
# What passes. RuntimeError: Prefect's server has not described the work pool yet.
_AWAY = (EngineUnavailable, httpx.HTTPError, PrefectException, RuntimeError)


class SubmissionVerdict(StrEnum):
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
class SubmissionDecision:
    """A verdict. job: number of the job to act on, if there is one. message: the cause, for people."""

    verdict: SubmissionVerdict
    job: int = 0
    message: str = ""


def jobs_by_run(jobs: Iterable[SlurmJob]) -> Mapping[str, SlurmJob]:
    """Returns, by id of the flow run, the newest job that was submitted for it."""
    return {job.flow_run: job for job in sorted(jobs, key=lambda job: job.id) if job.flow_run}


def decide(run: JobRun, jobs: Mapping[str, SlurmJob]) -> SubmissionDecision:
    """Decides on a run that was read before the jobs were.

    jobs: see `jobs_by_run`.
    """
    job, number = jobs.get(run.id), job_number(run.infrastructure)
    if job is None and number is None:
        if run.is_cancelling or run.age_s < UNSUBMITTED_S:
            return SubmissionDecision(verdict=SubmissionVerdict.NOTHING)
        return SubmissionDecision(
            verdict=SubmissionVerdict.CRASHED,
            message="no Slurm job was submitted for it: its worker ended before it had",
        )
    over = SubmissionVerdict.CANCELLED if run.is_cancelling else SubmissionVerdict.CRASHED
    if job is None:
        return SubmissionDecision(verdict=over, message=f"Slurm job {number} has ended, and Slurm has forgotten how")
    if ended := _ended(job):
        return SubmissionDecision(verdict=over, message=ended)
    if run.is_cancelling and not job.is_completing:
        verdict = SubmissionVerdict.CANCEL_JOB if job.is_waiting else SubmissionVerdict.END
        return SubmissionDecision(verdict=verdict, job=job.id)
    return SubmissionDecision(
        verdict=SubmissionVerdict.NOTHING if number == job.id else SubmissionVerdict.ADOPT, job=job.id
    )


def _ended(job: SlurmJob) -> str:
    """Returns how a job has ended, in words; empty for a job that has not."""
    where = f" on {job.node}" if job.node else ""
    reason = f" ({job.reason})" if job.reason else ""
    if job.num_restarts and not job.is_completing:
        return f"Slurm job {job.id} was requeued{reason}; a node is requested anew instead"
    if job.has_ended:
        return f"Slurm job {job.id} has ended{where}: {job.state}, {job.exit}{reason}"
    return ""


class SlurmWorkerResult(BaseWorkerResult):
    """The job that was submitted for a flow run."""


class SlurmWorker(BaseWorker[SlurmJobConfiguration, SlurmVariables, SlurmWorkerResult]):
    """Submits flow runs, and reports those whose jobs end without a word."""

    type = "slurm"
    job_configuration = SlurmJobConfiguration
    job_configuration_variables = SlurmVariables
    _description = "Runs each flow run as a batch job of Slurm."
    _display_name = "Slurm"

    def __init__(self, *arguments: Any, slurm: Slurm | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._slurm = slurm or Slurm()
        self._watching: asyncio.Task[None] | None = None
        self._submitting: set[UUID] = set()  # runs whose jobs are not submitted yet
        self._ending: dict[int, float] = {}  # by job, when it was asked to end
        self._is_away = False

    async def setup(self) -> None:
        """Prepares the worker; from now on it watches all jobs of its work pool."""
        await super().setup()
        self._watching = asyncio.create_task(self._watch())
        self._watching.add_done_callback(self._watch_ended)

    async def teardown(self, *exc_info: Any) -> None:
        """Stops watching; jobs continue."""
        if self._watching is not None:
            self._watching.cancel()
            with suppress(asyncio.CancelledError):
                await self._watching
        await super().teardown(*exc_info)

    async def run(
        self,
        flow_run: FlowRun,
        configuration: SlurmJobConfiguration,
        task_status: anyio.abc.TaskStatus[Any] | None = None,
    ) -> SlurmWorkerResult:
        """Submits the job of a flow run, and returns without waiting for its end, which `look` reports.

        Waits while Slurm does not answer. Raises SlurmError.
        """
        log_dir = Path(configuration.log_dir or settings.home() / "slurm")
        options = configuration.arguments(flow_run=str(flow_run.id), log_dir=log_dir)
        await asyncio.to_thread(log_dir.mkdir, parents=True, exist_ok=True, mode=0o700)
        self._submitting.add(flow_run.id)
        try:
            job = await self._submit(flow_run, configuration, options)
        finally:
            self._submitting.discard(flow_run.id)
        logger = self.get_flow_run_logger(flow_run)
        logger.info(
            "Slurm job %d was submitted; its output is in %s/%d.log", job, configuration.log_dir or log_dir, job
        )
        if task_status is not None:
            task_status.started(infrastructure_of(job))
        return SlurmWorkerResult(identifier=infrastructure_of(job), status_code=0)

    async def _submit(self, flow_run: FlowRun, configuration: SlurmJobConfiguration, options: Sequence[str]) -> int:
        """Returns the number of the run's job. Raises SlurmError.

        An answer of sbatch may be lost after Slurm has accepted the job, which is then found by its comment.
        """
        script, environment = configuration.batch_script, configuration.environment(os.environ)
        may_be_there = False
        while True:
            try:
                if may_be_there:
                    jobs = jobs_by_run(await asyncio.to_thread(self._slurm.jobs))
                    if (job := jobs.get(str(flow_run.id))) is not None:
                        return job.id
                may_be_there = True
                return await asyncio.to_thread(self._slurm.submit, options, script=script, environment=environment)
            except EngineUnavailable as error:
                self.get_flow_run_logger(flow_run).warning("waiting until a job can be submitted: %s", error)
                await anyio.sleep(LOOK_EVERY_S)

    async def kill_infrastructure(
        self, infrastructure_pid: str, configuration: SlurmJobConfiguration, grace_seconds: int = GRACE_S
    ) -> None:
        """Ends the job of a flow run in order, and cancels it where it has not ended after the grace time."""
        number = job_number(infrastructure_pid)
        if number is None:
            raise InfrastructureNotFound(f"{infrastructure_pid!r} is not the id of a Slurm job")
        deadline_s = time.monotonic() + min(configuration.grace_s, grace_seconds)
        try:
            is_told = False
            while (job := await self._find(number)) is not None and not job.has_ended and not job.num_restarts:
                if job.is_waiting or time.monotonic() >= deadline_s:
                    await asyncio.to_thread(self._slurm.cancel, number)
                    return
                if not is_told:
                    await asyncio.to_thread(self._slurm.end, number)
                    is_told = True
                await anyio.sleep(1.0)
            if job is None:
                raise InfrastructureNotFound(f"Slurm job {number} has ended")
        except (EngineUnavailable, SlurmError) as error:
            raise InfrastructureNotAvailable(str(error)) from error

    async def _find(self, number: int) -> Any:
        jobs = await asyncio.to_thread(self._slurm.jobs)
        return next((job for job in jobs if job.id == number), None)

    # -- the watch over all jobs of the work pool ----------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            await anyio.sleep(LOOK_EVERY_S)
            try:
                await self.look()
                self._is_away = False
            except _AWAY as error:
                if not self._is_away:
                    self._logger.warning("jobs cannot be watched for now, trying again: %s", error)
                self._is_away = True

    def _watch_ended(self, watching: asyncio.Task[None]) -> None:
        if not watching.cancelled() and (error := watching.exception()) is not None:
            self._logger.error("the watch over jobs has failed: the worker ends", exc_info=error)
            signal.raise_signal(signal.SIGTERM)  # whoever started the worker starts it anew

    async def look(self) -> None:
        """Compares the flow runs of the work pool with their jobs, and acts on each difference."""
        runs = await self._unended()  # before the jobs: the job of a run that is known is then known, too
        if not runs:
            return
        jobs = jobs_by_run(await asyncio.to_thread(self._slurm.jobs))
        for run in runs:
            if run.id in self._submitting:
                continue
            try:
                await self._act(run, decide(_as_job_run(run), jobs))
            except (SlurmError, ObjectNotFound) as error:  # concerns this run alone
                self.get_flow_run_logger(run).warning("its job cannot be ended: %s", error)

    async def _unended(self) -> Sequence[FlowRun]:
        result: list[FlowRun] = []
        while True:
            page = await self.client.read_flow_runs(
                flow_run_filter=FlowRunFilter(
                    state=FlowRunFilterState(type=FlowRunFilterStateType(any_=list(UNENDED)))
                ),
                work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[self.work_pool.name])),
                limit=RUNS_AT_ONCE,
                offset=len(result),
            )
            result += page
            if len(page) < RUNS_AT_ONCE:
                return result

    async def _act(self, run: FlowRun, decision: SubmissionDecision) -> None:
        job = decision.job
        match decision.verdict:
            case SubmissionVerdict.ADOPT:
                await self.client.update_flow_run(run.id, infrastructure_pid=infrastructure_of(job))
            case SubmissionVerdict.CANCEL_JOB:
                await asyncio.to_thread(self._slurm.cancel, job)
            case SubmissionVerdict.END:
                await self._end(run, job)
            case SubmissionVerdict.CANCELLED:
                await self.client.set_flow_run_state(run.id, Cancelled(message=decision.message), force=True)
            case SubmissionVerdict.CRASHED:
                await self._report(run.id, decision.message)

    async def _end(self, run: FlowRun, job: int) -> None:
        """Asks a job to end, and cancels it if it has not done so in its grace time."""
        if job not in self._ending:
            await asyncio.to_thread(self._slurm.end, job)
            self._ending[job] = time.monotonic()
            return
        configuration = await self.job_configuration.resolve_for_flow_run(
            run, client=self.client, work_pool=self.work_pool, worker_name=self.name, worker_id=self.backend_id
        )
        if time.monotonic() - self._ending[job] >= configuration.grace_s:
            await asyncio.to_thread(self._slurm.cancel, job)

    async def _report(self, id: UUID, message: str) -> None:
        """Reports a flow run as crashed, unless it has reported its end meanwhile."""
        try:
            run = await self.client.read_flow_run(id)
        except ObjectNotFound:
            return
        if run.state is None or not run.state.is_final():
            self.get_flow_run_logger(run).error(message)
            await self.client.set_flow_run_state(id, Crashed(message=message))


def _as_job_run(run: FlowRun) -> JobRun:
    state = run.state
    return JobRun(
        id=str(run.id),
        infrastructure=run.infrastructure_pid or "",
        is_cancelling=state is not None and state.is_cancelling(),
        age_s=(datetime.now(UTC) - state.timestamp).total_seconds() if state is not None else 0.0,
    )

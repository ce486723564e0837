"""Prefect's workers of the types of batch schedulers: they submit each flow run as a job.

`prefect worker start --type ENGINE --pool NAME` starts one. It keeps no state of its own: what it needs to know is in
Prefect and in the scheduler. Jobs therefore outlive it, and the next worker watches them.
"""

import asyncio
import os
import re
import signal
import sys
import time
from abc import ABC
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, get_type_hints
from uuid import UUID

import anyio
import anyio.abc
import httpx
from prefect.client.schemas import filters
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import InfrastructureNotAvailable, InfrastructureNotFound, ObjectNotFound, PrefectException
from prefect.states import Cancelled, Crashed
from prefect.workers.base import BaseJobConfiguration, BaseVariables, BaseWorker, BaseWorkerResult
from pydantic import Field, create_model

from ringmaster.compat.prefect import worker_texts
from ringmaster.errors import EngineUnavailable, SchedulerError
from ringmaster.flows import settings
from ringmaster.flows.pool.segment_runs import RUNS_AT_ONCE, as_node_run
from ringmaster.tasks.execution.engine import NodeRun
from ringmaster.tasks.execution.engine_registry import ENGINES, LOCAL
from ringmaster.tasks.pool.batch_scheduler import (
    COMMAND,
    GRACE_S,
    IS_SHARED,
    BatchScheduler,
    SchedulerJob,
    SchedulerOptions,
)
from ringmaster.tasks.pool.engines import default_of, options_class

# -P: a file in the working folder with the name of a library must not be imported instead of the library. Prefect's own
# default, `prefect flow-run execute`, starts a second interpreter, which takes seconds more.
DEFAULT_COMMAND = f"{sys.executable} -P -m prefect.engine"


class SchedulerJobConfiguration(BaseJobConfiguration):
    """The job of one flow run. Subclasses have the options of a scheduler's jobs as fields."""

    options_class: ClassVar[type[SchedulerOptions]]

    def prepare_for_flow_run(self, *arguments: Any, **options: Any) -> None:
        """Sets what depends on the flow run."""
        self.command = self.command or DEFAULT_COMMAND
        super().prepare_for_flow_run(*arguments, **options)

    @property
    def options(self) -> SchedulerOptions:
        """The options of the job."""
        kind = self.options_class
        return kind(**{each.name: getattr(self, each.name) for each in kind.job_fields()})

    def arguments(self, *, flow_run: str, log_dir: Path) -> list[str]:
        """Returns the options of the command that submits the job; see `SchedulerOptions`."""
        name = re.sub(r"[^\w.-]+", "-", self.name or "flow-run")
        return self.options.arguments(job_name=name, flow_run=flow_run, log_dir=log_dir)

    def environment(self, own: Mapping[str, str]) -> dict[str, str]:
        """Returns the environment of the job: the worker's, and that of the flow run. It may hold passwords."""
        given = {name: value for name, value in self.env.items() if value is not None}
        shared = {} if self.options.exclusive else {IS_SHARED: "1"}
        inherited = self.options_class.scheduler.environment_of_jobs(own)
        return {**inherited, **given, **shared, COMMAND: self.command or DEFAULT_COMMAND}


UNSUBMITTED_S = 90.0  # a run whose worker ended before it had submitted a job is given up after this time

LOOK_EVERY_S = 3.0
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
class SubmissionDecision:
    """A verdict. job: number of the job to act on, if there is one. message: the cause, for users."""

    verdict: SubmissionVerdict
    job: int = 0
    message: str = ""


def jobs_by_run(jobs: Iterable[SchedulerJob]) -> Mapping[str, SchedulerJob]:
    """Returns, by id of the flow run, the newest job that was submitted for it."""
    return {job.flow_run: job for job in sorted(jobs, key=lambda job: job.id) if job.flow_run}


def decide(
    run: NodeRun, jobs: Mapping[str, SchedulerJob], *, age_s: float, scheduler: type[BatchScheduler]
) -> SubmissionDecision:
    """Decides on a run that was read before the jobs were.

    jobs: see `jobs_by_run`.
    age_s: seconds since the run's state has changed.
    """
    job, number, title = jobs.get(run.id), scheduler.job_of(run.infrastructure), scheduler.title
    if job is None and number is None:
        if run.is_ending or age_s < UNSUBMITTED_S:
            return SubmissionDecision(verdict=SubmissionVerdict.NOTHING)
        message = f"no {title} job was submitted for it: its worker ended before it had"
        return SubmissionDecision(verdict=SubmissionVerdict.CRASHED, message=message)
    over = SubmissionVerdict.CANCELLED if run.is_ending else SubmissionVerdict.CRASHED
    if job is None:
        message = f"{title} job {number} has ended, and {title} has forgotten how"
        return SubmissionDecision(verdict=over, message=message)
    if ended := _ended(job, title):
        return SubmissionDecision(verdict=over, message=ended)
    if run.is_ending and not job.is_completing:
        verdict = SubmissionVerdict.CANCEL_JOB if job.is_waiting else SubmissionVerdict.END
        return SubmissionDecision(verdict=verdict, job=job.id)
    return SubmissionDecision(
        verdict=SubmissionVerdict.NOTHING if number == job.id else SubmissionVerdict.ADOPT, job=job.id
    )


def _ended(job: SchedulerJob, title: str) -> str:
    """Returns how a job has ended, in words; empty for a job that has not."""
    where = f" on {job.node}" if job.node else ""
    reason = f" ({job.reason})" if job.reason else ""
    if job.num_restarts and not job.is_completing:
        return f"{title} job {job.id} was requeued{reason}; a node is requested again instead"
    if job.has_ended:
        return f"{title} job {job.id} has ended{where}: {job.state}, {job.exit}{reason}"
    return ""


class SchedulerWorker(BaseWorker[SchedulerJobConfiguration, BaseVariables, BaseWorkerResult], ABC):
    """Submits flow runs, and reports those whose jobs end without a word. Each scheduler has a subclass."""

    job_configuration = SchedulerJobConfiguration

    def __init__(self, *arguments: Any, scheduler: BatchScheduler | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._scheduler = scheduler or self.job_configuration.options_class.scheduler()
        self._watching: asyncio.Task[None] | None = None
        self._submitting: set[UUID] = set()  # runs whose jobs are not submitted yet
        self._ending: dict[int, float] = {}  # by job, when it was requested to end
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
        configuration: SchedulerJobConfiguration,
        task_status: anyio.abc.TaskStatus[Any] | None = None,
    ) -> BaseWorkerResult:
        """Submits the job of a flow run, and returns without waiting for its end, which `poll` reports.

        Waits while the scheduler does not answer. Raises SchedulerError.
        """
        scheduler = self._scheduler
        log_dir = Path(configuration.options.log_dir or settings.home() / scheduler.name)
        options = configuration.arguments(flow_run=str(flow_run.id), log_dir=log_dir)
        await asyncio.to_thread(log_dir.mkdir, parents=True, exist_ok=True, mode=0o700)
        self._submitting.add(flow_run.id)
        try:
            job = await self._submit(flow_run, configuration, options)
        finally:
            self._submitting.discard(flow_run.id)
        allocation, log = scheduler.allocation_of(job), log_dir / scheduler.log.format(job=job)
        self.get_flow_run_logger(flow_run).info(
            "%s job %d was submitted; its output is in %s", scheduler.title, job, log
        )
        if task_status is not None:
            task_status.started(allocation)
        return BaseWorkerResult(identifier=allocation, status_code=0)

    async def _submit(self, flow_run: FlowRun, configuration: SchedulerJobConfiguration, options: Sequence[str]) -> int:
        """Returns the number of the run's job. Raises SchedulerError.

        An answer may be lost after the scheduler has accepted the job, which is then found by its mark.
        """
        script, environment = configuration.options.batch_script, configuration.environment(os.environ)
        may_be_there = False
        while True:
            try:
                if may_be_there:
                    jobs = jobs_by_run(await asyncio.to_thread(self._scheduler.jobs))
                    if (job := jobs.get(str(flow_run.id))) is not None:
                        return job.id
                may_be_there = True
                return await asyncio.to_thread(self._scheduler.submit, options, script=script, environment=environment)
            except EngineUnavailable as error:
                self.get_flow_run_logger(flow_run).warning("waiting until a job can be submitted: %s", error)
                await anyio.sleep(LOOK_EVERY_S)

    async def kill_infrastructure(
        self, infrastructure_pid: str, configuration: SchedulerJobConfiguration, grace_seconds: int = GRACE_S
    ) -> None:
        """Ends the job of a flow run in order, and cancels it where it has not ended after the grace time."""
        number = self._scheduler.job_of(infrastructure_pid)
        if number is None:
            raise InfrastructureNotFound(f"{infrastructure_pid!r} is not the id of a {self._scheduler.title} job")
        deadline_s = time.monotonic() + min(configuration.options.grace_s, grace_seconds)
        try:
            is_commanded_to_end = False
            while (job := await self._find(number)) is not None and not job.has_ended and not job.num_restarts:
                if job.is_waiting or time.monotonic() >= deadline_s:
                    await asyncio.to_thread(self._scheduler.cancel, number)
                    return
                if not is_commanded_to_end:
                    await asyncio.to_thread(self._scheduler.end, number)
                    is_commanded_to_end = True
                await anyio.sleep(1.0)
            if job is None:
                raise InfrastructureNotFound(f"{self._scheduler.title} job {number} has ended")
        except (EngineUnavailable, SchedulerError) as error:
            raise InfrastructureNotAvailable(str(error)) from error

    async def _find(self, number: int) -> Any:
        jobs = await asyncio.to_thread(self._scheduler.jobs)
        return next((job for job in jobs if job.id == number), None)

    # -- the watch over all jobs of the work pool ----------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            await anyio.sleep(LOOK_EVERY_S)
            try:
                await self.poll()
                self._is_away = False
            except _AWAY as error:
                if not self._is_away:
                    self._logger.warning("jobs cannot be watched for now, trying again: %s", error)
                self._is_away = True

    def _watch_ended(self, watching: asyncio.Task[None]) -> None:
        if not watching.cancelled() and (error := watching.exception()) is not None:
            self._logger.error("the watch over jobs has failed: the worker ends", exc_info=error)
            signal.raise_signal(signal.SIGTERM)  # whoever started the worker starts it again

    async def poll(self) -> None:
        """Compares the flow runs of the work pool with their jobs, and acts on each difference."""
        runs = await self._unended()  # before the jobs: the job of a run that is known is then known, too
        if not runs:
            return
        jobs = jobs_by_run(await asyncio.to_thread(self._scheduler.jobs))
        for run in runs:
            if run.id in self._submitting:
                continue
            age_s = (datetime.now(UTC) - run.state.timestamp).total_seconds() if run.state is not None else 0.0
            try:
                await self._act(run, decide(as_node_run(run), jobs, age_s=age_s, scheduler=type(self._scheduler)))
            except (SchedulerError, ObjectNotFound) as error:  # concerns this run alone
                self.get_flow_run_logger(run).warning("its job cannot be ended: %s", error)

    async def _unended(self) -> Sequence[FlowRun]:
        result: list[FlowRun] = []
        while True:
            page = await self.client.read_flow_runs(
                flow_run_filter=filters.FlowRunFilter(
                    state=filters.FlowRunFilterState(type=filters.FlowRunFilterStateType(any_=list(UNENDED)))
                ),
                work_pool_filter=filters.WorkPoolFilter(name=filters.WorkPoolFilterName(any_=[self.work_pool.name])),
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
                await self.client.update_flow_run(run.id, infrastructure_pid=self._scheduler.allocation_of(job))
            case SubmissionVerdict.CANCEL_JOB:
                await asyncio.to_thread(self._scheduler.cancel, job)
            case SubmissionVerdict.END:
                await self._end(run, job)
            case SubmissionVerdict.CANCELLED:
                await self.client.set_flow_run_state(run.id, Cancelled(message=decision.message), force=True)
            case SubmissionVerdict.CRASHED:
                await self._report(run.id, decision.message)

    async def _end(self, run: FlowRun, job: int) -> None:
        """Requests a job to end, and cancels it if it has not done so in its grace time."""
        if job not in self._ending:
            await asyncio.to_thread(self._scheduler.end, job)
            self._ending[job] = time.monotonic()
            return
        configuration = await self.job_configuration.resolve_for_flow_run(
            run, client=self.client, work_pool=self.work_pool, worker_name=self.name, worker_id=self.backend_id
        )
        if time.monotonic() - self._ending[job] >= configuration.options.grace_s:
            await asyncio.to_thread(self._scheduler.cancel, job)

    async def _report(self, id: UUID, message: str) -> None:
        """Reports a flow run as crashed, unless it has reported its end meanwhile."""
        try:
            run = await self.client.read_flow_run(id)
        except ObjectNotFound:
            return
        if run.state is None or not run.state.is_final():
            self.get_flow_run_logger(run).error(message)
            await self.client.set_flow_run_state(id, Crashed(message=message))


def worker_class(options: type[SchedulerOptions]) -> type[SchedulerWorker]:
    """Returns Prefect's type of worker for the jobs of a scheduler, which is known to Prefect from now on."""
    name, title, types = options.scheduler.name, options.scheduler.title, get_type_hints(options)
    fields: dict[str, Any] = {
        each.name: (
            types[each.name],
            Field(
                default=default_of(each),
                description=each.metadata["description"],
                ge=each.metadata["least"],
                **each.metadata["schema"],
            ),
        )
        for each in options.job_fields()
    }
    configuration = create_model(f"{title}JobConfiguration", __base__=SchedulerJobConfiguration, **fields)
    configuration.options_class = options
    content = {
        "__doc__": f"Submits flow runs as jobs of {title}.",
        "type": name,
        "job_configuration": configuration,
        "job_configuration_variables": create_model(f"{title}Variables", __base__=BaseVariables, **fields),
        **worker_texts(description=f"Runs each flow run as a batch job of {title}.", display_name=title),
    }
    return type(f"{title}Worker", (SchedulerWorker,), content)


WORKERS: Mapping[str, type[SchedulerWorker]] = {
    name: worker_class(kind)
    for name in ENGINES.paths()
    if name != LOCAL and issubclass(kind := options_class(name), SchedulerOptions)
}
"""The types of workers that Prefect gets from here, by name."""

"""Batch schedulers that lend nodes, each as a job of its own: their commands, their jobs, and the options of these.

A scheduler is a `BatchScheduler`, which defines its commands and parses their output, and a
`SchedulerOptions`, which says what can be requested for a node. What a pool makes of both is here, and in the worker of
Prefect that submits the jobs (`ringmaster.flows.pool.batch_worker`).
"""

from __future__ import annotations

import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import Field, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from ringmaster.errors import EngineUnavailable, SchedulerError
from ringmaster.tasks.pool.engines import CONTROLLER, EngineOptions, NodeDeployment, Service, default_of, option
from ringmaster.tasks.pool.provider import MAX_REMEMBERED, Allocation, AllocationStatus

if TYPE_CHECKING:
    from ringmaster.tasks.execution.engine import Engine, EngineContext, NodeRun

logger = logging.getLogger(__name__)

TIMEOUT_S = 60.0  # the commands give up by themselves after some time, which sites choose
END_GRACE_S = 120.0  # for a job to end in order, before it is cancelled
GRACE_S = 60
COMMAND, IS_SHARED = "FLOW_RUN_COMMAND", "JOB_IS_SHARED"
"""Environment variables of a batch script."""
SCRIPT = (Path(__file__).parent / "batch_script.sh").read_text()
Run = Callable[[Sequence[str], str | None, Mapping[str, str] | None], subprocess.CompletedProcess[str]]
"""Runs a command with a standard input and an environment (None for those of this process) to its end."""

# The states of jobs and nodes, into which each scheduler's own are translated.
WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"})
_ENDED = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)
_DRAINED = frozenset({"DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "REBOOT_REQUESTED", "POWER_DOWN"})
_UNREACHABLE = frozenset({"DOWN", "NOT_RESPONDING", "POWERED_DOWN", "REBOOT_ISSUED", "UNKNOWN"})


@dataclass(frozen=True, kw_only=True)
class SchedulerJob:
    """A job as its scheduler describes it.

    states: its state, such as RUNNING, and flags such as COMPLETING: its processes are being ended.
    node: the name of its node; empty while it waits.
    user_id: the number of the user who submitted it; None where the scheduler does not report it.
    flow_run: the id of the flow run that it was submitted for; empty for other jobs.
    num_restarts: how many times it was requeued after it had started.
    end_s: when it ended, or has to, in seconds since the epoch; None while it waits.
    is_preempted: whether another job takes its node.
    exit: how its batch script ended, in words.
    reason: why it waits or ended, in the scheduler's words; empty if there is no reason.
    """

    id: int
    states: frozenset[str]
    node: str = ""
    user_id: int | None = None
    flow_run: str = ""
    num_restarts: int = 0
    end_s: float | None = None
    is_preempted: bool = False
    exit: str = ""
    reason: str = ""

    @property
    def is_completing(self) -> bool:
        """Whether the scheduler is ending its processes, or cannot confirm that they have ended."""
        return "COMPLETING" in self.states

    @property
    def is_waiting(self) -> bool:
        """Whether it has not started, or is to start again."""
        return bool(self.states & WAITING) and not self.is_completing

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, and the scheduler knows of no process of it."""
        return bool(self.states & _ENDED) and not self.is_completing

    @property
    def state(self) -> str:
        """Its states in words."""
        return "+".join(sorted(self.states))


@dataclass(frozen=True, kw_only=True)
class SchedulerNode:
    """A node as the scheduler describes it. reason: why it is drained or down, in its administrator's words."""

    name: str
    states: frozenset[str]
    reason: str = ""

    @property
    def is_drained(self) -> bool:
        """Whether it accepts no new jobs."""
        return bool(self.states & _DRAINED)

    @property
    def is_away(self) -> bool:
        """Whether the scheduler cannot reach it: processes may run there that it counts as ended."""
        return bool(self.states & _UNREACHABLE)


def _run(command: Sequence[str], input: str | None, env: Mapping[str, str] | None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, input=input or "", env=env, capture_output=True, text=True, timeout=TIMEOUT_S)


class BatchScheduler(ABC):
    """The cluster that the commands of this machine reach. Calls wait for it.

    All methods raise EngineUnavailable while the scheduler does not answer.

    name: name of the engine, and of its type of work pools in Prefect.
    title: name of the scheduler in messages. server: its part that answers. ping: the command that checks whether it
    does. submit_command, jobs_command, end_command, cancel_command: options of a job, or a job, follow.
        Ending a job means SIGTERM to its batch script, which decides what hears of it.
    other_commands: the other programs that have to be installed. clients: how, to follow "such as a login node".
    away: matches what the commands print when the server, or the key service of the cluster, does not answer.
    over: matches what they print of a job that has ended, or is about to.
    variables: matches the environment variables that the scheduler sets in a job.
    log: name of the file of a job's output, with a place for the job.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    server: ClassVar[str]
    ping: ClassVar[str]
    submit_command: ClassVar[tuple[str, ...]]
    jobs_command: ClassVar[tuple[str, ...]]
    end_command: ClassVar[tuple[str, ...]]
    cancel_command: ClassVar[tuple[str, ...]]
    other_commands: ClassVar[tuple[str, ...]] = ()
    clients: ClassVar[str]
    away: ClassVar[re.Pattern[str]]
    over: ClassVar[re.Pattern[str]]
    variables: ClassVar[re.Pattern[str]]
    log: ClassVar[str]

    def __init__(self, *, run: Run = _run) -> None:
        self._run = run

    @abstractmethod
    def read_jobs(self, text: str) -> Sequence[SchedulerJob]:
        """Returns the jobs that the command has printed. Raises ValueError for a list that may lack jobs."""

    @abstractmethod
    def nodes(self, names: Collection[str]) -> Mapping[str, SchedulerNode]:
        """Returns nodes by their names."""

    def submit(self, options: Sequence[str], *, script: str, environment: Mapping[str, str]) -> int:
        """Submits a batch job; returns its number. Raises SchedulerError.

        options: options of the command, which every user of the cluster can read.
        script: the batch script, which is passed through standard input and therefore written to no file here.
        environment: the variables of the command and of the job, which only the job's user can read.
        """
        answer = self._answer([*self.submit_command, *options], input=script, env=environment)
        number = re.search(r"\d+", answer.strip().rpartition("\n")[2])
        if number is None:
            raise SchedulerError(f"{self.title} names no job: {self.submit_command[0]} prints {answer!r}")
        return int(number[0])

    def jobs(self) -> Sequence[SchedulerJob]:
        """Returns the jobs that the scheduler knows: those that wait or run, and those that ended lately."""
        text = self._query(self.jobs_command)
        try:
            return self.read_jobs(text)
        except ValueError as error:
            raise self._unavailable(f"{self.jobs_command[0]}: {error}") from error

    def end(self, job: int) -> None:
        """Sends SIGTERM to the batch script of a running job, which ends in order; does nothing if it has ended."""
        self._cancel(self.end_command, job)

    def cancel(self, job: int) -> None:
        """Cancels a job. If it runs, all its processes receive SIGTERM, and SIGKILL after a time of the cluster's."""
        self._cancel(self.cancel_command, job)

    @classmethod
    def allocation_of(cls, job: int) -> str:
        """Returns the id under which Prefect, and the pool, know a job."""
        return f"{cls.name}:{job}"

    @classmethod
    def job_of(cls, allocation: str) -> int | None:
        """Returns the number of the job with such an id; None for other ids."""
        engine, _, number = allocation.partition(":")
        return int(number) if engine == cls.name and number.isdecimal() else None

    @classmethod
    def environment_of_jobs(cls, environment: Mapping[str, str]) -> dict[str, str]:
        """Returns an environment without what the scheduler has set for a job, in which the caller may run.

        Such variables would be taken for options of the new job.
        """
        return {name: value for name, value in environment.items() if not cls.variables.match(name)}

    @classmethod
    def lacking_commands(cls) -> Sequence[str]:
        """Returns the faults of this machine: one for the commands that are not installed, with a remedy."""
        needed = (cls.submit_command, cls.jobs_command, cls.end_command, cls.cancel_command)
        programs = dict.fromkeys([*(command[0] for command in needed), *cls.other_commands])
        absent = [name for name in programs if shutil.which(name) is None]
        return [f"{', '.join(absent)} cannot be found on this machine. {cls._remedy()}"] if absent else []

    @classmethod
    def _remedy(cls) -> str:
        return f"To fix: use a machine from which jobs can be submitted, such as a login node {cls.clients}"

    def _cancel(self, command: Sequence[str], job: int) -> None:
        try:
            self._answer([*command, str(job)])
        except SchedulerError as error:
            if not self.over.search(str(error)):
                raise

    def _query(self, command: Sequence[str]) -> str:
        """Returns the output of a command that the scheduler has no reason to refuse."""
        try:
            return self._answer(command)
        except SchedulerError as error:
            raise self._unavailable(str(error)) from error

    def _answer(self, command: Sequence[str], *, input: str | None = None, env: Mapping[str, str] | None = None) -> str:
        name = command[0]
        try:
            done = self._run(command, input, env)
        except subprocess.TimeoutExpired as error:
            raise self._unavailable(f"{name} has waited for {TIMEOUT_S:.0f} s") from error
        except OSError as error:
            raise EngineUnavailable(f"{name} cannot be started here ({error}). {self._remedy()}") from error
        if done.returncode == 0:
            return done.stdout
        text = " ".join((done.stderr or done.stdout).split()) or f"exit status {done.returncode}"
        if self.away.search(text):
            raise self._unavailable(text)
        raise SchedulerError(f"{self.title} refuses {name}: {text}")

    def _unavailable(self, cause: str) -> EngineUnavailable:
        remedy = f"To fix: wait until it is back; `{self.ping}` on this machine checks whether it is"
        return EngineUnavailable(f"{self.server} does not answer: {cause}. {remedy}")


@dataclass(frozen=True, kw_only=True)
class _KnownJob:
    """What is remembered of a job.

    node: the last node that it ran on.
    has_ended: whether the scheduler has confirmed its end.
    is_lost: whether it has ended, as the scheduler sees it, while that could not reach its node.
    ended_at_s: when its end was requested, by the clock.
    """

    node: str = ""
    has_ended: bool = False
    is_lost: bool = False
    ended_at_s: float | None = None


class SchedulerMachines:
    """The machines that a scheduler lends: what it reports of the jobs of a pool's flow runs. Implements `Machines`.

    Not thread-safe: the provider's thread alone uses it. A job serves one node once. If the scheduler requeues it,
    another one is requested, and it is cancelled.

    The pool's jobs are those of the user of this process: schedulers list the jobs of all users, and the jobs of their
    pools are marked in the same way.

    clock: monotonic seconds.
    """

    def __init__(self, scheduler: BatchScheduler, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._scheduler, self._clock, self._user_id = scheduler, clock, os.getuid()
        self._seen: dict[int, _KnownJob] = {}

    def poll(self, runs: Sequence[NodeRun]) -> Mapping[str, Allocation]:
        """Returns the states of the jobs of `runs`, and of those that ended lately; see `Machines`.

        Cancels requeued jobs, and those that have not ended in order in time.
        """
        wanted = {number for run in runs if (number := self._scheduler.job_of(run.infrastructure)) is not None}
        known, users = {job.id: job for job in self._scheduler.jobs()}, (None, self._user_id)
        jobs = [job for job in known.values() if (job.flow_run and job.user_id in users) or job.id in wanted]
        for job in jobs:
            self._remember(job)
        current = {job.id for job in jobs} | wanted
        nodes = self._scheduler.nodes({seen.node for id, seen in self._seen.items() if id in current and seen.node})
        result = [self._allocation(job, nodes) for job in jobs]
        result += [self._forgotten(number, nodes) for number in sorted(wanted - known.keys())]
        for job in jobs:
            self._insist(job)
        return {each.id: each for each in result}

    def allocation_of(self, run: NodeRun) -> str:
        """Returns the id of the job of a flow run; see `Machines`."""
        return run.infrastructure

    def end(self, allocation: str) -> None:
        """Ends a job in order; see `Machines`."""
        number = self._scheduler.job_of(allocation)
        if number is None:
            return
        seen = self._seen.get(number, _KnownJob())
        if seen.ended_at_s is None:
            # A job that waits is cancelled: nothing would receive a signal.
            self._try(self._scheduler.end if seen.node else self._scheduler.cancel, number)
            self._seen[number] = replace(seen, ended_at_s=self._clock())

    def _try(self, call: Callable[[int], None], job: int) -> None:
        try:
            call(job)
        except SchedulerError as error:  # concerns this job alone
            logger.warning("%s job %d cannot be ended: %s", self._scheduler.title, job, error)

    def _remember(self, job: SchedulerJob) -> None:
        seen = self._seen.pop(job.id, _KnownJob())  # the job that was seen last is the last to be forgotten
        self._seen[job.id] = replace(seen, node=job.node or seen.node, has_ended=job.has_ended)
        while len(self._seen) > MAX_REMEMBERED:
            del self._seen[next(iter(self._seen))]

    def _insist(self, job: SchedulerJob) -> None:
        ended_at_s = self._seen[job.id].ended_at_s
        is_late = ended_at_s is not None and self._clock() - ended_at_s > END_GRACE_S
        if not job.has_ended and not job.is_completing and (job.num_restarts or is_late):
            self._try(self._scheduler.cancel, job.id)

    def _allocation(self, job: SchedulerJob, nodes: Mapping[str, SchedulerNode]) -> Allocation:
        status, why = self._status(job, nodes)
        until_s = job.end_s if status in (AllocationStatus.RUNNING, AllocationStatus.LEAVING) else None
        return Allocation(id=self._scheduler.allocation_of(job.id), status=status, until_s=until_s, why=why)

    def _status(self, job: SchedulerJob, nodes: Mapping[str, SchedulerNode]) -> tuple[AllocationStatus, str]:
        node, title = nodes.get(job.node), self._scheduler.title
        name = f"its {title} job {job.id}"
        reason = f" ({job.reason})" if job.reason else ""
        if job.is_completing:
            return AllocationStatus.LEAVING, f"{name} is ending{reason}"
        if job.num_restarts:
            return self._ended(job, f"{name} was requeued{reason}", nodes)
        if job.has_ended:
            return self._ended(job, f"{name} has ended: {job.state}, {job.exit}{reason}", nodes)
        if self._seen[job.id].ended_at_s is not None:
            return AllocationStatus.LEAVING, f"{name} was given back"
        if job.is_waiting:
            return AllocationStatus.PENDING, f"{name} waits{reason}"
        if "RUNNING" not in job.states:
            return AllocationStatus.LOST, f"{name} is {job.state}{reason}"
        if job.is_preempted:
            return AllocationStatus.LEAVING, f"{name} is preempted"
        if node is not None and node.is_drained:
            return AllocationStatus.LEAVING, f"{title} drains {node.name}: {node.reason or 'no reason is given'}"
        return AllocationStatus.RUNNING, ""

    def _ended(self, job: SchedulerJob, why: str, nodes: Mapping[str, SchedulerNode]) -> tuple[AllocationStatus, str]:
        """Returns the status of a job whose processes have ended, unless its node has failed.

        When a node that has failed comes back, the scheduler ends what still runs there, and never reports when it is
        done.
        """
        seen = self._seen[job.id]
        node = nodes.get(seen.node)
        if seen.is_lost or "NODE_FAIL" in job.states or (node is not None and node.is_away):
            self._seen[job.id] = replace(seen, is_lost=True)
            where = seen.node or "its node"
            return AllocationStatus.LOST, f"{why}, and {self._scheduler.title} does not know what runs on {where}"
        if job.num_restarts and not seen.node:
            return AllocationStatus.LOST, f"{why}, and it is unknown where it ran"
        return AllocationStatus.ENDED, why

    def _forgotten(self, number: int, nodes: Mapping[str, SchedulerNode]) -> Allocation:
        """Returns the allocation of a job that the scheduler does not know any more.

        A scheduler may forget a job some minutes after its end, or at once if it loses its state. Then the job's
        processes live until their node queries the scheduler about them.
        """
        seen, title = self._seen.get(number, _KnownJob()), self._scheduler.title
        is_away = seen.node in nodes and nodes[seen.node].is_away
        is_ended = seen.has_ended and not seen.is_lost and not is_away
        status = AllocationStatus.ENDED if is_ended else AllocationStatus.LOST
        why = f"{title} does not know its job {number} any more"
        return Allocation(id=self._scheduler.allocation_of(number), status=status, why=why)


def batch_script(engine: str, *, directive: str, job: str, node: str, restarts: str) -> str:
    """Returns the batch script of nodes.

    directive: how lines with options of the job begin.
    job, node, restarts: what bash replaces by the job's number, its node's name, and how many times it was requeued.
    """
    values = {"ENGINE": engine, "DIRECTIVE": directive, "JOB": job, "NODE": node, "RESTARTS": restarts}
    return re.sub("@([A-Z]+)@", lambda match: values[match[1]], SCRIPT)


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions(EngineOptions):
    """The options of nodes that are jobs. Each job has one node.

    All fields but those of `EngineOptions` are variables of the base job template, which a work pool, a deployment or a
    flow run may choose.

    scheduler: takes the jobs.
    """

    scheduler: ClassVar[type[BatchScheduler]]

    time: str | None = option(
        None,
        "For how long a node is lent: 8h, 30m, 2d, or as the scheduler reads it. The queue's limit if empty.",
        flag="--time",
        title="Time limit",
        examples=["8h"],
    )
    exclusive: bool = option(True, "Whether the job has the node to itself.")
    grace_s: int = option(
        GRACE_S,
        "How long a cancelled flow run has to end in order, before its job is cancelled.",
        least=0,
        title="Grace (seconds)",
    )
    log_dir: str | None = option(
        None,
        "Where the output of the jobs is stored, a file each: a folder that nodes and worker share. By default a "
        "folder in RINGMASTER_HOME with the scheduler's name.",
        title="Folder of logs",
    )
    batch_script: str = option("", "The batch script.", json_schema_extra={"format": "sh"})

    def arguments(self, *, job_name: str, flow_run: str, log_dir: Path) -> list[str]:
        """Returns the options of the command that submits a job. They are visible to all users of the cluster.

        job_name: a name that any scheduler takes.
        flow_run: id of the flow run, by which the job is found even if its number was never stored.
        log_dir: the folder for the output of jobs.
        """
        raise NotImplementedError

    @classmethod
    def job_fields(cls) -> Sequence[Field[Any]]:
        """Returns the fields that are variables of the base job template."""
        common = {each.name for each in fields(EngineOptions)}
        return [each for each in fields(cls) if each.name not in common]

    def job_variables(self) -> Mapping[str, Any]:
        """Returns the values for the base job template that differ from its defaults."""
        given = {each.name: getattr(self, each.name) for each in self.job_fields()}
        return {each.name: given[each.name] for each in self.job_fields() if given[each.name] != default_of(each)}

    def with_template(self) -> Self:
        """Returns these options where the defaults of the base job template fill what was not chosen."""
        known, values = {each.name for each in self.job_fields()}, {**self.template_defaults(), **self.job_variables()}
        return replace(self, **{name: value for name, value in values.items() if name in known})

    @classmethod
    def build(cls, context: EngineContext) -> Engine:
        """Builds the engine; see `EngineOptions`. Raises ValueError where commands are not installed, too."""
        from ringmaster.tasks.pool.work_pool import work_pool_engine

        if faults := cls.scheduler.lacking_commands():
            raise ValueError("\n".join(faults))
        return work_pool_engine(context, lambda _: SchedulerMachines(cls.scheduler()), name=cls.scheduler.name)

    def deployment(self) -> NodeDeployment:
        """Returns the deployment of lent nodes."""
        return self.node_deployment(self._work_pool, self.scheduler.name, self.job_variables())

    @property
    def _work_pool(self) -> str:
        return f"ringmaster-{self.scheduler.name}"

    def services(self, home: Path) -> Sequence[Service]:
        """Returns the worker of Prefect that submits the jobs."""
        command = (sys.executable, "-m", "prefect", "worker", "start", "--type", self.scheduler.name)
        worker = Service(
            name=self.scheduler.name,
            command=(*command, "--pool", self._work_pool, "--name", platform.node() or "localhost"),
            # Prefect's default is 10 s, by which each node would come later.
            environment={"PREFECT_WORKER_QUERY_SECONDS": os.environ.get("PREFECT_WORKER_QUERY_SECONDS", "2")},
            after=(CONTROLLER,),
            group=False,
        )
        return [worker]

    def queried_faults(self, home: Path) -> Sequence[str]:
        """Returns why the scheduler cannot be queried; see `EngineOptions`."""
        faults = self.scheduler.lacking_commands()
        try:
            if not faults:
                self.scheduler().jobs()
        except EngineUnavailable as error:
            return [str(error)]
        return faults


def short_time_s(text: str) -> int | None:
    """Returns a time such as 8h, 30m or 2d in seconds; None for other texts, which the scheduler may understand."""
    result = re.fullmatch(r"(\d+)\s*([mhd])", text.strip().lower())
    return int(result[1]) * {"m": 60, "h": 3600, "d": 86400}[result[2]] if result else None

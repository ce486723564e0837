"""The machines that Slurm lends: what it says of the jobs of a pool's flow runs."""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ringmaster.errors import EngineUnavailable, SlurmError
from ringmaster.tasks.execution.engine import EngineContext, NodeRun
from ringmaster.tasks.execution.known_nodes import EMPTY_BEFORE_S
from ringmaster.tasks.pool.pool_engine import MOST_REMEMBERED, PoolEngine
from ringmaster.tasks.pool.provider import Allocation, AllocationStatus
from ringmaster.tasks.pool.slurm.commands import (
    Slurm,
    SlurmJob,
    SlurmNode,
    SlurmPartition,
    infrastructure_of,
    job_number,
    lacking_commands,
    seconds_of,
)
from ringmaster.tasks.pool.work_pool import build_engine

logger = logging.getLogger(__name__)

END_GRACE_S = 120.0  # for a job to end in order, before it is cancelled

_GRES = re.compile(r"(?:gres[:/])?(?P<name>[a-z]\w*)(?::(?P<type>[a-z_]\w*))?(?::(?P<number>\d+))?(?:\(.*\))?", re.I)
_ASKS_FOR_GPUS = re.compile(r"(^|\s)(--gpus|-G|(--gres|--tres-per-\w+)[= ]\S*gpu)")
_SEPARATOR = re.compile(r",(?![^(]*\))")  # no comma in parentheses, as in gpu:8(S:0,1)
LEAST_TIME_S = EMPTY_BEFORE_S + 60.0  # before anything was measured, a node would otherwise leave as it comes
UNAVAILABLE = "Requested node configuration is not available"


@dataclass(frozen=True, kw_only=True)
class _KnownJob:
    """What is remembered of a job.

    node: the last node that it ran on.
    has_ended: whether Slurm has confirmed its end.
    is_lost: whether it has ended, as Slurm sees it, while Slurm could not reach its node.
    ended_at_s: when it was asked to end, by the clock.
    """

    node: str = ""
    has_ended: bool = False
    is_lost: bool = False
    ended_at_s: float | None = None


class SlurmMachines:
    """Implements `Machines`. Not thread-safe: the provider's thread alone uses it.

    A job serves one node once. If Slurm requeues it, another one is requested, and it is cancelled.

    slurm: the commands. clock: monotonic seconds.
    user_id: the user whose jobs are the pool's; None for the user of this process. Slurm lists the jobs of all users,
        and the jobs of their pools have the same kind of comment.
    """

    def __init__(
        self, slurm: Slurm, *, clock: Callable[[], float] = time.monotonic, user_id: int | None = None
    ) -> None:
        self._slurm, self._clock = slurm, clock
        self._user_id = os.getuid() if user_id is None else user_id
        self._seen: dict[int, _KnownJob] = {}

    def look(self, runs: Sequence[NodeRun]) -> Mapping[str, Allocation]:
        """Returns what Slurm says of the jobs of `runs`, and of those that ended lately; see `Machines`.

        Cancels requeued jobs, and those that have not ended in order in time.
        """
        wanted = {number for run in runs if (number := job_number(run.infrastructure)) is not None}
        known = {job.id: job for job in self._slurm.jobs()}
        jobs = [job for job in known.values() if (job.flow_run and self._is_own(job)) or job.id in wanted]
        for job in jobs:
            self._remember(job)
        current = {job.id for job in jobs} | wanted
        nodes = self._slurm.nodes({seen.node for id, seen in self._seen.items() if id in current and seen.node})
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
        number = job_number(allocation)
        if number is None:
            return
        seen = self._seen.get(number, _KnownJob())
        if seen.ended_at_s is not None:
            return
        try:
            if seen.node:
                self._slurm.end(number)
            else:
                self._slurm.cancel(number)  # it waits: nothing would receive a signal
        except SlurmError as error:  # concerns this job alone
            logger.warning("Slurm job %d cannot be ended: %s", number, error)
        self._seen[number] = replace(seen, ended_at_s=self._clock())

    def _is_own(self, job: SlurmJob) -> bool:
        return job.user_id in (None, self._user_id)

    def _remember(self, job: SlurmJob) -> None:
        seen = self._seen.pop(job.id, _KnownJob())  # the job that was seen last is the last to be forgotten
        self._seen[job.id] = replace(seen, node=job.node or seen.node, has_ended=job.has_ended)
        while len(self._seen) > MOST_REMEMBERED:
            del self._seen[next(iter(self._seen))]

    def _insist(self, job: SlurmJob) -> None:
        asked_s = self._seen[job.id].ended_at_s
        is_late = asked_s is not None and self._clock() - asked_s > END_GRACE_S
        if not job.has_ended and not job.is_completing and (job.num_restarts or is_late):
            try:
                self._slurm.cancel(job.id)
            except SlurmError as error:
                logger.warning("Slurm job %d cannot be cancelled: %s", job.id, error)

    def _allocation(self, job: SlurmJob, nodes: Mapping[str, SlurmNode]) -> Allocation:
        status, why = self._status(job, nodes)
        until_s = job.end_s if status in (AllocationStatus.RUNNING, AllocationStatus.LEAVING) else None
        return Allocation(id=infrastructure_of(job.id), status=status, until_s=until_s, why=why)

    def _status(self, job: SlurmJob, nodes: Mapping[str, SlurmNode]) -> tuple[AllocationStatus, str]:
        node = nodes.get(job.node)
        name = f"its Slurm job {job.id}"
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
            return AllocationStatus.LEAVING, f"Slurm drains {node.name}: {node.reason or 'no reason is given'}"
        return AllocationStatus.RUNNING, ""

    def _ended(self, job: SlurmJob, why: str, nodes: Mapping[str, SlurmNode]) -> tuple[AllocationStatus, str]:
        """Returns the status of a job whose processes have ended, unless its node has failed.

        When a node that has failed comes back, Slurm ends what still runs there, and never says when it is done.
        """
        seen = self._seen[job.id]
        node = nodes.get(seen.node)
        if seen.is_lost or "NODE_FAIL" in job.states or (node is not None and node.is_away):
            self._seen[job.id] = replace(seen, is_lost=True)
            return AllocationStatus.LOST, f"{why}, and Slurm does not know what runs on {seen.node or 'its node'}"
        if job.num_restarts and not seen.node:
            return AllocationStatus.LOST, f"{why}, and it is unknown where it ran"
        return AllocationStatus.ENDED, why

    def _forgotten(self, number: int, nodes: Mapping[str, SlurmNode]) -> Allocation:
        """Returns the allocation of a job that Slurm does not know any more.

        Slurm forgets a job some minutes after its end, or at once if its controller loses its state. Then the job's
        processes live until their node asks the controller about them.
        """
        seen, why = self._seen.get(number, _KnownJob()), f"Slurm does not know its job {number} any more"
        is_away = seen.node in nodes and nodes[seen.node].is_away
        is_ended = seen.has_ended and not seen.is_lost and not is_away
        status = AllocationStatus.ENDED if is_ended else AllocationStatus.LOST
        return Allocation(id=infrastructure_of(number), status=status, why=why)


def slurm(context: EngineContext) -> PoolEngine:
    """Builds the engine, which reads events and asks for nodes from now on.

    Raises ValueError outside of a pool, and where the commands of Slurm are not installed.
    """
    if faults := lacking_commands():
        raise ValueError("\n".join(faults))
    return build_engine(context, lambda _: SlurmMachines(Slurm()), name="slurm")


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """What a pool asks of Slurm for each node; empty texts leave the choice to Slurm.

    time: a time limit as sbatch reads it, or as in 8h.
    gres: generic resources, as in gpu:8.
    num_gpus: how many GPUs are to serve; 0 where that depends on what Slurm gives.
    has_whole_node: whether the job has its node, with all GPUs, for itself.
    script: the batch script, whose lines may ask for more.
    """

    partition: str = ""
    time: str = ""
    gres: str = ""
    num_gpus: int = 0
    has_whole_node: bool = False
    script: str = ""


def faults(
    slurm: Slurm,
    request: JobRequest,
    *,
    options: Callable[[JobRequest], Sequence[str]],
    lacking: Callable[[], Sequence[str]] = lacking_commands,
) -> Sequence[str]:
    """Returns what is wrong with a request for nodes.

    options: returns the options of sbatch for a request, with which sbatch is asked itself, too. What was found to be
        wrong before is left out of its request.
    lacking: returns the faults of commands that are missing.
    """
    if result := lacking():
        return result
    try:
        partitions, nodes = slurm.partitions(), slurm.all_nodes()
        default = [each for each in partitions if each.is_default]
        names = request.partition.split(",") if request.partition else []
        # Where the job may run; where it cannot run as asked, any partition, so that other faults are found, too.
        allowed = ([each for each in partitions if each.name in names] if names else default) or partitions
        partition_faults = _partition_faults(names, partitions)
        time_faults = _time_faults(request.time, allowed)
        gres_faults = _gres_faults(request.gres, allowed, nodes)
        gpu_faults = _gpu_faults(request, options(request), allowed, nodes)
        result = [*partition_faults, *time_faults, *gres_faults, *gpu_faults]
        if partition_faults and not default:
            return result
        rest = JobRequest(
            partition="" if partition_faults else request.partition,
            time="" if time_faults else request.time,
            gres="" if gres_faults else request.gres,
        )
        are_all_there = not any(node.is_drained or node.is_away for node in nodes)
        return [*result, *_refusals(slurm, options(rest), are_all_there=are_all_there)]
    except EngineUnavailable as error:
        return [str(error)]


def _partition_faults(names: Sequence[str], partitions: Sequence[SlurmPartition]) -> Sequence[str]:
    """Returns the faults of the names, of which sbatch takes several, or of having named none."""
    known = {each.name: each for each in partitions}
    listed = ", ".join(known) or "none"
    if not names and not any(each.is_default for each in partitions):
        return [f"the cluster has no default partition. To fix: name one by --partition, of {listed}"]
    absent = [name for name in names if name not in known]
    closed = [name for name in names if name in known and not known[name].is_up]
    return [
        *(f"--partition {name} is not in this cluster. To fix: choose one of {listed}" for name in absent),
        *(f"--partition {name} starts no jobs at present. To fix: choose another one of {listed}" for name in closed),
    ]


def _time_faults(time: str, allowed: Sequence[SlurmPartition]) -> Sequence[str]:
    if not time:
        return []
    try:
        asked_s = seconds_of(time)
    except ValueError:
        return [f"--time {time} is no time. To fix: write it as in 30m, 8h, 2d or 1-12:00:00"]
    if asked_s < LEAST_TIME_S:
        least = f"To fix: at least --time {LEAST_TIME_S // 60:.0f}m"
        return [f"--time {time} is too short: a node is emptied {EMPTY_BEFORE_S:.0f} s before its end. {least}"]
    limit_s = max((each.max_time_s for each in allowed), default=math.inf)
    if asked_s <= limit_s:
        return []
    most = f"To fix: at most --time {limit_s // 60:.0f}m"
    return [f"--time {time} is above the limit of partition {_names(allowed)}. {most}"]


def _gres_faults(gres: str, allowed: Sequence[SlurmPartition], nodes: Sequence[SlurmNode]) -> Sequence[str]:
    wanted = numbers_of(gres)
    own = [node for node in nodes if node.partitions & {each.name for each in allowed}]
    if not wanted or any(_has(node, wanted) for node in own):
        return []
    there = " or ".join(sorted({node.gres or "nothing" for node in own})) or "no generic resources"
    return [f"--gres {gres}: no node of partition {_names(allowed)} has that. To fix: a node there has {there}"]


def _gpu_faults(
    request: JobRequest, options: Sequence[str], allowed: Sequence[SlurmPartition], nodes: Sequence[SlurmNode]
) -> Sequence[str]:
    """Returns the fault of a job whose node would not see the GPUs that are to serve, as nothing asks for them.

    A job that has its node for itself is given all GPUs of it. Where Slurm does not know of GPUs, it hides none.
    """
    directives = [line.removeprefix("#SBATCH") for line in request.script.splitlines() if line.startswith("#SBATCH")]
    if not request.num_gpus or _ASKS_FOR_GPUS.search(" ".join([*options, *directives])):
        return []
    own = [node for node in nodes if node.partitions & {each.name for each in allowed}]
    have_gpus = all(_has(node, {("gpu", ""): request.num_gpus}) for node in own)
    knows_gpus = any(_has(node, {("gpu", ""): 1}) for node in nodes)
    if not knows_gpus or (request.has_whole_node and have_gpus):
        return []
    number = request.num_gpus
    return [
        f"--node-devices gpu:{number}: nothing asks Slurm for GPUs, so that a node may be given none. "
        f"To fix: --gres gpu:{number}"
    ]


def _names(partitions: Sequence[SlurmPartition]) -> str:
    return ", ".join(each.name for each in partitions)


def _has(node: SlurmNode, wanted: Mapping[tuple[str, str], int]) -> bool:
    there = numbers_of(node.gres)
    return all(
        sum(number for key, number in there.items() if key[0] == name and type in ("", key[1])) >= least
        for (name, type), least in wanted.items()
    )


def numbers_of(gres: str) -> Mapping[tuple[str, str], int]:
    """Returns the numbers in a text such as "gpu:a100:8(S:0-1),nvme:1", by name and type ("" for any).

    What cannot be understood is left out: sbatch judges that.
    """
    result: dict[tuple[str, str], int] = {}
    for part in _SEPARATOR.split(gres):
        if match := _GRES.fullmatch(part.strip()):
            key = (match["name"].lower(), (match["type"] or "").lower())
            result[key] = result.get(key, 0) + int(match["number"] or 1)
    return result


def _refusals(slurm: Slurm, options: Sequence[str], *, are_all_there: bool) -> Sequence[str]:
    """Returns why sbatch would refuse a job. are_all_there: whether no node is drained or down."""
    try:
        slurm.check(options)
    except SlurmError as error:
        # `--test-only` asks for nodes that are there now, whereas a job waits until they are back.
        if UNAVAILABLE in str(error) and not are_all_there:
            return []
        remedy = "To fix: change --partition, --time, --gres or --sbatch, or add what the site needs"
        return [f"{error}. {remedy}, as in --sbatch=--account=NAME"]
    return []

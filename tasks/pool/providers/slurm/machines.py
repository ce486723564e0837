"""The machines that Slurm lends: what it says of the jobs of a pool's flow runs."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ringmaster.errors import SlurmError
from ringmaster.tasks.execution.engines.context import NodeRun
from ringmaster.tasks.pool.providers.provider import Allocation, AllocationStatus
from ringmaster.tasks.pool.providers.slurm.commands import Slurm
from ringmaster.tasks.pool.providers.slurm.records import SlurmJob, SlurmNode, infrastructure_of, job_number

logger = logging.getLogger(__name__)

END_GRACE_S = 120.0  # for a job to end in order, before it is cancelled
MOST_REMEMBERED = 10_000


@dataclass(frozen=True, kw_only=True)
class _Seen:
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
        self._seen: dict[int, _Seen] = {}

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
        found = [self._allocation(job, nodes) for job in jobs]
        found += [self._forgotten(number, nodes) for number in sorted(wanted - known.keys())]
        for job in jobs:
            self._insist(job)
        return {each.id: each for each in found}

    def allocation_of(self, run: NodeRun) -> str:
        """Returns the id of the job of a flow run; see `Machines`."""
        return run.infrastructure

    def end(self, allocation: str) -> None:
        """Ends a job in order; see `Machines`."""
        number = job_number(allocation)
        if number is None:
            return
        seen = self._seen.get(number, _Seen())
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
        seen = self._seen.pop(job.id, _Seen())  # the job that was seen last is the last to be forgotten
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
        seen, why = self._seen.get(number, _Seen()), f"Slurm does not know its job {number} any more"
        is_away = seen.node in nodes and nodes[seen.node].is_away
        is_ended = seen.has_ended and not seen.is_lost and not is_away
        status = AllocationStatus.ENDED if is_ended else AllocationStatus.LOST
        return Allocation(id=infrastructure_of(number), status=status, why=why)

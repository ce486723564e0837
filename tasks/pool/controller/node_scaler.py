"""Requests nodes of a pool's engine while jobs need them, and gives idle ones back, by the policy of `elasticity`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

from ringmaster.tasks.execution.engine import Engine, EngineNode
from ringmaster.tasks.execution.engines.known_nodes import KnownNodes
from ringmaster.tasks.execution.executor import Executor
from ringmaster.tasks.execution.job_table import JobTable
from ringmaster.tasks.pool.controller.elasticity import (
    ComingTimes,
    ElasticityOptions,
    IdleTimes,
    JobDemand,
    node_range,
    num_nodes_wanted,
)
from ringmaster.tasks.pool.controller.node_worth import NodeQuestion, NodeWorth

logger = logging.getLogger(__name__)


class NodeScaler:
    """Adjusts the number of lent nodes of one pool. All methods are called on the executor's thread.

    Nothing is stored: the number is computed anew from the jobs and the nodes that are there, also by the next
    controller.

    clock: monotonic seconds.
    """

    def __init__(
        self,
        options: ElasticityOptions,
        *,
        engine: Engine,
        executor: Executor,
        known_nodes: KnownNodes,
        clock: Callable[[], float],
    ) -> None:
        self._options, self._engine, self._executor = options, engine, executor
        self._known_nodes, self._clock = known_nodes, clock
        self._coming, self._idle = ComingTimes(), IdleTimes()
        self._lent: frozenset[str] = frozenset()
        self._like: EngineNode | None = None  # the last node that the engine lent
        self._num_requested: int | None = None
        self._is_withheld = False  # whether a batch waits to be profiled, and gets no node
        self._worth = NodeWorth(options.prices, clock=clock) if options.prices is not None else None

    def look(self, *, is_node_awaited: bool, lends: Callable[[str], bool]) -> None:
        """Requests as many nodes as the jobs need, and gives back nodes that have been idle for long.

        is_node_awaited: whether a batch needs a node, for example to be profiled there.
        lends: whether devices of a node are lent to trials.
        """
        now_s, nodes = self._clock(), list(self._known_nodes.there.values())
        serving = [node for node in nodes if node.is_lent and not node.is_leaving]
        self._coming.came(len({node.name for node in serving} - self._lent), now_s=now_s)
        self._lent = frozenset(node.name for node in serving)
        if serving:
            self._like = serving[0]
        own = [node for node in nodes if not node.is_lent]
        num_own_devices = sum(len(node.devices) for node in own)
        jobs = demands(self._executor.job_table)
        num_wanted = self._num_wanted(jobs, own=own, num_own_devices=num_own_devices)
        exceeds_budget = bool(jobs) and self._worth is not None and self._worth.exceeds_budget
        if is_node_awaited and not num_own_devices:
            num_wanted = max(num_wanted, self._num_for_profiling(exceeds_budget=exceeds_budget))
        self._request(num_wanted, num_jobs=len(jobs), now_s=now_s)
        idle = [each.name for each in serving if self._executor.is_free(each.name) and not lends(each.name)]
        self._idle.note(idle, now_s=now_s)
        if exceeds_budget:
            for node in serving:  # also those with work, which ends at checkpoints
                logger.info("node %s is given back: it would cost more than the budget", node.name)
                self._known_nodes.give_back(node.name)
            return
        surplus = max(len(serving) - num_wanted, 0)
        for name in self._idle.longer_than(self._options.idle_s, now_s=now_s)[:surplus]:
            logger.info("node %s is given back: it was idle for %.0f s", name, self._options.idle_s)
            self._known_nodes.give_back(name)

    def _num_wanted(self, jobs: Sequence[JobDemand], *, own: Collection[EngineNode], num_own_devices: int) -> int:
        like = self._like
        # Before the first node is there, its devices are unknown: as many as all jobs can use, so that one is
        # requested.
        devices_per_node = max(sum(job.most_devices for job in jobs), 1) if like is None else len(like.devices)
        limits = {
            "devices_per_node": devices_per_node,
            "num_own_devices": num_own_devices,
            "max_nodes": self._options.max_nodes,
        }
        if self._worth is None:
            return num_nodes_wanted(jobs, come_s=self._coming.come_s, **limits)
        least, most = node_range(jobs, **limits)
        job_table, come_s = self._executor.job_table, self._coming.come_s
        if like is None:
            return least
        worth = self._worth.limit(
            [job.name for job in job_table.left()],
            lambda: NodeQuestion.of(job_table, own, lent=like, least=least, most=most, come_s=come_s),
        )
        return least if worth is None else min(worth, most)

    def _num_for_profiling(self, *, exceeds_budget: bool) -> int:
        """Returns how many nodes a batch gets that waits to be profiled: none while those of the jobs cost too much."""
        if exceeds_budget and not self._is_withheld:
            logger.info("no node is requested for a batch that waits to be profiled: nodes cost more than the budget")
        self._is_withheld = exceeds_budget
        return 0 if exceeds_budget else 1

    def _request(self, num_nodes: int, *, num_jobs: int, now_s: float) -> None:
        if num_nodes != self._num_requested:
            self._num_requested = num_nodes
            logger.info("nodes wanted: %d for %d jobs (%d are there)", num_nodes, num_jobs, len(self._lent))
        self._coming.requested(max(num_nodes - len(self._lent), 0), now_s=now_s)
        self._engine.request(num_nodes)


def demands(job_table: JobTable) -> Sequence[JobDemand]:
    """Returns what is left of the jobs that run or wait."""
    found = []
    for job in job_table.left():
        profiles = job_table.profiles[job.name]
        num_steps = max((job.num_steps or 0) - job_table.records[job.name].step, 0)
        if not profiles or not num_steps:
            continue
        sizes = [profile.num_devices for profile in profiles]
        device_s = num_steps * min(profile.together_s * profile.num_devices for profile in profiles)
        found.append(JobDemand(device_s=device_s, least_devices=min(sizes), most_devices=max(sizes)))
    return found

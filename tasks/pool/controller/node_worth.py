"""Computes how many lent nodes are worth their price, on a thread, since each answer takes several plans."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ringmaster.tasks.background_worker import in_a_thread
from ringmaster.tasks.cluster import Cluster, Node
from ringmaster.tasks.execution.engine import EngineNode
from ringmaster.tasks.execution.job_table import JobTable
from ringmaster.tasks.planning import Plan, Problem, solve
from ringmaster.tasks.planning.problems.problem import Node as PlanningNode
from ringmaster.tasks.planning.problems.problem import Option, PlanningJob
from ringmaster.tasks.planning.whatif.nodes import NodePrices, NodesWorth, nodes_worth
from ringmaster.tasks.profiling.options import planning_problem

logger = logging.getLogger(__name__)

WORK_S = 1.0  # of the planner, for each number of nodes
AGAIN_S = 300.0  # after which the answer is computed again, as jobs have ended meanwhile

Background = Callable[[Callable[[], NodesWorth]], "Future[NodesWorth]"]


def quick_plan(problem: Problem) -> Plan:
    """Returns a plan for the makespan, made with little work."""
    return solve(problem, work_s=WORK_S)


@dataclass(frozen=True, kw_only=True)
class NodeQuestion:
    """How many nodes are worth their price?

    problem: what is left to do, with all options of the jobs.
    own: the nodes of one's own.
    lent: a lent node; all lent nodes are like it.
    least, most: limits of the answer. All jobs can run on the least number of lent nodes.
    come_s: seconds that a node takes to come.
    """

    problem: Problem
    own: tuple[PlanningNode, ...]
    lent: PlanningNode
    least: int
    most: int
    come_s: float

    @classmethod
    def of(
        cls,
        job_table: JobTable,
        own: Collection[EngineNode],
        *,
        lent: EngineNode,
        least: int,
        most: int,
        come_s: float,
    ) -> NodeQuestion | None:
        """Asks about the jobs that are left and that some number of nodes can run; returns None where there are none.

        own: the nodes of one's own. lent: a lent node, which may have left.
        """
        jobs = [job for job in job_table.left() if job_table.profiles[job.name] and job.num_steps]
        if not jobs:
            return None
        cluster = Cluster(nodes=tuple(Node(name=node.name, devices=node.devices) for node in (*own, lent)))
        steps_done = {**job_table.groups.steps(), **{job.name: job_table.records[job.name].step for job in jobs}}
        problem = planning_problem(
            jobs, job_table.profiles, cluster, name="nodes", steps_done=steps_done, with_missing=True
        )
        nodes = {node.id: node for node in problem.nodes}
        question = cls(
            problem=problem,
            own=tuple(nodes[node.name] for node in own),
            lent=nodes[lent.name],
            least=least,
            most=max(least, most),
            come_s=come_s,
        )
        return question._of_runnable_jobs()

    def problem_on(self, num_nodes: int) -> Problem:
        """Returns the problem on so many lent nodes, with the options that these can run."""
        nodes = self._nodes(num_nodes)
        runs = _runs_on(nodes)
        jobs = tuple(replace(job, options=tuple(filter(runs, job.options))) for job in self.problem.jobs)
        return replace(self.problem, nodes=nodes, jobs=jobs)

    def _nodes(self, num_nodes: int) -> tuple[PlanningNode, ...]:
        return (*self.own, *(replace(self.lent, id=f"{self.lent.id}/{number}") for number in range(num_nodes)))

    def _of_runnable_jobs(self) -> NodeQuestion | None:
        """Returns the question about the jobs that the most nodes can run, and at least as many nodes as these need."""
        left = _runnable(self.problem.jobs, self._nodes(self.most))
        if not left:
            return None
        numbers = range(self.least, self.most + 1)
        least = next(number for number in numbers if len(_runnable(left, self._nodes(number))) == len(left))
        return replace(self, problem=replace(self.problem, jobs=left), least=least)


def _runs_on(nodes: Sequence[PlanningNode]) -> Callable[[Option], bool]:
    """Returns a function that says whether the nodes can run an option. Thousands of options have few sizes."""
    known: dict[tuple[Any, ...], bool] = {}

    def runs(option: Option) -> bool:
        size = (option.device_type, option.num_devices, option.num_nodes, option.host_memory_bytes)
        if size not in known:
            known[size] = sum(option.runs_on(node) for node in nodes) >= option.num_nodes
        return known[size]

    return runs


def _runnable(jobs: Sequence[PlanningJob], nodes: Sequence[PlanningNode]) -> tuple[PlanningJob, ...]:
    """Returns the jobs that have an option for the nodes, and do not wait for one that has none."""
    runs, names = _runs_on(nodes), {job.id for job in jobs}
    found = tuple(job for job in jobs if any(map(runs, job.options)))
    stuck = names - {job.id for job in found}
    while more := {job.id for job in found if job.id not in stuck and stuck.intersection(job.after)}:
        stuck |= more
    return tuple(job for job in found if job.id not in stuck)


class NodeWorth:
    """Keeps the last answer, and computes it anew once jobs have come or time has passed. Used by one thread.

    clock: monotonic seconds. background: runs the computation.
    """

    def __init__(
        self,
        prices: NodePrices,
        *,
        clock: Callable[[], float],
        make_plan: Callable[[Problem], Plan] = quick_plan,
        background: Background | None = None,
    ) -> None:
        self._prices, self._clock, self._make_plan = prices, clock, make_plan
        self._background = background or partial(in_a_thread, "prices-of-nodes")
        self._jobs: frozenset[str] = frozenset()
        self._asked_s = -AGAIN_S
        self._pending: Future[NodesWorth] | None = None
        self._answer: NodesWorth | None = None

    @property
    def exceeds_budget(self) -> bool:
        """Whether even the least number of nodes costs more than the budget, by the last answer."""
        return self._answer is not None and self._answer.ends_s is None

    def limit(self, jobs: Sequence[str], ask: Callable[[], NodeQuestion | None]) -> int | None:
        """Returns how many nodes are worth their price, by the last answer; None before the first.

        jobs: the names of the jobs that are left.
        ask: returns the question, if it can be asked.
        """
        if self._pending is not None and self._pending.done():
            self._take(self._pending)
            self._pending = None
        has_come = not frozenset(jobs) <= self._jobs
        if self._pending is None and (has_come or self._clock() - self._asked_s >= AGAIN_S):
            self._begin(jobs, ask())
        return None if self._answer is None else self._answer.num_nodes

    def _begin(self, jobs: Sequence[str], question: NodeQuestion | None) -> None:
        if question is None:
            return
        self._jobs, self._asked_s = frozenset(jobs), self._clock()
        work = partial(
            nodes_worth,
            question.problem_on,
            least=question.least,
            most=question.most,
            prices=self._prices,
            come_s=question.come_s,
            make_plan=self._make_plan,
        )
        self._pending = self._background(work)

    def _take(self, pending: Future[NodesWorth]) -> None:
        if (error := pending.exception()) is not None:
            logger.error("what nodes are worth could not be computed; the last answer stays", exc_info=error)
            return
        answer = pending.result()
        if self._answer is None or answer.num_nodes != self._answer.num_nodes:
            logger.info("%d nodes are worth their price: %s", answer.num_nodes, answer.why)
        self._answer = answer

"""Requests nodes of a pool's engine while jobs need them, and gives idle ones back, by the policy of `elasticity`.

Plans for nodes that end: where the work allows it, no segment outlasts its node.

Whoever executes a plan empties each node before its end, whatever is planned there, so that its gangs have time to
write checkpoints.
"""

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

from ringmaster.errors import ProblemError
from ringmaster.tasks.background_worker import in_a_thread
from ringmaster.tasks.cluster import Cluster, Node
from ringmaster.tasks.execution.engine import Engine, EngineNode
from ringmaster.tasks.execution.executor import Executor
from ringmaster.tasks.execution.job_table import JobTable
from ringmaster.tasks.execution.known_nodes import EMPTY_BEFORE_S, KnownNodes
from ringmaster.tasks.execution.replan_policy import runnable, runs_on
from ringmaster.tasks.planning import Plan, Problem, solve
from ringmaster.tasks.planning.node_prices import NodePrices, NodesWorth, nodes_worth
from ringmaster.tasks.planning.problems.problem_parts import PlanningNode
from ringmaster.tasks.planning.solve import bounded
from ringmaster.tasks.pool.engines import DEFAULT_IDLE_S
from ringmaster.tasks.profiling.search import planning_problem

DEFAULT_COME_S = 60.0
"""The time that a node is expected to take to come, before one has come."""
NUM_KEPT = 9


@dataclass(frozen=True, kw_only=True)
class ElasticityOptions:
    """The limits of an elastic pool.

    max_nodes: the most nodes that the engine lends at a time.
    idle_s: seconds without work after which a node is given back.
    prices: what nodes cost; None where that does not matter.
    """

    max_nodes: int
    idle_s: float = DEFAULT_IDLE_S
    prices: NodePrices | None = None


@dataclass(frozen=True, kw_only=True)
class JobDemand:
    """What is left of a job.

    device_s: the least device seconds over its options.
    least_devices, most_devices: devices of the smallest and the largest gang that can train it.
    """

    device_s: float
    least_devices: int
    most_devices: int


def node_range(
    jobs: Sequence[JobDemand], *, devices_per_node: int, num_own_devices: int, max_nodes: int
) -> tuple[int, int]:
    """Returns how many nodes jobs need at least, and can use at most, besides the devices of one's own.

    At least, there are enough for the largest of the smallest gangs; at most, for the largest gangs of all jobs.
    """
    if not jobs:
        return 0, 0
    needed = _nodes_for(max(job.least_devices for job in jobs) - num_own_devices, devices_per_node)
    usable = _nodes_for(sum(job.most_devices for job in jobs) - num_own_devices, devices_per_node)
    least = max(needed, 1 if num_own_devices == 0 else 0)
    return min(least, max_nodes), min(max(least, usable), max_nodes)


def num_nodes_wanted(
    jobs: Sequence[JobDemand], *, devices_per_node: int, num_own_devices: int, come_s: float, max_nodes: int
) -> int:
    """Returns how many nodes an engine should lend, besides the devices of one's own, if nodes have no price."""
    least, most = node_range(
        jobs, devices_per_node=devices_per_node, num_own_devices=num_own_devices, max_nodes=max_nodes
    )
    work_s = sum(job.device_s for job in jobs)
    used = math.floor((work_s / max(come_s, 1e-9) - num_own_devices) / devices_per_node)
    return min(max(least, used), most)


def _nodes_for(num_devices: int, devices_per_node: int) -> int:
    return max(math.ceil(num_devices / devices_per_node), 0)


class ComingTimes:
    """Measures how long nodes take from their request until they serve. clock values are monotonic seconds."""

    def __init__(self) -> None:
        self._requested_s: deque[float] = deque()
        self._took_s: deque[float] = deque(maxlen=NUM_KEPT)

    @property
    def come_s(self) -> float:
        """The median of the last times; a default before the first."""
        return statistics.median(self._took_s) if self._took_s else DEFAULT_COME_S

    def requested(self, num_missing: int, *, now_s: float) -> None:
        """Notes that so many nodes are requested and not there."""
        while len(self._requested_s) < num_missing:
            self._requested_s.append(now_s)
        while len(self._requested_s) > num_missing:
            self._requested_s.pop()

    def came(self, num_nodes: int, *, now_s: float) -> None:
        """Notes that nodes have come."""
        for _ in range(min(num_nodes, len(self._requested_s))):
            self._took_s.append(now_s - self._requested_s.popleft())


class IdleTimes:
    """Measures how long nodes have been without work."""

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}

    def note(self, idle: Collection[str], *, now_s: float) -> None:
        """Notes which nodes are without work now."""
        self._since_s = {node: self._since_s.get(node, now_s) for node in idle}

    def longer_than(self, idle_s: float, *, now_s: float) -> list[str]:
        """Returns the nodes that have been without work for that long, the longest first."""
        result = [node for node, since_s in self._since_s.items() if now_s - since_s >= idle_s]
        return sorted(result, key=lambda node: (self._since_s[node], node))


logger = logging.getLogger(__name__)

WORK_S = 1.0  # of the planner, for each number of nodes
AGAIN_S = 300.0  # after which the answer is computed again, as jobs have ended meanwhile


HEED_S = 10.0
"""Time for the controller to notice that a node is about to end, and for its gangs to hear of it."""
SAFETY = 2.0  # checkpoints of several gangs share one storage
STAYING = 0.5
"""The share of the time of the node that stays longest, from which on nodes are planned as if they stayed, where the
work outlasts all nodes. Nodes that were lent at the same time end almost together, and share the work.
"""


def worth_of_nodes(
    job_table: JobTable,
    own: Collection[EngineNode],
    *,
    lent: EngineNode,
    least: int,
    most: int,
    come_s: float,
    prices: NodePrices,
) -> Callable[[], NodesWorth] | None:
    """Returns what computes how many nodes are worth their price for the jobs that are left.

    None where no job is left that some number of nodes can run.

    own: the nodes of one's own.
    lent: a lent node, which may have left; all lent nodes are like it.
    least, most: limits of the answer.
    come_s: seconds that a node takes to come.
    """
    jobs = [job for job in job_table.left() if job_table.profiles[job.name] and job.num_steps]
    if not jobs:
        return None
    cluster = Cluster(nodes=tuple(Node(name=node.name, devices=node.devices) for node in (*own, lent)))
    steps_done = {**job_table.groups.steps(), **{job.name: job_table.records[job.name].step for job in jobs}}
    problem = planning_problem(
        jobs, job_table.profiles, cluster, name="nodes", steps_done=steps_done, with_missing=True
    )
    planned = {node.id: node for node in problem.nodes}

    def nodes(num_lent: int) -> tuple[PlanningNode, ...]:
        like = planned[lent.name]
        copies = (replace(like, id=f"{like.id}/{number}") for number in range(num_lent))
        return (*(planned[node.name] for node in own), *copies)

    most = max(least, most)
    left = runnable(problem.jobs, nodes(most))
    if not left:
        return None

    def problem_on(num_lent: int) -> Problem:
        """Returns the problem on so many lent nodes, with the options that these can run."""
        runs = runs_on(nodes(num_lent))
        its_jobs = tuple(replace(job, options=tuple(filter(runs, job.options))) for job in left)
        return replace(problem, nodes=nodes(num_lent), jobs=its_jobs)

    # The jobs that the most nodes can run need at least so many.
    least = next(number for number in range(least, most + 1) if len(runnable(left, nodes(number))) == len(left))
    make_plan = partial(solve, work_s=WORK_S)
    return partial(nodes_worth, problem_on, least=least, most=most, prices=prices, come_s=come_s, make_plan=make_plan)


class NodeWorth:
    """Keeps the last answer, and computes it again once jobs have come or time has passed. Used by one thread.

    clock: monotonic seconds.
    """

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._jobs: frozenset[str] = frozenset()
        self._requested_s = -AGAIN_S
        self._pending: Future[NodesWorth] | None = None
        self._answer: NodesWorth | None = None

    @property
    def exceeds_budget(self) -> bool:
        """Whether even the least number of nodes costs more than the budget, by the last answer."""
        return self._answer is not None and self._answer.ends_s is None

    def limit(self, jobs: Sequence[str], ask: Callable[[], Callable[[], NodesWorth] | None]) -> int | None:
        """Returns how many nodes are worth their price, by the last answer; None before the first.

        jobs: the names of the jobs that are left.
        ask: returns what computes the answer, if that can be done.
        """
        if self._pending is not None and self._pending.done():
            self._take(self._pending)
            self._pending = None
        is_due = not frozenset(jobs) <= self._jobs or self._clock() - self._requested_s >= AGAIN_S
        if self._pending is None and is_due and (work := ask()) is not None:
            self._jobs, self._requested_s = frozenset(jobs), self._clock()
            self._pending = in_a_thread("prices-of-nodes", work)
        return None if self._answer is None else self._answer.num_nodes

    def _take(self, pending: Future[NodesWorth]) -> None:
        if (error := pending.exception()) is not None:
            logger.error("what nodes are worth could not be computed; the last answer stays", exc_info=error)
            return
        answer = pending.result()
        if self._answer is None or answer.num_nodes != self._answer.num_nodes:
            logger.info("%d nodes are worth their price: %s", answer.num_nodes, answer.why)
        self._answer = answer


class NodeScaler:
    """Adjusts the number of lent nodes of one pool. All methods are called on the executor's thread.

    Nothing is stored: the number is computed again from the jobs and the nodes that are there, also by the next
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
        self._worth = NodeWorth(clock=clock)

    def poll(self, *, is_node_awaited: bool, lends: Callable[[str], bool]) -> None:
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
        exceeds_budget = bool(jobs) and self._worth.exceeds_budget
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
        like, come_s, prices = self._like, self._coming.come_s, self._options.prices
        limits = {
            # Before the first node is there, its devices are unknown: as many as all jobs can use, so that one is
            # requested.
            "devices_per_node": max(sum(job.most_devices for job in jobs), 1) if like is None else len(like.devices),
            "num_own_devices": num_own_devices,
            "max_nodes": self._options.max_nodes,
        }
        if prices is None:
            return num_nodes_wanted(jobs, come_s=come_s, **limits)
        least, most = node_range(jobs, **limits)
        if like is None:
            return least
        table = self._executor.job_table
        work = partial(worth_of_nodes, table, own, lent=like, least=least, most=most, come_s=come_s, prices=prices)
        worth = self._worth.limit([job.name for job in table.left()], work)
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
    result = []
    for job in job_table.left():
        profiles = job_table.profiles[job.name]
        num_steps = max((job.num_steps or 0) - job_table.records[job.name].step, 0)
        if not profiles or not num_steps:
            continue
        sizes = [profile.num_devices for profile in profiles]
        device_s = num_steps * min(profile.gang_step_s * profile.num_devices for profile in profiles)
        result.append(JobDemand(device_s=device_s, least_devices=min(sizes), most_devices=max(sizes)))
    return result


def empty_before_s(job_table: JobTable) -> float:
    """Returns how long before its end a node is emptied: 10 s, and twice the longest step and checkpoint of any job.

    A fixed time before anything was measured.
    """
    profiles = [profile for job in job_table.left() for profile in job_table.profiles[job.name]]
    if not profiles:
        return EMPTY_BEFORE_S
    return HEED_S + SAFETY * max(profile.gang_step_s + profile.save_s for profile in profiles)


def plan_before_ends(
    problem: Problem, *, ends_s: Mapping[str, float], objective: str, make_plan: Callable[[Problem], Plan]
) -> Plan:
    """Returns a plan in which no segment outlasts its node, with a bound and a certificate for `problem`.

    Where there is no such plan, because all nodes end before the jobs do, those that stay longest are planned as if
    they did not end, and the others as before. The jobs stop at checkpoints there, and continue on another node.

    ends_s: by node, the end of its last segment, in the time of the problem; nodes that stay are left out.
    make_plan: plans a problem. Raises ProblemError where there is no plan.
    """
    plan = make_plan(problem)
    if not any(
        segment.end_s > ends_s[node] for segment in plan.segments for node, _ in segment.devices if node in ends_s
    ):
        return plan
    longest_s = max(ends_s.get(node.id, math.inf) for node in problem.nodes)
    staying = {node for node, end_s in ends_s.items() if end_s >= STAYING * longest_s}
    for without in [set[str](), staying] if staying else [set[str]()]:
        try:
            limited = make_plan(_ending(problem, {node: s for node, s in ends_s.items() if node not in without}))
        except ProblemError:
            continue
        if without:
            logger.info(
                "jobs outlast all nodes: they stop at checkpoints on %s, and continue on others",
                ", ".join(sorted(staying)),
            )
        return bounded(limited, problem, objective=objective)
    logger.info("jobs outlast all nodes: they stop at checkpoints before their nodes end, and continue on others")
    return plan


def _ending(problem: Problem, ends_s: Mapping[str, float]) -> Problem:
    known_s = {node.id: node.available_until_s for node in problem.nodes if node.available_until_s is not None}
    nodes = tuple(
        replace(node, available_until_s=min(max(ends_s[node.id], 0.0), known_s.get(node.id, math.inf)))
        if node.id in ends_s
        else node
        for node in problem.nodes
    )
    return replace(problem, nodes=nodes)

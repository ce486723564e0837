"""A provider whose allocations are flow runs in a work pool of Prefect: each flow run serves one node.

The work pool's worker starts the machine of a flow run, for example as a job of a scheduler. What has become of the
machine is read from the engine itself (`Machines`), as Prefect learns of it later or, without its worker, never.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Protocol

from ringmaster.tasks.background_worker import in_a_thread
from ringmaster.tasks.execution.engine import EngineContext, NodeRun, NodeRuns
from ringmaster.tasks.pool.pool_engine import PoolEngine, pool_engine
from ringmaster.tasks.pool.provider import GONE, MAX_REMEMBERED, Allocation, AllocationStatus, NodeProvider

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0
FIRST_DELAY_S, LONGEST_DELAY_S = 5.0, 300.0
"""The delay before the next flow run where the last one ended before its node came; doubled each time."""


class Machines(Protocol):
    """The machines that an engine lends, as it reports them. Calls wait for the engine, and raise EngineUnavailable."""

    def poll(self, runs: Sequence[NodeRun]) -> Mapping[str, Allocation]:
        """Returns the states of all allocations in the engine: those of `runs`, and those that ended lately."""

    def allocation_of(self, run: NodeRun) -> str:
        """Returns the id of a flow run's allocation, under which the node registers; empty if it is not known yet."""

    def end(self, allocation: str) -> None:
        """Ends an allocation in order: its node gets a signal, and time to leave the pool."""


class MachinesOfRuns:
    """Machines about which nothing but their flow runs is known: those of any work pool. Implements `Machines`.

    A node registers under the id of its flow run. The end of a flow run does not prove that its processes have ended,
    for example where a pod has a grace period. So its node leaves, and is lost once it is silent.
    """

    def __init__(self, node_runs: NodeRuns) -> None:
        self._node_runs = node_runs
        self._seen: dict[str, Allocation] = {}

    def poll(self, runs: Sequence[NodeRun]) -> Mapping[str, Allocation]:
        """Returns the allocations of all flow runs that live, and of those that lived before, as far as remembered."""
        for allocation in self._seen.values():
            why = "its flow run has ended"
            self._seen[allocation.id] = replace(allocation, status=AllocationStatus.LEAVING, why=why)
        for run in runs:
            status = AllocationStatus.RUNNING if run.is_begun else AllocationStatus.PENDING
            self._seen.pop(run.id, None)  # the run that was seen last is the last to be forgotten
            self._seen[run.id] = Allocation(id=run.id, status=status)
        for id in list(self._seen)[: max(len(self._seen) - max(MAX_REMEMBERED, len(runs)), 0)]:
            del self._seen[id]
        return dict(self._seen)

    def allocation_of(self, run: NodeRun) -> str:
        """Returns the id of the flow run."""
        return run.id

    def end(self, allocation: str) -> None:
        """Cancels the flow run."""
        self._node_runs.cancel(allocation)


class WorkPoolProvider(NodeProvider):
    """Keeps as many flow runs alive as nodes are requested.

    From `begin` to `close`, a thread polls the engine and Prefect.

    node_runs: the flow runs.
    machines: what they run on.
    look_every_s: the interval of the questions.
    clock: monotonic seconds.
    on_failure: a callback for the unexpected end of the thread.
    on_close: ends what a question waits for, so that `close` need not.
    """

    def __init__(
        self,
        *,
        node_runs: NodeRuns,
        machines: Machines,
        look_every_s: float = LOOK_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
        on_failure: Callable[[], None] = lambda: None,
        on_close: Callable[[], object] = lambda: None,
    ) -> None:
        self._node_runs, self._machines, self._look_every_s = node_runs, machines, look_every_s
        self._clock = clock
        self._starting: dict[str, str] = {}  # by run that was started and has no node yet, its allocation or ""
        self._served: set[str] = set()
        self._num_failures, self._not_before_s = 0, -math.inf
        self._lock = threading.Lock()
        self._num_wanted: int | None = None  # until the controller has set a number, nothing is started or ended
        self._to_release: set[str] = set()
        self._allocations: Mapping[str, Allocation] = {}
        self._closing, self._is_due = threading.Event(), threading.Event()
        self._is_away = False
        self._on_failure, self._on_close = on_failure, on_close
        self._ended: Future[None] | None = None
        self._runs: Sequence[NodeRun] = ()

    def begin(self) -> None:
        """Starts the thread."""
        self._ended = in_a_thread("node-provider", self._work)
        self._ended.add_done_callback(self._report)

    def request(self, num_nodes: int) -> None:
        """Sets the target node count; see `NodeProvider`."""
        with self._lock:
            if num_nodes != self._num_wanted:
                logger.info("%d nodes are requested", num_nodes)
                self._num_wanted = num_nodes
                self._is_due.set()

    def release(self, allocation: str) -> None:
        """Gives a machine back; see `NodeProvider`."""
        with self._lock:
            self._to_release.add(allocation)
            self._is_due.set()

    def allocations(self) -> Mapping[str, Allocation]:
        """Returns what the engine last reported; see `NodeProvider`."""
        return self._allocations

    def served(self, allocations: Collection[str]) -> None:
        """Notes which nodes have come; see `NodeProvider`."""
        with self._lock:
            self._served |= set(allocations)

    def close(self) -> None:
        """Ends the thread, once its question is answered."""
        self._on_close()
        self._closing.set()
        self._is_due.set()
        if self._ended is not None:
            wait([self._ended])

    def _report(self, ended: Future[None]) -> None:
        if (error := ended.exception()) is not None:
            logger.error("the node provider has failed", exc_info=error)
            self._on_failure()

    def _work(self) -> None:
        while not self._closing.is_set():
            try:
                self.poll()
                self._is_away = False
            except ConnectionError as error:
                if not self._is_away:
                    logger.warning("nodes cannot be requested or released for now, trying again: %s", error)
                self._is_away = True
            self._is_due.wait(self._look_every_s)
            self._is_due.clear()

    def poll(self) -> None:
        """Polls the engine and Prefect once, and acts on what is requested. Raises ConnectionError."""
        # The engine first: what became of the machines matters also while Prefect is away.
        self._allocations = allocations = self._machines.poll(self._runs)
        with self._lock:
            num_wanted, to_release = self._num_wanted, set(self._to_release)
        for id in sorted(to_release):
            if id in allocations and allocations[id].status not in GONE:
                self._machines.end(id)
            with self._lock:
                self._to_release.discard(id)
        self._runs = runs = self._node_runs.live()
        self._count_failures(runs)
        if num_wanted is None:
            return
        alive = [run for run in runs if self._is_alive(run) and self._machines.allocation_of(run) not in to_release]
        if self._clock() >= self._not_before_s:
            for _ in range(len(alive), num_wanted):
                self._starting[self._node_runs.start()] = ""
        waiting = [run for run in alive if not run.is_begun]
        for run in waiting[: max(len(alive) - num_wanted, 0)]:
            self._starting.pop(run.id, None)
            self._node_runs.cancel(run.id)

    def _count_failures(self, runs: Sequence[NodeRun]) -> None:
        """Delays further runs where one has ended before its node has registered, whatever the cause."""
        for run in runs:
            if run.id in self._starting:
                self._starting[run.id] = self._machines.allocation_of(run) or self._starting[run.id]
        live = {run.id for run in runs}
        with self._lock:
            served = set(self._served)
        come = {id for id, allocation in self._starting.items() if allocation in served}
        failed = self._starting.keys() - live - come
        text = self._why(min(failed)) if failed else ""
        with self._lock:
            self._served -= served
        self._starting = {id: each for id, each in self._starting.items() if id in live - come}
        if come:
            self._num_failures, self._not_before_s = 0, -math.inf
        if failed:
            delay_s = min(FIRST_DELAY_S * 2**self._num_failures, LONGEST_DELAY_S)
            self._num_failures, self._not_before_s = self._num_failures + 1, self._clock() + delay_s
            logger.error("%d nodes could not be started: %s. The next attempt is in %.0f s", len(failed), text, delay_s)

    def _why(self, run: str) -> str:
        """Returns why a run has ended before its node came. Raises ConnectionError."""
        machine = self._allocations.get(self._starting[run] or run)
        why = [self._node_runs.why_ended(run), machine.why if machine is not None else ""]
        text = "; ".join(filter(None, why))
        return f"{run}: {text}" if text else f"the log of flow run {run} in Prefect has the reason"

    def _is_alive(self, run: NodeRun) -> bool:
        """Returns whether a flow run serves a node that takes segments, or will."""
        allocation = self._allocations.get(self._machines.allocation_of(run))
        if run.is_ending:
            return False
        return allocation is None or allocation.status in (AllocationStatus.PENDING, AllocationStatus.RUNNING)


def work_pool_engine(
    context: EngineContext,
    machines: Callable[[NodeRuns], Machines],
    *,
    name: str,
    node_runs: NodeRuns | None = None,
    on_close: Callable[[], object] = lambda: None,
) -> PoolEngine:
    """Builds an engine whose nodes are flow runs in a work pool of Prefect.

    machines: returns what the flow runs run on.
    name: name of the engine, for messages.
    node_runs: what serves the nodes, where those are not flow runs.
    on_close: see `WorkPoolProvider`.

    Raises ValueError outside of a pool.
    """
    node_runs = node_runs or context.node_runs
    if node_runs is None:
        raise ValueError(f"engine {name!r} needs a pool. To fix: start it by `ringmaster up --engine {name}`")
    provider = WorkPoolProvider(
        node_runs=node_runs, machines=machines(node_runs), on_failure=context.on_failure, on_close=on_close
    )
    engine = pool_engine(context, name=name, provider=provider)
    provider.begin()
    return engine

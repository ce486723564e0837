"""A node's worker: a process worker of Prefect that runs segments inside itself, from its own fork server.

A segment thus starts in a fraction of a second, while a new Prefect process costs five seconds of a core. All other
flow runs (if the worker serves flows too) are child processes, which Prefect's own worker class starts.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self
from uuid import UUID

import anyio
import anyio.abc
import anyio.to_thread
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.responses import WorkerFlowRunResponse
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.workers.base import BaseWorker, BaseWorkerResult
from prefect.workers.process import ProcessWorker

from ringmaster.flows.pool.runs.segment_runs import ANSWER_S, AWAY, Excused, SegmentRuns
from ringmaster.tasks.pool.node.agent import DRAIN_S, NodeAgent
from ringmaster.tasks.storage.message_store import OrderRecord

logger = logging.getLogger(__name__)

SEGMENT = "segment"  # the name of the flow, and of its deployment
DEFAULT_QUEUE = "default"  # the queue of flows other than segments
POLL_EVERY_S = 2.0  # interval of polling for flows; segments are polled at once when an order has come
SYNC_EVERY_S = 15.0  # Prefect shows a worker as offline after three missed intervals
FIRST_PAUSE_S = 0.05  # first pause between polls for the run of an order; each pause is longer than the one before
OVERDUE_S = 5.0  # waiting time after which an order's run that is in no queue is read by its id
LAST_STATES_S = 4.0  # time to report the final states of the last runs to Prefect


def queue_of(node: str) -> str:
    """Returns the queue of a node in the work pool."""
    return f"node-{node}"


class NodeWorker(ProcessWorker):
    """Serves the node of `host`, which must be started, from `serve` until `stop` or until the host has ended.

    host: the node agent.
    work_pool: Prefect's work pool.
    serves_flows: whether the worker runs flows too.
    drain_s: seconds for gangs to stop at a checkpoint when the worker ends.
    """

    def __init__(
        self, host: NodeAgent, *, work_pool: str, serves_flows: bool = False, drain_s: float = DRAIN_S
    ) -> None:
        queues = [queue_of(host.name), *([DEFAULT_QUEUE] if serves_flows else [])]
        super().__init__(work_pool_name=work_pool, work_queues=queues, name=host.name)
        self._host, self._queue_names, self._drain_s = host, queues, drain_s
        self._segments = SegmentRuns(host, lambda: self.client)
        self._deployments: dict[UUID, bool] = {}  # by id, whether it is the deployment of segments
        self._loop = asyncio.get_running_loop()
        self._ordered, self._stopping = asyncio.Event(), asyncio.Event()
        self._given_s: dict[int, float] = {}  # by segment, since when its order has waited
        self._pause_s = FIRST_PAUSE_S
        self._runs: set[anyio.CancelScope] = set()  # scopes of the runs that must not outlast the worker

    @classmethod
    def __dispatch_key__(cls) -> str | None:
        """Returns the key of this class in Prefect's registry; its `type` is that of the work pool, "process"."""
        return "ringmaster-node"

    def stop(self) -> None:
        """Makes `serve` end in order. Call it in the worker's event loop, as signal handlers do."""
        self._stopping.set()
        self._ordered.set()

    # -- serving -----------------------------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Serves until it is stopped; then gangs write a checkpoint and stop, and the node leaves the pool."""
        self._host.on_orders = self._on_orders
        try:
            await self._serve()
        finally:
            self._host.on_orders = _nobody  # our event loop is about to close

    async def __aenter__(self) -> Self:
        """Skips the runner of Prefect's process worker, which serves flows that are submitted to it from Python."""
        await BaseWorker.__aenter__(self)
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        """Closes what `__aenter__` has opened."""
        await BaseWorker.__aexit__(self, *exc_info)

    async def _serve(self) -> None:
        async with self, anyio.create_task_group() as loops:
            loops.start_soon(self._keep, "queues cannot be made", self._make_queues, None)
            loops.start_soon(
                self._keep, "Prefect is not told that the node lives", self._sync_and_initialize, SYNC_EVERY_S
            )
            loops.start_soon(self._poll)
            loops.start_soon(self._segments.watch_cancellations)
            loops.start_soon(self._segments.beat)
            await self._stopping.wait()
            logger.info("node %s leaves: its gangs write a checkpoint", self._host.name)
            await anyio.to_thread.run_sync(lambda: self._host.drain(within_s=self._drain_s))
            await self._segments.join(within_s=LAST_STATES_S)
            loops.cancel_scope.cancel()
            for scope in list(self._runs):
                scope.cancel()

    async def _keep(self, failing: str, action: Callable[[], Awaitable[Any]], every_s: float | None) -> None:
        """Repeats an action every `every_s` seconds or, if that is None, until it succeeds; Prefect may be away."""
        excused, is_done = Excused(failing), False
        while not is_done:
            with excused:
                await action()
                is_done = every_s is None
            await anyio.sleep(every_s or POLL_EVERY_S)

    async def _make_queues(self) -> None:
        for name in self._queue_names:
            try:
                await self.client.create_work_queue(name=name, work_pool_name=self._work_pool_name)
            except ObjectAlreadyExists:
                continue

    async def _poll(self) -> None:
        """Polls for runs periodically, and with short pauses while the run of an order is missing."""
        excused = Excused("no run can be begun")
        while not (self._stopping.is_set() or self._host.ended.is_set()):
            with excused, anyio.fail_after(ANSWER_S):
                await self.get_and_submit_flow_runs()
                await self._ask_for_overdue()
            if excused.is_away:  # devices must not idle for lack of a flow run that shows their work
                for order in self._overdue():
                    await self._segments.run_unseen(order.segment)
            wait_s = POLL_EVERY_S
            if {order.segment for order in self._host.waiting} - self._segments.under_way:
                wait_s, self._pause_s = self._pause_s, min(1.5 * self._pause_s, POLL_EVERY_S)
            with anyio.move_on_after(wait_s):
                await self._ordered.wait()
            self._ordered.clear()
        self.stop()

    def _on_orders(self) -> None:
        """Notes that the node agent has waiting orders; the agent calls it periodically, in a thread of its own."""
        self._loop.call_soon_threadsafe(self._hurry)

    def _hurry(self) -> None:
        """Polls for the runs of new orders at once."""
        now_s, waiting = self._loop.time(), {order.segment for order in self._host.waiting}
        if waiting - self._given_s.keys():
            self._pause_s = FIRST_PAUSE_S
            self._ordered.set()
        self._given_s = {segment: self._given_s.get(segment, now_s) for segment in waiting}

    async def _ask_for_overdue(self) -> None:
        """Starts runs whose claim succeeded but whose answer from Prefect was lost: they are no longer in a queue."""
        for order in self._overdue():
            if order.flow_run is None:
                continue
            try:
                flow_run = await self.client.read_flow_run(UUID(order.flow_run))
            except ObjectNotFound:
                continue
            if flow_run.state is not None and flow_run.state.type == StateType.PENDING:
                self._begin(flow_run, is_claimed=True)

    def _overdue(self) -> list[OrderRecord]:
        """Returns the orders that have waited for at least OVERDUE_S."""
        due_s = self._loop.time() - OVERDUE_S
        return [order for order in self._host.waiting if self._given_s.get(order.segment, math.inf) <= due_s]

    # -- runs --------------------------------------------------------------------------------------------------------

    async def _submit_scheduled_flow_runs(self, flow_run_response: list[WorkerFlowRunResponse]) -> list[FlowRun]:
        """Starts runs of segments in this process; leaves other runs to Prefect's method."""
        segments = [entry for entry in flow_run_response if await self._is_segment(entry.flow_run)]
        for entry in segments:
            self._begin(entry.flow_run)
        others = [entry for entry in flow_run_response if entry not in segments]
        return await super()._submit_scheduled_flow_runs(flow_run_response=others)

    async def _is_segment(self, flow_run: FlowRun) -> bool:
        id = flow_run.deployment_id
        if id is None:
            return False
        if id not in self._deployments:
            deployment = await self.client.read_deployment(id)
            flow = await self.client.read_flow(deployment.flow_id)
            self._deployments[id] = (flow.name, deployment.name) == (SEGMENT, SEGMENT)
        return self._deployments[id]

    def _begin(self, flow_run: FlowRun, *, is_claimed: bool = False) -> None:
        assert self._runs_task_group is not None
        if not self._segments.knows(flow_run.id):
            self._runs_task_group.start_soon(self._run_segment, flow_run, is_claimed)

    async def _run_segment(self, flow_run: FlowRun, is_claimed: bool) -> None:
        with self._ending_with_us():
            try:
                await self._segments.run(flow_run, is_claimed=is_claimed)
            except AWAY as error:  # it was not claimed, or is overdue soon
                logger.warning("%s cannot be claimed yet: %s", flow_run.name, error)

    async def _submit_run(self, flow_run: FlowRun) -> None:
        """Calls Prefect's method, which would end the worker if the server is away."""
        try:
            await super()._submit_run(flow_run)
        except AWAY as error:
            logger.warning("%s cannot be begun yet: %s", flow_run.name, error)
            self._submitting_flow_run_ids.discard(flow_run.id)

    async def _submit_run_and_capture_errors(
        self, flow_run: FlowRun, task_status: anyio.abc.TaskStatus[int | Exception] | None = None
    ) -> BaseWorkerResult | Exception:
        """Calls Prefect's method; ends the process of the run when the worker ends."""
        results = list[BaseWorkerResult | Exception]()
        with self._ending_with_us():
            results.append(await super()._submit_run_and_capture_errors(flow_run, task_status=task_status))
        if results:
            return results[0]
        await self._propose_crashed_state(flow_run, "its worker has ended")
        return RuntimeError("the worker has ended")

    @contextmanager
    def _ending_with_us(self) -> Iterator[None]:
        with anyio.CancelScope() as scope:
            self._runs.add(scope)
            try:
                yield
            finally:
                self._runs.discard(scope)


def _nobody() -> None:
    """Ignores orders, while no worker serves."""

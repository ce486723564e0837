"""Flow runs of `segment/segment`, run inside this process: watching a gang needs no Python process of its own.

Prefect's states follow the state of the gangs. The only exception is a run that is cancelled in the UI: its gang stops
at a checkpoint. While Prefect is away, gangs go on, and the states are reported later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from uuid import UUID

import anyio
import anyio.to_thread
import httpx
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.events import emit_event
from prefect.exceptions import Abort, ObjectNotFound, PrefectException
from prefect.states import Cancelled, Completed, Crashed, Failed, Pending, Running
from prefect.utilities.engine import propose_state

from ringmaster.tasks.execution.orders import CANCELLED, LOST
from ringmaster.tasks.pool.node.agent import NodeAgent
from ringmaster.techniques.runtime.processes.gang import CRASHED, DONE, INVALID, OUT_OF_MEMORY, PREEMPTED, Outcome

logger = logging.getLogger(__name__)

CANCELLATIONS_EVERY_S = 3.0
HEARTBEAT_EVERY_S = 30.0
NO_ANSWER = "no answer"
ANSWER_S = 10.0  # timeout of a request to Prefect, whose client would retry for a minute, with long pauses
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 10.0  # pauses between reports of a state
MOST_TAKEN_AT_ONCE = 64


# ValueError: another server that answers in Prefect's place, such as a proxy, and returns no JSON.
AWAY = (httpx.HTTPError, PrefectException, TimeoutError, ValueError)


class Excused:
    """Suppresses the errors of Prefect's absence, and logs the first one in a row.

    what: what cannot be done meanwhile, for the log.
    """

    def __init__(self, what: str) -> None:
        self._what, self.is_away = what, False

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        is_away = isinstance(error, AWAY)
        if is_away and not self.is_away:
            logger.warning("%s while Prefect is away, trying again: %s", self._what, str(error) or NO_ANSWER)
        self.is_away = is_away
        return is_away


class SegmentRuns:
    """The segment runs of one node.

    host: the node agent.
    client: returns the worker's client, while the worker serves.
    """

    def __init__(self, host: NodeAgent, client: Callable[[], PrefectClient]) -> None:
        self._host, self._client = host, client
        self._runs: dict[UUID, FlowRun] = {}
        self._cancelled: set[UUID] = set()
        self._unseen: dict[int, Future[Outcome]] = {}  # by segment, the outcome of what was started without a run
        self._threads = anyio.CapacityLimiter(MOST_TAKEN_AT_ONCE)
        self._idle = asyncio.Condition()

    def knows(self, flow_run: UUID) -> bool:
        """Returns whether a run is in progress here."""
        return flow_run in self._runs

    @property
    def under_way(self) -> set[int]:
        """The segments of the runs in progress."""
        return {_segment(flow_run) for flow_run in self._runs.values()}

    async def run(self, flow_run: FlowRun, *, is_claimed: bool = False) -> None:
        """Claims a run, executes its share of the segment, and reports its final state to Prefect.

        It does nothing if the run is not to be run.

        is_claimed: whether an earlier claim, whose answer was lost, has set the run to pending already.

        Raises httpx.HTTPError or TimeoutError if the run cannot be claimed now.
        """
        if flow_run.id in self._runs:
            return
        self._runs[flow_run.id] = flow_run
        try:
            if is_claimed or await self._claim(flow_run):
                await self._run(flow_run)
        finally:
            del self._runs[flow_run.id]
            async with self._idle:
                self._idle.notify_all()

    async def run_unseen(self, segment: int) -> None:
        """Starts a segment without its run while Prefect is away; the run shows the outcome once it arrives."""
        if (future := await self._take(segment)) is not None:
            logger.info("segment %d begins without a flow run: Prefect is away", segment)
            self._unseen[segment] = future

    async def watch_cancellations(self) -> None:
        """Stops the gangs of cancelled runs; runs for ever."""
        excused = Excused("it is not known which runs were cancelled")
        while True:
            await anyio.sleep(CANCELLATIONS_EVERY_S)
            with excused:
                if watched := [id for id in self._runs if id not in self._cancelled]:
                    with anyio.fail_after(ANSWER_S):
                        await self._look_for_cancelled(watched)

    async def beat(self) -> None:
        """Sends Prefect the runs' heartbeats, for ever: an automation marks silent runs as crashed."""
        while True:
            for flow_run in list(self._runs.values()):
                _beat(flow_run)
            await anyio.sleep(HEARTBEAT_EVERY_S)

    async def join(self, *, within_s: float) -> None:
        """Waits at most `within_s` seconds until Prefect knows the final states of all runs."""
        with anyio.move_on_after(within_s):
            async with self._idle:
                await self._idle.wait_for(lambda: not self._runs)

    async def _claim(self, flow_run: FlowRun) -> bool:
        try:
            with anyio.fail_after(ANSWER_S):
                state = await propose_state(self._client(), Pending(), flow_run_id=flow_run.id)
        except (Abort, ObjectNotFound):
            return False  # it was cancelled or deleted meanwhile
        return bool(state.is_pending())

    async def _run(self, flow_run: FlowRun) -> None:
        segment = _segment(flow_run)
        future = self._unseen.pop(segment, None) or await self._take(segment)
        if future is None:
            await self._insist(flow_run, self._not_begun(segment))
            return
        logger.info("segment %d begins", segment)
        _beat(flow_run)
        await self._insist(flow_run, Running())
        outcome = await asyncio.wrap_future(future)
        logger.info("segment %d ended: %s %s", segment, outcome.status, outcome.message)
        await self._insist(flow_run, final_state(outcome))
        self._cancelled.discard(flow_run.id)

    def _not_begun(self, segment: int) -> State:
        """Returns the state of a run that was claimed and whose order was not taken."""
        if self._host.is_leaving:  # the order may still be valid: a cancelled run would mean that its job shall end
            return Crashed(message=f"node {self._host.name} left before segment {segment} began")
        return Cancelled(message=f"segment {segment} was withdrawn, or was not for this worker")

    async def _take(self, segment: int) -> Future[Outcome] | None:
        return await anyio.to_thread.run_sync(self._host.take, segment, abandon_on_cancel=True, limiter=self._threads)

    async def _insist(self, flow_run: FlowRun, state: State) -> None:
        """Reports a state to Prefect, and retries while Prefect is away."""
        wait_s = FIRST_WAIT_S
        while True:
            try:
                with anyio.fail_after(ANSWER_S):
                    await propose_state(self._client(), state, flow_run_id=flow_run.id)
                return
            except (Abort, ObjectNotFound) as refusal:
                logger.info("%s does not become %s: %s", flow_run.name, state.name, refusal)
                return
            except (httpx.HTTPError, TimeoutError, ValueError) as error:
                if wait_s == FIRST_WAIT_S:
                    why = str(error) or NO_ANSWER
                    logger.warning("%s cannot be reported as %s yet: %s", flow_run.name, state.name, why)
            await anyio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    async def _look_for_cancelled(self, watched: list[UUID]) -> None:
        cancelled = await self._client().read_flow_runs(
            flow_run_filter=FlowRunFilter(
                id=FlowRunFilterId(any_=watched),
                state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.CANCELLING, StateType.CANCELLED])),
            )
        )
        for flow_run in cancelled:
            logger.info("%s is cancelled: its gang stops at a checkpoint", flow_run.name)
            self._cancelled.add(flow_run.id)
            self._host.cancel(_segment(flow_run))


def final_state(outcome: Outcome) -> State:
    """Returns Prefect's state for an outcome; the executor decides what follows from the outcome."""
    states: dict[str, State] = {
        DONE: Completed(),
        PREEMPTED: Completed(name="Preempted"),
        CANCELLED: Cancelled(),
        OUT_OF_MEMORY: Failed(name="OutOfMemory"),
        INVALID: Failed(),
        CRASHED: Crashed(),
        LOST: Crashed(),
    }
    return states[outcome.status].model_copy(update={"message": outcome.message or None})


def _segment(flow_run: FlowRun) -> int:
    return int(flow_run.parameters["segment"])


def _beat(flow_run: FlowRun) -> None:
    """Emits the heartbeat event that Prefect's own engine emits for a live run."""
    resource = {"prefect.resource.id": f"prefect.flow-run.{flow_run.id}", "prefect.resource.name": flow_run.name}
    related = [{"prefect.resource.id": f"prefect.flow.{flow_run.flow_id}", "prefect.resource.role": "flow"}]
    emit_event("prefect.flow-run.heartbeat", resource=resource, related=related)

"""The child runs of segments in Prefect: one in each node's queue, below the run of the flow that submitted the job."""

from __future__ import annotations

import threading
from uuid import UUID

import httpx
from prefect import Task
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.states import Pending

from ringmaster.flows.pool.worker import queue_of
from ringmaster.tasks.execution.orders import CANCELLED, LOST
from ringmaster.tasks.pool.controller.launching import RunIsOver
from ringmaster.tasks.pool.submissions import Submissions
from ringmaster.tasks.storage.message_store import OrderRecord
from ringmaster.techniques.runtime.processes.gang import CRASHED, Outcome

DEPLOYMENT = "segment/segment"


class ChildRuns:
    """Creates the child runs of orders. A runner calls `launch` from any of its threads."""

    def __init__(self, submissions: Submissions) -> None:
        self._submissions = submissions
        self._lock = threading.Lock()
        self._client: SyncPrefectClient | None = None
        self._deployment: UUID | None = None
        self._parents: dict[str, UUID | None] = {}  # the flow run of each batch

    def launch(self, order: OrderRecord) -> str:
        """Returns the id of an order's child run, which is created once however often it is requested.

        Raises ConnectionError while Prefect is away or has no deployment of segments yet. Raises RunIsOver if the run
        has ended before a node took it: a person cancelled it, or it crashed with a worker that left.
        """
        try:
            run = self._create(order)
        except (httpx.HTTPError, PrefectException, ValueError) as error:  # ValueError: what answers is not Prefect
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        if run.state is not None and run.state.is_final():
            status = {StateType.CANCELLED: CANCELLED, StateType.CRASHED: LOST}.get(run.state.type, CRASHED)
            raise RunIsOver(Outcome(status=status, message=f"its run became {run.state.name} before it began"))
        return str(run.id)

    def close(self) -> None:
        """Closes the connections."""
        with self._lock:
            if self._client is not None:
                self._client.__exit__(None, None, None)

    def _create(self, order: OrderRecord) -> FlowRun:
        client, deployment = self._connect()
        try:
            return client.create_flow_run_from_deployment(
                deployment,
                parameters={"segment": order.segment, "node": order.node},
                name=f"{order.share.order.job.name} {order.segment} on {order.node}",
                # Segment numbers alone repeat: in a new database of the pool, or in one of a back-up older than
                # Prefect's.
                idempotency_key=f"segment-{order.segment}-{order.node}-{order.incarnation}",
                parent_task_run_id=self._parent_task(client, order),
                work_queue_name=queue_of(order.node),
            )
        except ObjectNotFound:
            with self._lock:
                self._deployment = None  # it was deployed anew
            raise

    def _connect(self) -> tuple[SyncPrefectClient, UUID]:
        with self._lock:
            if self._client is None:
                client = get_client(sync_client=True)
                self._client = client.__enter__()  # `close` exits the context
            if self._deployment is None:
                self._deployment = self._client.read_deployment_by_name(DEPLOYMENT).id
            return self._client, self._deployment

    def _parent_task(self, client: SyncPrefectClient, order: OrderRecord) -> UUID | None:
        """Returns the task that stands for the child in its parent's run, as in `run_deployment`, or None."""
        parent = self._parent(order.batch)
        if parent is None:
            return None
        task = Task(name="segment", fn=_stands_for_a_child)
        task.task_key = f"{__name__}.{DEPLOYMENT}"
        try:
            made = client.create_task_run(
                task,
                flow_run_id=parent,
                dynamic_key=f"{order.segment}-{order.node}",
                name=f"{order.share.order.job.name} {order.segment} on {order.node}",
                state=Pending(),
            )
        except ObjectNotFound:  # somebody has deleted the run
            self._parents[order.batch] = None
            return None
        return made.id

    def _parent(self, batch: str) -> UUID | None:
        if batch not in self._parents:
            found = self._submissions.find(batch)
            self._parents[batch] = UUID(found.flow_run) if found is not None and found.flow_run else None
        return self._parents[batch]


def _stands_for_a_child() -> None:
    """The body of a task that is never called: the task is only a node of the parent's graph."""

"""The child runs of segments in Prefect: one on the queue of each node, under the run of the flow that submitted it."""

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
from ringmaster.tasks.pool.launching import RunIsOver
from ringmaster.tasks.pool.mail import OrderRecord
from ringmaster.tasks.pool.submissions import Submissions
from ringmaster.techniques.engine.gang import CRASHED, Outcome

DEPLOYMENT = "segment/segment"


class ChildRuns:
    """Makes the child runs of orders; `launch` is what a runner calls, from any of its threads."""

    def __init__(self, submissions: Submissions) -> None:
        self._submissions = submissions
        self._lock = threading.Lock()
        self._client: SyncPrefectClient | None = None
        self._deployment: UUID | None = None
        self._parents: dict[str, UUID | None] = {}  # the flow run of each batch

    def launch(self, order: OrderRecord) -> str:
        """The child run of an order, made once however often it is asked for.

        Raises ConnectionError while Prefect is away or has not been told of segments yet, and RunIsOver where the run
        has ended without any node's having taken it: a person cancelled it, or it crashed with a worker that left.
        """
        try:
            run = self._create(order)
        except (httpx.HTTPError, PrefectException, ValueError) as error:  # or what answers is not Prefect
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        if run.state is not None and run.state.is_final():
            status = {StateType.CANCELLED: CANCELLED, StateType.CRASHED: LOST}.get(run.state.type, CRASHED)
            raise RunIsOver(Outcome(status=status, message=f"its run became {run.state.name} before it began"))
        return str(run.id)

    def close(self) -> None:
        """Ends the connections."""
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
                # Numbers alone come again: from a new database of the pool, or one of a back-up older than Prefect's.
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
                self._client = client.__enter__()  # for as long as this lives; `close` leaves it
            if self._deployment is None:
                self._deployment = self._client.read_deployment_by_name(DEPLOYMENT).id
            return self._client, self._deployment

    def _parent_task(self, client: SyncPrefectClient, order: OrderRecord) -> UUID | None:
        """The task that stands for the child in its parent's run, as `run_deployment` makes it; None without one."""
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
    """Never called: the task only has its place in the parent's graph."""

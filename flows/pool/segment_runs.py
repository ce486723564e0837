"""The flow runs that show segments in Prefect: one for each segment, below the flow run of its batch.

The pool's controller alone starts and ends segments. These runs follow its event log, through public calls of Prefect's
client: state, log and links. While Prefect is away, segments continue, and the runs follow once it is back. Two actions
of a person go the other way: cancelling a run preempts its segment, and retrying a run makes its job due again.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import TypeVar
from uuid import UUID

import httpx
from prefect import Task
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas import filters
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.states import AwaitingRetry, Cancelled, Cancelling, Completed, Crashed, Failed, Pending, Running, Scheduled
from sqlalchemy import select

from ringmaster.flows.batch.flow_runs import prefect_is_away
from ringmaster.tasks.control.requests import RequestKind, Requests, RequestStatus
from ringmaster.tasks.execution.engine import NodeRun
from ringmaster.tasks.execution.execution_events import SegmentEnded, SegmentStarted
from ringmaster.tasks.pool.event_log import EventLog, PoolEntry
from ringmaster.tasks.pool.submissions import BatchStatus, Submissions
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.journal import Journal
from ringmaster.tasks.storage.message_store import MessageStore
from ringmaster.tasks.storage.schema import SEGMENTS
from ringmaster.techniques.processes.gang_events import Outcome, OutcomeStatus
from ringmaster.techniques.processes.reporter import STOP
from ringmaster.text import printable

logger = logging.getLogger(__name__)

T = TypeVar("T")

FLOW = NODE_DEPLOYMENT = "serve-node"
RUNS_AT_ONCE = 200  # what Prefect's server returns at most
LIVE = (StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.CANCELLING)
DEPLOYMENT = "segment/z-internal-segment"
QUEUE = "segments"  # of the work pool. No worker serves it, as nothing is to be started for these runs
ACTIONS_EVERY_S = 5.0  # interval of the checks for runs that a person has cancelled or retried
CURSOR = "segment_runs_shown"  # the pool's fact: the number of the last event that Prefect shows
# ValueError: another server that answers in Prefect's place, such as a proxy, and returns no JSON.
AWAY = (httpx.HTTPError, PrefectException, ValueError)


class OpenClient:
    """Keeps one client between its uses. All uses are in one thread."""

    def __init__(self) -> None:
        self._client: SyncPrefectClient | None = None

    @contextmanager
    def use(self) -> Iterator[SyncPrefectClient]:
        """Yields the client. After an error the client is closed, and the next use makes a new one."""
        if self._client is None:
            self._client = get_client(sync_client=True).__enter__()
        try:
            yield self._client
        except BaseException:
            self.close()
            raise

    def call(self, act: Callable[[SyncPrefectClient], T]) -> T:
        """Returns what `act` returns for the client."""
        with self.use() as client:
            return act(client)

    def close(self) -> None:
        """Closes the client, if it is open."""
        if self._client is not None:
            client, self._client = self._client, None
            client.__exit__(None, None, None)


class PrefectNodeRuns:
    """Reads, starts and cancels the runs of the deployment `serve-node`, in one thread; implements `NodeRuns`."""

    def __init__(self) -> None:
        self._client = OpenClient()

    def live(self) -> Sequence[NodeRun]:
        """Returns the runs that have not ended, oldest first."""
        state = filters.FlowRunFilter(
            state=filters.FlowRunFilterState(type=filters.FlowRunFilterStateType(any_=list(LIVE)))
        )
        with self._prefect() as client:
            result: list[FlowRun] = []
            while True:
                page = client.read_flow_runs(
                    flow_run_filter=state,
                    deployment_filter=filters.DeploymentFilter(
                        name=filters.DeploymentFilterName(any_=[NODE_DEPLOYMENT])
                    ),
                    limit=RUNS_AT_ONCE,
                    offset=len(result),
                )
                result += page
                if len(page) < RUNS_AT_ONCE:
                    break
        runs = {run.id: run for run in result}  # one that was created between two pages may be in both
        return [as_node_run(run) for run in sorted(runs.values(), key=_begin)]

    def start(self) -> str:
        """Starts one more run, and returns its id; the work pool's worker starts a machine for it."""
        with self._prefect() as client:
            deployment = client.read_deployment_by_name(f"{FLOW}/{NODE_DEPLOYMENT}")
            return str(client.create_flow_run_from_deployment(deployment.id, state=Scheduled()).id)

    def cancel(self, id: str) -> None:
        """Cancels a run: the work pool's worker ends its machine in order."""
        with self._prefect() as client:
            client.set_flow_run_state(UUID(id), Cancelling(message="the pool needs fewer nodes"))

    def why_ended(self, id: str) -> str:
        """Returns the state of a run that has ended, with its message; empty for a run that is not there any more."""
        with self._prefect() as client:
            try:
                state = client.read_flow_run(UUID(id)).state
            except ObjectNotFound:
                return ""
        return "" if state is None or not state.is_final() else f"{state.name}: {state.message or 'without a message'}"

    @contextmanager
    def _prefect(self) -> Iterator[SyncPrefectClient]:
        try:
            with self._client.use() as client:
                yield client
        except (httpx.HTTPError, PrefectException) as error:
            raise ConnectionError(f"Prefect does not answer: {type(error).__name__}: {error}") from error


def _begin(run: FlowRun) -> float:
    return run.created.timestamp() if run.created is not None else 0.0


def as_node_run(run: FlowRun) -> NodeRun:
    """Returns what an engine has to know of a flow run."""
    return NodeRun(
        id=str(run.id),
        infrastructure=run.infrastructure_pid or "",
        is_begun=run.start_time is not None,
        is_ending=run.state is not None and run.state.type == StateType.CANCELLING,
    )


class SegmentRuns:
    """Keeps Prefect's runs of segments up to date with the event log of a pool.

    database: the pool's database; only the leading controller's process has a `SegmentRuns`.
    clock: monotonic seconds.
    """

    def __init__(self, database: Database, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._database, self._clock = database, clock
        self._log, self._facts = EventLog(database), Journal(database, batch="")
        self._requests, self._submissions = Requests(database), Submissions(database)
        self._deployment: UUID | None = None
        self._flow_runs: dict[str, str] = {}  # by batch; read once, as every segment of a batch needs it
        self._preempted: set[int] = set()
        self._looked_s = -ACTIONS_EVERY_S
        self._client = OpenClient()
        self._cursor: int | None = self._facts.get(CURSOR)
        if self._cursor is None:  # a pool that has run before, with segments that Prefect has shown in another way
            self._cursor = self._log.newest()

    def look_when_due(self) -> None:
        """Updates the runs if there is something to show, or if persons may have acted."""
        if self._is_due() or self._news():
            self._client.call(self.poll)

    def poll(self, client: SyncPrefectClient) -> None:
        """Shows the events since the last call; at intervals also handles the actions of persons."""
        self._deployment = deployment = self._deployment or client.read_deployment_by_name(DEPLOYMENT).id
        for entry in self._news():
            try:
                self._show(client, entry, deployment)
            except AWAY as error:
                if isinstance(error, ObjectNotFound):
                    self._deployment = None  # it was deployed again
                    raise
                if not isinstance(error, httpx.HTTPStatusError) or prefect_is_away(error):
                    raise
                logger.error("Prefect refuses to show segment %d: %s", entry.event.number, error)
            except Exception:
                logger.exception("segment %d is not shown", entry.event.number)
            self._cursor = entry.id
            self._facts.put(CURSOR, entry.id)
        if self._is_due():
            self._looked_s = self._clock()
            for run in self._acted_upon(client, deployment):
                self._obey(client, run)

    def _is_due(self) -> bool:
        return self._clock() - self._looked_s >= ACTIONS_EVERY_S

    def _news(self) -> list[PoolEntry]:
        return self._log.segment_events(after=self._cursor or 0)

    # -- from the event log to Prefect -------------------------------------------------------------------------------

    def _show(self, client: SyncPrefectClient, entry: PoolEntry, deployment: UUID) -> None:
        event = entry.event
        key = self._key(event.number)
        if key is None:  # the database was restored to an older state meanwhile
            return
        run = self._run(client, entry, deployment, key=key)
        if isinstance(event, SegmentStarted):
            text = f"{event.technique} on {_devices(event)}, steps {event.first_step} to {event.segment.last_step}"
            _log(client, run, text if event.attempt == 1 else f"{text} (attempt {event.attempt})")
            return
        _log(client, run, f"{event.outcome.status}: {event.decision}")
        is_cancelled = run.state is not None and run.state.type == StateType.CANCELLING
        with suppress(ObjectNotFound):  # somebody has deleted the run
            state = Cancelled(message=event.decision) if is_cancelled else final_state(event.outcome)
            client.set_flow_run_state(run.id, state, force=True)

    def _run(self, client: SyncPrefectClient, entry: PoolEntry, deployment: UUID, *, key: str) -> FlowRun:
        """Returns the run of a segment, which is created once however often it is requested."""
        event = entry.event
        name = f"{event.segment.job} {event.number} on {', '.join(dict.fromkeys(n for n, _ in event.segment.devices))}"
        return client.create_flow_run_from_deployment(
            deployment,
            parameters={"segment": event.number},
            name=name,
            state=Running(),
            # Segment numbers repeat in a new database of the pool, and in one of an older backup.
            idempotency_key=f"segment-{key}",
            parent_task_run_id=self._parent_task(client, entry, name=name),
            work_queue_name=QUEUE,
        )

    def _parent_task(self, client: SyncPrefectClient, entry: PoolEntry, *, name: str) -> UUID | None:
        """Returns the task that represents a segment's run in the run of its batch, or None if that run is gone."""
        if entry.batch not in self._flow_runs:
            self._flow_runs[entry.batch] = self._submissions.flow_run(entry.batch)
        if not (flow_run := self._flow_runs[entry.batch]):
            return None
        task = Task(name="segment", fn=_stands_for_a_run)
        task.task_key = f"{__name__}.{DEPLOYMENT}"
        try:
            flow_run_id, dynamic_key = UUID(flow_run), str(entry.event.number)
            made = client.create_task_run(
                task, flow_run_id=flow_run_id, dynamic_key=dynamic_key, name=name, state=Pending()
            )
        except ObjectNotFound:  # somebody has deleted the run
            return None
        return made.id

    def _key(self, number: int) -> str | None:
        """Returns the key of a segment, which no other database of a pool has."""
        return self._database.scalar(select(SEGMENTS.c.key).where(SEGMENTS.c.id == number))

    # -- from Prefect to the pool ------------------------------------------------------------------------------------

    def _acted_upon(self, client: SyncPrefectClient, deployment: UUID) -> list[FlowRun]:
        """Returns the runs that a person has cancelled or retried, and those that were started by hand."""
        states = [StateType.CANCELLING, StateType.SCHEDULED]
        return client.read_flow_runs(
            flow_run_filter=filters.FlowRunFilter(
                state=filters.FlowRunFilterState(type=filters.FlowRunFilterStateType(any_=states))
            ),
            deployment_filter=filters.DeploymentFilter(id=filters.DeploymentFilterId(any_=[deployment])),
        )

    def _obey(self, client: SyncPrefectClient, run: FlowRun) -> None:
        number = int(run.parameters.get("segment", 0))
        if run.idempotency_key != f"segment-{self._key(number)}":
            text = "no segment belongs to this run. To fix: retry the run of a segment, or start a batch"
            client.set_flow_run_state(run.id, Failed(message=text), force=True)
        elif run.state is not None and run.state.type == StateType.CANCELLING:
            self._preempt(number, run)
        elif (state := self._retried(client, number, run)) is not None:
            client.set_flow_run_state(run.id, state, force=True)

    def _preempt(self, number: int, run: FlowRun) -> None:
        """Has a segment stop at a checkpoint; its end, which the event log reports, ends the run."""
        if number not in self._preempted:
            self._preempted.add(number)
            logger.info("%s is cancelled: its gang stops at a checkpoint", run.name)
            MessageStore(self._database).command(number, STOP)

    def _retried(self, client: SyncPrefectClient, number: int, run: FlowRun) -> State | None:
        """Makes the job of a run due again; returns the state of the run, None while the request is not answered."""
        query = select(SEGMENTS.c.batch, SEGMENTS.c.job).where(SEGMENTS.c.id == number)
        batch, job = self._database.read(lambda connection: connection.execute(query).one())
        if self._submissions.status(batch) == BatchStatus.ENDED:
            return self._batch_retried(client, batch)
        state_id = run.state.id if run.state is not None else run.id
        request = self._requests.read(
            self._requests.ask(RequestKind.RETRY, {"batch": batch, "jobs": [job]}, key=f"retry {run.id} {state_id}")
        )
        if request.status == RequestStatus.OPEN:
            return None
        message = str(request.answer.get("message", ""))
        return (
            Completed(name="Retried", message=message)
            if request.status == RequestStatus.DONE
            else Failed(message=message)
        )

    def _batch_retried(self, client: SyncPrefectClient, batch: str) -> State:
        """Resumes a batch that has ended, with all its jobs that are not done, by its own flow run."""
        submission = self._submissions.find(batch)
        above = client.read_flow_run(UUID(submission.flow_run)) if submission and submission.flow_run else None
        if above is None or above.deployment_id is None:
            text = f"batch {batch} has ended. To fix: resume it by `ringmaster run FILE --resume`"
            return Failed(message=text)
        client.set_flow_run_state(above.id, AwaitingRetry(message="the run of a segment was retried"), force=True)
        return Completed(name="Retried", message=f"the batch had ended: its flow run {above.name} resumes it")


def final_state(outcome: Outcome) -> State:
    """Returns Prefect's state for an outcome."""
    states: dict[str, State] = {
        OutcomeStatus.DONE: Completed(),
        OutcomeStatus.PREEMPTED: Completed(name="Preempted"),
        OutcomeStatus.OUT_OF_MEMORY: Failed(name="OutOfMemory"),
        OutcomeStatus.INVALID: Failed(),
        OutcomeStatus.CRASHED: Crashed(),
        OutcomeStatus.LOST: Crashed(),
    }
    return states[outcome.status].model_copy(update={"message": outcome.message or None})


def _devices(event: SegmentStarted | SegmentEnded) -> str:
    """Returns the devices of a segment by node, such as "alpha: 0, 1; beta: 0, 1"."""
    nodes: dict[str, list[str]] = {}
    for node, device in event.segment.devices:
        nodes.setdefault(node, []).append(str(device))
    return "; ".join(f"{node}: {', '.join(numbers)}" for node, numbers in nodes.items())


def _log(client: SyncPrefectClient, run: FlowRun, message: str) -> None:
    """Adds a line to the log of a run."""
    line = {
        "name": "ringmaster.segment",
        "level": logging.INFO,
        "message": printable(message),
        "timestamp": datetime.now(UTC).isoformat(),
        "flow_run_id": str(run.id),
    }
    client.create_logs([line])


def _stands_for_a_run() -> None:
    """The body of a task that is never called: the task is only a node of the batch's graph."""

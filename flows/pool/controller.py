"""The process of a pool's controller: stands by, leads, and leaves running segments to the next controller.

Besides running the executor, it creates the flow runs of submitted batches, when Prefect answers, and monitors them
(`BatchRuns`). A run that Prefect has lost is created again. A run whose process fell silent is scheduled again. The
final state of the run becomes the answer to the batch's request. A batch that is cancelled before it is measured gets
no run, or its run is cancelled. A request that cannot be handled is refused with the cause, and the others continue.

`revive_crashed_runs` restarts flow runs whose process died: the runs that submit batches to a pool, follow and record
them. The pool's jobs continue without the run, but nothing more is recorded until a process follows them again. The
same run is scheduled again, finds the jobs that it had submitted, and repeats nothing. `answer_late_runs` answers runs
that ask a person who does not answer.
"""

import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas import filters
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.states import AwaitingRetry, Cancelled, Cancelling
from pydantic import ValidationError
from sqlalchemy.exc import SQLAlchemyError

from ringmaster.errors import input_errors
from ringmaster.feature_check import refuse_faulty_features
from ringmaster.flows import settings
from ringmaster.flows.batch.flow_runs import OF_COMMAND, runs_fact
from ringmaster.flows.form_fields import ANSWER_WITHIN_S
from ringmaster.flows.interrupts import stop_signals
from ringmaster.flows.output import ProcessRole, log_to_stderr
from ringmaster.flows.pool.segment_runs import AWAY, RUNS_AT_ONCE, OpenClient, PrefectNodeRuns, SegmentRuns
from ringmaster.flows.reports.progress import describe
from ringmaster.flows.retraining.approval import silence_to_start
from ringmaster.flows.settings import PoolAddress
from ringmaster.tasks.alarms import Alarm, DeadlineAlarms, NodeAlarms
from ringmaster.tasks.alarms.prefect_events import emit_alarm
from ringmaster.tasks.background_worker import background_thread
from ringmaster.tasks.cluster import Cluster
from ringmaster.tasks.control.requests import Request, RequestKind, Requests, RequestStatus
from ringmaster.tasks.execution.engine import EngineContext
from ringmaster.tasks.execution.engine_registry import WORKERS, build_engine
from ringmaster.tasks.execution.execution_events import ExecutionEvent
from ringmaster.tasks.execution.executor import Executor
from ringmaster.tasks.execution.job_table import JobTable
from ringmaster.tasks.execution.replanner import Replanner
from ringmaster.tasks.pool.controller import HOLDER_OF_SEGMENTS, PoolController
from ringmaster.tasks.pool.failover import BEAT_EVERY_S, Leadership
from ringmaster.tasks.pool.loans import SilenceMonitor
from ringmaster.tasks.pool.nodes import NodeRegistry, PoolLeases, Timeouts
from ringmaster.tasks.pool.pool_clock import PoolClock
from ringmaster.tasks.pool.submissions import CANCELLED, MEASURING, BatchMeasurement, Submissions, measurements, name_of
from ringmaster.tasks.process_identity import say_ready
from ringmaster.tasks.storage.database import BatchingDatabase, Database, DatabaseClosed
from ringmaster.tasks.storage.journal import Journal
from ringmaster.tasks.storage.schema import check_release, note_release
from ringmaster.tasks.timeline.reader import TimelineReader
from ringmaster.text import Notice, printable_lines

logger = logging.getLogger(__name__)

SEGMENTS_EVERY_S = BATCHES_EVERY_S = CLOCK_EVERY_S = 1.0  # intervals of the watchers' checks
ALARMS_EVERY_S = CRASHES_EVERY_S = 10.0
ANSWERS_EVERY_S = 30.0

EmitAlarm = Callable[[Alarm], None]
"""Sends an alarm."""

NAME = "pool"
STAND_BY_S = 1.0  # interval of the leader checks
BEGIN_AGAIN_S = 10.0  # between two beginnings of a watcher that fails
FAREWELL_S = 3.0  # timeout of a database that is away when the process is to end


class PoolAlarms:
    """Watches a pool for lost nodes and devices, and for batches whose deadlines come to be in danger."""

    def __init__(self, database: Database, *, emit_alarm: EmitAlarm = emit_alarm) -> None:
        self._database, self._emit_alarm = database, emit_alarm
        self._nodes = NodeAlarms()
        self._deadlines: dict[str, DeadlineAlarms | None] = {}  # by active batch; None for one without deadlines
        self._timeline_reader = TimelineReader(database, name="the pool", is_pool=True)

    def poll(self) -> list[Alarm]:
        """Sends and returns the alarms that are new since the last check."""
        nodes = NodeRegistry(self._database)
        records = nodes.all()  # before those that have left: whoever leaves in between is in both
        result = [*self._nodes.poll(records, left=nodes.left()), *self._late()]
        for alarm in result:
            logger.warning("alarm: %s", alarm.message)
            self._emit_alarm(alarm)
        return result

    def _late(self) -> list[Alarm]:
        submissions = Submissions(self._database)
        active = submissions.active()
        self._deadlines = {id: known for id, known in self._deadlines.items() if id in active}
        result: list[Alarm] = []
        for id in active:
            if id not in self._deadlines:
                batch = submissions.find(id)
                deadlines_s = {} if batch is None else batch.terms.deadlines_s
                self._deadlines[id] = (
                    DeadlineAlarms(batch.name, deadlines_s=deadlines_s, started_s=batch.started_s)
                    if batch is not None and deadlines_s
                    else None
                )
            if (watch := self._deadlines[id]) is not None:
                result += watch.poll(self._timeline_reader.read(id))
        return result


def serve_pool(address: PoolAddress, *, notice: Notice, seed: int = 0) -> None:
    """Serves until SIGTERM or SIGINT, as the leader or standing by. Running segments continue after its end.

    seed: seed of the planner.

    The process ends at once, with an error in its log only, if another controller has taken the lead.
    """
    refuse_faulty_features()
    log_to_stderr(ProcessRole.CONTROLLER)
    with stop_signals() as on_stop:
        notice("waiting for the pool's database, where it does not answer yet")
        database = Database(address.database)
        leadership = Leadership(database)
        _lead(leadership, database, notice)
        with ExitStack() as stack:
            stack.callback(_resign, leadership, address)
            stack.enter_context(background_thread(partial(_beat, leadership), name="beat", timeout_s=FAREWELL_S))
            stopping = threading.Event()
            led = BatchingDatabase(leadership.guarded(database, on_deposed=_end_at_once))
            with suppress(DatabaseClosed):  # the database was away when the end was requested
                led.write(note_release)
                elasticity = settings.elasticity()
                NodeRegistry(led).note_most_lent(elasticity.max_nodes if elasticity is not None else 0)
                executor = stack.enter_context(_taken_over(led, stopping, seed=seed))
                close_timer = threading.Timer(FAREWELL_S, database.close)
                close_timer.daemon = True
                on_stop += [stopping.set, executor.stop_starting, close_timer.start]
                notice(f"leading the pool (epoch {leadership.epoch})")
                say_ready()
                executor.serve()
            notice("ending; segments continue, and the next controller continues with them")


@contextmanager
def _taken_over(database: Database, stopping: threading.Event, *, seed: int) -> Iterator[Executor]:
    """Yields a pool's executor in the state that the former controller has left, with its engine and watchers."""
    with ExitStack() as stack:
        pool_clock = PoolClock(database)
        segment_runs = SegmentRuns(database)  # first, so that it misses no event of what follows
        failure: Future[None] = Future()  # of the engine; it may fail before there is a controller to end
        node_runs, on_failure = PrefectNodeRuns(), partial(failure.set_result, None)
        context = EngineContext(folder=settings.home(), database=database, node_runs=node_runs, on_failure=on_failure)
        with input_errors():
            engine = build_engine(settings.engine(default=WORKERS), context)
        stack.callback(engine.close)
        controller = PoolController(
            database,
            engine=engine,
            timeouts=Timeouts.of_environment(),
            elasticity=settings.elasticity(),
            seed=seed,
        )
        replanner = Replanner(name=NAME, make_plan=controller.make_plan, add_terms=controller.add_terms)
        controller.on_objective, controller.on_speed = replanner.pursue, replanner.handle_event
        executor = Executor(
            cluster=Cluster(nodes=()),
            leases=PoolLeases(database),
            holder=HOLDER_OF_SEGMENTS,
            job_table=JobTable(Journal(database, batch=None, clock=pool_clock)),
            engine=engine,
            listeners=[controller.listen, _log],
            replanner=replanner,
        )
        controller.take_over(executor)
        failure.add_done_callback(lambda _: executor.call(_give_up))
        ticker = threading.Thread(target=partial(controller.keep_ticking, stopping), name="pacemaker", daemon=True)
        ticker.start()
        # Twice the usual timeout, as no device is at stake and a process that has just begun may be slow.
        batch_runs = BatchRuns(database, silent_s=2 * Timeouts.of_environment().lost_after_s)
        watchers: Mapping[str, tuple[Callable[[], object], float]] = {
            "segment-runs": (segment_runs.look_when_due, SEGMENTS_EVERY_S),
            "crashed-runs": (partial(OpenClient().call, partial(revive_crashed_runs, database)), CRASHES_EVERY_S),
            "batch-runs": (batch_runs.poll, BATCHES_EVERY_S),
            "alarms": (PoolAlarms(database).poll, ALARMS_EVERY_S),
            "clock": (pool_clock.poll, CLOCK_EVERY_S),
            "late-answers": (partial(OpenClient().call, answer_late_runs), ANSWERS_EVERY_S),
        }
        for name, (poll, every_s) in watchers.items():
            threading.Thread(target=poll_repeatedly, args=(poll, stopping, every_s), name=name, daemon=True).start()
        yield executor


def poll_repeatedly(poll: Callable[[], object], stopping: threading.Event, every_s: float) -> None:
    """Calls `poll` at intervals. Prefect's absence is logged once each time, any other failure once for each cause."""
    reported, is_away = set[str](), False
    while not stopping.wait(every_s):
        try:
            poll()
            is_away = False
        except (SQLAlchemyError, DatabaseClosed):  # the database logs its absence itself
            continue
        except AWAY as error:
            if not is_away:
                logger.warning(
                    "%s waits for Prefect: %s: %s", threading.current_thread().name, type(error).__name__, error
                )
            is_away = True
        except Exception as error:
            if repr(error) not in reported:
                reported.add(repr(error))
                logger.exception("%s has failed, and begins again", threading.current_thread().name)
            stopping.wait(BEGIN_AGAIN_S)


def _lead(leadership: Leadership, database: Database, notice: Notice) -> None:
    """Waits for the lead.

    Raises ReleaseMismatch if a controller of another release has it, which it would not give up.
    """
    has_notified = False
    while not leadership.claim():
        database.read(check_release)
        if not has_notified:
            notice("another controller leads, or did until a moment ago: standing by")
            has_notified = True
        time.sleep(STAND_BY_S)


def _beat(leadership: Leadership, over: threading.Event) -> None:
    """Sends this leader's heartbeats until `over` is set."""
    with suppress(SQLAlchemyError):
        while leadership.beat():
            if over.wait(BEAT_EVERY_S):
                return
        _end_at_once()


def _resign(leadership: Leadership, address: PoolAddress) -> None:
    """Gives up the lead, so that another controller leads at once; without the database, it leads after a timeout."""
    with suppress(SQLAlchemyError):
        quick = Database(address.database, timeout_s=FAREWELL_S)
        leadership.resign(quick)
        quick.close()


def _give_up() -> None:
    """Ends this process from the controller's thread, so that another controller leads."""
    raise RuntimeError("the engine of this pool has failed: the log says why. The next controller continues")


def _end_at_once() -> None:
    """Ends this process at once, as another controller leads: it must not act on the pool any more."""
    logger.error("another controller leads this pool: this one ends")
    logging.shutdown()
    os._exit(1)


def _log(event: ExecutionEvent) -> None:
    """Logs an event of the controller: what was decided, and why."""
    text, _ = describe(event)
    if text:
        logger.info("%s", text)


ASKING_DEPLOYMENT = "train-batch"

DEPLOYMENT = "train-batch/train-batch"
FOLLOW_EVERY_S = 5.0  # interval of the checks of their runs
MAX_FAILURES = 2  # of the handling of one request
CANCELLED_WITHIN = timedelta(seconds=60)  # the time for a process to end; after that, it is taken for dead
PASSING = (HTTPStatus.NOT_FOUND, HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)  # 404: not deployed yet
MAX_RUNS = 4  # runs of one flow run without an active batch: repeated crashes have another cause than a machine
DEPLOYMENTS = ("train-batch", "sweep", "retrain-daily", "submit-jobs")
RECENT = timedelta(hours=1)
BEGUN_WITHIN = timedelta(minutes=5)  # time for a claimed run to begin


def answer_late_runs(
    client: SyncPrefectClient, *, clock: Callable[[], datetime] = lambda: datetime.now(UTC)
) -> list[str]:
    """Answers suspended runs that have waited too long, as their own parameters specify; returns their names.

    clock: returns the time of day.
    """
    waiting = client.read_flow_runs(
        flow_run_filter=filters.FlowRunFilter(
            state=filters.FlowRunFilterState(name=filters.FlowRunFilterStateName(any_=["Suspended"])),
        ),
        deployment_filter=filters.DeploymentFilter(name=filters.DeploymentFilterName(any_=[ASKING_DEPLOYMENT])),
    )
    late = [run for run in waiting if run.state and clock() - run.state.timestamp > timedelta(seconds=_within_s(run))]
    for run in late:
        trains = run.parameters.get("without_answer") == "train"
        logger.warning("nobody has answered %s: it %s", run.name, "trains" if trains else "is not trained")
        client.resume_flow_run(run.id, run_input=silence_to_start(_within_s(run), trains))
    return [run.name for run in late]


def _within_s(run: FlowRun) -> float:
    """Returns the run's parameter, or its default: a run has only those parameters that it was given."""
    return float(run.parameters.get("answer_within_s", ANSWER_WITHIN_S))


class BatchRuns:
    """Creates and monitors the flow runs of batches that were handed over.

    database: the pool's database.
    silent_s: seconds without heartbeats after which a process that follows a batch is considered dead.
    clock: monotonic seconds.
    """

    def __init__(self, database: Database, *, silent_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._requests, self._submissions, self._clock = Requests(database), Submissions(database), clock
        self._database, self._facts = database, Journal(database, batch="")
        self._failures: Counter[int] = Counter()  # by request
        self._silences = SilenceMonitor(clock=clock, silent_s=silent_s, blind_s=3 * FOLLOW_EVERY_S)
        self._followed_s = -FOLLOW_EVERY_S

    def poll(self) -> None:
        """Creates the missing runs, and checks the states of the others."""
        waiting = []
        for request in self._requests.open(RequestKind.TRAIN):
            if why := request.content.get(CANCELLED):
                self._requests.answer(request.id, status=RequestStatus.WITHDRAWN, answer={"message": str(why)})
            else:
                waiting.append(request)
        is_due = self._clock() - self._followed_s >= FOLLOW_EVERY_S
        granted = self._requests.open(RequestKind.TRAIN, status=RequestStatus.GRANTED) if is_due else []
        measuring = measurements(self._database) if is_due else []
        if not (waiting or granted or measuring):
            return
        with get_client(sync_client=True) as client:
            if waiting:
                deployment = client.read_deployment_by_name(DEPLOYMENT).id
                for request in waiting:
                    self._handle(request, partial(self._start, client, request, deployment=deployment))
            if is_due:
                self._follow(client, granted)
                for measurement in measuring:
                    self._look_at(client, measurement)
                self._followed_s = self._clock()

    def _handle(self, request: Request, act: Callable[[], None]) -> None:
        """Acts on a request; refuses it at the second failure that is its own, and not Prefect's."""
        try:
            act()
        except (httpx.TransportError, SQLAlchemyError, ObjectNotFound):
            raise
        except httpx.HTTPStatusError as error:
            if error.response.status_code in PASSING or error.response.is_server_error:
                raise
            self._count_failure(request, error)
        except (PrefectException, json.JSONDecodeError, ValidationError):  # the latter: what answers is not Prefect
            raise
        except OSError as error:  # the folder of the home is away or full
            logger.warning("batch %s cannot be started for now: %s", name_of(request), error)
        except Exception as error:
            logger.exception("batch %s cannot be started or followed", name_of(request))
            self._count_failure(request, error)
        else:
            self._failures.pop(request.id, None)

    def _count_failure(self, request: Request, error: Exception) -> None:
        self._failures[request.id] += 1
        if self._failures[request.id] < MAX_FAILURES:
            return
        message = printable_lines(f"the pool's controller cannot handle it: {type(error).__name__}: {error}")
        self._requests.answer(request.id, status=RequestStatus.REFUSED, answer={"message": message})

    def _start(self, client: SyncPrefectClient, request: Request, *, deployment: UUID) -> None:
        """Creates the flow run of a batch, once however often it is requested."""
        file = Path(request.content["file"])
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(request.content["batch"]))
        attempt = int(request.answer.get("attempt", 1))
        parameters = {
            "batch": {"path": str(file)},
            "name": name_of(request),
            "checkpoint_every_s": request.content["checkpoint_every_s"],
        }
        run = client.create_flow_run_from_deployment(
            deployment,
            parameters=parameters,
            idempotency_key=f"{request.key}-{attempt}",
        )
        logger.info("batch %s has flow run %s", name_of(request), run.name)
        answer = {"flow_run": str(run.id), "run_name": run.name, "attempt": attempt}
        self._requests.answer(request.id, status=RequestStatus.GRANTED, answer=answer)

    def _follow(self, client: SyncPrefectClient, granted: Sequence[Request]) -> None:
        runs = _runs_of(client, granted)
        states = {number: run.state and (run.state.type, run.state.timestamp) for number, run in runs.items()}
        silent = self._silences.among(granted, states=states)
        active = {*self._submissions.active().values()}
        for request in granted:
            if (run := runs.get(request.id)) is not None:
                is_silent, is_active = request.id in silent, str(run.id) in active
                act = partial(self._judge, client, request, run, is_silent=is_silent, is_active=is_active)
            else:
                act = partial(self._begin_again, request)
            self._handle(request, act)

    def _begin_again(self, request: Request) -> None:
        """Opens the request of a batch whose flow run Prefect has lost, so that it gets another one."""
        logger.warning("Prefect has no flow run of batch %s any more: another one is made", name_of(request))
        attempt = int(request.answer.get("attempt", 1)) + 1
        self._requests.answer(request.id, status=RequestStatus.OPEN, answer={"attempt": attempt})

    def _look_at(self, client: SyncPrefectClient, measurement: BatchMeasurement) -> None:
        """Cancels the run of a batch that is cancelled while it is measured; forgets a run that has ended."""
        try:
            run = client.read_flow_run(UUID(str(measurement.flow_run)))
        except (ObjectNotFound, ValueError):
            run = None
        if run is None or (run.state is not None and run.state.is_final()):
            self._facts.remove(f"{MEASURING}{measurement.id}")
        elif measurement.cancelled:
            self._cancel(client, run, measurement.cancelled)

    def _cancel(self, client: SyncPrefectClient, run: FlowRun, why: str) -> None:
        """Cancels a run: its worker or its process ends it, or nobody does where there is none or that is dead."""
        state = run.state
        if state is None or state.is_final():
            return
        since = datetime.now(UTC) - state.timestamp
        if state.type in (StateType.PENDING, StateType.RUNNING):
            client.set_flow_run_state(run.id, Cancelling(message=why), force=True)
        elif state.type != StateType.CANCELLING or since > CANCELLED_WITHIN:
            client.set_flow_run_state(run.id, Cancelled(message=why), force=True)

    def _judge(
        self, client: SyncPrefectClient, request: Request, run: FlowRun, *, is_silent: bool, is_active: bool
    ) -> None:
        if (state := run.state) is None:
            return
        if (why := request.content.get(CANCELLED)) and not is_active:
            self._cancel(client, run, str(why))
        has_crashed_too_often = run.run_count >= MAX_RUNS and not is_active
        if state.is_final() and (state.type != StateType.CRASHED or has_crashed_too_often):
            status = RequestStatus.DONE if state.type == StateType.COMPLETED else RequestStatus.REFUSED
            message = f"its flow run is {state.name}: {state.message or ''}".rstrip(": ")
            self._requests.answer(request.id, status=status, answer={**request.answer, "message": message})
        elif state.type == StateType.RUNNING and is_silent:  # `revive_crashed_runs` handles runs that never begin
            logger.warning("nobody follows batch %s any more: flow run %s continues", name_of(request), run.name)
            text = f"its process had been silent for {self._silences.silent_s:.0f} s"
            client.set_flow_run_state(run.id, run_again(run, message=text), force=True)


def run_again(run: FlowRun, *, message: str) -> State[Any]:
    """Returns the state that schedules a flow run again, before those that were scheduled after it."""
    return AwaitingRetry(message=message, scheduled_time=run.expected_start_time)


def _runs_of(client: SyncPrefectClient, requests: Sequence[Request]) -> Mapping[int, FlowRun]:
    """Returns the flow runs of batches, as far as Prefect has them, by the number of the request."""
    wanted = dict[UUID, int]()
    for request in requests:
        with suppress(LookupError, ValueError, TypeError, AttributeError):  # its row is damaged: it gets another run
            wanted[UUID(request.answer["flow_run"])] = request.id
    ids, result = [*wanted], dict[int, FlowRun]()
    for first in range(0, len(ids), RUNS_AT_ONCE):
        page = filters.FlowRunFilter(id=filters.FlowRunFilterId(any_=ids[first : first + RUNS_AT_ONCE]))
        for run in client.read_flow_runs(flow_run_filter=page, limit=RUNS_AT_ONCE):
            result[wanted[run.id]] = run
    return result


def revive_crashed_runs(
    database: Database, client: SyncPrefectClient, *, clock: Callable[[], datetime] = lambda: datetime.now(UTC)
) -> list[str]:
    """Schedules crashed runs again; returns their names.

    These are crashed runs whose batch is active, or that crashed within the last hour fewer than MAX_RUNS times, and
    runs that a worker has claimed and not begun within BEGUN_WITHIN: their process died before it reported a state,
    while its worker could not reach Prefect.

    database: the pool's database, which has the batches that each run, or a flow that it called, has submitted.
    clock: returns the time of day.
    """
    crashed, facts, now = _in_state(client, StateType.CRASHED), Journal(database, batch=""), clock()
    active = {*Submissions(database).active()} if crashed else set()
    wanted = [
        run for run in _in_state(client, StateType.PENDING) if run.state and now - run.state.timestamp > BEGUN_WITHIN
    ]
    for run in crashed:
        submitted = {id for id, _ in facts.get(runs_fact(str(run.id)), {}).values()}
        is_new = run.end_time is not None and now - run.end_time < RECENT
        if submitted & active or (is_new and run.run_count < MAX_RUNS):
            wanted.append(run)
    for run in wanted:
        logger.warning("flow run %s had crashed, and continues (its run %d)", run.name, run.run_count + 1)
        client.set_flow_run_state(run.id, run_again(run, message="its process had died"), force=True)
    return [run.name for run in wanted]


def _in_state(client: SyncPrefectClient, state: StateType) -> list[FlowRun]:
    result = client.read_flow_runs(
        flow_run_filter=filters.FlowRunFilter(
            state=filters.FlowRunFilterState(type=filters.FlowRunFilterStateType(any_=[state]))
        ),
        deployment_filter=filters.DeploymentFilter(name=filters.DeploymentFilterName(any_=list(DEPLOYMENTS))),
    )
    return [run for run in result if OF_COMMAND not in run.tags]  # what a person interrupts is not begun again

"""The process of a pool's controller: stands by, leads, and leaves running segments to the next controller."""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

from sqlalchemy.exc import SQLAlchemyError

from ringmaster.errors import input_errors
from ringmaster.flows import settings
from ringmaster.flows.interrupts import stop_signals
from ringmaster.flows.output import ProcessRole, log_to_stderr
from ringmaster.flows.pool.batch_runs import BatchRuns, answer_late_runs, revive_crashed_runs
from ringmaster.flows.pool.segment_runs import AWAY, OpenClient, PrefectNodeRuns, SegmentRuns
from ringmaster.flows.reports.progress import describe
from ringmaster.flows.settings import PoolAddress
from ringmaster.tasks.alarms import Alarm, DeadlineAlarms, NodeAlarms
from ringmaster.tasks.alarms.task import sound
from ringmaster.tasks.background_worker import running
from ringmaster.tasks.cluster import Cluster
from ringmaster.tasks.execution.engine import EngineContext
from ringmaster.tasks.execution.events import ExecutionEvent
from ringmaster.tasks.execution.executor import Executor
from ringmaster.tasks.execution.replanner import Replanner
from ringmaster.tasks.pool.controller import HOLDER_OF_SEGMENTS, PoolController
from ringmaster.tasks.pool.engines import WORKERS, build_engine
from ringmaster.tasks.pool.failover import BEAT_EVERY_S, Leadership
from ringmaster.tasks.pool.nodes import NodeRegistry, PoolLeases, Timeouts
from ringmaster.tasks.pool.submissions import Submissions
from ringmaster.tasks.process_identity import say_ready
from ringmaster.tasks.storage.database import BatchingDatabase, Database, DatabaseClosed
from ringmaster.tasks.storage.journal import Journal
from ringmaster.tasks.storage.schema import check_release, note_release
from ringmaster.tasks.timeline.reader import TimelineReader

logger = logging.getLogger(__name__)

SEGMENTS_EVERY_S = BATCHES_EVERY_S = 1.0  # intervals of the watchers' checks
ALARMS_EVERY_S = CRASHES_EVERY_S = 10.0
ANSWERS_EVERY_S = 30.0

Sound = Callable[[Alarm], None]
"""Sends an alarm."""

NAME = "pool"
STAND_BY_S = 1.0  # interval of the leader checks
BEGIN_AGAIN_S = 10.0  # between two beginnings of a watcher that fails
FAREWELL_S = 3.0  # timeout of a database that is away when the process is to end
Notice = Callable[[str], None]


class PoolAlarms:
    """Watches a pool for lost nodes and devices, and for batches whose deadlines come to be in danger."""

    def __init__(self, database: Database, *, sound: Sound = sound) -> None:
        self._database, self._sound = database, sound
        self._nodes = NodeAlarms()
        self._deadlines: dict[str, DeadlineAlarms | None] = {}  # by active batch; None for one without deadlines
        self._timeline_reader = TimelineReader(database, name="the pool", is_pool=True)

    def look(self) -> list[Alarm]:
        """Sends and returns the alarms that are new since the last check."""
        nodes = NodeRegistry(self._database)
        records = nodes.all()  # before those that have left: whoever leaves in between is in both
        result = [*self._nodes.look(records, left=nodes.left()), *self._late()]
        for alarm in result:
            logger.warning("alarm: %s", alarm.message)
            self._sound(alarm)
        return result

    def _late(self) -> list[Alarm]:
        submissions = Submissions(self._database)
        active = submissions.active()
        self._deadlines = {id: known for id, known in self._deadlines.items() if id in active}
        result: list[Alarm] = []
        for id in active:
            if id not in self._deadlines:
                batch = submissions.find(id)
                deadlines_s = {} if batch is None else batch.planning_terms.deadlines_s
                self._deadlines[id] = (
                    DeadlineAlarms(batch.name, deadlines_s=deadlines_s, started_s=batch.started_s)
                    if batch is not None and deadlines_s
                    else None
                )
            if (watch := self._deadlines[id]) is not None:
                result += watch.look(self._timeline_reader.read(id))
        return result


def serve_pool(address: PoolAddress, *, notice: Notice, seed: int = 0) -> None:
    """Serves until SIGTERM or SIGINT, as the leader or standing by. Running segments go on after its end.

    seed: seed of the planner.

    The process ends at once, with an error in its log only, if another controller has taken the lead.
    """
    log_to_stderr(ProcessRole.CONTROLLER)
    with stop_signals() as on_stop:
        notice("waiting for the pool's database, where it does not answer yet")
        database = Database(address.database)
        leadership = Leadership(database)
        _lead(leadership, database, notice)
        with ExitStack() as stack:
            stack.callback(_resign, leadership, address)
            stack.enter_context(running(partial(_beat, leadership), name="beat", timeout_s=FAREWELL_S))
            stopping = threading.Event()
            led = BatchingDatabase(leadership.guarded(database, on_deposed=_end_at_once))
            with suppress(DatabaseClosed):  # the database was away when we were asked to end
                led.write(note_release)
                elasticity = settings.elasticity()
                NodeRegistry(led).note_most_lent(elasticity.max_nodes if elasticity is not None else 0)
                executor = stack.enter_context(_taken_over(led, stopping, seed=seed))
                timeouts_fault = threading.Timer(FAREWELL_S, database.close)
                timeouts_fault.daemon = True
                on_stop += [stopping.set, executor.stop, timeouts_fault.start]
                notice(f"leading the pool (epoch {leadership.epoch})")
                say_ready()
                executor.serve()
            notice("ending; segments go on, and the next controller goes on with them")


@contextmanager
def _taken_over(database: Database, stopping: threading.Event, *, seed: int) -> Iterator[Executor]:
    """Yields a controller in the recovered state of the former one, with its controller, engine and watchers."""
    with ExitStack() as stack:
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
        controller.on_objective, controller.on_speed = replanner.pursue, replanner.hear
        executor = Executor(
            name=NAME,
            cluster=Cluster(nodes=()),
            leases=PoolLeases(database),
            holder=HOLDER_OF_SEGMENTS,
            journal=Journal(database, batch=None),
            engine=engine,
            make_plan=controller.make_plan,
            add_terms=controller.add_terms,
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
            "batch-runs": (batch_runs.look, BATCHES_EVERY_S),
            "alarms": (PoolAlarms(database).look, ALARMS_EVERY_S),
            "late-answers": (partial(OpenClient().call, answer_late_runs), ANSWERS_EVERY_S),
        }
        for name, (look, every_s) in watchers.items():
            threading.Thread(target=keep_looking, args=(look, stopping, every_s), name=name, daemon=True).start()
        yield executor


def keep_looking(look: Callable[[], object], stopping: threading.Event, every_s: float) -> None:
    """Calls `look` at intervals. Prefect's absence is logged once each time, any other failure once for each cause."""
    reported, is_away = set[str](), False
    while not stopping.wait(every_s):
        try:
            look()
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
    raise RuntimeError("the engine of this pool has failed: the log says why. The next controller goes on")


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

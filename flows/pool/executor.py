"""The executor of a pool as a process: stands by, leads, and leaves whatever runs to the next one."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

from rich.text import Text
from sqlalchemy.exc import SQLAlchemyError

from ringmaster.flows.pool.alarms import PoolAlarms
from ringmaster.flows.pool.batch_runs import BatchRuns
from ringmaster.flows.pool.child_runs import ChildRuns
from ringmaster.flows.pool.crashed_runs import CrashedRuns
from ringmaster.flows.pool.late_answers import LateAnswers
from ringmaster.flows.pool.process_log import log_to_stderr
from ringmaster.flows.services.files import say_ready
from ringmaster.flows.settings import PoolAddress
from ringmaster.flows.views import describe
from ringmaster.tasks.cluster import Cluster
from ringmaster.tasks.execution.events import ExecutionEvent
from ringmaster.tasks.execution.executor import Executor
from ringmaster.tasks.execution.journal import Journal
from ringmaster.tasks.execution.replanner import Replanner
from ringmaster.tasks.pool.database import Database, DatabaseClosed
from ringmaster.tasks.pool.leadership import BEAT_EVERY_S, Leadership
from ringmaster.tasks.pool.leases import PoolLeases
from ringmaster.tasks.pool.patience import Patience
from ringmaster.tasks.pool.releases import check_release, note_release
from ringmaster.tasks.pool.runner import PoolRunner
from ringmaster.tasks.pool.steward import HOLDER_OF_SEGMENTS, Steward
from ringmaster.tasks.pool.submissions import Submissions

logger = logging.getLogger(__name__)

NAME = "pool"
STAND_BY_S = 1.0  # between two looks at who leads
FAREWELL_S = 3.0  # for a database that is away when the process is to end

Notice = Callable[[str], None]


def serve_pool(address: PoolAddress, *, notice: Notice, seed: int = 0) -> None:
    """Serves until SIGTERM or SIGINT: as the leader, or standing by for it. What runs then goes on without us.

    seed: of the planner. The process ends at once, without a further word, where another executor has taken the lead.
    """
    log_to_stderr()
    with _signals() as on_stop:
        notice("waiting for the pool's database, where it does not answer yet")
        database = Database(address.database)
        leadership = Leadership(database)
        _lead(leadership, database, notice)
        with ExitStack() as stack:
            stack.callback(_resign, leadership, address)
            stack.enter_context(_beating(leadership))
            stopping = threading.Event()
            led = leadership.guarded(database, on_deposed=_end_at_once)
            with suppress(DatabaseClosed):  # it was away when we were told to end
                led.write(note_release)
                executor = stack.enter_context(_taken_over(led, stopping, seed=seed))
                impatience = threading.Timer(FAREWELL_S, database.close)
                impatience.daemon = True
                on_stop += [stopping.set, executor.stop, impatience.start]
                notice(f"leading the pool (epoch {leadership.epoch})")
                say_ready()
                executor.serve()
            notice("ending; segments go on, and the next executor goes on with them")


@contextmanager
def _taken_over(database: Database, stopping: threading.Event, *, seed: int) -> Iterator[Executor]:
    """An executor that is where the former one was, with all that serves it."""
    with ExitStack() as stack:
        runs = ChildRuns(Submissions(database))
        stack.callback(runs.close)
        runner = PoolRunner(database, launch=runs.launch)
        stack.callback(runner.close)
        steward = Steward(database, runner=runner, patience=Patience.of_environment(), seed=seed)
        replanner = Replanner(name=NAME, make_plan=steward.make_plan, on_terms=steward.on_terms)
        steward.on_objective, steward.on_speed = replanner.pursue, replanner.hear
        executor = Executor(
            name=NAME,
            cluster=Cluster(nodes=()),
            leases=PoolLeases(database),
            holder=HOLDER_OF_SEGMENTS,
            journal=Journal(database, batch=None),
            submit=runner.submit,
            make_plan=steward.make_plan,
            on_terms=steward.on_terms,
            listeners=[steward.listen, _log],
            replanner=replanner,
            steer=runner.steer,
        )
        steward.take_over(executor)
        runner.on_deaf = partial(executor.call, _give_up)
        runner.start()
        pacemaker = threading.Thread(target=partial(steward.keep_ticking, stopping), name="pacemaker", daemon=True)
        pacemaker.start()
        crashed = CrashedRuns(Submissions(database))
        threading.Thread(target=crashed.keep_looking, args=(stopping,), name="crashed-runs", daemon=True).start()
        # No device is at stake, and a process that has just begun may be slow.
        batch_runs = BatchRuns(database, silent_s=2 * Patience.of_environment().lost_after_s)
        threading.Thread(target=batch_runs.keep_looking, args=(stopping,), name="batch-runs", daemon=True).start()
        alarms = PoolAlarms(database)
        threading.Thread(target=alarms.keep_looking, args=(stopping,), name="alarms", daemon=True).start()
        late = LateAnswers()
        threading.Thread(target=late.keep_looking, args=(stopping,), name="late-answers", daemon=True).start()
        yield executor


def _lead(leadership: Leadership, database: Database, notice: Notice) -> None:
    """Waits for the lead. Raises OtherRelease where one of another release has it: there is nothing to stand by for."""
    is_told = False
    while not leadership.claim():
        database.read(check_release)
        if not is_told:
            notice("another executor leads, or did until a moment ago: standing by")
            is_told = True
        time.sleep(STAND_BY_S)


@contextmanager
def _beating(leadership: Leadership) -> Iterator[None]:
    """Says that this leader lives, again and again."""
    over = threading.Event()

    def beat() -> None:
        with suppress(SQLAlchemyError):
            while leadership.beat():
                if over.wait(BEAT_EVERY_S):
                    return
            _end_at_once()

    thread = threading.Thread(target=beat, name="beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=FAREWELL_S)


def _resign(leadership: Leadership, address: PoolAddress) -> None:
    """Leaves the lead to the next one at once; where the database is away, that one waits for our silence."""
    with suppress(SQLAlchemyError):
        hasty = Database(address.database, patience_s=FAREWELL_S)
        leadership.resign(hasty)
        hasty.close()


def _give_up() -> None:
    """In the executor's thread: ends this process, so that another one leads."""
    raise RuntimeError("what gangs say cannot be read any more: the log says why. The next executor goes on")


def _end_at_once() -> None:
    """Another executor leads: whatever this process still wants to do is not its to do any more."""
    logger.error("another executor leads this pool: this one ends")
    logging.shutdown()
    os._exit(1)


@contextmanager
def _signals() -> Iterator[list[Callable[[], None]]]:
    """SIGTERM and SIGINT end the process in order, also where whoever started us had them ignored.

    Gives a list of what is to be called then; while it is empty nothing is begun, and the process just ends.
    """
    on_stop: list[Callable[[], None]] = []

    def stop(*_: object) -> None:
        if not on_stop:
            raise SystemExit(0)
        acts = on_stop.copy()
        on_stop[:] = [lambda: None]  # told twice, it does no more
        for act in acts:
            act()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield on_stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _log(event: ExecutionEvent) -> None:
    """An executor's listener: what was decided, and why."""
    if line := describe(event):
        logger.info("%s", Text.from_markup(line).plain)

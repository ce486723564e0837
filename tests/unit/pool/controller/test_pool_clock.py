"""The times of a pool's batches, where the wall clock is put forward or back while they are trained."""

import pytest

from ringmaster import clock as clock_module
from ringmaster.clock import AHEAD_S, SteadyClock
from ringmaster.flows.batch.result import _span_s
from ringmaster.tasks.execution.execution_events import predictions_in
from ringmaster.tasks.pool import pool_clock
from ringmaster.tasks.pool.pool_clock import PoolClock
from ringmaster.tasks.pool.submissions import BatchMeasurement, Submissions, measured
from ringmaster.tasks.storage import journal
from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.tasks.storage.fact_keys import CLOCK, FIRST_PREDICTION, NEWEST_PREDICTION
from ringmaster.tasks.storage.journal import Journal
from ringmaster.tasks.timeline.queries import Archive
from ringmaster.tasks.timeline.reader import TimelineReader
from tests.unit.pool.bench import Clock, Gangs, PoolBench, run, submission, worker_of

DAY_S = 86400.0
WALL_S = 1.8e9


class MachineClocks(Clock):
    """The clocks of a machine. Called, it returns the time since the boot."""

    def __init__(self):
        super().__init__()
        self.step_s = 0.0

    def wall_s(self):
        return WALL_S + self.now_s + self.step_s

    def steady(self, **options):
        return SteadyClock(clock=self, **{"wall_clock": self.wall_s, **options})


@pytest.fixture
def clocks(monkeypatch):
    result = MachineClocks()
    monkeypatch.setattr(clock_module.time, "time", result.wall_s)
    monkeypatch.setattr(clock_module, "boot_s", result)
    for module in (clock_module, pool_clock, journal):
        monkeypatch.setattr(module, "SteadyClock", result.steady)
    return result


@pytest.fixture
def database(tmp_path):
    database = Database(file_url(tmp_path / "pool.db"), synced=False)
    yield database
    database.close()


def time_in(database):
    """Returns the time by which another process of the machine counts."""
    return Journal(database, batch="b1").clock()


@pytest.mark.parametrize("step_s", [DAY_S, -DAY_S])
def test_a_step_of_the_wall_clock_changes_no_duration_of_a_batch(clocks, database, step_s):
    clock = PoolClock(database)
    pool, worker = PoolBench(database, clocks, batch_clock=clock), worker_of(database, num_devices=1)
    records, gangs = Journal(database, batch="b1"), Gangs(worker)
    began_s = time_in(database)
    pool.submit(submission(jobs=("a", "b"), num_steps=100))
    pool.pass_seconds(30, worker)
    clocks.step_s = step_s
    clock.poll()
    run(pool, gangs)
    assert 30 <= _span_s(records.segments()) <= 60
    assert all(segment.started_s >= began_s for segment in records.segments())
    first, newest = predictions_in({key: records.get(key) for key in (FIRST_PREDICTION, NEWEST_PREDICTION)})
    assert first.since_s == newest.since_s
    assert began_s <= newest.since_s <= newest.since_s + newest.made_s <= time_in(database)
    timeline = TimelineReader(database, name="the pool", is_pool=True).read("b1")
    assert 30 <= timeline.now_s <= 60
    assert Archive(database, is_pool=True).window("b1")[1] == {"b1"}


@pytest.mark.parametrize("step_s", [DAY_S, -DAY_S])
def test_the_next_controller_counts_on_while_a_batch_has_not_ended(clocks, database, step_s):
    PoolClock(database)
    Submissions(database).submit(submission())
    began_s = time_in(database)
    clocks.step_s = step_s
    clocks.now_s += 20
    clock = PoolClock(database)
    assert clock() == time_in(database) == pytest.approx(began_s + 20)
    Submissions(database).end("b1")
    clock.poll()
    assert clock() == time_in(database) == clocks.wall_s()


@pytest.mark.parametrize("step_s", [DAY_S, -DAY_S])
def test_the_clock_is_set_to_the_wall_clock_once_no_batch_counts_by_it(clocks, database, step_s):
    clock = PoolClock(database)
    with measured(database, BatchMeasurement(id="b1", name="b", jobs=("a",), flow_run="")):
        began_s = time_in(database)
        clocks.step_s = step_s
        clock.poll()
        assert time_in(database) == began_s
    clock.poll()
    assert time_in(database) == clock() == clocks.wall_s()


def test_after_a_boot_with_an_earlier_wall_clock_no_time_is_before_those_recorded(clocks, database):
    PoolClock(database)
    Submissions(database).submit(submission())
    began_s = time_in(database)
    facts = Journal(database, batch="")
    facts.put(CLOCK, {**facts.get(CLOCK), "boot_id": "of another boot"})
    clocks.step_s = -DAY_S
    assert PoolClock(database)() >= began_s


def test_another_machine_counts_as_far_ahead_of_its_wall_clock_as_the_controllers(clocks, database, monkeypatch):
    clock = PoolClock(database)
    Submissions(database).submit(submission())
    clocks.step_s = -DAY_S
    clock.poll()
    assert Journal(database, batch="").get(CLOCK)[AHEAD_S] == pytest.approx(DAY_S)
    monkeypatch.setattr(clock_module, "is_of_this_boot", lambda record: False)
    assert time_in(database) == pytest.approx(clock())

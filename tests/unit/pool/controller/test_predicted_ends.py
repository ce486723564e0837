"""Predicted ends on a pool: of each batch and its jobs, from the first plan that contains them on."""

import pytest

from ringmaster.tasks.execution.execution_events import PredictionUpdate, predictions_in
from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.tasks.storage.fact_keys import FIRST_PREDICTION, NEWEST_PREDICTION
from ringmaster.tasks.storage.journal import Journal
from ringmaster.tasks.timeline.reader import TimelineReader
from tests.unit.pool.bench import Clock, PoolBench, submission, worker_of


@pytest.fixture
def database(tmp_path):
    database = Database(file_url(tmp_path / "pool.db"), synced=False)
    yield database
    database.close()


def predicted(database, batch):
    journal = Journal(database, batch=batch)
    return predictions_in({key: journal.get(key) for key in (FIRST_PREDICTION, NEWEST_PREDICTION)})


def test_each_batch_of_a_pool_has_predicted_ends_and_later_batches_change_them(database):
    pool, worker = PoolBench(database, Clock()), worker_of(database, num_devices=1)
    pool.step()
    pool.submit(submission("b1", jobs=("a", "b"), num_steps=100))
    first, newest = predicted(database, "b1")
    assert first.jobs.keys() == newest.jobs.keys() == {"a", "b"}
    assert first.low_s < first.makespan_s < first.high_s
    assert first.jobs["b"].end_s == pytest.approx(first.makespan_s, abs=0.01)
    assert first.makespan_s > first.jobs["a"].end_s
    pool.pass_seconds(10, worker)
    pool.submit(submission("b2", jobs=("c",), num_steps=100))
    second, _ = predicted(database, "b2")
    assert second.jobs.keys() == {"c"}
    assert second.since_s >= first.since_s
    assert second.makespan_s > first.makespan_s  # it runs after the other batch, on the one device
    again, newest = predicted(database, "b1")
    assert again == first
    assert newest.made_s >= 0
    assert not pool.told(PredictionUpdate)  # they would fill the event log


def test_the_next_controller_goes_on_with_the_first_prediction(database):
    clock, worker = Clock(), worker_of(database, num_devices=1)
    pool = PoolBench(database, clock)
    pool.step()
    pool.submit(submission("b1", jobs=("a", "b"), num_steps=100))
    first, _ = predicted(database, "b1")
    other = PoolBench(database, clock)
    other.pass_seconds(3, worker)
    again, newest = predicted(database, "b1")
    assert again == first
    # The bench lets three seconds pass on its own clock, and hardly any on the wall clock, by which they are published.
    assert newest.since_s == pytest.approx(first.since_s, abs=4.0)


def test_a_timeline_of_one_batch_has_its_predicted_end(database):
    pool, _ = PoolBench(database, Clock()), worker_of(database, num_devices=1)
    pool.step()
    pool.submit(submission("b1", jobs=("a", "b"), num_steps=100), submission("b2", jobs=("c",), num_steps=100))
    timeline_reader = TimelineReader(database, name="the pool", is_pool=True)
    whole, one = timeline_reader.read(), timeline_reader.read("b2")
    assert whole.predicted.keys() == {"b1", "b2"}
    assert all(job.predicted is not None for job in whole.jobs)
    assert one.predicted.keys() == {"b2"}
    assert one.predicted["b2"].end_s == pytest.approx(one.jobs[0].predicted.end_s, abs=0.01)

"""Maintenance of a pool's database: which rows are deleted after months, and which are stored for good."""

import pytest
from sqlalchemy import update

from ringmaster.tasks.control.requests import RequestKind, Requests, RequestStatus
from ringmaster.tasks.execution.execution_events import JobEnded
from ringmaster.tasks.pool import controller
from ringmaster.tasks.pool.event_log import BatchEvents, EventLog, LogPosition
from ringmaster.tasks.pool.submissions import Submissions
from ringmaster.tasks.storage.database import Database, delete_in_chunks, file_url
from ringmaster.tasks.storage.fact_keys import IS_RECORDED
from ringmaster.tasks.storage.journal import JobRecord, JobStatus, Journal
from ringmaster.tasks.storage.schema import EVENT_LOG, PLANS, REQUESTS
from tests.unit.pool.bench import submission

NOW_S = 1e9
OLD_S = NOW_S - controller.KEPT_S - 1.0


@pytest.fixture
def database(tmp_path):
    database = Database(file_url(tmp_path / "pool.db"))
    yield database
    database.close()


def age(database):
    """Makes all rows old."""
    for table, column in ((REQUESTS, "made_s"), (EVENT_LOG, "told_s"), (PLANS, "made_s")):
        database.write(lambda c, table=table, column=column: c.execute(update(table).values({column: OLD_S})))


def end(database, batch, *, is_recorded):
    EventLog(database).append(batch, JobEnded(record=JobRecord(name="a", status=JobStatus.DONE)))
    Journal(database, batch=batch).put(IS_RECORDED, is_recorded)
    Submissions(database).end(batch)


def decisions(database, batch):
    return BatchEvents(database, batch).rows(LogPosition(), most=9)[0]


def test_what_was_told_is_dropped_where_the_batch_has_ended_and_is_recorded(database):
    for name in ("recorded", "not", "standing"):
        Submissions(database).submit(submission(name))
    end(database, "recorded", is_recorded=True)
    end(database, "not", is_recorded=False)
    EventLog(database).append("standing", JobEnded(record=JobRecord(name="a", status=JobStatus.DONE)))
    Journal(database, batch="standing").put(IS_RECORDED, True)
    age(database)
    assert controller.tidy(database, now_s=NOW_S) == 1
    assert {name: len(decisions(database, name)) for name in ("recorded", "not", "standing")} == {
        "recorded": 0,
        "not": 1,
        "standing": 1,
    }


def test_answered_requests_are_dropped_and_open_ones_are_not(database):
    requests = Requests(database)
    answered, standing = (requests.ask(RequestKind.PAUSE, {"batch": "b", "jobs": []}) for _ in range(2))
    requests.answer(answered, status=RequestStatus.DONE)
    age(database)
    assert controller.tidy(database, now_s=NOW_S) == 1
    assert [request.id for request in requests.open()] == [standing]


def test_of_the_standing_plans_the_newest_is_kept_and_of_batches_all(database):
    for batch in ("", "", "b1"):
        Journal(database, batch=batch).write_plan({"of": batch}, why="start")
    Journal(database, batch="").write_plan({"of": "the pool, newest"}, why="clock")
    age(database)
    assert controller.tidy(database, now_s=NOW_S) == 2
    assert Journal(database, batch="").plans() == [{"of": "the pool, newest"}]
    assert Journal(database, batch="b1").plans() == [{"of": "b1"}]


def test_what_is_young_stays(database):
    Submissions(database).submit(submission("b1"))
    end(database, "b1", is_recorded=True)
    age(database)
    assert controller.tidy(database, now_s=OLD_S + 1.0) == 0


def test_many_rows_are_dropped_a_portion_at_a_time_so_that_others_may_write(database, monkeypatch):
    for number in range(7):
        EventLog(database).append("b1", JobEnded(record=JobRecord(name=f"j{number}", status=JobStatus.DONE)))
    sizes, write = [], database.write
    monkeypatch.setattr(database, "write", lambda act: sizes.append(write(act)) or sizes[-1])
    assert delete_in_chunks(database, EVENT_LOG, EVENT_LOG.c.batch == "b1", most_rows=3) == 7
    assert sizes == [3, 3, 1, 0]
    assert not decisions(database, "b1")

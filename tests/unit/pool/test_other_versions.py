"""Submissions by a flow of another version are refused with a message, and do not stop the executor."""

import pytest
from sqlalchemy import select, update

from ringmaster.tasks.control.requests import RequestKind, RequestStatus
from ringmaster.tasks.pool.submissions import Submissions
from ringmaster.tasks.storage.journal import JobStatus, Journal
from ringmaster.tasks.storage.schema import BATCHES
from tests.unit.pool.bench import submission
from tests.unit.pool.workers import Worker


@pytest.mark.parametrize(
    "changed", [{"colour": "red"}, {"jobs": None}, {"jobs": [7]}, {"terms": []}], ids=lambda changed: str(changed)
)
def test_a_batch_that_cannot_be_read_fails_and_others_go_on(database, pool, changed):
    pool.pass_seconds(1, Worker(database))
    Submissions(database).submit(submission("b1"))
    here = BATCHES.c.id == "b1"

    def rewrite(connection):
        content = connection.execute(select(BATCHES.c.content).where(here)).scalar_one()
        connection.execute(update(BATCHES).where(here).values(content={**content, **changed}))

    database.write(rewrite)
    pool.submit(submission("b2"))
    records = Journal(database, batch="b1").jobs()
    assert {record.status for record in records.values()} == {JobStatus.FAILED}
    assert all("the same version on all machines" in record.message for record in records.values())
    assert Submissions(database).status("b1") == "ended"
    assert {row.id for row in pool.plans[-1].jobs} == {"b2/a", "b2/b"}


def test_directions_that_cannot_be_read_are_refused(database, pool):
    pool.pass_seconds(1, Worker(database))
    pool.submit(submission("b1"))
    said = pool.ask(RequestKind.DIRECT, batch="b1", jobs={"a": {"colour": "red"}})
    assert (said.status, "Job has no field ['colour']" in said.answer["message"]) == (
        RequestStatus.REFUSED,
        True,
    )
    assert "the same version on all machines" in said.answer["message"]

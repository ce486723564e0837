"""The outcomes of segments, in the form in which earlier releases have stored them."""

from sqlalchemy import update

from ringmaster.codec import to_json
from ringmaster.tasks.storage.journal import SegmentSpec
from ringmaster.tasks.storage.schema import SEGMENTS
from ringmaster.techniques.processes.gang_events import JobResult
from tests.unit.execution.fakes import open_journal

STORED = {
    "status": "preempted",
    "message": "m",
    "first_step": 0,
    "step": 5,
    "save_s": 0.1,
    "fellows": {"b": {"status": "left", "step": 4}},
    "of_a_plugin": {"curve": [1.0]},
}


def test_an_outcome_is_read_as_each_jobs_own_and_stored_again_as_it_was(tmp_path):
    journal = open_journal(tmp_path)
    for name in "bc":
        journal.write_job(name, lead_job="a")
    (number,) = journal.start_segments([("a", SegmentSpec(members={"b": 2, "c": 3}))])
    assert (journal.segments("a")[0].outcome, journal.segments("a")[0].result) == (None, JobResult())
    journal.database.execute(update(SEGMENTS).values(outcome=STORED))

    results = {name: journal.segments(name)[0].result for name in "abc"}

    assert to_json(results["a"]) == STORED
    assert results["b"] == JobResult(status="left", step=4)
    assert results["c"] == JobResult(status="preempted", message="m")
    journal.end_segment(number, results["a"])
    assert journal.database.scalar(SEGMENTS.select().with_only_columns(SEGMENTS.c.outcome)) == STORED

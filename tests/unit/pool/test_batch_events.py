"""The events of a batch, as followers read them: in order, each once, and each value read and written few times."""

import json
import time

import pytest
from sqlalchemy import event as sql
from sqlalchemy import insert

from ringmaster.tasks.execution.dispatch import PlannedSegment
from ringmaster.tasks.execution.execution_events import GangReport, JobEnded, SegmentEnded, SegmentStarted
from ringmaster.tasks.pool.event_log import BatchEvents, EventLog, EventReader, LogPosition
from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.tasks.storage.journal import JobRecord, JobStatus, Journal, SegmentSpec
from ringmaster.tasks.storage.message_store import MessageStore
from ringmaster.tasks.storage.schema import EVENT_LOG
from ringmaster.techniques.processes.gang_events import (
    EvaluationReported,
    JobOfGroupEnded,
    JobReady,
    JobResult,
    Outcome,
    OutcomeStatus,
    Steps,
)
from tests.unit.pool.bench import Clock, PoolBench, submission
from tests.unit.pool.workers import Worker

LOSS = 0.8675309


@pytest.fixture
def database(tmp_path):
    database = Database(file_url(tmp_path / "pool.db"), synced=False)
    yield database
    database.close()


class Story:
    """Writes the events of batch b as a pool does."""

    def __init__(self, database):
        self.database, self.journal = database, Journal(database, batch="b")
        self.log, self.message_store, self.numbers = EventLog(database), MessageStore(database), {}

    def begin(self, job="a"):
        return self.journal.start_segments([(job, SegmentSpec())])[0]

    def start(self, number, job="a"):
        started = SegmentStarted(
            number=number, segment=planned(job), technique="ddp", num_devices=1, first_step=0, attempt=1
        )
        self.log.append("b", started)

    def say(self, segment, event):
        number = self.numbers[segment] = self.numbers.get(segment, -1) + 1
        self.message_store.store(segment, "n", events=[(number, event)])

    def end(self, number, job="a"):
        outcome = Outcome(status=OutcomeStatus.DONE)
        self.log.append("b", JobEnded(record=JobRecord(name=job, status=JobStatus.DONE)))
        self.log.append("b", SegmentEnded(number=number, segment=planned(job), outcome=outcome, decision=""))


def planned(job):
    return PlannedSegment(job=job, option=0, devices=(("n", 0),), start_s=0.0, end_s=1.0, last_step=1)


def seen(events):
    return [shown(entry.event) for entry in events]


def shown(event):
    if isinstance(event, JobEnded):
        return f"{event.job} has ended"
    number = event.number
    if isinstance(event, GangReport):
        return f"{number} {event.job} {event.event.step}"
    return f"{number} {'starts' if isinstance(event, SegmentStarted) else 'ends'}"


def reader(database, after=LogPosition()):
    return EventReader(BatchEvents(database, "b"), after)


def test_what_a_gang_said_before_its_start_was_told_waits_for_it(database):
    story = Story(database)
    number = story.begin()
    story.say(number, JobReady(step=0))
    reads = reader(database)
    assert reads.read() == []
    story.start(number)
    assert seen(reads.read()) == ["1 starts", "1 a 0"]


def test_what_comes_after_the_end_of_a_segment_is_dropped(database):
    story = Story(database)
    story.start(number := story.begin())
    story.end(number)
    reads = reader(database)
    assert seen(reads.read()) == ["1 starts", "a has ended", "1 ends"]
    story.say(number, JobReady(step=0))
    assert reads.read() == []
    assert reader(database, LogPosition(decision=3)).read() == []


def test_a_member_of_a_group_is_named_and_ends_by_the_executors_decision(database):
    story = Story(database)
    story.start(number := story.begin())
    story.say(number, Steps(job="b", first_step=0, seconds=(1.0,), losses=(2.0,), wall_s=5.0))
    story.say(number, JobOfGroupEnded(job="b", outcome=JobResult(status="done", step=1)))
    story.say(number, EvaluationReported(step=1, metrics={"loss": 2.0}, wall_s=7.0))
    story.say(number, Outcome(status=OutcomeStatus.DONE))
    found = reader(database).read()
    assert seen(found) == ["1 starts", "1 b 1", "1 a 1"]
    assert [entry.time_s for entry in found[1:]] == [5.0, 7.0]


def test_batches_and_old_segments_do_not_hold_up_each_other(database):
    story = Story(database)
    other = Journal(database, batch="other").start_segments([("a", SegmentSpec())])[0]
    story.say(other, JobReady(step=0))
    old = story.begin()
    story.say(old, JobReady(step=0))  # maintenance has deleted its start with the other old rows
    story.start(number := story.begin())
    story.say(number, JobReady(step=3))
    assert seen(reader(database).read()) == ["3 starts", "3 a 3"]


def several(database):
    """Three segments, of which two run at the same time. Returns the events in the order of the pool."""
    story = Story(database)
    first, second = story.begin("a"), story.begin("b")
    story.start(first, "a")
    story.say(first, JobReady(step=0))
    story.start(second, "b")
    for step in range(5):
        story.say(first, JobReady(step=step))
        story.say(second, JobReady(step=step))
    story.say(first, Outcome(status=OutcomeStatus.DONE))
    story.end(first, "a")
    third = story.begin("c")
    story.say(third, JobReady(step=0))
    story.start(third, "c")
    for step in range(3):
        story.say(second, JobReady(step=step))
        story.say(third, JobReady(step=step))
    story.end(second, "b")
    story.end(third, "c")


@pytest.mark.parametrize("most", [1, 2, 3, 7, 1000])
def test_in_pages_of_any_size_and_from_any_position_on_each_event_comes_once(database, most):
    several(database)
    found, reads = [], reader(database)
    while page := reads.read(most=most):
        found += page
    names = seen(found)
    assert len(names) == 3 + 6 + 8 + 4 + 6
    for number, job in enumerate("abc", 1):
        said = [index for index, name in enumerate(names) if name.startswith(f"{number} {job}")]
        assert len(said) == {"a": 6, "b": 8, "c": 4}[job]
        assert names.index(f"{number} starts") < said[0]
        assert said[-1] < names.index(f"{job} has ended") < names.index(f"{number} ends")
    for index, entry in enumerate(found):
        again, rest = reader(database, entry.at), []
        while page := again.read(most=most):
            rest += page
        assert sorted(seen(rest)) == sorted(names[index + 1 :])


def test_readers_of_one_process_share_what_they_read_and_one_that_is_behind_misses_nothing(database, monkeypatch):
    monkeypatch.setattr("ringmaster.tasks.pool.event_log.MAX_RECENT", 4)
    several(database)
    events = BatchEvents(database, "b")
    fast, slow = EventReader(events, LogPosition()), EventReader(events, LogPosition())
    every = fast.read()
    found = []
    while page := slow.read(most=2):
        found += page
    assert found == every
    story = Story(database)
    story.start(number := story.begin())
    story.say(number, JobReady(step=9))
    assert seen(slow.read()) == seen(fast.read()) == [f"{number} starts", f"{number} a 9"]


def test_what_an_earlier_release_has_copied_into_the_log_comes_once(database):
    story = Story(database)
    story.start(number := story.begin())
    for step in range(2):
        story.say(number, JobReady(step=step))
        content = {"number": number, "job": "a", "event": {"event": "ready", "step": step, "startup_s": 1.0}}
        row = insert(EVENT_LOG).values(batch="b", kind="GangSaid", content=content, told_s=time.time())
        database.write(lambda connection, row=row: connection.execute(row))
    story.say(number, JobReady(step=2))
    story.end(number)
    found = reader(database).read()
    assert sorted(seen(found)) == sorted(["1 starts", "1 a 0", "1 a 1", "1 a 2", "a has ended", "1 ends"])
    assert [entry.event.event.startup_s for entry in found if isinstance(entry.event, GangReport)].count(1.0) == 2


def test_a_loss_value_is_written_once_and_read_twice_on_its_way_to_a_recorder(database):
    """Once by the executor, and once by the process that follows and records the batch."""
    written, read = [], []

    def decoded(text):
        read.append(str(LOSS) in text)
        return json.loads(text)

    def before(connection, cursor, statement, parameters, context, executemany):
        if str(LOSS) in str(parameters):
            written.append(statement)

    database._engine.dialect._json_deserializer = decoded
    sql.listen(database._engine, "before_cursor_execute", before)
    pool, worker = PoolBench(database, Clock()), Worker(database, "n1", num_devices=1)
    pool.pass_seconds(1, worker)
    pool.submit(submission("b", jobs=("a",)))
    ((segment, _),) = worker.take_all().items()
    worker.say(segment, "ready", step=0)
    events = BatchEvents(database, "b")
    shows, records = EventReader(events, LogPosition()), EventReader(events, LogPosition())
    shows.read(), records.read()
    read.clear()
    worker.say(segment, "steps", first_step=0, losses=[LOSS], seconds=[1.0], wall_s=5.0)
    pool.step()
    for reads in (shows, records):
        (entry,) = reads.read()
        assert entry.event.event.losses == (LOSS,)
    assert [statement.split()[:3] for statement in written] == [["INSERT", "INTO", "said"]]
    assert sum(read) == 2

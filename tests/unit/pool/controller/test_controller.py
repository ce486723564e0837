"""The pool controller: nodes join and leave, batches are submitted and end, users make requests."""

from concurrent.futures import Future
from dataclasses import replace

import pytest
from sqlalchemy import update

from ringmaster.tasks.control.requests import RequestKind, RequestStatus
from ringmaster.tasks.execution.execution_events import GangReport, JobEnded, PlanUpdate, SegmentEnded, SegmentStarted
from ringmaster.tasks.pool import controller
from ringmaster.tasks.pool.nodes import NodeRegistry, NodeStatus
from ringmaster.tasks.pool.submissions import Submissions
from ringmaster.tasks.storage.fact_keys import IS_RECORDED
from ringmaster.tasks.storage.journal import JobStatus, Journal
from ringmaster.tasks.storage.message_store import MessageStore
from ringmaster.tasks.storage.schema import BATCHES
from tests.unit.execution.fakes import profile
from tests.unit.pool.bench import Gangs, PoolBench, run, submission
from tests.unit.pool.workers import Worker

# -- batches ---------------------------------------------------------------------------------------------------------


def test_a_batch_is_run_to_its_end_and_told_of_it_in_its_own_names(database, pool):
    gangs = Gangs(Worker(database, "n1", num_devices=2))
    pool.pass_seconds(1, *gangs.workers)
    pool.submit(submission(jobs=("a", "b", "c"), bases={"c": "a"}))
    assert pool.statuses() == {"a": JobStatus.RUNNING, "b": JobStatus.RUNNING, "c": JobStatus.WAITING}
    assert sorted(pool.held()) == ["n1:cpu:0", "n1:cpu:1"]
    run(pool, gangs)
    assert pool.statuses() == dict.fromkeys("abc", JobStatus.DONE)
    assert pool.held() == {} and pool.executor.job_table.entries == {}
    assert {(event.job, event.record.status) for event in pool.told(JobEnded)} == {(j, JobStatus.DONE) for j in "abc"}
    assert [event.segment.job for event in pool.told(SegmentStarted)] == ["a", "b", "c"]
    assert {event.job for event in pool.told(GangReport)} == set("abc")
    (planned, *_) = pool.told(PlanUpdate)
    assert [row.id for row in planned.problem.jobs] == ["a", "b", "c"]
    assert planned.problem.job("c").after == ("a",)
    assert {segment.job for segment in planned.plan.segments} == set("abc")


def test_two_batches_share_devices_and_hear_only_of_themselves(database, pool):
    gangs = Gangs(Worker(database, "n1", num_devices=1), Worker(database, "n2", num_devices=1))
    pool.pass_seconds(1, *gangs.workers)
    pool.submit(submission("b1", jobs=("a", "x")), submission("b2", jobs=("a", "y")))
    run(pool, gangs)
    for batch, jobs in (("b1", {"a", "x"}), ("b2", {"a", "y"})):
        assert pool.statuses(batch) == dict.fromkeys(jobs, JobStatus.DONE)
        assert {event.job for event in pool.told(JobEnded, batch)} == jobs
        for planned in pool.told(PlanUpdate, batch):
            assert {row.id for row in planned.problem.jobs} <= jobs
    assert {key[0].rpartition("/")[0] for key, *_ in gangs.trained} == {"/runs/b1/checkpoints", "/runs/b2/checkpoints"}


def test_what_gangs_have_said_is_not_kept_for_ever(database, pool, monkeypatch):
    monkeypatch.setattr(controller, "MAX_MESSAGES", 1)
    gangs = Gangs(Worker(database, "n1", num_devices=1))
    pool.pass_seconds(1, *gangs.workers)
    for batch in ("b1", "b2", "b3"):
        pool.submit(submission(batch, jobs=("a",)))
        run(pool, gangs)
        assert pool.statuses(batch) == {"a": JobStatus.DONE}
    assert MessageStore(database).batches() == {"b1", "b2", "b3"}, "what is not recorded yet is kept"
    for batch in ("b1", "b2", "b3"):
        Journal(database, batch=batch).put(IS_RECORDED, True)
    controller.clear_messages(database)
    assert MessageStore(database).batches() == {"b3"}
    assert [word.segment for word in MessageStore(database).events(after=0)] == [3, 3, 3]


def test_what_cannot_be_trained_at_all_does_not_keep_a_batch_from_its_end(database, pool):
    pool.submit(submission(jobs=("a",), profiles={}), failed={"z": "no technique can train it"})
    pool.step()
    assert pool.statuses() == {"a": JobStatus.FAILED, "z": JobStatus.FAILED}
    told = [event.record.message for event in pool.told(JobEnded)]
    assert told == ["no technique can train it", "it was submitted without a profile"]
    assert not pool.is_standing()


def test_a_batch_that_is_reopened_goes_on(database, pool):
    gangs = Gangs(Worker(database))
    pool.pass_seconds(1, *gangs.workers)
    pool.submit(submission(jobs=("a",)))
    assert pool.ask(RequestKind.CANCEL, batch="b1").status == RequestStatus.DONE
    run(pool, gangs)
    assert pool.statuses() == {"a": JobStatus.CANCELLED}
    pool.executor.job_table.journal.write_job("b1/a", status=JobStatus.WAITING, message="")
    Submissions(database).reopen("b1")
    run(pool, gangs)
    assert pool.statuses() == {"a": JobStatus.DONE}


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (submission("b1", profiles={"a": (profile("single", 0),), "b": (profile(),)}), "it cannot be planned"),
        (submission("b1", bases={"a": "b", "b": "a"}), "it cannot be planned"),
        (replace(submission("b1"), terms={"objective": "beauty"}), "'beauty' is not an objective"),
        (replace(submission("b1"), terms={"speed": 9}), "speed"),
    ],
    ids=["no device", "circle", "objective", "terms"],
)
def test_a_batch_that_cannot_be_planned_fails_and_disturbs_nobody(database, pool, batch, message):
    gangs = Gangs(Worker(database))
    pool.pass_seconds(1, *gangs.workers)
    pool.submit(batch, submission("b2", jobs=("x",)))
    assert not pool.is_standing()
    for job in ("a", "b"):
        assert message in Journal(database, batch="b1").jobs()[job].message
    run(pool, gangs)
    assert pool.statuses("b2") == {"x": JobStatus.DONE}


def test_a_batch_that_cannot_be_read_fails_and_disturbs_nobody(database, pool):
    Submissions(database).submit(submission("b1"))
    content = {"id": "b1", "from": "the future"}
    database.write(lambda connection: connection.execute(update(BATCHES).values(content=content)))
    gangs = Gangs(Worker(database))
    pool = PoolBench(database, pool.clock)
    pool.submit(submission("b2", jobs=("x",)))
    run(pool, gangs)
    assert pool.statuses("b1") == {"a": JobStatus.FAILED, "b": JobStatus.FAILED}
    assert pool.statuses("b2") == {"x": JobStatus.DONE}


# -- nodes -----------------------------------------------------------------------------------------------------------


def test_a_batch_waits_for_its_first_node(database, pool):
    pool.submit(submission(jobs=("a",)))
    assert pool.statuses() == {"a": JobStatus.WAITING}
    gangs = Gangs(Worker(database))
    pool.pass_seconds(1, *gangs.workers)
    assert pool.statuses() == {"a": JobStatus.RUNNING}
    run(pool, gangs)


def test_a_silent_node_is_lost_and_its_job_goes_on_elsewhere(database, pool):
    lost, other = Worker(database, "n1", num_devices=1), Worker(database, "n2", num_devices=1)
    gangs = Gangs(lost)
    pool.pass_seconds(1, lost, other)
    pool.submit(submission(jobs=("a",)))
    gangs.move(), gangs.move()
    pool.pass_seconds(59, other)
    assert pool.told(SegmentEnded) == []
    pool.pass_seconds(3, other)
    (ended,) = pool.told(SegmentEnded)
    assert (ended.outcome.status, ended.segment.devices) == ("lost", (("n1", 0),))
    assert [node.name for node in NodeRegistry(database).all()] == ["n2"]
    assert list(pool.held()) == ["n2:cpu:0"]
    assert not lost.beat(), "should it live, it hears that it was given up"
    gangs.workers = [other]
    run(pool, gangs)
    assert pool.statuses() == {"a": JobStatus.DONE}
    assert [steps for _, *steps in gangs.trained] == [[0, 5], [5, 7], [7, 10]]


def test_silence_while_nobody_could_look_is_none(database, pool):
    worker = Worker(database)
    pool.pass_seconds(1, worker)
    pool.submit(submission(jobs=("a",)))
    pool.step(seconds=600.0)  # the database was unavailable
    pool.pass_seconds(59)
    assert [node.name for node in NodeRegistry(database).all()] == ["n"]
    pool.pass_seconds(3)
    assert NodeRegistry(database).all() == []


def test_another_incarnation_of_a_node_loses_what_the_former_one_ran(database, pool):
    gangs = Gangs(Worker(database))
    pool.pass_seconds(1, *gangs.workers)
    pool.submit(submission(jobs=("a",)))
    gangs.move()
    gangs.workers = [Worker(database, incarnation="two")]
    pool.pass_seconds(2, *gangs.workers)
    assert [event.outcome.status for event in pool.told(SegmentEnded)] == ["lost"]
    run(pool, gangs)
    assert pool.statuses() == {"a": JobStatus.DONE}


def test_a_worker_that_ended_in_order_takes_its_node_along(database, pool):
    worker = Worker(database)
    pool.pass_seconds(1, worker)
    NodeRegistry(database).remove("n", incarnation=worker.incarnation)
    pool.pass_seconds(1)
    pool.submit(submission(jobs=("a",)))
    assert pool.statuses() == {"a": JobStatus.WAITING}


def test_a_device_that_is_unwell_is_not_used_and_left(database, pool):
    worker = Worker(database, num_devices=2)
    gangs = Gangs(worker)
    pool.pass_seconds(1, worker)
    pool.submit(submission(jobs=("a", "b")))
    gangs.move()
    worker.beat(health={"0": "ECC errors"})
    pool.step(seconds=1.0)
    on_it = next(e.number for e in pool.told(SegmentStarted) if e.segment.devices == (("n", 0),))
    assert worker.told(on_it) == ["stop"]
    run(pool, gangs)
    later = [event.segment.devices for event in pool.told(SegmentStarted)][2:]
    assert later and set(later) == {(("n", 1),)}
    assert pool.statuses() == {"a": JobStatus.DONE, "b": JobStatus.DONE}


def test_nothing_new_starts_on_a_node_that_leaves(database, pool):
    worker = Worker(database)
    worker.beat(status=NodeStatus.LEAVING)
    pool.pass_seconds(1)
    pool.submit(submission(jobs=("a",)))
    assert pool.statuses() == {"a": JobStatus.WAITING}
    other = Worker(database, "n2")
    pool.pass_seconds(1, other)
    assert [event.segment.devices[0][0] for event in pool.told(SegmentStarted)] == ["n2"]


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "ringmaster.tasks.execution.replanner"]


def test_the_log_says_once_which_jobs_have_no_devices_and_once_that_they_have(database, pool, caplog):
    small = Worker(database, "n1", num_devices=1)
    gangs = Gangs(small)
    pool.pass_seconds(1, small)
    wide = submission("b2", jobs=("wide",), profiles={"wide": (profile(num_devices=2),)})
    with caplog.at_level("INFO", logger="ringmaster.tasks.execution.replanner"):
        pool.submit(submission("b1", jobs=("a",), num_steps=1000), wide)
        gangs.move()
        pool.pass_seconds(300, small)
        assert said(caplog) == ["no devices are there for pool: b2/wide"]
        pool.pass_seconds(10, small, Worker(database, "n2", num_devices=2))
    assert said(caplog)[1:] == ["devices are there again for pool: b2/wide"]


def test_the_log_says_once_why_there_is_no_plan(database, pool, caplog):
    def fail(_):
        broken = Future()
        broken.set_exception(RuntimeError("the solver is broken"))
        return broken

    pool.executor._plan_manager.replanner._background = fail
    worker = Worker(database, "n1")
    pool.pass_seconds(1, worker)
    pool.submit(submission())
    pool.pass_seconds(60, worker)
    assert said(caplog) == ["the rest of pool could not be planned again: the solver is broken"]

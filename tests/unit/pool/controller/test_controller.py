"""The pool controller: nodes join and leave, batches are submitted and end, users make requests."""

from concurrent.futures import Future
from dataclasses import replace

import pytest
from sqlalchemy import update

from ringmaster.tasks.execution.events import GangSaid, JobEnded, Planned, SegmentEnded, SegmentStarted
from ringmaster.tasks.pool import requests as wishes
from ringmaster.tasks.pool.controller import maintenance
from ringmaster.tasks.pool.nodes import Nodes, NodeStatus
from ringmaster.tasks.pool.requests import Requests
from ringmaster.tasks.pool.submissions import Submissions
from ringmaster.tasks.storage.journal import JobStatus, Journal
from ringmaster.tasks.storage.message_store import MessageStore
from ringmaster.tasks.storage.schema import BATCHES
from tests.unit.execution.fakes import profile
from tests.unit.pool.bench import Gangs, PoolBench, submission
from tests.unit.pool.workers import Worker


def run(pool, gangs, *, moves=30):
    """Lets gangs and executor take turns until no batch is active."""
    for _ in range(moves):
        pool.step(seconds=0.1)
        if not Submissions(pool.database).standing():
            return
        gangs.move()
    raise AssertionError(f"it did not come to its end: {pool.statuses()}")


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
    assert {(event.job, event.status) for event in pool.told(JobEnded)} == {(j, JobStatus.DONE) for j in "abc"}
    assert [event.segment.job for event in pool.told(SegmentStarted)] == ["a", "b", "c"]
    assert {event.job for event in pool.told(GangSaid)} == set("abc")
    (planned, *_) = pool.told(Planned)
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
        for planned in pool.told(Planned, batch):
            assert {row.id for row in planned.problem.jobs} <= jobs
    assert {key[0].rpartition("/")[0] for key, *_ in gangs.trained} == {"/runs/b1/checkpoints", "/runs/b2/checkpoints"}


def test_what_gangs_have_said_is_not_kept_for_ever(database, pool, monkeypatch):
    monkeypatch.setattr(maintenance, "MOST_MESSAGES", 1)
    gangs = Gangs(Worker(database, "n1", num_devices=1))
    pool.pass_seconds(1, *gangs.workers)
    for batch in ("b1", "b2", "b3"):
        pool.submit(submission(batch, jobs=("a",)))
        run(pool, gangs)
        assert pool.statuses(batch) == {"a": JobStatus.DONE}
    assert MessageStore(database).batches() == {"b1", "b2", "b3"}, "what is not recorded yet is kept"
    for batch in ("b1", "b2", "b3"):
        Journal(database, batch=batch).put(maintenance.IS_RECORDED, True)
    maintenance.clear_messages(database)
    assert MessageStore(database).batches() == {"b3"}
    assert [word.segment for word in MessageStore(database).events(after=0)] == [3, 3, 3]


def test_what_cannot_be_trained_at_all_does_not_keep_a_batch_from_its_end(database, pool):
    pool.submit(submission(jobs=("a",), profiles={}), failed={"z": "no technique can train it"})
    pool.step()
    assert pool.statuses() == {"a": JobStatus.FAILED, "z": JobStatus.FAILED}
    told = [event.message for event in pool.told(JobEnded)]
    assert told == ["no technique can train it", "it was submitted without a profile"]
    assert not pool.is_standing()


def test_a_batch_that_is_reopened_goes_on(database, pool):
    gangs = Gangs(Worker(database))
    pool.pass_seconds(1, *gangs.workers)
    pool.submit(submission(jobs=("a",)))
    assert pool.ask(wishes.RequestKind.CANCEL, batch="b1").status == wishes.RequestStatus.DONE
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
        (replace(submission("b1"), terms={"objective": "beauty"}), "'beauty' is no objective"),
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
    assert [node.name for node in Nodes(database).all()] == ["n2"]
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
    assert [node.name for node in Nodes(database).all()] == ["n"]
    pool.pass_seconds(3)
    assert Nodes(database).all() == []


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
    Nodes(database).remove("n", incarnation=worker.incarnation)
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


# -- requests --------------------------------------------------------------------------------------------------------


def test_jobs_are_paused_resumed_and_cancelled(database, pool):
    gangs = Gangs(Worker(database, num_devices=2))
    pool.pass_seconds(1, *gangs.workers)
    pool.submit(submission(jobs=("a", "b")))
    gangs.move()
    paused = pool.ask(wishes.RequestKind.PAUSE, batch="b1", jobs=["a"])
    assert paused.answer == {"message": "paused: a of batch nightly-b1"}
    for _ in range(6):
        gangs.move()
        pool.step()
    assert pool.statuses() == {"a": JobStatus.PAUSED, "b": JobStatus.DONE}
    assert pool.is_standing()
    assert pool.ask(wishes.RequestKind.RESUME, batch="b1", jobs=[]).answer == {
        "message": "resumed: a of batch nightly-b1"
    }
    assert pool.statuses()["a"] == JobStatus.RUNNING
    pool.ask(wishes.RequestKind.CANCEL, batch="b1", jobs=[])
    run(pool, gangs)
    assert pool.statuses() == {"a": JobStatus.CANCELLED, "b": JobStatus.DONE}


def test_a_job_that_failed_is_retried_with_the_jobs_that_failed_because_of_it(database, pool):
    worker = Worker(database, num_devices=2)
    gangs = Gangs(worker)
    pool.pass_seconds(1, worker)
    pool.submit(submission(jobs=("a", "b", "c", "d"), bases={"c": "b", "d": "c"}))
    segments = {share.order.job.name: segment for segment, share in worker.take_all().items()}
    worker.end(segments["b"], "invalid", "the loss is not finite")
    pool.step()
    assert pool.statuses() == {
        "a": JobStatus.RUNNING,
        "b": JobStatus.FAILED,
        "c": JobStatus.FAILED,
        "d": JobStatus.FAILED,
    }
    retried = pool.ask(wishes.RequestKind.RETRY, batch="b1", jobs=["b"])
    assert retried.answer == {"message": "due again: b of batch nightly-b1"}
    assert pool.statuses() == {
        "a": JobStatus.RUNNING,
        "b": JobStatus.RUNNING,
        "c": JobStatus.WAITING,
        "d": JobStatus.WAITING,
    }
    worker.end(segments["a"], step=10, first_step=0, metrics={"loss": 1.0})
    run(pool, gangs)
    assert pool.statuses() == dict.fromkeys("abcd", JobStatus.DONE)


def test_a_retried_job_that_ran_out_of_memory_everywhere_has_all_its_options_again(database, pool):
    worker = Worker(database, num_devices=2)
    pool.pass_seconds(1, worker)
    pool.submit(submission(jobs=("a", "b")))
    while pool.statuses()["a"] != JobStatus.FAILED:
        for segment, share in worker.take_all().items():
            if share.order.job.name == "a":
                worker.end(segment, "out_of_memory", "no room")
        pool.step(seconds=0.1)
    pool.ask(wishes.RequestKind.RETRY, batch="b1", jobs=["a"])
    assert pool.statuses()["a"] == JobStatus.RUNNING


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        (
            wishes.RequestKind.CANCEL,
            {"batch": "b9"},
            "there is no batch 'b9'. There is: nightly-b1 (b1), twin (b2), twin (b3)",
        ),
        (
            wishes.RequestKind.CANCEL,
            {"batch": "twin"},
            "several batches are named twin: b2, b3. To fix: say which by its id",
        ),
        (wishes.RequestKind.CANCEL, {"batch": "b0"}, "batch b0 has ended"),
        (wishes.RequestKind.CANCEL, {"batch": "b1", "jobs": ["a", "q"]}, "batch nightly-b1 has no job q. It has: a, b"),
        (
            wishes.RequestKind.RESUME,
            {"batch": "b1"},
            "no job of batch nightly-b1 can be resumed: a is waiting, b is waiting",
        ),
        (
            wishes.RequestKind.RESUME,
            {"batch": "b1", "jobs": ["a"]},
            "of batch nightly-b1 a is waiting: it cannot be resumed",
        ),
        (
            wishes.RequestKind.RETRY,
            {"batch": "b1", "jobs": ["a"]},
            "of batch nightly-b1 a is waiting: it cannot be retried",
        ),
        (
            wishes.RequestKind.SET_PRIORITY,
            {"batch": "b1", "priority": -1},
            "a priority is a number above 0 and at most 1000 (1 is usual, 2 counts twice), not -1",
        ),
        (wishes.RequestKind.LEND, {"node": "n7", "least": 1, "most": 1}, "there is no node 'n7'. There is: n"),
    ],
)
def test_what_cannot_be_done_is_refused_with_what_there_is(database, pool, kind, content, message):
    pool.submit(submission("b0", jobs=("a",), profiles={}))
    pool.step()
    pool.submit(submission(), submission("b2", name="twin"), submission("b3", name="twin"))
    Worker(database)
    pool.clock.now_s += 2.0
    if kind != wishes.RequestKind.LEND:
        Nodes(database).remove("n", incarnation="n-one")
    answer = pool.ask(kind, **content)
    assert (answer.status, answer.answer) == (wishes.RequestStatus.REFUSED, {"message": message})


def test_idle_devices_are_lent_while_a_job_goes_on_beside_them(database, pool):
    worker, requests = Worker(database, num_devices=3), Requests(database)
    gangs = Gangs(worker)
    pool.pass_seconds(1, worker)
    pool.submit(submission(jobs=("a",)))
    gangs.move()
    one = pool.ask(wishes.RequestKind.LEND, node="n", least=1, most=1, fills=True, beats=0)
    assert one.answer == {"devices": ["n:cpu:1"]}, "not all that is idle, as others have work"
    two = pool.ask(wishes.RequestKind.LEND, node="n", least=2, most=2, beats=0)
    assert two.status == wishes.RequestStatus.OPEN
    requests.answer(one.id, status=wishes.RequestStatus.WITHDRAWN)
    pool.step(), pool.step()
    assert requests.read(two.id).answer == {"devices": ["n:cpu:1", "n:cpu:2"]}
    assert pool.statuses() == {"a": JobStatus.RUNNING}
    assert not any(isinstance(event, SegmentEnded) for event in pool.told(SegmentEnded))
    requests.answer(two.id, status=wishes.RequestStatus.WITHDRAWN)
    run(pool, gangs)
    assert pool.held() == {}


def test_all_idle_devices_are_lent_to_be_filled_where_there_is_no_other_work(database, pool):
    worker = Worker(database, num_devices=3)
    pool.pass_seconds(1, worker)
    loan = pool.ask(wishes.RequestKind.LEND, node="n", least=1, most=1, fills=True, beats=0)
    assert loan.answer == {"devices": ["n:cpu:0", "n:cpu:1", "n:cpu:2"]}


def test_a_job_that_may_start_gets_devices_before_trials_do(database, pool):
    worker, requests = Worker(database, num_devices=1), Requests(database)
    gangs = Gangs(worker)
    pool.pass_seconds(1, worker)
    first = pool.ask(wishes.RequestKind.LEND, node="n", least=1, most=1, beats=0)
    assert first.status == wishes.RequestStatus.GRANTED
    pool.submit(submission(jobs=("a",)))
    second = pool.ask(wishes.RequestKind.LEND, node="n", least=1, most=1, beats=0)
    requests.answer(first.id, status=wishes.RequestStatus.WITHDRAWN)
    pool.pass_seconds(2, worker)
    assert pool.statuses() == {"a": JobStatus.RUNNING}
    assert requests.read(second.id).status == wishes.RequestStatus.OPEN
    run(pool, gangs)
    assert requests.read(second.id).status == wishes.RequestStatus.GRANTED


def test_a_gang_makes_room_for_whoever_presses_and_goes_on_afterwards(database, pool):
    worker, requests = Worker(database, num_devices=2), Requests(database)
    gangs = Gangs(worker)
    pool.pass_seconds(1, worker)
    pool.submit(submission())
    gangs.move()
    assert set(pool.statuses().values()) == {JobStatus.RUNNING}
    loan = pool.ask(wishes.RequestKind.LEND, node="n", least=1, most=1, presses=True, beats=0)
    assert loan.status == wishes.RequestStatus.OPEN
    gangs.move()
    pool.step(), pool.step()
    assert requests.read(loan.id).answer == {"devices": ["n:cpu:0"]}
    pool.pass_seconds(2, worker)
    assert sorted(pool.statuses().values()) == [JobStatus.RUNNING, JobStatus.WAITING]
    requests.answer(loan.id, status=wishes.RequestStatus.WITHDRAWN)
    pool.step(), pool.step()
    assert set(pool.statuses().values()) == {JobStatus.RUNNING}
    run(pool, gangs)
    assert pool.held() == {}


def test_an_unhealthy_device_is_lent_once_it_is_well(database, pool):
    worker, requests = Worker(database, num_devices=1), Requests(database)
    pool.pass_seconds(1, worker)
    worker.beat(health={"0": "in use by a stranger"})
    pool.step(seconds=2)
    loan = pool.ask(wishes.RequestKind.LEND, node="n", least=1, most=1, beats=0)
    pool.step(seconds=1)
    assert requests.read(loan.id).status == wishes.RequestStatus.OPEN
    pool.pass_seconds(2, worker)  # the device of the worker is healthy again
    assert requests.read(loan.id).answer == {"devices": ["n:cpu:0"]}


def test_devices_are_not_lent_to_the_dead(database, pool):
    worker, requests = Worker(database), Requests(database)
    pool.pass_seconds(1, worker)
    loan = pool.ask(wishes.RequestKind.LEND, node="n", least=1, most=1, beats=0)
    pool.step()
    for _ in range(60):
        requests.renew(loan.id)
        pool.pass_seconds(2, worker)
    assert requests.read(loan.id).status == wishes.RequestStatus.GRANTED
    pool.pass_seconds(62, worker)
    assert requests.read(loan.id).status == wishes.RequestStatus.WITHDRAWN
    assert pool.held() == {}
    pool.submit(submission(jobs=("a",)))
    assert pool.statuses() == {"a": JobStatus.RUNNING}


def said(caplog):
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "ringmaster.tasks.execution.replanning.replanner"
    ]


def test_the_log_says_once_which_jobs_have_no_devices_and_once_that_they_have(database, pool, caplog):
    small = Worker(database, "n1", num_devices=1)
    gangs = Gangs(small)
    pool.pass_seconds(1, small)
    wide = submission("b2", jobs=("wide",), profiles={"wide": (profile(num_devices=2),)})
    with caplog.at_level("INFO", logger="ringmaster.tasks.execution.replanning.replanner"):
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
    assert said(caplog) == ["the rest of pool could not be planned anew: the solver is broken"]

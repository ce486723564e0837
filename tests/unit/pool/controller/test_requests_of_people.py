"""Requests to a pool's controller: to pause, resume, retry and cancel jobs, and to lend devices."""

import math
import threading
from dataclasses import replace

import pytest

from ringmaster.features.clones.execute import CLONE
from ringmaster.features.warm_start.job import WarmStart
from ringmaster.tasks.batch.grid import SAME_SHAPE
from ringmaster.tasks.control.requests import RequestKind, Requests, RequestStatus
from ringmaster.tasks.execution.execution_events import SegmentEnded
from ringmaster.tasks.pool import controller
from ringmaster.tasks.pool.nodes import NodeRegistry
from ringmaster.tasks.storage.journal import JobStatus
from ringmaster.techniques.job_specs import ScheduleSpec
from tests.unit.pool.bench import Gangs, PoolBench, run, submission
from tests.unit.pool.workers import Worker


def test_jobs_are_paused_resumed_and_cancelled(database, pool):
    gangs = Gangs(Worker(database, num_devices=2))
    pool.pass_seconds(1, *gangs.workers)
    pool.submit(submission(jobs=("a", "b")))
    gangs.move()
    paused = pool.ask(RequestKind.PAUSE, batch="b1", jobs=["a"])
    assert paused.answer == {"message": "paused: a of batch nightly-b1"}
    for _ in range(6):
        gangs.move()
        pool.step()
    assert pool.statuses() == {"a": JobStatus.PAUSED, "b": JobStatus.DONE}
    assert pool.is_standing()
    assert pool.ask(RequestKind.RESUME, batch="b1", jobs=[]).answer == {"message": "resumed: a of batch nightly-b1"}
    assert pool.statuses()["a"] == JobStatus.RUNNING
    pool.ask(RequestKind.CANCEL, batch="b1", jobs=[])
    run(pool, gangs)
    assert pool.statuses() == {"a": JobStatus.CANCELLED, "b": JobStatus.DONE}


def test_a_clone_of_a_pool_outlives_the_controller_and_can_be_cloned_itself(database, pool):
    gangs = Gangs(Worker(database, num_devices=2))
    pool.pass_seconds(1, *gangs.workers)
    pool.submit(submission(jobs=("a", "b"), bases={"b": "a"}))
    assert pool.ask(RequestKind.SET, batch="b1", jobs=["b"], settings={"weight": 3}).status == RequestStatus.DONE
    for source, name, seed in (("b", "c", 7), ("c", "d", 8)):
        made = pool.ask(CLONE, batch="b1", jobs=[source], name=name, settings={"seed": seed})
        assert made.answer["message"].startswith(f"{name}: a clone of {source} from its first step")
    again = PoolBench(database, pool.clock)
    again.step()
    entries = again.executor.job_table.entries
    assert {name: (each.job.seed, each.job.base) for name, each in entries.items()} == {
        "b1/a": (0, None),
        "b1/b": (0, "b1/a"),
        "b1/c": (7, "b1/a"),
        "b1/d": (8, "b1/a"),
    }
    assert {row.id: row.weight for row in again.plans[-1].jobs}["b1/b"] == 3.0
    run(again, gangs)
    assert again.statuses() == dict.fromkeys("abcd", JobStatus.DONE)


def test_a_clone_of_a_job_that_went_on_from_a_checkpoint_begins_there_too(database, pool):
    gangs = Gangs(Worker(database, num_devices=2))
    pool.pass_seconds(1, *gangs.workers)
    batch = submission(jobs=("a", "b"))
    a, b = (replace(each, schedule=ScheduleSpec(num_steps=10)) for each in batch.jobs)
    jobs = replace(a, num_steps=4), b.with_features(WarmStart(checkpoints="a", step=4))
    pool.submit(replace(batch, jobs=jobs))
    pool.ask(CLONE, batch="b1", jobs=["b"], name="c", settings={"seed": 7})
    table = pool.executor.job_table
    assert table.entries["b1/c"].job.feature(WarmStart) == WarmStart(checkpoints="b1/a", step=4)
    assert table.records["b1/c"].step == 4 and table.after["b1/c"] == ("b1/a",)
    refused = pool.ask(RequestKind.SET, batch="b1", jobs=["a", "b"], settings={"steps": 20})
    assert refused.answer["message"] == (
        "b, c continues from the last step of a; b: schedule.num_steps: must be at least the 20 steps of the job, "
        "which "
        "is a part of them, got 10. To fix: give all steps of the schedule, or leave it out"
    )


def test_a_job_whose_steps_are_set_keeps_the_checkpoint_that_it_began_with(database, pool):
    gangs = Gangs(Worker(database, num_devices=2))
    pool.pass_seconds(1, *gangs.workers)
    batch = submission(jobs=("a", "b"))
    a, b = (replace(each, schedule=ScheduleSpec(num_steps=40)) for each in batch.jobs)
    jobs = replace(a, num_steps=4), b.with_features(WarmStart(checkpoints="a", step=4))
    pool.submit(replace(batch, jobs=jobs))
    table = pool.executor.job_table
    table.write("b1/b", step=6)
    for num_steps in (20, 30):
        assert pool.ask(RequestKind.SET, batch="b1", jobs=["b"], settings={"steps": num_steps}).answer["message"]
        job = table.entries["b1/b"].job
        assert job.feature(WarmStart).step == 0 and job.feature(WarmStart).first == WarmStart(
            checkpoints="b1/a", step=4
        )
        assert job.total_steps == num_steps and table.after["b1/b"] == ("b1/a",)
    pool.ask(CLONE, batch="b1", jobs=["b"], name="c", settings={"seed": 7})
    assert table.entries["b1/c"].job.feature(WarmStart) == WarmStart(checkpoints="b1/a", step=4)
    assert table.records["b1/c"].step == 4


def test_the_steps_of_jobs_that_are_let_train_up_to_a_goal_cannot_be_set_and_a_clone_has_its_own(database, pool):
    gangs = Gangs(Worker(database, num_devices=2))
    pool.pass_seconds(1, *gangs.workers)
    pool.submit(submission(jobs=("a",)))
    pool.ask(RequestKind.DIRECT, batch="b1", goals={"a": 5})
    refused = pool.ask(RequestKind.SET, batch="b1", jobs=[], settings={"steps": 20})
    assert refused.status == RequestStatus.REFUSED
    assert refused.answer["message"].startswith(
        "a trains as far as what steers its batch, such as a sweep, lets it. To"
    )
    pool.ask(CLONE, batch="b1", jobs=["a"], name="c", settings={"num_steps": 20})
    assert pool.executor.job_table.totals == {"b1/a": 5, "b1/c": 20}


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
    retried = pool.ask(RequestKind.RETRY, batch="b1", jobs=["b"])
    assert retried.answer == {"message": "retried: b of batch nightly-b1"}
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
    pool.ask(RequestKind.RETRY, batch="b1", jobs=["a"])
    assert pool.statuses()["a"] == JobStatus.RUNNING


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        (
            RequestKind.CANCEL,
            {"batch": "b9"},
            "there is no batch 'b9'. There is: nightly-b1 (b1), twin (b2), twin (b3)",
        ),
        (
            RequestKind.CANCEL,
            {"batch": "twin"},
            "several batches are named twin: b2, b3. To fix: give its id",
        ),
        (RequestKind.CANCEL, {"batch": "b0"}, "batch b0 has ended"),
        (RequestKind.CANCEL, {"batch": "b1", "jobs": ["a", "q"]}, "batch nightly-b1 has no job q. It has: a, b"),
        (
            RequestKind.RESUME,
            {"batch": "b1"},
            "no job of batch nightly-b1 can be resumed: a is waiting, b is waiting",
        ),
        (
            RequestKind.RESUME,
            {"batch": "b1", "jobs": ["a"]},
            "of batch nightly-b1 a is waiting: it cannot be resumed",
        ),
        (
            RequestKind.RETRY,
            {"batch": "b1", "jobs": ["a"]},
            "of batch nightly-b1 a is waiting: it cannot be retried",
        ),
        (
            RequestKind.SET,
            {"batch": "b1", "settings": {"priority": -1, "colour": 1}},
            "colour cannot be set. To fix: choose from steps, weight, deadline, priority; "
            "priority must be a number above 0 and at most 1000 (1 is usual, 2 counts twice), got -1",
        ),
        (
            CLONE,
            {"batch": "b1", "jobs": ["a"], "name": "b", "settings": {}},
            "batch nightly-b1 has a job 'b' already. To fix: choose another --name",
        ),
        (
            CLONE,
            {"batch": "b1", "jobs": ["a"], "name": "c", "settings": {"global_batch_size": 8}},
            "these settings make no job: global_batch_size is unknown or changes the speed or size of a job. To fix: "
            f"choose from {', '.join(SAME_SHAPE)}, or submit another job, which is measured first",
        ),
        (
            CLONE,
            {"batch": "b1", "jobs": ["a"], "name": "c", "is_warm": True},
            "a has no checkpoint yet. To fix: wait for one, or leave out --warm",
        ),
        (RequestKind.LEND, {"node": "n7", "least": 1, "most": 1}, "there is no node 'n7'. There is: n"),
    ],
)
def test_what_cannot_be_done_is_refused_with_what_there_is(database, pool, kind, content, message):
    pool.submit(submission("b0", jobs=("a",), profiles={}))
    pool.step()
    pool.submit(submission(), submission("b2", name="twin"), submission("b3", name="twin"))
    Worker(database)
    pool.clock.now_s += 2.0
    if kind != RequestKind.LEND:
        NodeRegistry(database).remove("n", incarnation="n-one")
    answer = pool.ask(kind, **content)
    assert (answer.status, answer.answer) == (RequestStatus.REFUSED, {"message": message})


def test_idle_devices_are_lent_while_a_job_goes_on_beside_them(database, pool):
    worker, requests = Worker(database, num_devices=3), Requests(database)
    gangs = Gangs(worker)
    pool.pass_seconds(1, worker)
    pool.submit(submission(jobs=("a",)))
    gangs.move()
    one = pool.ask(RequestKind.LEND, node="n", least=1, most=1, fills=True, beats=0)
    assert one.answer == {"devices": ["n:cpu:1"]}, "not all that is idle, as others have work"
    two = pool.ask(RequestKind.LEND, node="n", least=2, most=2, beats=0)
    assert two.status == RequestStatus.OPEN
    requests.answer(one.id, status=RequestStatus.WITHDRAWN)
    pool.step(), pool.step()
    assert requests.read(two.id).answer == {"devices": ["n:cpu:1", "n:cpu:2"]}
    assert pool.statuses() == {"a": JobStatus.RUNNING}
    assert not any(isinstance(event, SegmentEnded) for event in pool.told(SegmentEnded))
    requests.answer(two.id, status=RequestStatus.WITHDRAWN)
    run(pool, gangs)
    assert pool.held() == {}


def test_all_idle_devices_are_lent_to_be_filled_where_there_is_no_other_work(database, pool):
    worker = Worker(database, num_devices=3)
    pool.pass_seconds(1, worker)
    loan = pool.ask(RequestKind.LEND, node="n", least=1, most=1, fills=True, beats=0)
    assert loan.answer == {"devices": ["n:cpu:0", "n:cpu:1", "n:cpu:2"]}


def test_a_job_that_may_start_gets_devices_before_trials_do(database, pool):
    worker, requests = Worker(database, num_devices=1), Requests(database)
    gangs = Gangs(worker)
    pool.pass_seconds(1, worker)
    first = pool.ask(RequestKind.LEND, node="n", least=1, most=1, beats=0)
    assert first.status == RequestStatus.GRANTED
    pool.submit(submission(jobs=("a",)))
    second = pool.ask(RequestKind.LEND, node="n", least=1, most=1, beats=0)
    requests.answer(first.id, status=RequestStatus.WITHDRAWN)
    pool.pass_seconds(2, worker)
    assert pool.statuses() == {"a": JobStatus.RUNNING}
    assert requests.read(second.id).status == RequestStatus.OPEN
    run(pool, gangs)
    assert requests.read(second.id).status == RequestStatus.GRANTED


def test_a_gang_makes_room_for_whoever_presses_and_goes_on_afterwards(database, pool):
    worker, requests = Worker(database, num_devices=2), Requests(database)
    gangs = Gangs(worker)
    pool.pass_seconds(1, worker)
    pool.submit(submission())
    gangs.move()
    assert set(pool.statuses().values()) == {JobStatus.RUNNING}
    loan = pool.ask(RequestKind.LEND, node="n", least=1, most=1, presses=True, beats=0)
    assert loan.status == RequestStatus.OPEN
    gangs.move()
    pool.step(), pool.step()
    assert requests.read(loan.id).answer == {"devices": ["n:cpu:0"]}
    pool.pass_seconds(2, worker)
    assert sorted(pool.statuses().values()) == [JobStatus.RUNNING, JobStatus.WAITING]
    requests.answer(loan.id, status=RequestStatus.WITHDRAWN)
    pool.step(), pool.step()
    assert set(pool.statuses().values()) == {JobStatus.RUNNING}
    run(pool, gangs)
    assert pool.held() == {}


def test_an_unhealthy_device_is_lent_once_it_is_well(database, pool):
    worker, requests = Worker(database, num_devices=1), Requests(database)
    pool.pass_seconds(1, worker)
    worker.beat(health={"0": "in use by a stranger"})
    pool.step(seconds=2)
    loan = pool.ask(RequestKind.LEND, node="n", least=1, most=1, beats=0)
    pool.step(seconds=1)
    assert requests.read(loan.id).status == RequestStatus.OPEN
    pool.pass_seconds(2, worker)  # the device of the worker is healthy again
    assert requests.read(loan.id).answer == {"devices": ["n:cpu:0"]}


def test_devices_are_not_lent_to_the_dead(database, pool):
    worker, requests = Worker(database), Requests(database)
    pool.pass_seconds(1, worker)
    loan = pool.ask(RequestKind.LEND, node="n", least=1, most=1, beats=0)
    pool.step()
    for _ in range(60):
        requests.renew(loan.id)
        pool.pass_seconds(2, worker)
    assert requests.read(loan.id).status == RequestStatus.GRANTED
    pool.pass_seconds(62, worker)
    assert requests.read(loan.id).status == RequestStatus.WITHDRAWN
    assert pool.held() == {}
    pool.submit(submission(jobs=("a",)))
    assert pool.statuses() == {"a": JobStatus.RUNNING}


def test_a_request_has_the_controller_look_at_once(database, pool, monkeypatch):
    monkeypatch.setattr(controller, "IDLE_TICK_S", math.inf)
    over, ticks = threading.Event(), []
    monkeypatch.setattr(pool.executor, "call", lambda act: (ticks.append(act), over.set()))
    Requests(database).ask(RequestKind.CANCEL, {"batch": "none", "jobs": []})
    pool.controller.keep_ticking(over)
    assert len(ticks) == 1

"""Groups on a pool: an executor dies after each of its writes, and no job of a group is lost or trained twice."""

from dataclasses import replace

import pytest

from ringmaster.tasks.control.requests import RequestKind
from ringmaster.tasks.execution.execution_events import SegmentStarted
from ringmaster.tasks.pool.submissions import Submissions
from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.tasks.storage.journal import JobStatus, Journal
from ringmaster.techniques import Profile
from ringmaster.techniques.processes.reporter import STOP, leave_command
from ringmaster.techniques.profiles import GroupMemberProfile
from tests.matrix import matrix
from tests.unit.pool.bench import Clock, Gangs, PoolBench, submission
from tests.unit.pool.controller.test_failover import (
    Killed,
    Mortal,
    assert_devices_serve_one,
    assert_nothing_was_doubled,
)
from tests.unit.pool.workers import Worker

TOGETHER = Profile(
    technique="shared_base",
    num_devices=1,
    num_ranks=1,
    step_s=1.0,
    peak_bytes=1,
    members=tuple(GroupMemberProfile(job=name, num_steps=10, step_s=0.5) for name in "bc"),
)


class GroupGangs(Gangs):
    """Fake gangs that train groups, in which members advance with their lead job."""

    def _move(self, worker, segment, order):
        if not order.members:
            super()._move(worker, segment, order)
            return
        moves = self.said[segment] = self.said.get(segment, 0) + 1
        if STOP in worker.told(segment):
            said = {each.job.name: {"status": "preempted", "step": self._step(each)} for each in order.members}
            worker.end(segment, "preempted", step=self._step(order), fellows=said)
            return
        every = [order, *order.members]
        left = {command.removeprefix("leave ") for command in worker.told(segment) if command.startswith("leave ")}
        for each in every if moves < 3 else ():
            name = each.job.name
            if moves == 1:
                worker.say(segment, "ready", job=name, step=self._step(each))
            elif name not in left:
                half = (self._step(each) + each.last_step) // 2
                self._train(each, half)
                worker.say(segment, "checkpoint", job=name, step=half)
        if moves == 3:
            said = {}
            for each in every:
                is_left = each.job.name in left
                if not is_left:
                    self._train(each, each.last_step)
                how = {"status": "left"} if is_left else {"status": "done", "metrics": {"loss": 1.0}}
                said[each.job.name] = {**how, "step": self._step(each)}
            mine = said.pop(order.job.name)
            mine.pop("status")
            worker.end(segment, first_step=0, fellows=said, **mine)

    def _step(self, order):
        return self.steps.get((order.checkpoint_dir, order.job.name), 0)

    def _train(self, order, until):
        key = (order.checkpoint_dir, order.job.name)
        self.trained.append((key, self._step(order), until))
        self.steps[key] = until


class TurnGangs(GroupGangs):
    """Fake gangs that train two jobs of a group at a time: the second member starts when the first has finished."""

    def _move(self, worker, segment, order):
        if not order.members:
            super()._move(worker, segment, order)
            return
        moves = self.said[segment] = self.said.get(segment, 0) + 1
        first, *others = order.members
        if moves == 1:
            for each in (order, first):
                worker.say(segment, "ready", job=each.job.name, step=self._step(each))
        elif moves == 2:
            worker.say(segment, "ended", job=first.job.name, outcome=self._end(first))
            for each in others:
                worker.say(segment, "ready", job=each.job.name, step=self._step(each))
        elif moves == 3:
            said = {each.job.name: self._end(each) for each in order.members}
            mine = {key: value for key, value in self._end(order).items() if key != "status"}
            worker.end(segment, first_step=0, fellows=said, **mine)

    def _end(self, order):
        if self._step(order) < order.last_step:
            self._train(order, order.last_step)
        return {"status": "done", "metrics": {"loss": 1.0}, "step": order.last_step}


ALL = (GroupGangs, TOGETHER)
OVER_TWO = (GroupGangs, replace(TOGETHER, num_devices=2, num_ranks=2))
TWO_AT_A_TIME = (TurnGangs, replace(TOGETHER, config={"at_once": 2}))


def group_of_three(together=TOGETHER):
    return replace(submission(jobs=("a", "b", "c")), together={"a": (together,)})


@pytest.fixture
def database(tmp_path):
    database = Database(file_url(tmp_path / "pool.db"), synced=False)
    yield database
    database.close()


def play(database, *, lives=(), how=ALL):
    """Runs a group on one node's devices. Each executor but the last dies after the number of writes in `lives`."""
    kind, together = how
    gangs = kind(*(Worker(database, node, num_devices=together.num_devices) for node in ("n1", "n2")))
    Submissions(database).submit(group_of_three(together))
    clock, lives, pool = Clock(), list(lives), None
    for _ in range(200):
        try:
            if pool is None:
                led = Mortal(database, lives[0] if lives else 10_000)
                pool = PoolBench(database, clock, led=led)
            pool.step(seconds=1.0)
            assert_devices_serve_one(database)
        except Killed:
            lives, pool = lives[1:], None
            continue
        for worker in gangs.workers:
            worker.beat()
        gangs.move()
        if not Submissions(database).unended():
            return pool, gangs, 10_000 - led.left
    raise AssertionError(f"it did not end: {pool.statuses()}")


@pytest.mark.parametrize("how", [ALL, OVER_TWO, TWO_AT_A_TIME], ids=["all", "over-two", "two-at-a-time"])
def test_a_group_is_one_segment_of_which_each_job_is_told(database, how):
    pool, gangs, _ = play(database, how=how)
    assert_nothing_was_doubled(database, pool, gangs, "abc")
    (started,) = pool.told(SegmentStarted)
    assert (started.segment.job, started.members) == ("a", ("b", "c"))
    assert len(started.segment.devices) == how[1].num_devices
    assert len({node for node, _ in started.segment.devices}) == 1
    (row,) = pool.plans[0].jobs
    assert (row.id, row.members) == ("b1/a", ("b1/b", "b1/c"))
    (segment,) = Journal(database, batch="b1").segments("c")
    assert (segment.job, segment.outcome.step) == ("c", 10)


@pytest.mark.parametrize(
    "how",
    matrix([(ALL,), (OVER_TWO,), (TWO_AT_A_TIME,)], quick=[(OVER_TWO,)], ids=["all", "over-two", "two-at-a-time"]),
)
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.full)])
def test_a_kill_after_any_write_doubles_and_loses_nothing(tmp_path, every, how):
    counted = Database(file_url(tmp_path / "count.db"), synced=False)
    *_, total = play(counted, how=how)
    counted.close()
    assert total > 8
    for last in range(1, total + 1, every):
        database = Database(file_url(tmp_path / f"{last}.db"), synced=False)
        pool, gangs, _ = play(database, lives=[last], how=how)
        assert_nothing_was_doubled(database, pool, gangs, "abc")
        database.close()


def test_a_job_of_a_group_is_cancelled_and_the_others_go_on(database):
    gangs = GroupGangs(Worker(database, num_devices=1))
    pool = PoolBench(database, Clock())
    pool.submit(group_of_three())
    gangs.move()
    pool.step(seconds=1.0)
    pool.ask(RequestKind.CANCEL, batch="b1", jobs=["b"])
    (worker,) = gangs.workers
    assert leave_command("b") in worker.told(1)
    for _ in range(6):
        worker.beat()
        gangs.move()
        pool.step(seconds=1.0)
    assert pool.statuses() == {"a": JobStatus.DONE, "b": JobStatus.CANCELLED, "c": JobStatus.DONE}
    assert len(Journal(database, batch="b1").segments()) == 1


def half_trained(database):
    """A half-trained group: its gangs, and the executor that has read their events."""
    gangs = GroupGangs(Worker(database, num_devices=1))
    pool = PoolBench(database, Clock())
    pool.submit(group_of_three())
    gangs.move(), gangs.move()
    pool.step(seconds=1.0)
    return gangs, pool


def go_on(pool, gangs):
    for _ in range(12):
        for worker in gangs.workers:
            worker.beat()
        gangs.move()
        pool.step(seconds=1.0)


@pytest.mark.parametrize(
    ("kind", "status"), [(RequestKind.PAUSE, JobStatus.PAUSED), (RequestKind.CANCEL, JobStatus.CANCELLED)]
)
@pytest.mark.parametrize(
    ("jobs", "of_others"), [(["a"], JobStatus.DONE), (["a", "b", "c"], None)], ids=["leader", "all"]
)
def test_a_gang_whose_leader_was_dismissed_is_taken_over(database, kind, status, jobs, of_others):
    gangs, pool = half_trained(database)
    pool.ask(kind, batch="b1", jobs=jobs)
    after = PoolBench(database, pool.clock)  # before the gang has stopped
    go_on(after, gangs)
    assert after.statuses() == {"a": status, "b": of_others or status, "c": of_others or status}
    assert after.held() == {}
    assert sorted(steps for (_, job), *steps in gangs.trained if job == "a") == [[0, 5]]


def test_a_leader_that_was_paused_goes_on_after_the_next_executor_has_come(database):
    gangs, pool = half_trained(database)
    pool.ask(RequestKind.PAUSE, batch="b1", jobs=["a"])
    after = PoolBench(database, pool.clock)
    after.ask(RequestKind.RESUME, batch="b1", jobs=["a"])  # before the gang has stopped
    go_on(after, gangs)
    assert_nothing_was_doubled(database, after, gangs, "abc")


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.full)])
def test_a_group_that_ran_out_of_memory_parts_whatever_write_its_executor_dies_in(tmp_path, every):
    num_killed, moments = 0, range(1, 20, every)
    for last in moments:
        database = Database(file_url(tmp_path / f"{last}.db"), synced=False)
        gangs, pool = half_trained(database)
        gangs.workers[0].end(1, "out_of_memory", "no room")
        led = Mortal(database, 10_000)
        pool = PoolBench(database, pool.clock, led=led)
        led.left = last
        try:
            pool.step(seconds=1.0)
        except Killed:
            num_killed += 1
            pool = PoolBench(database, pool.clock)
        else:
            led.left = 10_000
        go_on(pool, gangs)
        assert_nothing_was_doubled(database, pool, gangs, "abc")
        database.close()
    assert 1 < num_killed < len(moments)

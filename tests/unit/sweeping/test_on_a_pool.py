"""A sweep on a pool: steered over the database, while executors and flows die and others take over."""

from dataclasses import replace

import pytest

from ringmaster.features.rung_evaluation.row_parts import ROWS, part_at
from ringmaster.features.rung_evaluation.sweep import PartialEvaluationPolicy
from ringmaster.tasks.control.requests import RequestKind, Requests, RequestStatus
from ringmaster.tasks.pool.event_log import BatchEvents, EventReader, LogPosition
from ringmaster.tasks.pool.submissions import Submissions
from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.tasks.storage.journal import ENDED, JobRecord, JobStatus, Journal, changed
from ringmaster.tasks.sweeping.scheduler import SweepScheduler
from ringmaster.techniques.processes.gang_events import EvaluationReported, event_to_json
from tests.unit.execution.fakes import profile
from tests.unit.pool.bench import Clock, Gangs, PoolBench, submission
from tests.unit.pool.workers import Worker
from tests.unit.sweeping.sweeps import evaluated_part, loss, spec


class Evaluating(Gangs):
    """Fake gangs that evaluate where a trainer does, and train to their ordered step in one move."""

    def _move(self, worker, segment, order):
        job, last = order.job, order.last_step
        first = self.steps.get(job.name, 0)
        due = [step for step in range(first + 1, last + 1) if job.is_evaluated(step)]
        for step in due or ([first] if first == last and 0 < first < job.num_steps else []):
            part = part_at(job.evaluation, step)
            whole = EvaluationReported(step=step, metrics={"loss": loss(job, step)})
            report = event_to_json(whole if part is None else evaluated_part(job, part))
            worker.say(segment, report.pop("event"), **report)
        self.trained.append((job.name, first, last))
        self.steps[job.name] = last
        metrics = {"metrics": {"loss": loss(job, last)}} if last == job.num_steps else {}
        worker.end(segment, step=last, first_step=first, **metrics)


class Flow:
    """The part of a flow run that steers a sweep. A second one on the same database is the same run, restarted."""

    def __init__(self, database, asked, *, jobs, clock):
        self.jobs, self.clock = jobs, clock
        self.sweep_scheduler = SweepScheduler(asked, clock=clock)
        self.reader = EventReader(BatchEvents(database, "b1"), LogPosition())
        self.sweep_scheduler.begin(Journal(database, batch="b1"), jobs, num_slots=2)
        changes = self.sweep_scheduler.record_changes()
        self.records = {name: changed(JobRecord(name=name), its) for name, its in changes.items()}
        self.database = database

    def attach(self):
        def ask(steering):
            if steering:
                Requests(self.database).ask(RequestKind.DIRECT, {"batch": "b1", **steering.to_json()})

        ask(self.sweep_scheduler.pending_request())
        self.sweep_scheduler.attach(ask, later=lambda act: act(), elapsed_s=0.0)

    def handle_event(self):
        for entry in self.reader.read():
            self.sweep_scheduler.listen(entry.event)


def begin_sweep(database, asked):
    """Returns the flow of a sweep that is submitted to a pool, the pool, and its gangs."""
    jobs, clock = asked.batch().jobs, Clock()
    flow = Flow(database, asked, jobs=jobs, clock=clock)
    batch = replace(submission(jobs=()), jobs=jobs, profiles={job.name: (profile(),) for job in jobs})
    pool, gangs = PoolBench(database, clock), Evaluating(Worker(database, "n1", num_devices=2))
    pool.pass_seconds(1, *gangs.workers)
    pool.submit(batch, records=flow.records)
    flow.attach()
    return flow, pool, gangs


def steered(database, asked, *, num_moves=120):
    """The gangs of a sweep on a pool that has come to its end."""
    flow, pool, gangs = begin_sweep(database, asked)
    for _ in range(num_moves):
        pool.step(seconds=0.1)
        flow.handle_event()
        if not Submissions(database).unended():
            break
        gangs.move()
    return gangs


@pytest.fixture
def database(tmp_path):
    database = Database(file_url(tmp_path / "pool.db"), synced=False)
    yield database
    database.close()


@pytest.mark.parametrize(
    ("dies", "sampler"),
    [
        ("nobody", "random"),
        ("the executor", "tpe"),
        ("the flow", "tpe"),
        pytest.param("nobody", "tpe", marks=pytest.mark.full),
        pytest.param("the executor", "random", marks=pytest.mark.full),
        pytest.param("the flow", "random", marks=pytest.mark.full),
    ],
)
def test_a_sweep_on_a_pool(database, sampler, dies):
    asked = spec(sampler=sampler, num_trials=8)
    flow, pool, gangs = begin_sweep(database, asked)
    for move in range(120):
        pool.step(seconds=0.1)
        flow.handle_event()
        if not Submissions(database).unended():
            break
        gangs.move()
        if move % 7 == 3 and dies == "the executor":
            pool = PoolBench(database, flow.clock)
        if move % 7 == 3 and dies == "the flow":
            flow = Flow(database, asked, jobs=flow.jobs, clock=flow.clock)
            flow.attach()
    records = Journal(database, batch="b1").jobs()
    assert {record.status for record in records.values()} == {JobStatus.DONE, JobStatus.STOPPED}
    assert not flow.sweep_scheduler.is_open() and pool.held() == {}
    assert len({str(values) for values in flow.sweep_scheduler.values.values()}) == 8
    for name, record in records.items():
        trained = [part for part in gangs.trained if part[0] == name]
        assert sum(last - first for _, first, last in trained) == record.step, "no step is trained twice"
        if record.status == JobStatus.STOPPED:
            assert set(record.metrics) == {"loss"} and record.step < 64


def test_trials_on_a_pool_are_evaluated_on_further_rows(database):
    stopping = PartialEvaluationPolicy(policy="halving", min_steps=4, evaluation_error=0.01)
    gangs = steered(database, spec(num_trials=8, stopping=stopping))
    records = Journal(database, batch="b1").jobs()
    assert {record.status for record in records.values()} == {JobStatus.DONE, JobStatus.STOPPED}
    assert any(first == last for _, first, last in gangs.trained), "some were evaluated again at their rung"
    commands = [command for _, _, command in gangs.workers[0].message_store.commands(after=0)]
    assert not [command for command in commands if command.startswith(ROWS)], "no gang evaluates while it is asked"


def test_what_names_no_job_of_the_batch_is_refused(database):
    pool = PoolBench(database, Clock())
    pool.submit(submission())
    answer = pool.ask(RequestKind.DIRECT, batch="b1", goals={"x": 3})
    assert answer.status == RequestStatus.REFUSED and answer.answer["message"] == "batch nightly-b1 has no job x"


def test_a_goal_is_never_lowered_and_what_has_ended_stays_so(database):
    pool, gangs = PoolBench(database, Clock()), Evaluating(Worker(database, "n1", num_devices=2))
    pool.pass_seconds(1, *gangs.workers)
    records = {"a": JobRecord(name="a", goal=5), "b": JobRecord(name="b", goal=0)}
    pool.submit(submission(jobs=("a", "b")), records=records)
    pool.ask(RequestKind.DIRECT, batch="b1", goals={"a": 3}, stops={"b": "not worth it"})
    assert pool.statuses()["b"] == JobStatus.STOPPED and pool.statuses()["b"] in ENDED
    for _ in range(3):
        gangs.move()
        pool.step(seconds=0.1)
    assert Journal(database, batch="b1").jobs()["a"].step == 5 and pool.is_standing()
    pool.ask(RequestKind.DIRECT, batch="b1", goals={"a": 10, "b": 10})
    for _ in range(3):
        gangs.move()
        pool.step(seconds=0.1)
    assert pool.statuses() == {"a": JobStatus.DONE, "b": JobStatus.STOPPED} and not pool.is_standing()


def test_a_request_that_follows_from_an_evaluation_is_carried_out_after_it(database):
    pool, worker = PoolBench(database, Clock()), Worker(database, "n1", num_devices=1)
    pool.pass_seconds(1, worker)
    pool.submit(submission(jobs=("a",)), records={"a": JobRecord(name="a", goal=5)})
    (segment,) = worker.take_all()
    worker.say(segment, "ready", step=0)
    worker.say(segment, "metrics", step=3, metrics={"loss": 0.5})
    content = {"batch": "b1", "stops": {"a": "not worth it"}}
    number = Requests(database).ask(RequestKind.DIRECT, content)
    pool.step(looks=False)  # the flow has read the evaluation before the executor's engine has
    assert Requests(database).read(number).status == RequestStatus.DONE
    record = Journal(database, batch="b1").jobs()["a"]
    assert (record.status, record.metrics) == (JobStatus.STOPPED, {"loss": 0.5})

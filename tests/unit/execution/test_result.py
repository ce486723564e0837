"""The result of a batch, read from its journal."""

import time

import pytest

from ringmaster.flows.batch.artifacts import cost_markdown
from ringmaster.flows.batch.result import collect
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.planning import Option, PlanningJob, PlanningNode, Problem, solve
from ringmaster.tasks.planning.objectives import objective_by_name
from ringmaster.tasks.retraining.report import cost_of_batch
from ringmaster.tasks.storage.fact_keys import SINCE, STARTED
from ringmaster.tasks.storage.journal import JobStatus, Journal, SegmentSpec
from ringmaster.techniques import DataSpec, Job, ModelSpec
from ringmaster.techniques.processes.gang_events import JobResult


@pytest.fixture
def journal(tmp_path):
    journal = Journal.of_file(tmp_path / "journal.db")
    journal.clock = lambda: time.time()  # as tests set it
    yield journal
    journal.close()


def set_time(monkeypatch, now_s):
    monkeypatch.setattr("time.time", lambda: now_s)
    monkeypatch.setattr("time.clock_gettime", lambda _: now_s)


def job(name: str) -> Job:
    return Job(name=name, model=ModelSpec(factory="math:sqrt"), data=DataSpec(source="digits"), num_steps=1)


def read(batch, journal):
    """The result of all that is in the journal."""
    journal.put_all({STARTED: journal.get(STARTED, 0.0), SINCE: 0.0})
    return collect(batch, journal, journal.jobs(), lambda job: [])


def result_of(journal, monkeypatch, *, objective: str):
    """Two jobs train from second 100 to 110 on two devices, and from 110 to 140 on one. The batch started at 90."""
    batch = Batch.of(
        name="b",
        jobs=[job("a"), job("b")],
        objective=objective,
        weights={"b": 2.0},
        deadlines_s={"a": 60.0},
        price_per_device_hour=36.0,
    )
    journal.put("started_s", 90.0)
    for name, began_s, ended_s, devices in (("a", 100.0, 110.0, ("0", "1")), ("b", 110.0, 140.0, ("0",))):
        set_time(monkeypatch, began_s)
        spec = SegmentSpec(technique="ddp", num_devices=len(devices), devices=devices)
        number = journal.start_segments([(name, spec)])[0]
        set_time(monkeypatch, ended_s)
        journal.end_segment(number, JobResult(status="done"))
        journal.write_job(name, status=JobStatus.DONE, step=1)
    return read(batch, journal)


@pytest.mark.parametrize(("objective", "value"), [("makespan", 40.0), ("weighted", 10 + 2 * 40), ("cost", 0.5)])
def test_the_value_is_that_of_the_objective(journal, monkeypatch, objective, value):
    result = result_of(journal, monkeypatch, objective=objective)
    assert (result.objective, result.makespan_s) == (objective, 40.0)
    assert result.value == pytest.approx(value)


def test_fairness_is_relative_to_the_runtimes_of_the_first_plan(journal, monkeypatch):
    jobs = tuple(PlanningJob(name, (Option("ddp", 1, runtime_s),)) for name, runtime_s in (("a", 20.0), ("b", 30.0)))
    problem = Problem("b", (PlanningNode("n", 2),), jobs)
    journal.write_plan({"plan": solve(problem).to_json(), "problem": problem.to_json()}, why="first")
    assert result_of(journal, monkeypatch, objective="fairness").value == pytest.approx(40.0 / 30.0)


def test_fairness_is_of_the_groups_of_the_first_plan(journal, monkeypatch):
    """A pool plans a batch without users as one group: its fair share of both devices takes 50 s, and it took 40 s."""
    jobs = tuple(
        PlanningJob(name, (Option("ddp", 1, runtime_s),), user="b", after=after)
        for name, runtime_s, after in (("a", 20.0, ()), ("b", 30.0, ("a",)))
    )
    problem = Problem("b", (PlanningNode("n", 2),), jobs)
    journal.write_plan({"plan": solve(problem).to_json(), "problem": problem.to_json()}, why="first")
    monkeypatch.setattr(Job, "parents", property(lambda job: ("a",) if job.name == "b" else ()))
    planned = objective_by_name("fairness").coefficients(problem).value({"a": 10.0, "b": 40.0})
    assert result_of(journal, monkeypatch, objective="fairness").value == pytest.approx(planned)


def test_a_deadline_stands_beside_the_end_from_the_start_of_the_batch(journal, monkeypatch):
    a, b = result_of(journal, monkeypatch, objective="makespan").jobs
    assert (a["deadline_s"], a["ended_s"]) == (60.0, 20.0)
    assert "deadline_s" not in b


def test_jobs_of_one_gang_share_what_its_devices_cost(journal, monkeypatch):
    batch = Batch.of(name="b", jobs=[job("a"), job("b")], objective="cost")
    for began_s, ended_s, members in ((0.0, 3600.0, {"b": 0}), (3600.0, 5400.0, {})):
        set_time(monkeypatch, began_s)
        spec = SegmentSpec(technique="shared_base", num_devices=2, devices=("0", "1"), members=members)
        number = journal.start_segments([("a", spec)])[0]
        set_time(monkeypatch, ended_s)
        journal.end_segment(number, JobResult(status="done"))
    journal.write_job("a", status=JobStatus.DONE)
    journal.write_job("b", status=JobStatus.DONE, lead_job="a")
    result = read(batch, journal)
    hours = {each["name"]: [s["device_s"] / 3600 for s in each["segments"]] for each in result.jobs}
    assert hours == {"a": [1.0, 1.0], "b": [1.0]}
    assert result.value == pytest.approx(3.0)
    assert cost_of_batch(result.to_json()) == pytest.approx(3.0)
    assert "**3 device-hours**" in cost_markdown(batch, result)


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        ((JobStatus.DONE, JobStatus.DONE), "done"),
        ((JobStatus.DONE, JobStatus.FAILED), "failed"),
        ((JobStatus.CANCELLED, JobStatus.FAILED), "failed"),
        ((JobStatus.DONE, JobStatus.CANCELLED), "cancelled"),
        ((JobStatus.CANCELLED, JobStatus.WAITING), "interrupted"),
        ((JobStatus.DONE, JobStatus.PAUSED), "interrupted"),
    ],
)
def test_the_worst_end_of_a_job_is_the_batchs(journal, ends, status):
    batch = Batch.of(name="b", jobs=[job("a"), job("b")])
    for each, end in zip(batch.jobs, ends, strict=True):
        journal.write_job(each.name, status=end)
    assert read(batch, journal).status == status

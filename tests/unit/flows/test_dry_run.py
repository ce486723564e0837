"""Dry run of a batch: the plan and its cost as text, as JSON and as files."""

import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ringmaster.codec import to_json
from ringmaster.features.target.job import Variables
from ringmaster.features.tariffs.series import Series
from ringmaster.features.tariffs.terms import Tariff, Tariffs
from ringmaster.flows.batch import dry_run as rooms
from ringmaster.flows.batch.dry_run import DryRun, WorkLeft
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.cluster import Cluster, Device, Node
from ringmaster.tasks.execution.forecast import ForecastConditions, errors_in
from ringmaster.tasks.planning.term_features import DeviceUse
from ringmaster.tasks.profiling.machine_load import MachineLoad
from ringmaster.tasks.profiling.stage import ProfilingResult
from ringmaster.tasks.storage.fact_keys import STARTED
from ringmaster.tasks.storage.journal import JobStatus, Journal
from ringmaster.techniques import DataSpec, Job, ModelSpec, Profile
from ringmaster.techniques.profiles import PREDICTED, GroupMemberProfile

DEVICES = tuple(Device(kind="cpu", index=n, name="a", memory_bytes=2**30, cores=(n,)) for n in range(2))
CLUSTER = Cluster(nodes=(Node(name="here", devices=DEVICES),))


def job(name, **more):
    return Job(name=name, model=ModelSpec(factory="a:b"), data=DataSpec(source="digits"), num_steps=100, **more)


def profile(step_s, source="measured"):
    return Profile(technique="single", num_devices=1, num_ranks=1, step_s=step_s, peak_bytes=1, source=source)


def planned(
    tmp_path, monkeypatch, *, jobs, profiles, groups=None, faults=None, num_other_jobs=0, unfit=(), left=None, **batch
):
    """The dry run of a batch. unfit: the jobs that cannot take a step; the others have a preflight."""
    monkeypatch.setattr(rooms.settings, "home", lambda: tmp_path)
    asked = Batch(name="nightly", jobs=tuple(jobs), folder=Path(), text="", **batch)
    profiled = ProfilingResult(
        jobs=tuple(jobs),
        preflights={each.name: None for each in jobs if each.name not in unfit},
        profiles=profiles,
        groups=groups or {},
        faults=faults or {},
        num_trials=3,
    )
    terms = asked.terms if left is None else left.terms
    return rooms._planned(asked, profiled, CLUSTER, seed=0, num_others=num_other_jobs, left=left, terms=terms)


def test_what_it_comes_to(tmp_path, monkeypatch):
    found = planned(
        tmp_path,
        monkeypatch,
        jobs=[job("a"), job("b")],
        profiles={"a": (profile(36.0),), "b": (profile(18.0, PREDICTED),)},
        num_other_jobs=4,
        price_per_device_hour=2.0,
    )
    assert found.plan.makespan_s == pytest.approx(3600, rel=0.01)
    assert found.device_hours == pytest.approx(1.5, rel=0.01)
    said = "\n".join(found.sentences())
    assert "1.5 device-hours, at 2 an hour: 3" in said
    assert "3 trials were made for it; nothing was trained" in said
    assert "Predicted, not measured, and so a rough figure: b." in said
    assert "4 jobs of other batches" in said
    assert not found.are_measured
    data = found.to_json()
    assert (data["status"], data["predicted"], data["cost"]) == ("planned", ["b"], pytest.approx(3.0, rel=0.01))
    assert data["ends_s"] == found.made_s + found.plan.makespan_s
    assert "![Gantt chart](data:image/svg+xml;base64," in found.markdown()


def test_jobs_that_try_learning_rates_take_a_twentieth_of_the_steps(tmp_path, monkeypatch):
    tried = job("a", features=(Variables(lr=(1e-3, 2e-3)),))
    jobs = [*tried.searches(), tried]
    found = planned(tmp_path, monkeypatch, jobs=jobs, profiles={each.name: (profile(36.0),) for each in jobs})
    assert found.device_hours == pytest.approx(1.4, rel=0.01)


def test_what_more_devices_would_gain_is_on_the_page_of_a_long_batch(tmp_path, monkeypatch):
    jobs = [job("a"), job("b"), job("c")]
    found = planned(tmp_path, monkeypatch, jobs=jobs, profiles={each.name: (profile(36.0),) for each in jobs})
    page = found.markdown()
    assert "## What more devices would gain" in page
    assert "- With one more device (a, 1 core) on here the last job would end " in page
    assert page.index("## Segments") < page.index("| job | technique")
    short = planned(tmp_path, monkeypatch, jobs=jobs, profiles={each.name: (profile(0.01),) for each in jobs})
    assert "What more devices" not in short.markdown()
    late = planned(
        tmp_path, monkeypatch, jobs=jobs, profiles={each.name: (profile(36.0),) for each in jobs},
        deadlines_s={"a": 5.0},
    )  # fmt: skip
    assert "What more devices" in late.markdown()


def test_this_machine_is_planned_for_as_busy_as_it_is(tmp_path, monkeypatch):
    """The earlier run of the batch took a tenth longer than it was planned to."""
    ran = {"makespan_s": 110.0, "planned_makespan_s": 100.0, "prediction_spread": 0.1}
    node_context = SimpleNamespace(
        batch=Batch(name="nightly", jobs=(), folder=Path(), text=""),
        cluster=CLUSTER,
        load=lambda: MachineLoad(ratio=2.0),
        conditions=lambda load: ForecastConditions(load=load, earlier=errors_in([ran])),
    )
    jobs = [job("a"), job("b")]
    profiled = ProfilingResult(
        jobs=tuple(jobs),
        preflights={},
        profiles={each.name: (profile(1.0),) for each in jobs},
        groups={},
        faults={},
        num_trials=0,
    )
    monkeypatch.setattr(rooms.settings, "home", lambda: tmp_path)
    monkeypatch.setattr(rooms, "_profile_here", lambda node_context, *, policy: profiled)
    found = rooms._here(node_context, policy="needed", seed=0)
    assert found.plan.makespan_s == pytest.approx(200.0, rel=0.01)
    assert found.prediction.low_s < found.plan.makespan_s < found.prediction.makespan_s < found.prediction.high_s
    assert "- Likely " in found.markdown()
    assert found.to_json()["prediction"]["num_earlier"] == 1


def test_all_of_it_lies_as_files(tmp_path, monkeypatch):
    found = planned(tmp_path, monkeypatch, jobs=[job("a")], profiles={"a": (profile(1.0),)})
    rooms._write(found)
    assert found.folder.parent == tmp_path / "plans" / "nightly"
    names = {file.name for file in found.folder.iterdir()}
    assert names == {"dry-run.json", "dry-run.md", "plan.json", "problem.json", "gantt.svg"}


def test_a_deadline_that_no_plan_meets_is_told_and_planned_all_the_same(tmp_path, monkeypatch):
    found = planned(
        tmp_path,
        monkeypatch,
        jobs=[job("a"), job("b")],
        profiles={"a": (profile(1.0),), "b": (profile(1.0),)},
        deadlines_s={"a": 5.0, "b": 5000.0},
    )
    assert found.late == ("a",)
    assert not found.is_good
    assert found.summary() == "a would be late"
    assert found.plan is not None
    assert "By these runtimes no plan meets these deadlines: a." in "\n".join(found.sentences())


def test_jobs_that_cannot_be_trained_are_told_with_those_that_adapt_them(tmp_path, monkeypatch):
    found = planned(
        tmp_path,
        monkeypatch,
        jobs=[job("a"), job("b", base="a"), job("c")],
        profiles={"c": (profile(1.0),), "b": (profile(1.0),)},
        faults={"a": "too large"},
    )
    assert found.faults == {"a": "too large", "b": "its base a has failed"}
    assert [each.id for each in found.problem.jobs] == ["c"]
    assert found.to_json()["status"] == "failed"


@pytest.mark.parametrize(
    ("asked", "exit_code"),
    [
        ({}, 0),
        ({"faults": {"a": "its data has no rows"}, "unfit": ("a",)}, 2),
        ({"faults": {"a": "needs 90 GiB of 80 a device"}}, 1),
        ({"deadlines_s": {"b": 5.0}}, 1),
        ({"faults": {"a": "its data has no rows"}, "unfit": ("a",), "deadlines_s": {"b": 5.0}}, 2),
    ],
    ids=str,
)
def test_a_fault_of_a_job_is_one_of_the_input_and_a_lack_of_devices_or_time_is_none(
    tmp_path, monkeypatch, asked, exit_code
):
    profiles = {name: (profile(1.0),) for name in ("a", "b") if name not in asked.get("faults", {})}
    found = planned(tmp_path, monkeypatch, jobs=[job("a"), job("b")], profiles=profiles, **asked)
    assert found.exit_code == exit_code


def test_which_jobs_would_be_trained_together_is_told_with_what_that_saves(tmp_path, monkeypatch):
    names = ["a", "b", "c", "d"]
    members = tuple(GroupMemberProfile(job=name, num_steps=100, step_s=0.1) for name in names[1:])
    together = replace(profile(1.0), technique="shared_base", members=members)
    found = planned(
        tmp_path,
        monkeypatch,
        jobs=[job(name) for name in names],
        profiles={name: (profile(1.0),) for name in names},
        groups={"a": (together,)},
    )
    assert found.plan.makespan_s == pytest.approx(130.0)
    assert "Fused 4 jobs into 1 group" in "\n".join(found.sentences())
    assert found.to_json()["fused"].startswith("fused 4 jobs into 1 group")
    assert found.problem.job("a").options[-1].jobs == ("b", "c", "d")


def test_where_nothing_can_be_trained_there_is_no_plan(tmp_path, monkeypatch):
    found = planned(tmp_path, monkeypatch, jobs=[job("a")], profiles={}, faults={"a": "too large"})
    assert found.plan is None
    assert found.to_json()["plan"] is None
    assert "nightly cannot be planned" in found.markdown()
    assert "a cannot be trained: too large" in found.markdown()


def test_a_dry_run_is_a_value(tmp_path):
    found = DryRun(batch="b", made_s=0.0, num_trials=1, price_per_device_hour=1.0, folder=tmp_path, faults={})
    assert found.device_hours == 0.0
    assert "1 trial was made for it" in "\n".join(found.sentences())
    assert replace(found, num_trials=0).sentences()[0] == "Nothing was tried for it; nothing was trained."


def test_of_a_run_that_is_resumed_only_what_is_left_is_planned(tmp_path, monkeypatch):
    jobs = [job("done"), job("half"), job("new"), job("trained")]
    asked = Batch(name="nightly", jobs=tuple(jobs), folder=tmp_path, text="", deadlines_s={"half": 5000.0})
    with closing(Journal.of_file(tmp_path / "journal.db")) as journal:
        journal.put_all({"batch": asked.to_json(), STARTED: time.time() - 4000.0})
        for name, status, step in (("done", JobStatus.DONE, 100), ("half", JobStatus.FAILED, 60)):
            journal.write_job(name, status=status, step=step)
        journal.write_job("trained", status=JobStatus.RUNNING, step=100)
        left = WorkLeft.of(journal, run="run-1")
    profiles = {each.name: (profile(36.0),) for each in jobs}
    found = planned(tmp_path, monkeypatch, jobs=jobs, profiles=profiles, faults={"done": "?"}, left=left)
    seconds = {s.job: round(s.end_s - s.start_s) for s in found.plan.segments}
    assert seconds == {"half": 40 * 36, "new": 100 * 36}
    assert found.plan.makespan_s == pytest.approx(3600, rel=0.01)
    steps = "half at step 60 of 100, trained at step 100 of 100"
    assert found.sentences()[0] == f"This is what run run-1 has left: 1 of its 4 jobs have ended, {steps}."
    assert found.late == ("half",), "its deadline counts from the start of the run"
    assert found.to_json()["resumed"] == {"run": "run-1", "steps": {"half": 60, "new": 0, "trained": 100}}


def test_of_a_run_that_is_resumed_what_is_left_of_its_bounds_counts(tmp_path, monkeypatch):
    tariffs = Tariffs(every=Tariff(price=Series.constant(1.0)), max_money=5.0)
    asked = Batch(name="nightly", jobs=(job("a"),), folder=tmp_path, text="", objective="cost")
    with closing(Journal.of_file(tmp_path / "journal.db")) as journal:
        journal.put("batch", asked.to_json())
        left = WorkLeft.of(journal, run="run-1", batch=replace(asked, planning={Tariffs.key: to_json(tariffs)}))
    assert left.past == []
    now_s = time.time()
    for hours, budget in ((2, 3.0), (9, 0.0)):
        use = DeviceUse(node="here", num_devices=1, started_s=now_s - hours * 3600.0, ended_s=now_s)
        profiles = {"a": (profile(36.0),)}
        found = planned(tmp_path, monkeypatch, jobs=asked.jobs, profiles=profiles, left=replace(left, past=(use,)))
        assert found.problem.budgets == {"cost": pytest.approx(budget)}
        assert found.plan is not None, "the run would go on without the bound"

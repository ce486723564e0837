"""Artifacts of a batch's flow run: its plan, its decisions as they are made, and its cost."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote
from uuid import uuid4

from ringmaster.features.clones.forms import CloneAction
from ringmaster.flows.batch.artifacts import (
    MAX_CONTROLLED,
    MAX_DECISIONS,
    DecisionArtifact,
    PlanArtifact,
    control_markdown,
    cost_markdown,
    plan_markdown,
    show_plan,
)
from ringmaster.flows.batch.result import BatchResult
from ringmaster.flows.job_forms import SetAction, StateAction
from ringmaster.flows.pool_requests import control_jobs
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.execution.execution_events import DeviceWait, JobEnded, PlanUpdate, Prediction
from ringmaster.tasks.planning import Option, PlanningJob, PlanningNode, Problem, solve
from ringmaster.tasks.pool.active_batches import as_logged
from ringmaster.tasks.storage.journal import JobRecord


class Store:
    """Stores artifacts, with a simulated clock. Background work runs at once."""

    def __init__(self):
        self.now_s, self.made, self.tables = 0.0, 0, {}

    def write(self, artifact, rows):
        if artifact is None:
            self.made += 1
            artifact = uuid4()
        self.tables[artifact] = rows
        return artifact

    def decisions(self):
        return DecisionArtifact(
            clock=lambda: self.now_s,
            write=self.write,
            in_background=lambda act: SimpleNamespace(ask=act, close=lambda: None),
        )

    @property
    def rows(self):
        (rows,) = self.tables.values()
        return rows


def failed(job):
    return JobEnded(record=JobRecord(name=job, status="failed", message="its loss is [NaN]"))


def test_decisions_are_one_table_that_grows():
    store = Store()
    decisions = store.decisions()
    decisions.listen(DeviceWait(holders=("another batch",)))
    assert store.tables == {}, "now and then is enough"
    store.now_s = 11.0
    decisions.listen(DeviceWait(holders=("a third",)))
    store.now_s = 12.5
    decisions.listen(failed("a"))
    assert store.made == 1
    assert [row["after"] for row in store.rows] == ["0.0 s", "11.0 s", "12.5 s"]
    assert store.rows[2]["what"] == "a has failed: its loss is [NaN]"


def test_a_long_batch_keeps_the_newest():
    store = Store()
    decisions = store.decisions()
    for number in range(MAX_DECISIONS + 5):
        decisions.listen(DeviceWait(holders=(f"batch {number}",)))
    decisions.close()
    assert len(store.rows) == MAX_DECISIONS
    assert store.rows[0]["what"].endswith("batch 5")


def test_what_it_cost():
    segments = [{"device_s": 3600.0}, {"device_s": 3600.0}]
    result = BatchResult(
        batch="nightly",
        status="done",
        plan={"makespan_s": 3000.0},
        makespan_s=3100.0,
        objective="makespan",
        value=3100.0,
        current_practice_s=5000.0,
        idle_s=0.0,
        num_trials=7,
        profiling_s=12.0,
        jobs=({"name": "a", "status": "done", "segments": segments}, {"name": "b", "status": "done", "segments": []}),
    )
    batch = Batch(name="nightly", jobs=(), folder=Path(), text="", price_per_device_hour=2.5)
    text = cost_markdown(batch, result)
    assert "**2 device-hours**, at 2.5 an hour: **5**." in text
    assert "| a | 2 | 5 |" in text
    assert "| b | 0 | 0 |" in text
    assert "It took 3100.0 s, 3 % slower than planned (3000.0 s)." in text
    assert "By the same predicted runtimes, one job after another on all devices takes 5000.0 s, 1.67 times" in text
    failed = cost_markdown(batch, replace(result, jobs=({**result.jobs[0], "status": "failed"}, result.jobs[1])))
    assert "It took 3100.0 s, not all that was planned was done (3000.0 s)." in failed


def test_the_plan_says_when_the_batch_will_end_and_how_sure_that_is():
    problem = Problem("two", (PlanningNode("n", 1),), (PlanningJob("a", (Option("single", 1, 20.0),)),))
    plan = solve(problem)
    found = Prediction(makespan_s=21.0, low_s=18.0, high_s=24.5, load=1.0, spread=0.1, num_earlier=3)
    assert "Likely 18.0 to 24.5 s in 90 % of runs." in plan_markdown(plan, problem, found)
    certain = plan_markdown(plan, problem, replace(found, earliest_s=15.0, latest_s=23.0))
    assert "Likely 18.0 to 24.5 s in 90 % of runs, at the earliest 15.0 s by these runtimes." in certain
    nothing = plan_markdown(plan, problem, replace(found, earliest_s=0.04, latest_s=23.0))
    assert "Likely 18.0 to 24.5 s in 90 % of runs." in nothing, "zero seconds are not earliest end"
    assert "Predicted" not in plan_markdown(plan, problem)


def test_a_pool_shows_the_first_plan_of_a_batch_once():
    shown = []
    artifact = PlanArtifact(
        "nightly", device="H100", show=lambda plan, problem, *, device: shown.append((problem.name, device))
    )
    artifact.listen(DeviceWait(holders=("another batch",)))
    problem, plan = two_jobs_each("nightly")
    artifact.listen(PlanUpdate(problem=problem, plan=plan, why="start"))
    artifact.listen(PlanUpdate(problem=problem, plan=plan, why="a job is slower than planned"))
    assert shown == [("nightly", "H100")]


def test_only_a_batch_alone_on_a_pool_reads_what_more_devices_would_gain(monkeypatch):
    pages = {}
    monkeypatch.setattr(
        "ringmaster.flows.batch.artifacts.create_markdown_artifact",
        lambda *, key, markdown, description: pages.update({key: markdown}),
    )

    def page(*batches):
        problem, plan = two_jobs_each(*batches)
        own = as_logged(PlanUpdate(problem=problem, plan=plan, why="start"), "nightly")
        show_plan(own.plan, own.problem, device="H100")
        return pages["plan"]

    alone, shared = page("nightly"), page("nightly", "sweep")
    assert "- With one more device (H100) on n the last job would end" in alone
    assert "more device" not in shared
    assert "| a | single |" in alone
    assert "| a | single |" in shared


def two_jobs_each(*batches):
    """Returns a problem of a pool on two devices, in which each batch has the jobs a, b and c, and a plan of it."""
    options = (Option("single", 1, 1000.0), Option("ddp", 2, 600.0))
    jobs = tuple(PlanningJob(f"{batch}/{job}", options) for batch in batches for job in "abc")
    problem = Problem("pool", (PlanningNode("n", 2),), jobs)
    return problem, solve(problem)


def test_each_link_of_the_control_page_opens_a_form_that_is_filled_in():
    jobs = [f"job|{number}" for number in range(MAX_CONTROLLED + 2)]
    page = control_markdown("nightly-1", jobs, form="http://prefect/run")
    assert "2 more jobs have no row" in page
    assert page.count("[clone]") == MAX_CONTROLLED
    assert page.count("[cancel]") == MAX_CONTROLLED + 1
    (row,) = (line for line in page.splitlines() if line.startswith(r"| job\|7 |"))
    links = dict(re.findall(r"\[([a-z ]+)\]\(http://prefect/run\?parameters=([^)]+)\)", row))
    filled = {text: json.loads(unquote(parameters)) for text, parameters in links.items()}
    assert {each["batch"] for each in filled.values()} == {"nightly-1"}
    kinds = {text: control_jobs.validate_parameters(each)["what"] for text, each in filled.items()}
    assert kinds == {
        "clone": CloneAction(clone="job|7"),
        "change settings": SetAction(jobs=["job|7"]),
        **{action: StateAction(action=action, jobs=["job|7"]) for action in ("pause", "resume", "cancel")},
    }

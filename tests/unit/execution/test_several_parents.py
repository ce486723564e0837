"""Jobs with several base models, and jobs without steps, on fake gangs."""

from dataclasses import replace
from pathlib import Path

import pytest

from ringmaster.tasks.execution.dispatch import PlannedSegment
from ringmaster.tasks.execution.execution_events import JobEnded
from ringmaster.tasks.execution.starter import gang_order
from ringmaster.tasks.pool.active_batches import entries_of
from ringmaster.tasks.pool.submissions import Submission
from ringmaster.tasks.profiling.search import planning_problem
from ringmaster.tasks.storage.journal import JobStatus
from ringmaster.techniques import AdaptationSpec
from ringmaster.techniques.processes.gang_events import Outcome
from tests.unit.execution.fakes import Bench, FakeRunner, cluster, done, ends, job, profile

SOUP = AdaptationSpec(kind="merged", method="average", parents=("a", "b", "models:/x@champion", "/models/y"))


def soup(**changes):
    return job("soup", num_steps=0, features=(SOUP,), **changes)


def compares(call, runner):
    outcome = done(call, runner)
    return replace(outcome, result=replace(outcome.result, compared=({"model": "soup"},)))


@pytest.mark.parametrize("seed", range(5))
def test_a_job_waits_for_all_its_parents_and_is_told_where_they_are(tmp_path, seed):
    bench = Bench(tmp_path, [soup(), job("a"), job("b"), job("c")], runner=FakeRunner(seed))
    bench.paths.weights.update({"models:/x@champion": Path("/cache/x"), "/models/y": Path("/models/y")})
    bench.runner.script["soup"] = [compares]
    assert bench.run()
    names = bench.runner.names()
    assert names.index("soup") > max(names.index("a"), names.index("b"))
    order = next(call.order for call in bench.runner.calls if call.order.job.name == "soup")
    assert order.parents == {
        "a": str(tmp_path / "models" / "a"),
        "b": str(tmp_path / "models" / "b"),
        "models:/x@champion": "/cache/x",
        "/models/y": "/models/y",
    }
    assert order.weights_from is None
    assert order.last_step == 0
    assert bench.statuses["soup"] == JobStatus.DONE
    ended = next(event for event in bench.told(JobEnded) if event.job == "soup")
    assert ended.record.compared == ({"model": "soup"},)
    assert ended.record.step == 0


def test_without_one_of_its_parents_a_job_fails_and_the_others_go_on(tmp_path):
    jobs = [soup(), job("a"), job("b"), job("student", features=(AdaptationSpec(kind="distilled", teacher="soup"),))]
    bench = Bench(tmp_path, jobs)
    bench.runner.script["b"] = [ends("invalid", "no such data")]
    assert bench.run()
    assert bench.statuses == {
        "soup": JobStatus.FAILED,
        "a": JobStatus.DONE,
        "b": JobStatus.FAILED,
        "student": JobStatus.FAILED,
    }
    messages = {event.job: event.record.message for event in bench.told(JobEnded)}
    assert messages["soup"] == "its parent b has failed"
    assert messages["student"] == "its parent soup has failed"


def test_a_job_without_steps_that_crashes_is_tried_again(tmp_path):
    bench = Bench(tmp_path, [soup(), job("a"), job("b")])
    bench.runner.script["soup"] = [ends("crashed"), lambda *_: Outcome(status="lost"), done]
    assert bench.run()
    assert bench.statuses["soup"] == JobStatus.DONE
    assert bench.runner.names().count("soup") == 3


def test_a_plan_has_the_job_after_all_its_parents():
    jobs = [soup(base="a"), job("a"), job("b")]
    profiles = {"soup": (replace(profile("rewrite"), export_s=3.0),), "a": (profile(),), "b": (profile(),)}
    row = planning_problem(jobs, profiles, cluster(2), name="x").jobs[0]
    assert row.after == ("a", "b")
    assert row.options[0].runtime_s == pytest.approx(3.1)


def test_only_an_adaptation_is_told_of_its_parents_and_a_base_by_its_job(tmp_path):
    bench = Bench(tmp_path, [job("a")])
    bench.paths.weights.update({"tuned": Path("/cache/base")})
    segment = PlannedSegment(job="a", option=0, last_step=1, devices=(), start_s=0.0, end_s=1.0)

    def order(each):
        return gang_order(each, segment, profile(), paths=bench.paths, devices=[], number=1)

    tuned = job("tuned", base="models:/x@champion")
    assert (order(tuned).weights_from, order(tuned).parents) == ("/cache/base", {})
    pruned = tuned.with_features(AdaptationSpec(kind="pruned", method="magnitude"))
    assert order(pruned).parents == {"models:/x@champion": "/cache/base"}


def test_in_a_pool_parents_are_called_by_their_batch_and_gangs_know_their_own_names(tmp_path):
    submission = Submission(
        id="tonight-1",
        name="tonight",
        jobs=(soup(base="a"), job("a"), job("b")),
        profiles={name: (profile(),) for name in ("soup", "a", "b")},
        folder=str(tmp_path),
        cache_dir=str(tmp_path),
    )
    entry = entries_of(submission, struck_out={})[0]
    assert entry.job.parents == ("tonight-1/a", "tonight-1/b", "models:/x@champion", "/models/y")
    assert entry.job_in_batch == submission.jobs[0]

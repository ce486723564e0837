"""Plans for problems with running jobs: a segment that continues costs no switch, the others pay."""

from dataclasses import replace

import pytest

from benchmarks.planning.families import draw
from ringmaster.tasks.planning import Option, Plan, PlanningJob, PlanningNode, Problem, verify
from ringmaster.tasks.planning.bounds.bounds import preemptive_bound
from ringmaster.tasks.planning.preemptive import plan_preemptive
from ringmaster.tasks.planning.problems.problem_parts import CurrentRun
from tests.matrix import matrix


def planned(problem: Problem) -> Plan:
    bound = preemptive_bound(problem)
    segments = plan_preemptive(problem, bound)
    assert segments is not None
    plan = Plan(problem.name, segments, lower_bound_s=bound.seconds, certificate=bound.certificate)
    assert verify(plan, problem) == []
    return plan


def rest_of(problem: Problem, plan: Plan, now_s: float) -> Problem:
    """The problem that is left at a given time of a plan, with its running jobs."""
    jobs = []
    for job in problem.jobs:
        done, running = 0.0, None
        for segment in plan.segments_of(job.id):
            if segment.start_s < now_s:
                runtime_s = job.options[segment.option].runtime_s
                done += min(segment.work, max(0.0, now_s - segment.start_s - segment.overhead_s) / runtime_s)
                if segment.end_s > now_s:
                    running = CurrentRun(segment.option, segment.devices)
        if done < 1 - 1e-6:
            left = tuple(replace(o, runtime_s=o.runtime_s * (1 - done)) for o in job.options)
            jobs.append(replace(job, options=left, running=running, started=done > 0))
    return replace(problem, jobs=tuple(jobs))


def stays(plan: Plan, job: PlanningJob) -> bool:
    first = plan.segments_of(job.id)[0]
    return job.goes_on(first.option, first.start_s, first.devices)


@pytest.mark.parametrize("family", matrix(["paper-txt-12x16", "multi-6x32"], quick=["multi-6x32"]))
def test_a_plan_made_anew_goes_on_with_most_of_what_runs(family):
    problem = draw(family, seed=1)
    plan = planned(problem)
    now_s = 0.3 * plan.makespan_s
    rest = rest_of(problem, plan, now_s)
    anew = planned(rest)
    running = [job for job in rest.jobs if job.running]
    assert sum(stays(anew, job) for job in running) >= 0.5 * len(running)
    assert anew.makespan_s <= 1.02 * (plan.makespan_s - now_s)


def two_devices(*, switch_cost_s: float = 5.0, **of_first: object) -> Problem:
    options = (Option("single", 1, 100.0), Option("ddp", 2, 60.0))
    return Problem(
        "two",
        (PlanningNode("n0", 2),),
        (PlanningJob("first", options, **of_first), PlanningJob("second", options)),
        switch_cost_s,
    )


def test_what_runs_keeps_its_very_devices_and_pays_nothing():
    problem = two_devices(running=CurrentRun(0, (("n0", (1,)),)))
    plan = planned(problem)
    assert plan.makespan_s == pytest.approx(100.0)
    assert plan.segments_of("first")[0].devices == (("n0", (1,)),)
    assert plan.segments_of("first")[0].overhead_s == 0.0


def test_a_job_with_a_checkpoint_pays_at_its_head():
    plan = planned(two_devices(started=True))
    assert plan.segments_of("first")[0].overhead_s == pytest.approx(5.0)


def test_what_is_pinned_goes_on_for_as_long_as_it_must():
    pinned = CurrentRun(1, (("n0", (0, 1)),), pinned_until_s=30.0)
    problem = two_devices(switch_cost_s=1.0, running=pinned)
    first = planned(problem).segments_of("first")[0]
    assert (first.option, first.start_s, first.devices) == (1, 0.0, pinned.devices)
    assert first.end_s >= 30.0 - 1e-6


def test_a_gang_over_nodes_stays_on_its_nodes():
    wide, narrow = Option("fsdp", 4, 100.0, num_nodes=2), Option("single", 1, 40.0)
    running = CurrentRun(0, (("n1", (0, 1)), ("n2", (0, 1))))
    jobs = (PlanningJob("wide", (wide,), running=running), *(PlanningJob(f"j{i}", (narrow,)) for i in range(4)))
    problem = Problem("nodes", tuple(PlanningNode(f"n{i}", 2) for i in range(4)), jobs, 5.0)
    assert stays(planned(problem), problem.jobs[0])

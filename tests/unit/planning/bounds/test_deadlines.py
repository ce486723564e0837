"""Infeasible problems: the error names the jobs that conflict, and by how much."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planning.families import draw
from ringmaster.errors import ProblemError
from ringmaster.tasks.planning import Option, PlanningJob, PlanningNode, Problem, solve, verify
from ringmaster.tasks.planning.bounds.bounds import conflicts, unmet
from ringmaster.tasks.planning.plans.list_scheduling import BASELINES
from ringmaster.tasks.planning.plans.plan import Plan, Segment
from tests.drawing import draws
from tests.unit.planning.draw import tiny
from tests.unit.planning.test_whole_problem import whole_problems


def single(name: str, runtime_s: float = 10.0, **fields) -> PlanningJob:
    return PlanningJob(name, (Option("t", 1, runtime_s),), **fields)


def told(problem: Problem) -> tuple[str, ...]:
    with pytest.raises(ProblemError) as caught:
        solve(problem)
    return caught.value.faults


def test_jobs_that_cannot_meet_their_own_deadlines_are_all_named():
    jobs = (single("a", deadline_s=9.0), single("b", after=("a",), deadline_s=19.5), single("c", deadline_s=10.0))
    assert told(Problem("p", (PlanningNode("n", 3),), jobs)) == (
        "job a: cannot end before 10.0 s by these runtimes, its deadline is 9.0 s: 1.0 s too late",
        "job b: cannot end before 20.0 s by these runtimes, its deadline is 19.5 s: 0.5 s too late",
    )


def test_only_jobs_that_conflict_are_named():
    jobs = [single(f"late{i}", deadline_s=100.0) for i in range(3)]
    jobs += [single(f"free{i}") for i in range(3)]
    jobs += [single(f"due{i}", deadline_s=15.0) for i in range(3)]
    (fault,) = told(Problem("p", (PlanningNode("n", 1),), tuple(jobs)))
    assert fault.startswith("jobs due1, due2: cannot all end by 15.0 s: together they need at least 20.0 s, 5.0 s more")
    assert fault.endswith("all 3 jobs due by then miss 15.0 s")


def test_the_first_conflict_and_the_worst_are_told():
    jobs = [single(f"a{i}", deadline_s=15.0) for i in range(2)] + [single(f"b{i}", deadline_s=30.0) for i in range(4)]
    first, worst = told(Problem("p", (PlanningNode("n", 1),), tuple(jobs)))
    assert "jobs a0, a1: cannot all end by 15.0 s" in first
    assert "by 30.0 s" in worst
    assert "all 6 jobs due by then miss 30.0 s" in worst


def test_a_job_is_due_for_those_that_wait_for_it():
    bases = (single("base"), single("other"))
    tuned = (single("a", after=("base",), deadline_s=25.0), single("b", after=("other",), deadline_s=25.0))
    first, last = told(Problem("p", (PlanningNode("n", 1),), (*bases, *tuned)))
    assert first.startswith("jobs base, other: cannot all end by 15.0 s")
    assert "cannot all end by 25.0 s" in last


def test_a_job_cannot_start_before_all_that_it_waits_for_fits_the_devices():
    jobs = (single("base"), single("other"), single("tuned", after=("base", "other"), deadline_s=25.0))
    (fault,) = told(Problem("p", (PlanningNode("n", 1),), jobs))
    assert fault == "job tuned: cannot end before 30.0 s by these runtimes, its deadline is 25.0 s: 5.0 s too late"


def test_deadlines_beside_nodes_that_go_away():
    jobs = tuple(single(f"j{i}", deadline_s=30.0) for i in range(5))
    nodes = (PlanningNode("own", 1), PlanningNode("spot", 2, available_until_s=5.0))
    (fault,) = told(Problem("p", nodes, jobs))
    assert "cannot all end by 30.0 s: together they need at least" in fault


def test_nodes_that_go_away_too_early():
    nodes = (PlanningNode("a", 1, available_until_s=15.0), PlanningNode("b", 1, available_until_s=12.0))
    (fault,) = told(Problem("p", nodes, tuple(single(f"j{i}") for i in range(5))))
    assert "cannot all be done before the nodes go away, the last one at 15.0 s" in fault
    assert "they take at least 30.0 device-seconds, 3.0 more than the nodes give" in fault


def test_fused_groups_conflict_as_well():
    problem = draw("lora-4x2", seed=3)
    due = replace(problem, jobs=tuple(replace(job, deadline_s=4000.0) for job in problem.jobs))
    assert all("cannot" in fault for fault in told(due))


def test_jobs_that_are_late_in_the_best_plan_are_named():
    problem = tiny(num_jobs=2)
    due = replace(problem, jobs=tuple(replace(job, deadline_s=45.0) for job in problem.jobs))
    plan = Plan("tiny", tuple(Segment(f"j{i}", 0, 0.0, 40.0 + 7 * i, 1.0, 0.0, (("n0", (i,)),)) for i in range(2)))
    assert unmet(plan, due).endswith("ends jobs late: j1 (2.0 s after 45.0 s)")


@draws(20)
@given(whole_problems(), st.integers(0, len(BASELINES) - 1), st.booleans())
def test_no_conflict_is_told_of_deadlines_that_a_plan_meets(problem, rule, is_leaving):
    """The deadlines, or the ends of nodes, are those that a known plan just meets."""
    plan = BASELINES[rule](problem)
    assert verify(plan, problem) == []
    due = tuple(replace(job, deadline_s=plan.segments_of(job.id)[-1].end_s) for job in problem.jobs)
    ends = {node: max((s.end_s for s in plan.segments for own, _ in s.devices if own == node), default=0.0)
            for node in (node.id for node in problem.nodes)}  # fmt: skip
    nodes = tuple(replace(node, available_until_s=ends[node.id] if is_leaving else None) for node in problem.nodes)
    assert list(conflicts(replace(problem, jobs=due, nodes=nodes))) == []

"""Problems beyond plain jobs on plain nodes: times, device types, memory, other objectives."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planning.families import draw
from ringmaster.errors import ProblemError
from ringmaster.tasks.planning import Option, Plan, PlanningJob, PlanningNode, Problem, Segment, solve, verify
from tests.drawing import draws
from tests.unit.planning.draw import problems, tiny


@st.composite
def whole_problems(draw_) -> Problem:
    problem = draw_(problems(max_jobs=5))
    amounts = st.sampled_from([0.0, 0.5, 30.0])
    jobs = []
    for job in problem.jobs:
        options = tuple(
            replace(
                option,
                startup_s=draw_(amounts),
                save_s=draw_(amounts),
                evaluate_s=draw_(amounts),
                host_memory_bytes=draw_(st.sampled_from([0, 4, 8])),
            )
            for option in job.options
        )
        jobs.append(
            replace(job, options=options, release_s=draw_(amounts), weight=draw_(st.sampled_from([0.0, 1.0, 5.0])))
        )
    nodes = tuple(
        replace(
            node, price=draw_(st.sampled_from([0.0, 1.0, 3.0])), host_memory_bytes=draw_(st.sampled_from([None, 8]))
        )
        for node in problem.nodes
    )
    return replace(problem, nodes=nodes, jobs=tuple(jobs))


@draws(5)
@given(whole_problems(), st.sampled_from(["makespan", "weighted", "cost"]))
def test_every_plan_is_valid_and_its_bounds_hold(problem, objective):
    assert Problem.from_json(problem.to_json()) == problem
    plan = solve(problem, objective=objective)
    assert verify(plan, problem) == []
    assert Plan.from_json(plan.to_json()) == plan
    if objective != "makespan":
        assert plan.value_bound <= plan.value * (1 + 1e-9)


@draws(5)
@given(problems(max_jobs=6, with_after=False), st.integers(0, 5))
def test_types_of_devices_are_kept_apart(problem, seed):
    nodes = tuple(replace(node, device_type="ab"[i % 2]) for i, node in enumerate(problem.nodes))
    jobs = tuple(
        replace(
            job,
            options=tuple(
                replace(o, device_type="a") if o.runs_on(nodes[0]) and o.num_nodes == 1 else o for o in job.options
            ),
        )
        for job in problem.jobs
    )
    typed = replace(problem, nodes=nodes, jobs=jobs)
    assert verify(solve(typed, seed=seed), typed) == []


def one(option: Option, **fields) -> Problem:
    return Problem("one", (PlanningNode("n0", 2, "a", 100.0, 1.0, 8),), (PlanningJob("j", (option,), **fields),), 5.0)


WHOLE = Option("t", 1, 50.0, device_type="a", startup_s=4.0, save_s=2.0, evaluate_s=1.0, host_memory_bytes=8)
GOOD = Segment("j", 0, 10.0, 67.0, 1.0, 7.0, (("n0", (0,)),))


def test_every_second_is_planned():
    plan = solve(one(WHOLE, release_s=10.0))
    assert [replace(segment, devices=GOOD.devices) for segment in plan.segments] == [GOOD]
    assert plan.lower_bound_s == pytest.approx(67.0)


@pytest.mark.parametrize(
    ("segment", "job", "says"),
    [
        (replace(GOOD, overhead_s=6.0, end_s=66.0), {}, "pays 6.0 of 7.0"),
        (GOOD, {"release_s": 11.0}, "before its release"),
        (GOOD, {"deadline_s": 60.0}, "after its deadline"),
        (replace(GOOD, start_s=50.0, end_s=107.0), {}, "goes away at 100.0"),
        (GOOD, {"options": (replace(WHOLE, device_type=""),)}, None),
    ],
)
def test_the_verifier_knows_every_rule(segment, job, says):
    problem = one(WHOLE)
    problem = replace(problem, jobs=(replace(problem.jobs[0], **job),))
    faults = verify(Plan("one", (segment,)), problem)
    assert faults == [] if says is None else says in "\n".join(faults)


def test_the_verifier_knows_types_and_memory():
    node = PlanningNode("n0", 2, "a", host_memory_bytes=8)
    jobs = tuple(PlanningJob(f"j{i}", (replace(WHOLE, host_memory_bytes=5),)) for i in range(2))
    problem = Problem("two", (node, PlanningNode("n1", 1, "b")), jobs, 5.0)
    both = tuple(Segment(f"j{i}", 0, 0.0, 57.0, 1.0, 7.0, (("n0", (i,)),)) for i in range(2))
    assert "take 10 bytes of 8" in "\n".join(verify(Plan("two", both), problem))
    moved = (both[0], replace(both[1], devices=(("n1", (0,)),)))
    assert "whose devices are 'b'" in "\n".join(verify(Plan("two", moved), problem))
    plan = solve(problem)
    assert verify(plan, problem) == []
    assert plan.makespan_s == pytest.approx(114.0)


def test_an_impossible_deadline_is_told_with_its_seconds():
    problem = tiny()
    late = replace(problem, jobs=(replace(problem.jobs[0], deadline_s=10.0), *problem.jobs[1:]))
    with pytest.raises(ProblemError, match=r"job j0: cannot end before 24\.0 s.*14\.0 s too late"):
        solve(late)


def test_deadlines_that_conflict_are_told_together():
    problem = tiny(num_jobs=4)
    jobs = tuple(replace(job, deadline_s=60.0) for job in problem.jobs)
    with pytest.raises(ProblemError, match=r"jobs j1, j2, j3: cannot all end by 60\.0 s: .* 21\.0 s more"):
        solve(replace(problem, jobs=jobs))


def test_deadlines_are_met_where_they_can_be():
    problem = tiny(num_jobs=5)
    jobs = tuple(replace(job, deadline_s=30.0 if job.id == "j4" else None) for job in problem.jobs)
    with pytest.raises(ProblemError):
        solve(replace(problem, jobs=jobs))
    jobs = tuple(replace(job, deadline_s=41.0 if job.id == "j4" else None) for job in problem.jobs)
    plan = solve(replace(problem, jobs=jobs))
    assert plan.segments_of("j4")[-1].end_s <= 41.0


@pytest.mark.full
def test_heavy_jobs_end_early_and_cheap_nodes_are_taken():
    option = (Option("t", 1, 10.0),)
    jobs = (PlanningJob("light", option, weight=1.0), PlanningJob("heavy", option, weight=9.0))
    weighted = solve(Problem("p", (PlanningNode("n", 1),), jobs), objective="weighted")
    assert weighted.value == pytest.approx(9 * 10 + 20)
    assert weighted.gap == pytest.approx(0.0)
    nodes = (PlanningNode("dear", 2, price=5.0), PlanningNode("cheap", 1, price=1.0))
    assert solve(Problem("p", nodes, jobs), objective="cost").value == pytest.approx(20.0)
    hurried = tuple(replace(job, deadline_s=10.0) for job in jobs)
    assert solve(Problem("p", nodes, hurried), objective="cost").value == pytest.approx(60.0)


def test_nodes_that_go_away_are_left_in_time():
    jobs = tuple(PlanningJob(f"j{i}", (Option("t", 1, 10.0),)) for i in range(4))
    problem = Problem("p", (PlanningNode("spot", 2, available_until_s=15.0), PlanningNode("own", 1)), jobs)
    plan = solve(problem)
    assert verify(plan, problem) == []
    assert plan.makespan_s == pytest.approx(20.0)
    with pytest.raises(ProblemError, match="go away"):
        solve(replace(problem, nodes=problem.nodes[:1]))


@pytest.mark.full
def test_two_types_are_planned_close_to_their_bound():
    problem = draw("types-12x16", seed=1)
    plan = solve(problem)
    assert verify(plan, problem) == []
    assert plan.gap < 0.1

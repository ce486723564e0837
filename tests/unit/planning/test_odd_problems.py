"""Problems that combine all constraints: the plan is valid and its bound holds."""

from dataclasses import replace
from itertools import permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringmaster.errors import ProblemError
from ringmaster.tasks.planning import Plan, PlanningNode, Problem, solve, verify
from ringmaster.tasks.planning.bounds.bounds import preemptive_bound, rigid_bound
from ringmaster.tasks.planning.objectives import lateness_s, objective_by_name
from ringmaster.tasks.planning.plans.list_scheduling import BASELINES, schedule
from ringmaster.tasks.planning.problems.problem_parts import CurrentRun
from tests.drawing import draws
from tests.unit.planning.draw import problems, tiny
from tests.unit.planning.test_whole_problem import whole_problems


@st.composite
def odd_problems(draw) -> Problem:
    """Small problems with running, waiting, due and fused jobs, on different nodes that may leave."""
    problem = draw(whole_problems())
    nodes = tuple(replace(node, device_type=draw(st.sampled_from(["", "", "a"]))) for node in problem.nodes)
    problem = replace(problem, nodes=nodes)
    jobs, taken = [], set()
    for i, job in enumerate(problem.jobs):
        others = [other.id for other in problem.jobs if other.id != job.id and not other.after and not job.after]
        if others and draw(st.integers(0, 3)) == 0:
            group = tuple(draw(st.lists(st.sampled_from(others), min_size=1, max_size=2, unique=True)))
            faster = draw(st.sampled_from([0.5, 1.2, 3.0]))
            longest = max(o.runtime_s for o in job.options)
            job = replace(job, options=(*job.options, replace(job.options[0], runtime_s=faster * longest, jobs=group)))
        if not job.after and draw(st.booleans()):
            node = nodes[i % len(nodes)]
            k = draw(st.integers(0, len(job.options) - 1))
            option = job.options[k]
            ids = tuple(d for d in range(node.num_devices) if (node.id, d) not in taken)[: option.slot]
            if option.num_nodes == 1 and len(ids) == option.slot and option.runs_on(node) and not option.jobs:
                taken |= {(node.id, d) for d in ids}
                pin_s = draw(st.sampled_from([0.0, 0.0, 1.0, 1e6]))
                job = replace(job, release_s=0.0, running=CurrentRun(k, ((node.id, ids),), pin_s))
        elif draw(st.integers(0, 3)) == 0:
            job = replace(job, started=True)
        if draw(st.integers(0, 4)) == 0:
            job = replace(job, deadline_s=draw(st.sampled_from([1e3, 1e6, 1e10])))
        jobs.append(job)
    try:
        return replace(problem, jobs=tuple(jobs))
    except ProblemError:  # such as two running jobs that need more host memory than their node has
        return problem


@draws(80)
@given(odd_problems())
def test_every_value_has_a_file(problem):
    assert Problem.from_json(problem.to_json()) == problem
    assert sorted(j for jobs in problem.classes for j in jobs) == list(range(len(problem.jobs)))


@pytest.mark.parametrize("preemption", ["auto", "never"])
@draws(4)
@given(problem=odd_problems(), objective=st.sampled_from(["makespan", "weighted", "fairness", "cost"]))
def test_every_plan_keeps_every_rule(preemption, problem, objective):
    try:
        plan = solve(problem, objective=objective, preemption=preemption, work_s=20.0)
    except ProblemError as error:
        assert error.faults
        return
    assert verify(plan, problem) == []
    assert plan.lower_bound_s <= plan.makespan_s * (1 + 1e-9)
    assert Plan.from_json(plan.to_json()) == plan


@draws(20)
@given(whole_problems(), st.randoms(use_true_random=False))
def test_bounds_are_below_every_simple_plan_and_know_no_order(problem, random):
    bound_s, rigid_s = preemptive_bound(problem).seconds, rigid_bound(problem, work_s=5.0)[0]
    for rule in BASELINES:
        plan = rule(problem)
        assert verify(plan, problem) == []
        assert max(bound_s, rigid_s) <= plan.makespan_s * (1 + 1e-9)
    nodes, jobs = list(problem.nodes), list(problem.jobs)
    random.shuffle(nodes)
    random.shuffle(jobs)
    shuffled = replace(problem, nodes=tuple(nodes), jobs=tuple(jobs))
    assert preemptive_bound(shuffled).seconds == pytest.approx(bound_s, rel=1e-6)


@draws(4)
@given(problems(max_jobs=5, with_after=False), st.randoms(use_true_random=False))
def test_the_order_of_jobs_and_nodes_changes_no_more_than_the_gap(problem, random):
    plan = solve(problem)
    nodes, jobs = list(problem.nodes), list(problem.jobs)
    random.shuffle(nodes)
    random.shuffle(jobs)
    shuffled = replace(problem, nodes=tuple(nodes), jobs=tuple(jobs))
    other = solve(shuffled)
    assert verify(other, shuffled) == []
    both = sorted([plan, other], key=lambda each: each.makespan_s)
    assert both[1].makespan_s <= both[0].makespan_s * (1 + both[1].gap) * (1 + 1e-6)


def test_jobs_in_a_class_are_those_that_nothing_tells_apart():
    problem = tiny(num_jobs=2)
    a, b = problem.jobs
    same = replace(a, id="same")
    started = replace(a, id="started", started=True)
    first = replace(a, id="first")
    waits = replace(a, id="waits", after=("first",))
    every = replace(problem, jobs=(a, b, same, started, first, waits, replace(waits, id="too")))
    assert every.classes == ((0, 2), (1,), (3,), (4,), (5, 6))
    running = replace(same, running=CurrentRun(0, (("n0", (0,)),)))
    assert replace(problem, jobs=(a, b, running)).classes == ((0,), (1,), (2,))


def test_classes_change_no_bound():
    problem = Problem("p", (PlanningNode("n0", 4), PlanningNode("n1", 2, available_until_s=50.0)), tiny(5).jobs, 1.0)
    copies = tuple(replace(job, id=f"{job.id}-{i}", release_s=3.0) for job in problem.jobs for i in range(3))
    alike = replace(problem, jobs=copies)
    apart = replace(problem, jobs=tuple(replace(job, weight=1.0 + i) for i, job in enumerate(copies)))
    assert len(alike.classes) == 5
    assert len(apart.classes) == 15
    assert preemptive_bound(alike).seconds == pytest.approx(preemptive_bound(apart).seconds, rel=1e-6)
    alike_s, chosen = rigid_bound(alike, work_s=10.0)
    assert alike_s == pytest.approx(rigid_bound(apart, work_s=10.0)[0], rel=1e-3)
    assert chosen is not None
    assert chosen.keys() == {job.id for job in copies}


@pytest.mark.parametrize(
    ("objective", "due_s", "tolerance"), [("weighted", None, 1e-9), ("weighted", 80.0, 0.03), ("cost", 80.0, 1e-9)]
)
def test_other_objectives_of_small_problems_come_to_their_optimum(objective, due_s, tolerance):
    """Hill climbing between deadlines may end slightly above the optimum."""
    nodes = (PlanningNode("dear", 2, price=3.0), PlanningNode("cheap", 1, price=1.0))
    jobs = (replace(job, weight=1.0 + 4 * i, deadline_s=due_s) for i, job in enumerate(tiny(num_jobs=4).jobs))
    problem = Problem("p", nodes, tuple(jobs), switch_cost_s=1.0)
    plan = solve(problem, objective=objective, preemption="never")
    assert verify(plan, problem) == []
    assert plan.value_bound <= plan.value
    assert plan.value <= exhaustive(problem, objective) * (1 + tolerance)


def exhaustive(problem: Problem, objective: str) -> float:
    """The best value that meets the deadlines over all orders and options, on early or on cheap nodes."""
    minimised = objective_by_name(objective)
    ways = (
        (list(zip(order, options, strict=True)), prices)
        for order in permutations(job.id for job in problem.jobs)
        for options in product(*(range(len(problem.job(name).options)) for name in order))
        for prices in (minimised.coefficients(problem).prices, {})
    )
    plans = (Plan(problem.name, schedule(problem, choices, prices=prices)) for choices, prices in ways)
    return min(minimised.value(plan, problem) for plan in plans if lateness_s(plan, problem) == 0)

import itertools
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings

from ringmaster.tasks.planning import Option, Plan, PlanningJob, PlanningNode, Problem, verify
from ringmaster.tasks.planning.bounds.bounds import preemptive_bound, rigid_bound
from ringmaster.tasks.planning.bounds.job_costs import without_overheads
from ringmaster.tasks.planning.kernels.annealing import shorten
from ringmaster.tasks.planning.plans.list_scheduling import segments_of
from ringmaster.tasks.planning.problems.problem_parts import CurrentRun
from ringmaster.tasks.planning.rigid_search import CLOSE, plan_without_preemption, search
from tests.unit.planning.draw import problems


def drawn(seed: int, sizes: tuple[int, ...], num_jobs: int) -> Problem:
    """Jobs with good or bad scaling, on nodes of the given sizes."""
    random = Random(seed)
    jobs = []
    for j in range(num_jobs):
        hours, scales = random.uniform(0.2, 4.0), random.uniform(0.3, 1.0)
        options = [Option("t", s, 3600 * hours / s**scales * random.uniform(0.9, 1.1)) for s in (1, 2, 3, 4)]
        jobs.append(PlanningJob(f"j{j}", tuple(o for o in options if o.num_devices <= max(sizes))))
    return Problem("drawn", tuple(PlanningNode(f"n{v}", size) for v, size in enumerate(sizes)), tuple(jobs))


def shortest_s(problem: Problem) -> float:
    """The minimal makespan over all nodes, options and orders of the jobs, by brute force."""
    spots = [(v, k) for v in range(len(problem.nodes)) for k in range(max(len(job.options) for job in problem.jobs))]
    best = float("inf")
    for chosen in itertools.product(spots, repeat=len(problem.jobs)):
        pairs = list(zip(problem.jobs, chosen, strict=True))
        if any(
            k >= len(job.options) or job.options[k].num_devices > problem.nodes[v].num_devices for job, (v, k) in pairs
        ):
            continue
        ends = []
        for v, node in enumerate(problem.nodes):
            own = [job.options[k] for job, (where, k) in pairs if where == v]
            area = sum(option.num_devices * option.runtime_s for option in own) / node.num_devices
            if area >= best:
                ends.append(best)
                break
            ends.append(min((_ends_s(node, order) for order in itertools.permutations(own)), default=0.0))
        best = min(best, max(ends))
    return best


def _ends_s(node: PlanningNode, order: tuple[Option, ...]) -> float:
    free = [0.0] * node.num_devices
    for option in order:
        free.sort()
        start_s = free[option.num_devices - 1]
        top = sum(now <= start_s for now in free)
        free[top - option.num_devices : top] = [start_s + option.runtime_s] * option.num_devices
    return max(free)


@pytest.mark.parametrize(
    ("seed", "sizes", "num_jobs"),
    [
        pytest.param(0, (3,), 5, marks=pytest.mark.full),
        (1, (4,), 4),
        (2, (2, 2), 4),
        (3, (1, 2), 4),
        (4, (2, 3), 4),
        (5, (3,), 5),
    ],
)
def test_what_is_proved_optimal_is_optimal(seed, sizes, num_jobs):
    problem = drawn(seed, sizes, num_jobs)
    optimum_s, bound_s = shortest_s(problem), preemptive_bound(problem).seconds
    lower_s, orders = search(problem, lower_s=bound_s, upper_s=1.2 * optimum_s)
    plan = Plan(problem.name, segments_of(problem, orders), solver_bound_s=lower_s)
    assert verify(plan, problem) == []
    assert plan.makespan_s == pytest.approx(optimum_s)
    assert plan.solver_bound_s == pytest.approx(optimum_s, rel=1e-6)
    # No plan ends before the optimum, and the search proves that within its tolerance.
    lower_s, orders = search(problem, lower_s=bound_s, upper_s=optimum_s)
    assert orders is None
    assert optimum_s * (1 - 2 * CLOSE) <= lower_s <= optimum_s


def test_a_spent_budget_claims_nothing_that_is_false():
    problem = drawn(7, (4,), 9)
    bound_s = preemptive_bound(problem).seconds
    optimum_s, _ = search(problem, lower_s=bound_s, upper_s=2 * bound_s)
    for max_work in (1, 10_000, 100_000):
        found = search(problem, lower_s=bound_s, upper_s=2 * bound_s, max_work=max_work)
        assert found is None or bound_s < found[0] <= optimum_s * (1 + 1e-6)


def test_what_is_too_large_is_not_searched():
    assert search(drawn(0, (2,), 15), lower_s=1.0, upper_s=2.0) is None
    wide = PlanningJob("wide", (Option("t", 4, 10.0, num_nodes=2),))
    problem = Problem("wide", (PlanningNode("a", 2), PlanningNode("b", 2)), (wide,))
    assert search(problem, lower_s=1.0, upper_s=2.0) is None


def test_overheads_count_as_runtime():
    options = (Option("t", 1, 100.0, startup_s=5.0, save_s=2.0, evaluate_s=3.0),)
    jobs = (PlanningJob("fresh", options), PlanningJob("stopped", options, started=True))
    problem = Problem("p", (PlanningNode("n", 1),), jobs, switch_cost_s=60.0)
    bare = without_overheads(problem)
    assert [job.options[0].runtime_s for job in bare.jobs] == [110.0, 170.0]
    plan = Plan(problem.name, segments_of(problem, [(("fresh", 0), ("stopped", 0))]))
    assert verify(plan, problem) == []
    assert plan.makespan_s == 280.0


def test_order_and_times_are_not_left_out():
    option = (Option("t", 1, 10.0),)
    for job in (
        PlanningJob("b", option, after=("a",)),
        PlanningJob("b", option, release_s=5.0),
        PlanningJob("b", option, deadline_s=50.0),
    ):
        assert without_overheads(Problem("p", (PlanningNode("n", 1),), (PlanningJob("a", option), job))) is None


def annealed(problem: Problem) -> Plan:
    bound_s = preemptive_bound(problem).seconds
    plan = Plan(problem.name, plan_without_preemption(problem, bound_s, num_searches=2, steps=20_000))
    assert verify(plan, problem) == []
    return plan


def test_annealing_finds_what_the_exhaustive_search_proves():
    problem = drawn(3, (4, 2), 7)
    plan = annealed(problem)
    lower_s, _ = search(problem, lower_s=1.0, upper_s=plan.makespan_s * 1.01)
    assert plan.makespan_s == pytest.approx(lower_s, rel=0.01)
    assert plan == annealed(problem)


def test_options_longer_than_the_target_are_replaced_by_those_of_least_area():
    first, last = np.array([0, 4, 5]), np.array([4, 5, 6])
    need, length = np.array([1, 2, 3, 9, 1, 1]), np.array([1.2, 1.0, 0.6, 0.1, 1.3, 0.9])
    option = np.array([0, 4, 5])
    shorten(np.array([2, 0, 1]), 3, option, first, last, need, length, 8, 1.1)
    assert option.tolist() == [2, 4, 5]  # job 0: 3 devices x 0.6; job 1 has no other option


def test_annealing_leaves_an_option_that_no_better_plan_contains():
    """The long job takes two devices, or ends later than all others."""
    long = PlanningJob("long", (Option("t", 1, 102.0), Option("t", 2, 60.0)))
    jobs = (long, *(PlanningJob(f"j{i}", (Option("t", 1, 40.0),)) for i in range(4)))
    assert annealed(Problem("late", (PlanningNode("n", 3),), jobs)).makespan_s == pytest.approx(100.0)


@settings(deadline=None, max_examples=30)
@given(problem=problems(with_after=False))
def test_annealed_plans_of_drawn_problems_are_valid_and_not_below_the_bound(problem):
    bound_s = rigid_bound(problem)[0]
    segments = plan_without_preemption(problem, bound_s, num_searches=3, steps=2_000)
    if segments is not None:
        plan = Plan(problem.name, segments)
        assert verify(plan, problem) == []
        assert plan.makespan_s >= bound_s * (1 - 1e-6)


def test_annealing_takes_each_type_of_devices_at_its_own_speed():
    fast = Option("t", 1, 10.0, device_type="fast")
    jobs = tuple(PlanningJob(f"j{i}", (fast, Option("t", 1, 20.0, device_type="slow"))) for i in range(6))
    problem = Problem("types", (PlanningNode("a", 2, "fast"), PlanningNode("b", 1, "slow")), jobs)
    assert annealed(problem).makespan_s == pytest.approx(30.0)


def test_annealing_leaves_jobs_that_run_where_they_are():
    options = (Option("t", 1, 40.0, startup_s=3.0, save_s=1.0),)
    running = PlanningJob("running", options, running=CurrentRun(0, (("n", (1,)),)))
    jobs = (running, PlanningJob("stopped", options, started=True), PlanningJob("fresh", options))
    plan = annealed(Problem("p", (PlanningNode("n", 2),), jobs, switch_cost_s=10.0))
    going_on = plan.segments_of("running")[0]
    assert (going_on.start_s, going_on.end_s, going_on.devices) == (0.0, 41.0, (("n", (1,)),))
    assert plan.makespan_s == pytest.approx(85.0)


def test_many_jobs_that_only_a_few_of_many_nodes_can_run_are_placed_on_those():
    jobs = tuple(PlanningJob(f"j{i}", (Option("t", 2, 10.0),)) for i in range(100))
    nodes = (*(PlanningNode(f"small{v}", 1) for v in range(98)), PlanningNode("a", 2), PlanningNode("b", 2))
    assert annealed(Problem("few", nodes, jobs)).makespan_s == pytest.approx(500.0)


def test_gangs_of_several_nodes_are_left_to_others():
    wide = PlanningJob("wide", (Option("t", 4, 10.0, num_nodes=2),))
    assert plan_without_preemption(Problem("wide", (PlanningNode("a", 2), PlanningNode("b", 2)), (wide,)), 1.0) is None

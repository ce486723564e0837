"""Preemption with fixed seconds, release times, deadlines, order, leaving nodes, memory, weights and cost."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planning.families import draw
from ringmaster.errors import NoRoomError
from ringmaster.tasks.planning import Option, Plan, PlanningJob, PlanningNode, Problem, Segment, solve, verify
from ringmaster.tasks.planning.bounds.bounds import certified_bound
from ringmaster.tasks.planning.bounds.job_costs import least_of
from ringmaster.tasks.planning.objectives import objective_by_name
from ringmaster.tasks.planning.plans.list_scheduling import BASELINES, schedule, schedule_pieces
from ringmaster.tasks.planning.plans.plan import Certificate
from ringmaster.tasks.planning.plans.retiming import retimed
from ringmaster.tasks.planning.problems.problem_parts import CurrentRun
from tests.drawing import draws
from tests.unit.planning.draw import problems, tiny
from tests.unit.planning.test_whole_problem import whole_problems


def constrained(problem: Problem, rules: str, *, seed: int, length_s: float) -> Problem:
    """A drawn problem with start-up, save and evaluation times, and constraints by letter: (r)elease, (a)fter, (u)ntil,
    host (m)emory, (w)eights, prices of nodes ($).
    """
    random, jobs, nodes = Random(f"{rules}/{seed}"), [], problem.nodes
    for i, job in enumerate(problem.jobs):
        startup_s, save_s, evaluate_s = random.uniform(20, 120), random.uniform(5, 60), random.uniform(30, 400)
        options = (
            replace(
                o,
                startup_s=startup_s * (1 + 0.1 * o.num_devices),
                save_s=save_s,
                evaluate_s=evaluate_s / o.num_devices**0.5,
                host_memory_bytes=max(10, 60 // o.num_devices) if "m" in rules else 0,
            )
            for o in job.options
        )
        release_s = random.uniform(0.05, 0.5) * length_s if "r" in rules and random.random() < 0.5 else 0.0
        after = (problem.jobs[random.randrange(i)].id,) if "a" in rules and i and random.random() < 0.4 else ()
        weight = float(random.choice([1, 2, 5, 10])) if "w" in rules else 1.0
        jobs.append(replace(job, options=tuple(options), release_s=release_s, after=after, weight=weight))
    if "u" in rules:
        nodes = (*nodes[:-1], replace(nodes[-1], available_until_s=0.5 * length_s))
    if "m" in rules:
        nodes = tuple(replace(node, host_memory_bytes=100) for node in nodes)
    if "$" in rules:
        nodes = tuple(replace(node, price=random.choice([1.0, 2.0, 3.0])) for node in nodes)
    return replace(problem, jobs=tuple(jobs), nodes=nodes)


def best_simple(problem: Problem, objective: str) -> Plan:
    plans = []
    for baseline in BASELINES:
        try:
            plans.append(baseline(problem))
        except NoRoomError:
            continue
    return min(plans, key=lambda plan: objective_by_name(objective).rank(plan, problem))


def test_batches_with_fixed_seconds_are_planned_with_preemption():
    problem = constrained(draw("paper-txt-8x8", seed=1), "", seed=1, length_s=1e5)
    plan = solve(problem)
    assert verify(plan, problem) == []
    assert plan.num_switches > 0
    assert plan.gap < 0.01
    assert plan.certificate is not None


@pytest.mark.parametrize(
    ("rules", "objective", "gap"),
    [
        ("r", "makespan", 0.2),
        ("au", "makespan", 0.5),
        # Their rules and objectives have properties of their own, over drawn problems.
        pytest.param("m", "makespan", 0.4, marks=pytest.mark.full),
        pytest.param("rw", "weighted", 0.9, marks=pytest.mark.full),
        ("$", "cost", 0.01),
    ],
)
def test_constrained_plans_are_valid_and_better_than_simple_ones(rules, objective, gap):
    problem = constrained(draw("paper-mixed-6x12", seed=2), rules, seed=2, length_s=5e4)
    plan = solve(problem, objective=objective)
    assert verify(plan, problem) == []
    if rules == "au":
        assert plan == solve(problem, objective=objective)
    assert plan.gap < gap
    simple = best_simple(problem, objective)
    assert objective_by_name(objective).rank(plan, problem) <= objective_by_name(objective).rank(simple, problem)


@pytest.mark.full
@draws(4)
@given(whole_problems(), st.data(), st.sampled_from(["makespan", "weighted", "cost"]))
def test_odd_problems_with_running_jobs(problem, data, objective):
    """With running and pinned jobs, every plan is valid, its bound holds, and none is worse than a simple plan."""
    jobs, first = list(problem.jobs), problem.jobs[0]
    k = data.draw(st.integers(0, len(first.options) - 1))
    option = first.options[k]
    nodes = [node for node in problem.nodes if option.runs_on(node)][: option.num_nodes]
    devices = tuple((node.id, tuple(range(option.slot))) for node in nodes)
    pinned_s = data.draw(st.sampled_from([0.0, 10.0]))
    jobs[0] = replace(first, release_s=0.0, running=CurrentRun(k, devices, pinned_s))
    jobs[1:] = [replace(job, started=data.draw(st.booleans())) for job in jobs[1:]]
    problem = replace(problem, jobs=tuple(jobs))
    plan = solve(problem, objective=objective)
    assert verify(plan, problem) == []
    simple = best_simple(problem, objective)
    assert verify(simple, problem) == []
    late_s, value, _ = objective_by_name(objective).rank(plan, problem)
    assert (late_s, value) <= tuple(x * (1 + 2e-3) for x in objective_by_name(objective).rank(simple, problem)[:2])


@pytest.mark.full
def test_no_segment_of_several_is_shorter_than_asked_for():
    problem = constrained(draw("paper-txt-6x8", seed=1), "r", seed=1, length_s=5e4)
    for switches in (5.0, 60.0):
        plan = solve(problem, least_segment_switches=switches)
        assert verify(plan, problem) == []
        for job in problem.jobs:
            mine = plan.segments_of(job.id)
            assert len(mine) == 1 or min(s.duration_s for s in mine) >= switches * problem.switch_cost_s - 0.1
    with pytest.raises(ValueError, match="least_segment_switches"):
        solve(problem, least_segment_switches=-1.0)


@pytest.mark.full
def test_preemption_gains_under_release_times():
    """A short job with a large weight arrives after a long one. Without preemption it waits, or the device idles."""
    jobs = (
        PlanningJob("long", (Option("t", 1, 1000.0),), weight=1.0),
        PlanningJob("urgent", (Option("t", 1, 100.0),), release_s=300.0, weight=50.0),
    )
    problem = Problem("p", (PlanningNode("n", 1),), jobs, switch_cost_s=10.0)
    rigid = solve(problem, objective="weighted", preemption="never")
    free = solve(problem, objective="weighted")
    assert verify(free, problem) == []
    assert free.segments_of("urgent")[0].start_s == pytest.approx(300.0)
    assert free.value == pytest.approx(50 * 400 + 1110)
    assert rigid.value == pytest.approx(50 * 400 + 1400)


def test_retiming_finds_the_best_shares():
    """A job moves to both devices when the other job ends. The other job determines how long it runs before."""
    jobs = (
        PlanningJob("a", (Option("one", 1, 100.0, startup_s=4.0, save_s=2.0, evaluate_s=3.0),)),
        PlanningJob("b", (Option("one", 1, 300.0, startup_s=4.0, save_s=2.0), Option("two", 2, 160.0, startup_s=6.0))),
    )
    problem = Problem("p", (PlanningNode("n", 2),), jobs, switch_cost_s=10.0)
    rough = (
        Segment("a", 0, 0.0, 50.0, 0.5, 0.0, (("n", (0,)),)),
        Segment("b", 0, 0.0, 40.0, 0.1, 0.0, (("n", (1,)),)),
        Segment("b", 1, 60.0, 90.0, 0.1, 0.0, (("n", (0, 1)),)),
    )
    plan = Plan("p", retimed(problem, rough))
    assert verify(plan, problem) == []
    share = (109.0 - 6.0) / 300.0  # a ends at 109; until then b works, except for its start-up and save
    assert plan.makespan_s == pytest.approx(109.0 + 10.0 + 6.0 + (1 - share) * 160.0)


def test_pieces_are_placed_one_after_another():
    problem = tiny(num_jobs=2)
    plan = Plan("tiny", schedule_pieces(problem, [("j0", 0, 0.5), ("j1", 0, 1.0), ("j0", 1, 0.5)]))
    assert verify(plan, problem) == []
    assert [(s.job, s.start_s, s.end_s) for s in plan.segments] == [("j0", 0, 20), ("j1", 0, 47), ("j0", 47, 60)]


def test_what_runs_goes_on_and_pinned_jobs_first():
    job = PlanningJob("a", (Option("one", 1, 100.0, startup_s=5.0, save_s=1.0), Option("two", 2, 60.0, startup_s=5.0)))
    running = CurrentRun(0, (("n", (1,)),), pinned_until_s=21.0)
    problem = Problem("p", (PlanningNode("n", 2),), (replace(job, running=running),), switch_cost_s=1.0)
    stays = schedule(problem, [("a", 0)])
    assert [(s.end_s, s.devices) for s in stays] == [(101.0, (("n", (1,)),))]
    moves = schedule(problem, [("a", 1)])
    assert [(s.option, s.start_s, s.end_s) for s in moves] == [(0, 0.0, 21.0), (1, 21.0, 21.0 + 6.0 + 48.0)]
    assert verify(Plan("p", moves), problem) == []
    assert solve(problem).makespan_s == pytest.approx(75.0)


def test_fixed_seconds_are_part_of_what_prices_prove():
    """All work under one option and a last segment that only evaluates may be cheapest. The bound accounts for that."""
    slow_end = Option("a", 1, 100.0, startup_s=1.0, save_s=1.0, evaluate_s=500.0)
    quick_end = Option("b", 1, 900.0, startup_s=1.0, save_s=1.0, evaluate_s=2.0)
    job = PlanningJob("j", (slow_end, quick_end))
    assert least_of(job, [1.0, 1.0], 10.0) == pytest.approx(102.0 + 14.0)
    problem = Problem("p", (PlanningNode("n", 1),), (job,), switch_cost_s=10.0)
    assert certified_bound(Certificate(job_prices={"j": 1.0}), problem) == pytest.approx(116.0)
    plan = solve(problem, least_segment_switches=0.0)
    assert verify(plan, problem) == []
    assert plan.makespan_s >= 116.0


@draws(5)
@given(problems(max_jobs=5), st.sampled_from(["makespan", "weighted"]))
def test_a_time_limit_of_nothing_still_gives_a_plan(problem, objective):
    plan = solve(problem, time_limit_s=0.0, objective=objective)
    assert verify(plan, problem) == []

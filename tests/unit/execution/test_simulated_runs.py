"""Simulation of plans with wrong predictions and failing devices."""

from dataclasses import replace
from functools import cache, partial

import pytest

from benchmarks.simulation.simulated_runs import SimulationResult, clairvoyant
from benchmarks.simulation.simulated_runs import simulate as simulated
from ringmaster.tasks.planning import Option, Plan, PlanningJob, PlanningNode, Problem, Segment, solve
from ringmaster.tasks.planning.fusion import as_executed
from ringmaster.tasks.planning.plans.list_scheduling import BASELINES
from tests.unit.planning.draw import tiny


def at_once(problem):
    """The best plan of the rule-based baselines, which take no time."""
    return min((baseline(problem) for baseline in BASELINES), key=lambda plan: plan.makespan_s)


simulate = partial(simulated, make_plan=at_once)
REPLANS = pytest.mark.parametrize("replan", ["never", "completions", "clock"])


@cache
def planned():
    problem = tiny(num_jobs=4)
    return problem, solve(problem)


@REPLANS
def test_without_errors_a_plan_takes_what_it_says(replan):
    problem, plan = planned()
    done = simulate(problem, plan, noise=0.0, replan=replan)
    assert plan.lower_bound_s * (1 - 1e-9) <= done.makespan_s <= plan.makespan_s * (1 + 1e-6)
    if replan == "never":
        assert done.makespan_s == pytest.approx(plan.makespan_s)
        assert done.num_switches == plan.num_switches
    assert done.num_failures == 0


@REPLANS
def test_errors_and_failures_repeat_with_their_seed_and_cost_time(replan):
    problem, plan = planned()
    faulty = {"noise": 0.25, "failures_per_day": 500.0, "repair_s": 20.0, "seed": 3, "replan": replan}
    first = simulate(problem, plan, **faulty)
    assert first == simulate(problem, plan, **faulty)
    assert first.num_failures > 0
    assert first.makespan_s > clairvoyant(problem, noise=0.25, seed=3).lower_bound_s


@REPLANS
def test_nobody_beats_the_bound_of_who_knows_the_runtimes(replan):
    problem, plan = planned()
    bound_s = clairvoyant(problem, noise=0.25, seed=1).lower_bound_s
    done = simulate(problem, plan, noise=0.25, seed=1, replan=replan)
    assert done.makespan_s >= bound_s * (1 - 1e-9)


def one_job(runtime_s=1000.0, *, num_devices=1, **changes):
    job = PlanningJob("j", (Option("single", 1, runtime_s, **changes),))
    return Problem("one", (PlanningNode("n", num_devices),), (job,), switch_cost_s=10.0)


def test_each_segment_pays_what_its_option_costs():
    problem = one_job(startup_s=7.0, save_s=3.0, evaluate_s=5.0)
    one = solve(problem)
    assert simulate(problem, one, noise=0.0).makespan_s == pytest.approx(1000 + 7 + 3 + 5)
    two = replace(one, segments=(part(0, 500, 0.5), part(600, 1100, 0.5, device=0)))
    # The segment continues where it is, as nobody waits for its device.
    assert simulate(problem, two, noise=0.0).makespan_s == pytest.approx(1000 + 7 + 3 + 5)


def part(start_s, end_s, work, *, device=0, job="j"):
    return Segment(job, 0, float(start_s), float(end_s), work, 0.0, (("n", (device,)),))


def test_a_switch_is_paid_where_a_job_moves():
    problem = one_job(num_devices=2)
    plan = Plan("one", (part(0, 500, 0.5), part(500, 1010, 0.5, device=1)))
    done = simulate(problem, plan, noise=0.0)
    assert done == SimulationResult(pytest.approx(1010.0), num_switches=1, num_plans=1, num_adopted=1, num_failures=0)


def test_a_failed_gang_loses_what_it_did_since_its_checkpoint_and_waits_for_its_device():
    problem = one_job(100_000.0)
    done = simulate(problem, solve(problem), noise=0.0, failures_per_day=4.0, repair_s=600.0, seed=1)
    assert done.num_failures > 0
    assert done.num_switches == 0
    least_s = done.num_failures * (600.0 + problem.switch_cost_s)
    assert done.makespan_s > 100_000.0 + least_s
    # The checkpoint interval is at most sqrt(2 * 5 s * 21,600 s) = 465 s.
    assert done.makespan_s <= 100_000.0 + least_s + done.num_failures * 465.0


def test_a_failed_device_is_planned_around():
    jobs = tuple(PlanningJob(f"j{i}", (Option("single", 1, 40_000.0),)) for i in range(4))
    problem = Problem("four", (PlanningNode("n", 2),), jobs, switch_cost_s=10.0)
    faulty = {"noise": 0.0, "failures_per_day": 2.0, "repair_s": 60_000.0, "seed": 5}
    kept = simulate(problem, solve(problem), **faulty)
    assert kept.num_failures > 0
    replanned = simulate(problem, solve(problem), replan="clock", **faulty)
    assert replanned.num_adopted > 1
    assert replanned.makespan_s < kept.makespan_s


@pytest.mark.full
def test_plans_for_another_objective_are_judged_by_it():
    jobs = tuple(
        PlanningJob(f"j{i}", (Option("single", 1, 1000.0), Option("ddp", 2, 600.0)), weight=1.0 + i) for i in range(5)
    )
    problem = Problem("five", (PlanningNode("n", 2, price=1.0),), jobs, switch_cost_s=1.0)
    for objective in ("weighted", "cost"):
        plan = solve(problem, objective=objective, work_s=1.0)
        exact = simulated(problem, plan, noise=0.0)
        assert exact.value == pytest.approx(plan.value, rel=1e-6)
        true = clairvoyant(problem, noise=0.3, seed=1, objective=objective)
        replanned = simulated(problem, plan, noise=0.3, seed=1, replan="clock")
        assert replanned.value >= true.value_bound * (1 - 1e-9)
        if objective == "cost":
            assert replanned.value <= simulated(problem, plan, noise=0.3, seed=1).value * (1 + 1e-6)


def test_the_last_step_of_a_short_job_is_planned_for():
    """Work is counted in billionths: what is left of a second may be less than the least runtime of an option."""
    jobs = tuple(PlanningJob(f"j{i}", (Option("single", 1, 0.3 + 0.1 * i),)) for i in range(6))
    problem = Problem("short", (PlanningNode("n", 2),), jobs, switch_cost_s=0.001)
    plan = solve(problem, work_s=1.0)
    for seed in range(6):
        done = simulated(problem, plan, noise=0.3, seed=seed, replan="completions", make_plan=at_once)
        assert done.makespan_s > 0


def test_segments_end_on_whole_steps_where_jobs_have_steps():
    problem = one_job(1000.0, num_devices=2)
    plan = Plan("one", (part(0, 260, 0.26), part(260, 1010, 0.74, device=1)))
    whole = simulate(problem, plan, noise=0.0, num_steps={"j": 2})  # 0.26 of two steps rounds to one step
    assert (whole.makespan_s, whole.num_switches) == (pytest.approx(1010.0), 1)
    none = simulate(problem, plan, noise=0.0, num_steps={"j": 1})
    assert (none.makespan_s, none.num_switches) == (pytest.approx(1000.0), 0)


def test_replanning_on_the_clock_mends_a_plan_that_relied_on_wrong_runtimes():
    problem, plan = planned()
    realised = {
        replan: sum(simulate(problem, plan, noise=0.25, seed=seed, replan=replan).makespan_s for seed in range(2))
        for replan in ("never", "clock")
    }
    ideal_s = sum(clairvoyant(problem, noise=0.25, seed=seed).makespan_s for seed in range(2))
    assert realised["clock"] < realised["never"]
    assert realised["clock"] < 1.1 * ideal_s


def test_nodes_that_go_away_cannot_be_simulated():
    plain = tiny(num_jobs=2)
    leaving = replace(plain, nodes=(replace(plain.nodes[0], available_until_s=1e6),))
    with pytest.raises(ValueError, match="go away"):
        simulate(leaving, solve(plain))


def test_a_group_is_carried_out_as_its_leader():
    plain = tiny(num_jobs=4)
    jobs = (replace(plain.jobs[0], options=(*plain.jobs[0].options, Option("fused", 1, 50.0, jobs=("j1",)))),)
    problem = replace(plain, jobs=(*jobs, *plain.jobs[1:]))
    plan = solve(problem)
    assert any(s.job == "j0" and s.option == 2 for s in plan.segments)
    assert simulate(problem, plan, noise=0.0).makespan_s == pytest.approx(plan.makespan_s)
    left, as_left = as_executed(problem, plan)
    assert [job.id for job in left.jobs] == ["j0", "j2", "j3"]
    assert simulate(problem, plan, noise=0.2, replan="clock") == simulate(left, as_left, noise=0.2, replan="clock")

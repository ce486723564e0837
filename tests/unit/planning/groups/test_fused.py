"""Options that train several jobs at once."""

from dataclasses import replace
from itertools import combinations, permutations, product

import pytest

from benchmarks.planning.families import draw
from ringmaster.errors import ProblemError
from ringmaster.tasks.planning import (
    Certificate,
    Option,
    Plan,
    PlanningJob,
    PlanningNode,
    Problem,
    Segment,
    certified_bound,
    solve,
    verify,
)
from ringmaster.tasks.planning.bounds.bounds import preemptive_bound, rigid_bound
from ringmaster.tasks.planning.bounds.job_costs import useful_options
from ringmaster.tasks.planning.divisions import Contraction
from ringmaster.tasks.planning.objectives import objective_by_name
from ringmaster.tasks.planning.plans.list_scheduling import schedule
from ringmaster.tasks.planning.problems.problem_parts import CurrentRun


def adapters(gang_step_s: float, **fields) -> Problem:
    """Four jobs of 10 s each on two devices. Two pairs of them can be trained together in `gang_step_s`."""
    alone = Option("t", 1, 10.0)
    jobs = [PlanningJob(name, (alone,), **fields) for name in "abcd"]
    jobs[0] = replace(jobs[0], options=(alone, Option("fused", 1, gang_step_s, jobs=("b",))))
    jobs[2] = replace(jobs[2], options=(alone, Option("fused", 1, gang_step_s, jobs=("d",))))
    return Problem("adapters", (PlanningNode("n0", 2),), tuple(jobs), switch_cost_s=1.0)


def num_fused(plan: Plan, problem: Problem) -> int:
    return sum(bool(problem.job(s.job).options[s.option].jobs) for s in plan.segments)


@pytest.mark.parametrize(("gang_step_s", "makespan_s", "fused"), [(11.0, 11.0, 2), (19.9, 19.9, 2), (30.0, 20.0, 0)])
def test_jobs_are_fused_where_it_pays(gang_step_s, makespan_s, fused):
    problem = adapters(gang_step_s)
    plan = solve(problem)
    assert verify(plan, problem) == []
    assert plan.makespan_s == pytest.approx(makespan_s)
    assert plan.gap == pytest.approx(0.0, abs=1e-6)
    assert num_fused(plan, problem) == fused
    assert Problem.from_json(problem.to_json()) == problem
    assert Plan.from_json(plan.to_json()) == plan
    assert solve(problem) == plan


@pytest.mark.full
def test_adapters_that_leave_devices_idle_are_trained_together():
    problem = draw("lora-6x2", seed=2)
    plan, alone = solve(problem), solve(without_groups(problem))
    assert verify(plan, problem) == []
    assert num_fused(plan, problem) > 0
    assert plan.makespan_s < 0.95 * alone.makespan_s
    assert plan.gap < 0.03


def without_groups(problem: Problem) -> Problem:
    jobs = (replace(job, options=tuple(o for o in job.options if not o.jobs)) for job in problem.jobs)
    return replace(problem, jobs=tuple(jobs))


@pytest.mark.parametrize("objective", ["makespan", pytest.param("weighted", marks=pytest.mark.full), "cost"])
def test_no_division_beats_the_bound_and_the_best_is_found(objective):
    problem = draw("lora-4x2", seed=3)
    problem = replace(problem, nodes=tuple(replace(node, price=1.0) for node in problem.nodes))
    bound = preemptive_bound(problem)
    assert certified_bound(bound.certificate, problem) == pytest.approx(bound.seconds)
    best = float("inf")
    for division in divisions(problem):
        contracted = Contraction(problem).of(division)
        assert bound.seconds <= preemptive_bound(contracted.problem).seconds * (1 + 1e-9)
        best = min(best, exhaustive(contracted.problem, objective))
    plan = solve(problem, objective=objective, preemption="never")
    assert verify(plan, problem) == []
    value, value_bound = (
        (plan.makespan_s, plan.lower_bound_s) if objective == "makespan" else (plan.value, plan.value_bound)
    )
    assert value_bound <= best * (1 + 1e-9)
    assert value == pytest.approx(best, rel=1e-3)


def exhaustive(problem: Problem, objective: str) -> float:
    """The best value over all orders of jobs and all their options."""
    ways = (
        list(zip(order, options, strict=True))
        for order in permutations(job.id for job in problem.jobs)
        for options in product(*(useful_options(problem.job(name)) for name in order))
    )
    plans = (Plan(problem.name, schedule(problem, choices)) for choices in ways)
    return min(objective_by_name(objective).value(plan, problem) for plan in plans)


def divisions(problem: Problem):
    """Yields every way to divide the jobs into groups that options can train."""
    groups = {frozenset((job.id, *o.jobs)) for job in problem.jobs for o in job.options if o.jobs}
    for count in range(3):
        for chosen in combinations(sorted(groups, key=sorted), count):
            if sum(map(len, chosen)) == len(frozenset().union(*chosen)):
                grouped = frozenset().union(*chosen)
                yield [*chosen, *(frozenset((job.id,)) for job in problem.jobs if job.id not in grouped)]


def test_without_preemption_the_milp_bounds_groups_too():
    problem = adapters(15.0)
    assert rigid_bound(problem, work_s=10.0)[0] == pytest.approx(15.0, rel=1e-4)
    plan = solve(problem, preemption="never")
    assert plan.makespan_s == pytest.approx(15.0)


def test_any_cover_prices_prove_a_bound():
    problem = adapters(11.0)
    fair = Certificate({1: 1.0}, cover_prices=dict.fromkeys("abcd", 5.5))
    assert certified_bound(fair, problem) == pytest.approx(11.0)
    for prices in ({"a": 1.0}, {"a": 100.0, "b": 1.0}, dict.fromkeys("abcd", 1e6), {}):
        assert certified_bound(replace(fair, cover_prices=prices), problem) <= 11.0 * (1 + 1e-12)
    assert certified_bound(Certificate(cover_prices={"a": 1.0}), problem) == 0.0
    with pytest.raises(ValueError, match="negative"):
        certified_bound(replace(fair, cover_prices={"a": -1.0}), problem)


GROUP = Segment("a", 1, 0.0, 11.0, 1.0, 0.0, (("n0", (0,)),))
OTHER = Segment("c", 1, 0.0, 11.0, 1.0, 0.0, (("n0", (1,)),))


@pytest.mark.parametrize(
    ("segments", "says"),
    [
        ((GROUP, OTHER), None),
        ((GROUP,), "job d: work 0.000000000 of 1"),
        ((GROUP, OTHER, Segment("b", 0, 11.0, 22.0, 1.0, 1.0, (("n0", (0,)),))), "job b: work 2.000000000 of 1"),
        ((GROUP, Segment("b", 0, 0.0, 10.0, 1.0, 0.0, (("n0", (1,)),))), "job b: its segments overlap"),
        (
            (
                replace(GROUP, end_s=5.5, work=0.5),
                OTHER,
                Segment("a", 0, 5.5, 11.5, 0.5, 1.0, (("n0", (0,)),)),
                Segment("b", 0, 11.5, 16.5, 0.5, 0.0, (("n0", (0,)),)),
            ),
            "job b: switches at 11.5 but pays 0.0 of 1.0",
        ),
    ],
)
def test_every_job_is_done_once(segments, says):
    faults = verify(Plan("adapters", segments), adapters(11.0))
    assert faults == [] if says is None else says in "\n".join(faults)


def test_groups_keep_the_terms_of_their_jobs():
    problem = adapters(11.0)
    a, b, c, d = problem.jobs
    jobs = (replace(a, release_s=3.0), replace(b, weight=4.0), replace(c, after=("b",)), replace(d, deadline_s=40.0))
    problem = replace(problem, jobs=jobs)
    contracted = Contraction(problem).of([frozenset("ab"), frozenset("cd")])
    ab, cd = contracted.problem.jobs
    assert (ab.release_s, ab.weight, ab.after) == (3.0, 5.0, ())
    assert (cd.after, cd.deadline_s) == (("a",), 40.0)
    assert verify(solve(problem), problem) == []


def test_groups_that_would_wait_for_each_other_are_not_formed():
    problem = adapters(11.0)
    a, b, c, d = problem.jobs
    problem = replace(problem, jobs=(a, replace(b, after=("c",)), c, replace(d, after=("a",))))
    assert Contraction(problem).of([frozenset("ab"), frozenset("cd")]) is None
    assert verify(solve(problem), problem) == []


def test_what_is_pinned_stays_together():
    problem = adapters(30.0)
    a, b, c, d = problem.jobs
    running = CurrentRun(1, (("n0", (0,)),), pinned_until_s=5.0)
    problem = replace(problem, jobs=(replace(a, running=running), replace(b, started=True), c, d))
    contracted = Contraction(problem).of([frozenset("ab"), frozenset("c"), frozenset("d")])
    assert contracted.problem.jobs[0].running == replace(running, option=0)
    alone = Plan("adapters", tuple(Segment(x, 0, 0, 10.0, 1.0, 0.0, (("n0", (i,)),)) for i, x in enumerate("ab")))
    assert "job a: is pinned" in "\n".join(verify(alone, problem))


@pytest.mark.parametrize("option", [0, 1])
def test_what_a_running_group_carries_has_started(option):
    a, *others = adapters(11.0).jobs
    options = a.options if option else a.options[::-1]
    assert len(a.options) == 2 and options[option].jobs
    running = replace(a, options=options, running=CurrentRun(option, (("n0", (0,)),)))
    with pytest.raises(ProblemError, match="job a, running: its group carries b, which is not `started`"):
        Problem("p", (PlanningNode("n0", 2),), (running, *others))
    elsewhere = replace(others[0], running=CurrentRun(0, (("n0", (1,)),)))
    with pytest.raises(ProblemError, match="its group carries b, which is declared to run on its own"):
        Problem("p", (PlanningNode("n0", 2),), (running, elsewhere, *others[1:]))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"jobs": ("ghost",)}, "jobs names 'ghost'"),
        ({"jobs": ("a",)}, "names its own job 'a'"),
        ({"jobs": ("b", "b")}, "names 'b' 2 times"),
        ({"jobs": (3,)}, "jobs names 3"),
    ],
)
def test_wrong_groups_are_named(change, says):
    problem = adapters(11.0)
    a = problem.jobs[0]
    with pytest.raises(ProblemError, match=says):
        replace(problem, jobs=(replace(a, options=(a.options[0], replace(a.options[1], **change))), *problem.jobs[1:]))


def test_jobs_of_a_group_may_not_wait_for_each_other_and_each_can_run_alone():
    problem = adapters(11.0)
    a, b, c, d = problem.jobs
    with pytest.raises(ProblemError, match="contains both b and a, which it waits for"):
        replace(problem, jobs=(a, replace(b, after=("a",)), c, d))
    with pytest.raises(ProblemError, match="job a: every option carries further jobs"):
        replace(problem, jobs=(replace(a, options=a.options[1:]), b, c, d))

"""Entry points of planning: `solve(problem)` returns the best plan found and a lower bound.

`checked_plan` has every plan checked by the independent verifier. A plan is reused for a problem that differs slightly,
such as by the time left, so that no second search can end with a worse plan than the first.
"""

from dataclasses import replace
from functools import partial

from ringmaster.errors import ProblemError
from ringmaster.tasks.planning.bounds.bounds import preemptive_bound
from ringmaster.tasks.planning.objectives import SearchLimits, objective_by_name, objective_names
from ringmaster.tasks.planning.plan_search import SAME, PlanSearch, Preemption
from ringmaster.tasks.planning.plans.plan import Plan
from ringmaster.tasks.planning.plans.retiming import retimed
from ringmaster.tasks.planning.plans.verify import verify
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.work import TIME_LIMIT_S, WORK_S, WorkBudget


def solve(
    problem: Problem,
    *,
    work: WorkBudget | None = None,
    work_s: float = WORK_S,
    time_limit_s: float = TIME_LIMIT_S,
    seed: int = 0,
    preemption: Preemption = "auto",
    objective: str = "makespan",
    least_segment_switches: float = 5.0,
    enough: float = 0.0,
) -> Plan:
    """Returns the best plan found for a problem, never worse than any of `list_scheduling.BASELINES`.

    Equal arguments give equal plans, unless the time limit ends the search.

    work: the budget that the work is charged to; by default one of `work_s` and `time_limit_s`.
    work_s: the work that the search may do, in seconds of a quiet machine with two cores. On a busy machine, it takes
        longer and finds the same plan.
    time_limit_s: seconds of the wall after which the best plan so far is returned, with its gap. The compilation of
        kernels does not count. The work is never more than the time limit.
    preemption: "never" runs each job in one segment, "always" plans with switches, "auto" takes the better of the two.
    objective: "makespan" minimizes the end of the last job, "weighted" the sum of weight x end over all jobs, "cost"
        the price of the devices, and others are registered by entry points (`objectives`). Meeting
        deadlines takes precedence over every objective.
    least_segment_switches: the minimum length of a segment of a job that has several, in switch costs.
    enough: the search stops when the plan is above its bound by at most this share of the bound.

    Raises ValueError for an unknown preemption or objective or a negative minimum length, and ProblemError where
    deadlines or budgets cannot be met.
    """
    work = work or WorkBudget.of(work_s, time_limit_s=time_limit_s)
    if preemption not in ("auto", "never", "always"):
        raise ValueError(f"preemption is auto, never or always, not {preemption!r}")
    chosen_objective = objective_by_name(objective)
    if not least_segment_switches >= 0:
        raise ValueError(f"least_segment_switches must be a number >= 0, not {least_segment_switches!r}")
    if problem.budgets and not chosen_objective.keeps_budgets:
        keeping = (name for name in objective_names() if objective_by_name(name).keeps_budgets)
        raise ProblemError(
            [f"problem: has budgets, which {objective} does not keep. To fix: choose one of {', '.join(keeping)}"]
        )
    if problem.is_fused:
        from ringmaster.tasks.planning.divisions import FusedSearch

        search = FusedSearch(
            problem,
            partial(
                solve,
                seed=seed,
                preemption=preemption,
                objective=objective,
                least_segment_switches=least_segment_switches,
                enough=enough,
            ),
            work=work,
            preemption=preemption,
            objective=chosen_objective,
        )
        search.run()
        return search.proved()
    limits = SearchLimits(
        work=work,
        seed=seed,
        preemption=preemption,
        least_segment_s=least_segment_switches * problem.switch_cost_s,
        enough=enough,
    )
    if (plan := chosen_objective.search(problem, limits)) is not None:
        return plan
    return PlanSearch(
        problem,
        work=work,
        seed=seed,
        preemption=preemption,
        objective=chosen_objective,
        least_segment_s=least_segment_switches * problem.switch_cost_s,
        enough=enough,
    ).run()


def checked_plan(
    problem: Problem, *, work_s: float, seed: int, objective: str = "makespan", start: Plan | None = None
) -> Plan:
    """Solves the problem and checks the plan with the independent verifier. Raises ProblemError as `solve` does.

    start: a plan of a slightly different problem, which is reused if it is as good for this one.
    """
    plan = None if start is None else reuse_plan(start, problem, objective=objective)
    if plan is None:
        plan = solve(problem, work_s=work_s, seed=seed, objective=objective)
    return verified(plan, problem)


def reuse_plan(start: Plan, problem: Problem, *, objective: str) -> Plan | None:
    """Returns the plan with the best times for this problem, and with the problem's bound.

    Returns None where the plan is invalid for the problem, misses a deadline, or is worse by more than `SAME` than
    before.
    """
    rows = {job.id: len(job.options) for job in problem.jobs}
    names = {segment.job for segment in start.segments}
    if names != rows.keys() or any(segment.option >= rows[segment.job] for segment in start.segments):
        return None
    if not {name for s in start.segments for name, _ in s.devices} <= {node.id for node in problem.nodes}:
        return None
    chosen_objective = objective_by_name(objective)
    if (segments := retimed(problem, start.segments, objective=chosen_objective)) is None:
        return None
    plan = Plan(problem.name, segments, method=start.method, seconds=start.seconds)
    if verify(plan, problem):
        return None
    if chosen_objective.value(plan, problem) > (start.makespan_s if start.value is None else start.value) * (1 + SAME):
        return None
    return bounded(plan, problem, objective=objective)


def bounded(plan: Plan, problem: Problem, *, objective: str) -> Plan:
    """Returns a valid plan of the problem with the problem's own bound, value and certificate."""
    bound = preemptive_bound(problem)
    proved = replace(
        plan,
        lower_bound_s=min(bound.seconds, plan.makespan_s),
        certificate=bound.certificate,
        proof=bound.proof,
    )
    return objective_by_name(objective).valued(proved, problem, bound)


def verified(plan: Plan, problem: Problem) -> Plan:
    """Returns a plan of the problem that the independent verifier accepts."""
    faults = verify(plan, problem)
    assert not faults, f"the planner made an invalid plan of {problem.name}: {'; '.join(faults)}"
    return plan

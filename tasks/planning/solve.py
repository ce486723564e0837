"""Entry point of planning: `solve(problem)` returns the best plan found and a lower bound."""

from functools import partial

from ringmaster.tasks.planning.objectives import registry
from ringmaster.tasks.planning.plans.plan import Plan
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.search import PlanSearch, Preemption


def solve(
    problem: Problem,
    *,
    time_limit_s: float = 30.0,
    seed: int = 0,
    preemption: Preemption = "auto",
    objective: str = "makespan",
    least_segment_switches: float = 5.0,
    enough: float = 0.0,
) -> Plan:
    """Returns the best plan found for a problem, never worse than any of `baselines.BASELINES`.

    Equal arguments give equal plans: counts of iterations limit the search, and `time_limit_s` is only an outer guard.
    When the time limit is reached, the best plan so far is returned with its gap. The time limit does not count the
    compilation of kernels.

    preemption: "never" runs each job in one segment, "always" plans with switches, "auto" takes the better of the two.
    objective: "makespan" minimizes the end of the last job, "weighted" the sum of weight x end over all jobs, "cost"
        the price of the devices, and others are registered by entry points (`objectives/registry.py`). Meeting
        deadlines takes precedence over every objective.
    least_segment_switches: the minimum length of a segment of a job that has several, in switch costs.
    enough: the search stops when the plan is above its bound by at most this share of the bound.

    Raises ValueError for an unknown preemption or objective or a negative minimum length, and ProblemError where
    deadlines cannot be met.
    """
    if preemption not in ("auto", "never", "always"):
        raise ValueError(f"preemption is auto, never or always, not {preemption!r}")
    minimised = registry.objective(objective)
    if not least_segment_switches >= 0:
        raise ValueError(f"least_segment_switches must be a number >= 0, not {least_segment_switches!r}")
    if problem.is_fused:
        from ringmaster.tasks.planning.groups.fused import solve_fused

        return solve_fused(
            problem,
            partial(
                solve,
                seed=seed,
                preemption=preemption,
                objective=objective,
                least_segment_switches=least_segment_switches,
                enough=enough,
            ),
            time_limit_s=time_limit_s,
            preemption=preemption,
            objective=minimised,
        )
    return PlanSearch(
        problem,
        time_limit_s=time_limit_s,
        seed=seed,
        preemption=preemption,
        objective=minimised,
        least_segment_s=least_segment_switches * problem.switch_cost_s,
        enough=enough,
    ).run()

"""The one entry of planning: `solve(problem)` gives the best plan found, with a bound that says how good it
is."""

from functools import partial

from ringmaster.tasks.planning.plan import Plan
from ringmaster.tasks.planning.problem import Problem
from ringmaster.tasks.planning.search import Objective, Preemption, Search


def solve(
    problem: Problem,
    *,
    time_limit_s: float = 30.0,
    seed: int = 0,
    preemption: Preemption = "auto",
    objective: Objective = "makespan",
    least_segment_switches: float = 5.0,
    enough: float = 0.0,
) -> Plan:
    """The best plan found for a problem, never worse than any of `baselines.BASELINES`.

    Equal arguments give equal plans: the work is bounded by counts of iterations, and `time_limit_s` is only
    the outer guard; once it is reached, the best plan so far is returned with its gap. Compiling is not counted.
    preemption: "never" keeps each job in one segment, "always" plans with switches, "auto" takes the better
    of the two.
    least_segment_switches: no segment of a job that has several is planned to be shorter, in switch costs.
    objective: the last end; or the sum of weight x end of all jobs; or what the devices cost. Deadlines come first.
    enough: a share of its bound by which a plan may be above that to be searched no further.
    Raises ValueError for an unknown preemption or objective or a negative length, and ProblemError where
    deadlines cannot be met.
    """
    if preemption not in ("auto", "never", "always"):
        raise ValueError(f"preemption is auto, never or always, not {preemption!r}")
    if objective not in ("makespan", "weighted", "cost"):
        raise ValueError(f"objective is makespan, weighted or cost, not {objective!r}")
    if not least_segment_switches >= 0:
        raise ValueError(f"least_segment_switches must be a number >= 0, not {least_segment_switches!r}")
    if problem.is_fused:
        from ringmaster.tasks.planning.fused import solve_fused

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
            objective=objective,
        )
    return Search(
        problem,
        time_limit_s=time_limit_s,
        seed=seed,
        preemption=preemption,
        objective=objective,
        least_segment_s=least_segment_switches * problem.switch_cost_s,
        enough=enough,
    ).run()

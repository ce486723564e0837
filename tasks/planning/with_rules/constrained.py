"""Plans, preemptive or not, for problems with constraints that the compiled configuration LP does not model."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from ringmaster.tasks.planning.objectives.objective import Objective
from ringmaster.tasks.planning.plans.plan import Plan, Segment
from ringmaster.tasks.planning.plans.retiming import retimed, with_fewer
from ringmaster.tasks.planning.problems.problem import Problem

WORTH = 2e-4  # minimum gain of a segment, as a share of the objective


def plan_constrained(
    problem: Problem,
    best: Plan,
    *,
    bound_s: float,
    objective: Objective,
    preemptive: bool,
    least_s: float,
    seed: int,
    is_over: Callable[[], bool],
    placements: int,
) -> Plan:
    """Returns the best of a plan and those that list searches find from it.

    The lists first have one piece per job, then several if `preemptive`.

    least_s: minimum length of a segment of a job that has several.
    placements: limit of the placements of pieces on nodes, in each search.
    """
    from ringmaster.tasks.planning.with_rules.pieces import PieceSearch

    search = PieceSearch.of(problem, objective, bound_s)
    enough = 1.0 + 1e-6 if objective.only_last_end else 0.0
    for pieces in (False, True) if preemptive else (False,):
        if is_over():
            break
        found = search.searched(
            best.segments,
            least_s=least_s,
            enough=enough,
            preemptive=pieces,
            seed=seed,
            is_over=is_over,
            placements=placements,
        )
        method = "pieces" if pieces else "list annealing"
        plans = [exactly(problem, segments, objective=objective, least_s=least_s) for segments in found]
        best = min(
            [best, *(replace(best, segments=s, method=method) for s in plans if s)],
            key=lambda p: objective.rank(p, problem),
        )
    return best


def exactly(
    problem: Problem, segments: Sequence[Segment], *, objective: Objective, least_s: float
) -> tuple[Segment, ...]:
    """Returns a plan with the best times that its structure allows, without segments that gain next to nothing.

    Returns () where no times make it a valid plan.
    """
    found = retimed(problem, segments, objective=objective, least_s=least_s)
    found = found or retimed(problem, segments, objective=objective)
    if found is None:
        return ()
    return with_fewer(problem, found, objective=objective, least_s=least_s, worth=WORTH)

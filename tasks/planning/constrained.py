"""Plans for problems with constraints that the compiled configuration LP does not know, preemptive ones among them."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from ringmaster.tasks.planning.local_search import rank
from ringmaster.tasks.planning.plan import Plan, Segment
from ringmaster.tasks.planning.problem import Problem
from ringmaster.tasks.planning.retiming import retimed, with_fewer

WORTH = 2e-4  # of the objective: what a segment must gain to be kept


def plan_constrained(
    problem: Problem,
    best: Plan,
    *,
    bound_s: float,
    objective: str,
    preemptive: bool,
    least_s: float,
    seed: int,
    is_over: Callable[[], bool],
) -> Plan:
    """The best of a plan and those that searches over lists find from it: first one piece a job, then several.

    least_s: length of any segment of a job that has several.
    """
    from ringmaster.tasks.planning.pieces import PieceSearch

    search = PieceSearch.of(problem, bound_s)
    enough = 1.0 + 1e-6 if objective == "makespan" else 0.0
    for pieces in (False, True) if preemptive else (False,):
        if is_over():
            break
        found = search.searched(
            best.segments,
            objective=objective,
            least_s=least_s,
            enough=enough,
            preemptive=pieces,
            seed=seed,
            is_over=is_over,
        )
        method = "pieces" if pieces else "list annealing"
        plans = [exactly(problem, segments, objective=objective, least_s=least_s) for segments in found]
        best = min(
            [best, *(replace(best, segments=s, method=method) for s in plans if s)],
            key=lambda p: rank(p, problem, objective),
        )
    return best


def exactly(problem: Problem, segments: Sequence[Segment], *, objective: str, least_s: float) -> tuple[Segment, ...]:
    """A plan with the best times that its structure allows, and without segments that gain next to nothing; () where
    no times make it a plan."""
    found = retimed(problem, segments, objective=objective, least_s=least_s)
    found = found or retimed(problem, segments, objective=objective)
    if found is None:
        return ()
    return with_fewer(problem, found, objective=objective, least_s=least_s, worth=WORTH)

"""Planning by prices that change over time: the bound with its certificate, and the better of two searches."""

import math
import time
from collections.abc import Iterator
from dataclasses import replace

from ringmaster.errors import NoRoomError, ProblemError
from ringmaster.features.tariffs.tariff_arrays import TariffArrays
from ringmaster.features.tariffs.tariff_bound import TariffBound, TariffCertificate, TariffPrices
from ringmaster.features.tariffs.tariff_program import TariffProgram
from ringmaster.features.tariffs.tariff_search import TariffSearch
from ringmaster.features.tariffs.tariff_values import Factors, constant_rates
from ringmaster.tasks.planning.bounds.bounds import Bound, ValueBound, conflicts, preemptive_bound, unmet
from ringmaster.tasks.planning.objectives import Objective, SearchLimits, lateness_s
from ringmaster.tasks.planning.plans.plan import Certificate, Plan, Segment
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.solve import solve
from ringmaster.tasks.planning.work import WorkBudget

PER_COLUMN_S = 4e-5  # work of a linear program, about
SHARE_OF_CONSTANT = 0.15  # of the work, for the plan that ignores how prices change
SHARE_OF_PROOF = 0.4  # of the work, for the bound
SAME = 1e-6


class TariffProof:
    """Finds the certificate of the best bound: prices of linear programs, for intervals of the last end.

    The interval that has the least bound gets a linear program of its own until it is another one's turn that has one,
    or the work is done.

    bound_s: before which no plan ends.
    """

    def __init__(self, problem: Problem, factors: Factors, *, bound_s: float, work: WorkBudget | None = None) -> None:
        self.problem, self.factors, self.bound_s = problem, factors, bound_s
        self.work = work or WorkBudget()
        self.bound = TariffBound(problem, factors)
        none = TariffPrices(slots=({},) * len(self.bound.points_s))
        self.prices = [none]
        if factors.end:
            self.ends = list(self.bound.ends_s)
            self.starts = list(self.bound.points_s)
        else:
            self.ends, self.starts = [math.inf], [0.0]
        self.last_ends_s = [max(start_s, bound_s) for start_s in self.starts]  # of optima of the linear programs
        self.least = [-math.inf] * len(self.ends)
        self.index = [0] * len(self.ends)
        self.is_solved = [False] * len(self.ends)
        self.is_infeasible = False

    def run(self) -> None:
        """Solves linear programs until the bound is as high as they can prove, or the work is done."""
        self._evaluate(0)
        if self.factors.end:
            self._solve(None, replace(self.factors, end=0.0))
        while not self.is_infeasible:
            worst = self.worst
            if self.is_solved[worst] or (len(self.prices) > 1 and self.work.is_over()):
                return
            self.is_solved[worst] = True
            self._solve(worst if self.factors.end else None, self.factors)

    def _open(self) -> list[int]:
        """Returns the intervals in which the last job of a plan may end."""
        limits = enumerate(zip(self.starts, self.ends, strict=True))
        possible = [i for i, (a, b) in limits if self.bound.is_possible(a, b, bound_s=self.bound_s)]
        return possible or [len(self.ends) - 1]

    def _solve(self, last: int | None, factors: Factors) -> None:
        program = TariffProgram(self.bound, last=last, factors=factors)
        self.work.charge(PER_COLUMN_S * len(program.lp.columns))
        prices = program.solve()
        if prices is None:
            # Jobs that share columns may have options that the one has not that stands for them.
            self.is_infeasible = last is None and self.bound.classes == self.problem.classes
            return
        self.prices.append(self._lasting(prices))
        if last is not None:
            self.last_ends_s[last] = program.end_s
        self._evaluate(len(self.prices) - 1)

    def _lasting(self, prices: TariffPrices) -> TariffPrices:
        """Returns prices of which the last, endless window earns no more than the factor of the end."""
        earned = self.bound.lasting_worth(prices)
        if earned <= self.factors.end:
            return prices
        share, last = self.factors.end / earned * (1 - 1e-12), len(self.bound.points_s) - 1

        def scaled(row: tuple[float, ...]) -> tuple[float, ...]:
            return (*row[:last], row[last] * share)

        slots = {kind: {slot: w * share for slot, w in of.items()} for kind, of in prices.slots[last].items()}
        return replace(
            prices,
            slots=(*prices.slots[:last], slots),
            jobs={job: scaled(row) for job, row in prices.jobs.items()},
            quotas={group: scaled(row) for group, row in prices.quotas.items()},
        )

    def _evaluate(self, number: int) -> None:
        for i in self._open():
            start_s = max(self.starts[i], self.bound_s)
            least = self.bound.between(self.prices[number], start_s, min(self.ends[i], self.bound.latest_end_s))
            if least > self.least[i]:
                self.least[i], self.index[i] = least, number

    @property
    def value(self) -> float:
        """The bound on the value of any plan."""
        return max(0.0, min((self.least[i] for i in self._open()), default=0.0))

    @property
    def worst(self) -> int:
        """The interval with the least bound."""
        return min(self._open(), key=lambda i: self.least[i])

    def certificate(self) -> TariffCertificate:
        """Returns the certificate of the bound, with the prices that it uses."""
        used = sorted({self.index[i] for i in self._open()})
        place = {number: i for i, number in enumerate(used)}
        intervals: list[tuple[float, int]] = []
        for end_s, number in zip(self.ends, self.index, strict=True):
            index = place.get(number, 0)
            if intervals and intervals[-1][1] == index and not self.factors.end:
                intervals.pop()
            intervals.append((end_s, index))
        prices = tuple(self.prices[number] for number in used)
        return TariffCertificate(points_s=self.bound.points_s, prices=prices, intervals=tuple(intervals))

    def value_bound(self) -> ValueBound:
        """Returns the bound and its certificate as `verify` recomputes them."""
        proof = self.certificate()
        value = self.bound.proved(proof, bound_s=self.bound_s)
        return ValueBound(value, Certificate(of_objective=proof.to_json()))


def plan_by_tariffs(problem: Problem, objective: Objective, factors: Factors, limits: SearchLimits) -> Plan:
    """Returns the best plan found, with its bounds.

    The plan is not worse than one that ignores how prices change. Raises ProblemError where deadlines or budgets cannot
    be kept, with the proof where there is one.
    """
    began_s = time.monotonic()
    bound = preemptive_bound(problem)
    has_deadlines = any(job.deadline_s is not None for job in problem.jobs)
    if (has_deadlines or math.isinf(bound.seconds)) and (proved := list(conflicts(problem))):
        raise ProblemError(proved)
    if faults := list(_budget_conflicts(problem, bound)):
        raise ProblemError(faults)
    with limits.work.part(SHARE_OF_PROOF) as work:
        proof = TariffProof(problem, factors, bound_s=bound.seconds, work=work)
        proof.run()
    if proof.is_infeasible and (faults := list(_joint_conflict(problem, bound))):
        raise ProblemError(faults)
    best, proved_s = proof.value_bound(), time.monotonic()
    constant = _plan_by_constant_prices(problem, factors, limits)
    segments = _searched(problem, factors, proof, constant, limits)
    searched = Plan(problem.name, segments, method="insertion by tariffs") if segments else None
    plans = [plan for plan in (searched, constant) if plan is not None]
    if not plans:
        raise ProblemError(["no plan was found that meets all deadlines on these nodes. To fix: give later deadlines"])
    plan = min(plans, key=lambda each: (*_faultiness(each, problem, objective), objective.value(each, problem)))
    if lateness_s(plan, problem) > SAME * plan.makespan_s:
        raise ProblemError([unmet(plan, problem)])
    if faults := list(objective.faults(plan, problem)):
        text = "no plan was found that takes less, and none is proved to be impossible"
        raise ProblemError([f"{fault}; {text}. To fix: raise it, or give later deadlines" for fault in faults])
    seconds = {"bounds": round(proved_s - began_s, 3), "local search": round(time.monotonic() - proved_s, 3)}
    plan = objective.valued(replace(plan, seconds=seconds), problem, bound, best=best)
    return replace(
        plan,
        lower_bound_s=min(bound.seconds, plan.makespan_s),
        certificate=bound.certificate,
        proof=bound.proof,
        solver_bound_s=None,
        solver="",
    )


def _faultiness(plan: Plan, problem: Problem, objective: Objective) -> tuple[float, int]:
    late_s = lateness_s(plan, problem)
    return late_s if late_s > SAME * plan.makespan_s else 0.0, len(list(objective.faults(plan, problem)))


def _budget_conflicts(problem: Problem, bound: Bound) -> Iterator[str]:
    """Yields a message for each budget of which any plan takes more."""
    free = replace(problem, budgets={})
    for name, budget in problem.budgets.items():
        proof = TariffProof(free, Factors(**{name: 1.0}), bound_s=bound.seconds)
        proof.run()
        if proof.value > budget * (1 + SAME):
            yield (
                f"budget of {name}: no plan takes less than {proof.value:.6g}, which is {proof.value - budget:.6g} "
                f"more than {budget:.6g}. To fix: raise it, or give later deadlines"
            )


def _joint_conflict(problem: Problem, bound: Bound) -> Iterator[str]:
    """Yields a message where a sum of measures proves that no plan keeps all budgets, though each alone can be kept.

    The weights are dual prices of the program that exceeds all budgets by the least share.
    """
    prices = TariffProgram(TariffBound(problem, Factors()), last=None, factors=Factors(), is_elastic=True).solve()
    weights = {} if prices is None else {name: float(f"{price:.6g}") for name, price in prices.budgets.items()}
    allowed = math.fsum(weight * problem.budgets[name] for name, weight in weights.items())
    proof = TariffProof(replace(problem, budgets={}), Factors(**weights), bound_s=bound.seconds)
    proof.run()
    if weights and proof.value > allowed * (1 + SAME):
        sum_of = " + ".join(f"{weight:g} {name}" for name, weight in weights.items())
        yield (
            f"budgets: {sum_of} is at least {proof.value:.6g} in any plan, and {allowed:.6g} within all budgets. "
            f"To fix: raise them by {proof.value / allowed - 1:.1%} or more, or give later deadlines"
        )


def _plan_by_constant_prices(problem: Problem, factors: Factors, limits: SearchLimits) -> Plan | None:
    """Returns a plan at the mean prices of the nodes; None where none is found."""
    nodes = tuple(
        replace(
            node,
            price=factors.rate(*constant_rates(node, problem)),
            price_steps=(),
            energy_price_steps=(),
            carbon_steps=(),
        )
        for node in problem.nodes
    )
    jobs = tuple(replace(job, options=tuple(replace(o, power_w=None) for o in job.options)) for job in problem.jobs)
    plain = replace(problem, nodes=nodes, jobs=jobs, budgets={})
    try:
        with limits.work.part(SHARE_OF_CONSTANT) as work:
            return solve(
                plain,
                work=work,
                seed=limits.seed,
                preemption=limits.preemption,
                objective="makespan" if factors.end else "cost",
                least_segment_switches=limits.least_segment_s / problem.switch_cost_s if problem.switch_cost_s else 0.0,
                enough=limits.enough,
            )
    except (ProblemError, NoRoomError):
        return None


def _searched(
    problem: Problem, factors: Factors, proof: TariffProof, constant: Plan | None, limits: SearchLimits
) -> tuple[Segment, ...]:
    arrays = TariffArrays(
        problem,
        factors,
        prices=proof.prices[proof.index[proof.worst]],
        points_s=proof.bound.points_s,
        kinds=proof.bound.kinds,
        start=constant.segments if constant else (),
    )
    search = TariffSearch(
        arrays,
        factors,
        end_s=proof.last_ends_s[proof.worst],
        least_s=limits.least_segment_s,
        is_split=limits.preemption != "never",
        seed=limits.seed,
        work=limits.work,
    )
    return search.run(constant, enough=proof.value * (1 + max(limits.enough, 1e-4)))

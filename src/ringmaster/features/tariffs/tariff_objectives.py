"""Objectives of money, of emissions, and of their sum with the last end, under prices that change over time.

Without series, budgets and powers of options, the value of a plan is linear in the seconds for which it holds devices,
and the planner's own searches and bounds apply. Otherwise `solve` hands the problem to `plan_by_tariffs`.
"""

from abc import abstractmethod
from collections.abc import Iterator

from ringmaster.features.tariffs.tariff_bound import TariffBound, TariffCertificate, TariffPrices
from ringmaster.features.tariffs.tariff_values import Factors, constant_rates, measures_of
from ringmaster.tasks.planning.bounds.bounds import Bound, ValueBound
from ringmaster.tasks.planning.objectives import Coefficients, Objective, SearchLimits
from ringmaster.tasks.planning.plans.plan import Certificate, Plan
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.problems.series import SERIES

TOLERANCE = 1e-6  # share of a budget by which rounding may exceed it


class TariffObjective(Objective):
    """A sum of the last end, money and emissions, with factors of the problem."""

    keeps_budgets = True
    may_wait = True

    @abstractmethod
    def factors(self, problem: Problem) -> Factors:
        """Returns the factors of the three measures."""

    def is_linear(self, problem: Problem) -> bool:
        """Whether the value depends on nothing but the seconds for which each node's devices are held."""
        is_constant = all(len(getattr(node, name)) < 2 for node in problem.nodes for name in SERIES.values())
        has_energy = any(node.energy_price_steps or node.carbon_steps for node in problem.nodes)
        has_powers = any(option.power_w is not None for job in problem.jobs for option in job.options)
        return is_constant and not (has_energy and has_powers) and not problem.budgets and not self.factors(problem).end

    def coefficients(self, problem: Problem) -> Coefficients:
        """Returns the factor of the end, and the mean worth of each node's devices, which is exact if `is_linear`."""
        factors = self.factors(problem)
        prices = {node.id: factors.rate(*constant_rates(node, problem)) for node in problem.nodes}
        return Coefficients(
            latest={job.id: factors.end for job in problem.jobs} if factors.end else {},
            prices=prices if factors.cost or factors.emissions else {},
        )

    def value(self, plan: Plan, problem: Problem) -> float:
        """Returns the value of a plan."""
        if self.is_linear(problem):
            return super().value(plan, problem)
        return self.factors(problem).value(measures_of(plan, problem))

    def lower_bound(self, problem: Problem, bound: Bound) -> float:
        """Returns a value that no plan is below, without a solver: each job at its cheapest time and option."""
        if self.is_linear(problem):
            return super().lower_bound(problem, bound)
        tariffs = TariffBound(problem, self.factors(problem))
        prices = TariffPrices(slots=({},) * len(tariffs.points_s))
        return max(0.0, tariffs.between(prices, bound.seconds, tariffs.latest_end_s))

    def best_bound(self, problem: Problem, bound: Bound) -> ValueBound:
        """Returns the best lower bound on the value with its certificate."""
        if self.is_linear(problem):
            return super().best_bound(problem, bound)
        from ringmaster.features.tariffs.tariff_planner import TariffProof

        proof = TariffProof(problem, self.factors(problem), bound_s=bound.seconds)
        proof.run()
        return proof.value_bound()

    def certified_bound(self, certificate: Certificate | None, problem: Problem, *, bound_s: float) -> float:
        """Returns the lower bound on the value that a certificate proves, together with a bound on the last end.

        Raises ValueError where the certificate is not one of this objective.
        """
        if self.is_linear(problem) or certificate is None:
            return super().certified_bound(certificate, problem, bound_s=bound_s) if self.is_linear(problem) else 0.0
        proof = TariffCertificate.from_json(certificate.of_objective)
        tariffs = TariffBound(problem, self.factors(problem), points_s=proof.points_s)
        return tariffs.proved(proof, bound_s=bound_s)

    def faults(self, plan: Plan, problem: Problem) -> Iterator[str]:
        """Yields a fault for each budget that a plan exceeds."""
        if problem.budgets:
            measures = measures_of(plan, problem)
            for name, budget in problem.budgets.items():
                if measures.of(name) > budget * (1 + TOLERANCE):
                    yield f"budget of {name}: the plan takes {measures.of(name):.6g}, and may take {budget:.6g}"

    def search(self, problem: Problem, limits: SearchLimits) -> Plan | None:
        """Returns a plan by prices that change over time; None where the planner's own searches suffice."""
        if self.is_linear(problem):
            return None
        from ringmaster.features.tariffs.tariff_planner import plan_by_tariffs

        return plan_by_tariffs(problem, self, self.factors(problem), limits)


class Cost(TariffObjective):
    """The price of the devices for as long as jobs hold them, and of their energy."""

    name = "cost"

    def factors(self, problem: Problem) -> Factors:
        """Returns 1 for money."""
        return Factors(cost=1.0)


class Emissions(TariffObjective):
    """The grams of CO2 equivalents of the energy that devices draw while jobs hold them."""

    name = "emissions"

    def factors(self, problem: Problem) -> Factors:
        """Returns 1 for grams."""
        return Factors(emissions=1.0)


class TradeOffObjective(TariffObjective):
    """The sum of the last end, money and emissions, each times its factor in the problem (`Problem.factors`)."""

    name = "trade-off"

    def factors(self, problem: Problem) -> Factors:
        """Returns the factors of the problem; without any, 1 for money."""
        return Factors(**problem.factors) if problem.factors else Factors(cost=1.0)

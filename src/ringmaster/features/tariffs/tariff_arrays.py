"""A problem with prices that change over time as arrays, as the kernels of its search read them (`tariff_kernels`)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ringmaster.features.tariffs.tariff_bound import TariffPrices, useful_options
from ringmaster.features.tariffs.tariff_kernels import Rules
from ringmaster.features.tariffs.tariff_values import Factors, change_points, price_steps, watts
from ringmaster.tasks.planning.plans.plan import Segment
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.problems.problem_parts import Option, PlanningNode
from ringmaster.tasks.planning.problems.series import J_PER_KWH, MEASURES, value_at

Place = tuple[int, tuple[int, ...]]  # index of an option of the job, and of nodes


class TariffArrays:
    """A problem as arrays.

    prices: dual prices of the bound, on windows that begin at `points_s`; `kinds` are the names of the kinds of nodes
        there.
    start: segments whose places are among those of the problem, whatever their options; () for none.

    Attributes:
        index, node_index: the indices of jobs and of nodes by their ids.
        places: a job and a place of it, in the order of jobs. place_index: their indices.
        rules: what the kernels read, at the factors.
        plain, energy: the worth of a device-second and of one of its watts by kind and point, at the factors.
        by_measure: the same by the measure of a budget, each unit of which is worth 1.
    """

    def __init__(
        self,
        problem: Problem,
        factors: Factors,
        *,
        prices: TariffPrices,
        points_s: Sequence[float],
        kinds: Mapping[str, Sequence[PlanningNode]],
        start: Sequence[Segment],
    ) -> None:
        self.problem, self.prices = problem, prices
        self.index = {job.id: j for j, job in enumerate(problem.jobs)}
        self.node_index = {node.id: v for v, node in enumerate(problem.nodes)}
        self.places, self.place_index = self._all_places(start)
        self._kinds = kinds
        self._nodes = [nodes[0] for nodes in kinds.values()]
        self._points = sorted({0.0, *change_points(problem.nodes), *points_s})
        self.plain, self.energy = self._rates(factors)
        self.by_measure = {name: self._rates(Factors(**{name: 1.0})) for name in MEASURES if name in problem.budgets}
        self.rules = self._rules(points_s)

    def rules_at(self, factors: Factors) -> Rules:
        """Returns the rules at other factors."""
        plain, energy = self._rates(factors)
        return self.rules._replace(plain=plain, energy=energy)

    def place(self, segment: Segment) -> int:
        """Returns the index of the place of a segment."""
        return self.place_index[self.index[segment.job], (segment.option, self._nodes_of(segment.devices))]

    def _all_places(self, start: Sequence[Segment]) -> tuple[list[tuple[int, Place]], dict[tuple[int, Place], int]]:
        """Returns the places of all jobs, in the order of jobs, and their indices."""
        every: list[dict[Place, None]] = []
        for job in self.problem.jobs:
            places = dict.fromkeys((k, nodes) for k in useful_options(job) for nodes in self._node_sets(job.options[k]))
            if job.running is not None:
                places[job.running.option, self._nodes_of(job.running.devices)] = None
            every.append(places)
        for segment in start:
            every[self.index[segment.job]][segment.option, self._nodes_of(segment.devices)] = None
        flat = [(j, place) for j, places in enumerate(every) for place in places]
        return flat, {key: p for p, key in enumerate(flat)}

    def _nodes_of(self, devices: Sequence[tuple[str, Any]]) -> tuple[int, ...]:
        return tuple(sorted(self.node_index[name] for name, _ in devices))

    def _node_sets(self, option: Option) -> list[tuple[int, ...]]:
        """Returns sets of nodes for an option: neighbours in the order of nodes that fit it."""
        fit = [v for v, node in enumerate(self.problem.nodes) if option.runs_on(node)]
        return [tuple(fit[i : i + option.num_nodes]) for i in range(len(fit) - option.num_nodes + 1)]

    def _rules(self, points_s: Sequence[float]) -> Rules:
        problem, names, points, nodes = self.problem, list(self._kinds), self._points, self._nodes
        kind_of = {node.id: i for i, name in enumerate(names) for node in self._kinds[name]}
        every = sorted({(j, k) for j, (k, _) in self.places})
        largest = max(node.num_devices for node in problem.nodes)
        scarce = np.zeros((len(names), len(points), largest + 1))
        windows = np.searchsorted(np.array(points_s), points, side="right") - 1
        for i, name in enumerate(names):
            for q, window in enumerate(windows):
                for slot, worth in self.prices.slots[window].get(name, {}).items():
                    if slot <= largest:
                        scarce[i, q, slot] = worth
        options = [problem.jobs[j].options[k] for j, k in every]
        jobs = [problem.jobs[j] for j, _ in every]
        again = [o.startup_s + problem.switch_cost_s for o in options]
        option_index = {key: i for i, key in enumerate(every)}
        width = max(len(place[1]) for _, place in self.places)
        groups = {group: i for i, group in enumerate(problem.limits)}
        return Rules(
            points=np.array(points),
            plain=self.plain,
            energy=self.energy,
            scarce=scarce,
            kind=np.array([kind_of[node.id] for node in problem.nodes]),
            size=np.array([node.num_devices for node in problem.nodes]),
            memory=np.array([_or_endless(node.host_memory_bytes) for node in problem.nodes]),
            until=np.array([_or_endless(node.available_until_s) for node in problem.nodes]),
            place_option=np.array([option_index[j, k] for j, (k, _) in self.places]),
            place_nodes=np.array([(*on, *[-1] * (width - len(on))) for _, (_, on) in self.places]),
            held=np.array([self._is_held(j, place) for j, place in self.places]),
            first_place=np.searchsorted([j for j, _ in self.places], np.arange(len(problem.jobs) + 1)),
            slot=np.array([o.slot for o in options]),
            devices=np.array([o.num_devices for o in options]),
            runtime=np.array([o.runtime_s for o in options]),
            head=np.array([b if job.started else o.startup_s for o, b, job in zip(options, again, jobs, strict=True)]),
            again=np.array(again),
            save=np.array([o.save_s for o in options]),
            evaluate=np.array([o.evaluate_s for o in options]),
            host_memory=np.array([float(o.host_memory_bytes) for o in options]),
            power=np.array([[watts(o, node) for node in nodes] for o in options]),
            group=np.array([groups.get(job.user, len(groups) + j) for j, job in enumerate(problem.jobs)]),
            limit=np.array([problem.limits.get(job.user, -1) for job in problem.jobs]),
        )

    def _rates(self, factors: Factors) -> tuple[Any, Any]:
        """Returns the worth of a device-second by kind and point, and of one of its watts."""
        nodes, points = self._nodes, self._points
        plain = [[factors.cost * value_at(price_steps(node), at) for at in points] for node in nodes]
        energy = [
            [factors.rate(value_at(node.energy_price_steps, at), value_at(node.carbon_steps, at)) for at in points]
            for node in nodes
        ]
        return np.array(plain), np.array(energy) / J_PER_KWH

    def _is_held(self, j: int, place: Place) -> bool:
        running = self.problem.jobs[j].running
        return running is not None and place == (running.option, self._nodes_of(running.devices))


def _or_endless(value: float | None) -> float:
    return math.inf if value is None else float(value)

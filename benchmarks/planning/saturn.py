"""Saturn's joint MILP, restated from the paper in PuLP and solved by HiGHS.

The model is that of Nagrecha & Kumar, "Saturn: Efficient Multi-Large-Model Deep Learning", VLDB 2024, section 4.

For job t, option s (G_s devices, R_s seconds), node n with devices g, all big-M constants as below:

    B[t,s]  binary: t runs under s        O[t,n]  binary: t runs on n       P[t,n,g]  binary: t uses device g of n
    I[t,n,g] >= 0: start of t there       A[t,u]  binary: t comes before u  C: makespan, minimised

With `published=False`, a known horizon bounds each constant to the least valid value. As published, every constant is
1e10, next to which a solver's tolerance of 1e-6 on a binary is 1e4 seconds: segments may overlap, which is why each
plan is checked.
"""

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import highspy
import pulp

from ringmaster.tasks.planning import Plan, Problem, Segment
from ringmaster.tasks.planning.bounds.job_costs import useful_options
from ringmaster.tasks.planning.plans.list_scheduling import current_practice, even_split, optimus_greedy

PUBLISHED_M = 1e10
MAX_ROWS = 600_000  # PuLP builds as many in half a minute


def saturn(problem: Problem, *, time_limit_s: float, published: bool = False) -> Plan | None:
    """Returns the model's plan, with its own starts and devices and unchecked, or None without one.

    published: with M = 1e10 throughout. Options that another one beats in both devices and seconds are left out.
    """
    model = _Model(problem, published=published)
    if model.num_rows() > MAX_ROWS:
        return None
    model.build()
    # HiGHS keeps its number of threads for the whole process and refuses another one.
    highspy.Highs.resetGlobalScheduler(True)
    model.problem.solve(pulp.HiGHS(msg=False, threads=2, timeLimit=time_limit_s))
    highspy.Highs.resetGlobalScheduler(True)
    if model.problem.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return None
    return model.plan()


class _Model:
    def __init__(self, problem: Problem, *, published: bool) -> None:
        self.of, self.nodes = problem, problem.nodes
        self.options = {job.id: [(k, job.options[k]) for k in useful_options(job)] for job in problem.jobs}
        rules = (current_practice, even_split, optimus_greedy)
        self.horizon_s = min(rule(problem).makespan_s for rule in rules)
        most = max(node.num_devices for node in problem.nodes)
        self.time_m = {  # starts are within the horizon, so that this constant suffices
            t: {k: PUBLISHED_M if published else self.horizon_s + option.runtime_s for k, option in options}
            for t, options in self.options.items()
        }
        self.count_m = PUBLISHED_M if published else float(most)
        self.gang_m = PUBLISHED_M if published else self.horizon_s * most
        self.start_max = None if published else self.horizon_s

    def num_rows(self) -> int:
        devices, options = self.of.num_devices, sum(map(len, self.options.values()))
        return devices * options * (2 * (len(self.options) - 1) + 3)

    def build(self) -> None:
        jobs = list(self.options)
        self.problem = pulp.LpProblem("saturn", pulp.LpMinimize)
        self.c = self._variable("C")
        self.b = {(t, k): self._binary(f"B_{i}_{k}") for i, t in enumerate(jobs) for k, _ in self.options[t]}
        self.o = {(t, n.id): self._binary(f"O_{i}_{m}") for i, t in enumerate(jobs) for m, n in enumerate(self.nodes)}
        spots = [(t, n.id, g) for t in jobs for n in self.nodes for g in range(n.num_devices)]
        self.p = {spot: self._binary(f"P_{i}") for i, spot in enumerate(spots)}
        self.i = {spot: self._variable(f"I_{i}", self.start_max) for i, spot in enumerate(spots)}
        self.a = {(t, u): self._binary(f"A_{i}") for i, (t, u) in enumerate(combinations(jobs, 2))}
        self.problem += self.c
        for family in (self._one_choice, self._makespan, self._gang_sizes, self._gang_starts, self._isolation):
            for constraint in family():
                self.problem += constraint

    def _one_choice(self) -> Iterator[Any]:
        """sum_s B[t,s] = 1 and sum_n O[t,n] = 1 for each job t."""
        for t, options in self.options.items():
            yield pulp.lpSum(self.b[t, k] for k, _ in options) == 1
            yield pulp.lpSum(self.o[t, node.id] for node in self.nodes) == 1

    def _makespan(self) -> Iterator[Any]:
        """C >= I[t,n,g] + R_s - M (1 - B[t,s])."""
        for (t, _node, _device), start in self.i.items():
            for k, option in self.options[t]:
                yield self.c >= start + option.runtime_s - self.time_m[t][k] * (1 - self.b[t, k])

    def _gang_sizes(self) -> Iterator[Any]:
        """sum_g P[t,n,g] = G_s under the chosen option s on the job's node, and 0 on any other."""
        for t, options in self.options.items():
            for node in self.nodes:
                used = pulp.lpSum(self.p[t, node.id, g] for g in range(node.num_devices))
                yield used <= self.count_m * self.o[t, node.id]
                for k, option in options:
                    off = self.count_m * (2 - self.b[t, k] - self.o[t, node.id])
                    yield used >= option.num_devices - off
                    yield used <= option.num_devices + off

    def _gang_starts(self) -> Iterator[Any]:
        """The devices of a gang start together: sum_g I[t,n,g] / G_s = I[t,n,g] where P, B and O choose it."""
        for t, options in self.options.items():
            for node in self.nodes:
                total = pulp.lpSum(self.i[t, node.id, g] for g in range(node.num_devices))
                for k, option in options:
                    for g in range(node.num_devices):
                        chosen = self.p[t, node.id, g] + self.b[t, k] + self.o[t, node.id]
                        off = self.gang_m * (3 - chosen)
                        yield total * (1 / option.num_devices) <= self.i[t, node.id, g] + off
                        yield total * (1 / option.num_devices) >= self.i[t, node.id, g] - off

    def _isolation(self) -> Iterator[Any]:
        """For two jobs on a device, I[u] >= I[t] + R_s - M (3 - P[t] - P[u] - B[t,s] + 1 - A[t,u]), or vice versa."""
        for (t, u), before in self.a.items():
            for node in self.nodes:
                for g in range(node.num_devices):
                    at_t, at_u = (t, node.id, g), (u, node.id, g)
                    apart = 2 - self.p[at_t] - self.p[at_u]
                    for k, option in self.options[t]:
                        off = self.time_m[t][k] * (apart + 1 - self.b[t, k] + 1 - before)
                        yield self.i[at_u] >= self.i[at_t] + option.runtime_s - off
                    for k, option in self.options[u]:
                        off = self.time_m[u][k] * (apart + 1 - self.b[u, k] + before)
                        yield self.i[at_t] >= self.i[at_u] + option.runtime_s - off

    def plan(self) -> Plan:
        """Returns one segment a job: the chosen option, the devices where P is 1, and the model's start time."""
        segments = []
        for t, options in self.options.items():
            k, option = max(options, key=lambda pair: self.b[t, pair[0]].value())
            spots = [(n, g) for (job, n, g), p in self.p.items() if job == t and p.value() > 0.5]
            start_s = max([0.0, *(self.i[t, n, g].value() for n, g in spots)])
            gang = tuple((node.id, ids) for node in self.nodes if (ids := tuple(g for n, g in spots if n == node.id)))
            segments.append(Segment(t, k, start_s, start_s + option.runtime_s, 1.0, 0.0, gang))
        return Plan(self.of.name, tuple(sorted(segments, key=lambda s: (s.start_s, s.job))))

    def _binary(self, name: str) -> Any:
        return self.problem.add_variable(name, cat="Binary")

    def _variable(self, name: str, upper: float | None = None) -> Any:
        return self.problem.add_variable(name, 0, upper)

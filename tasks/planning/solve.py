"""The one entry of planning: `solve(problem)` gives the best plan found, with a bound that says how good it
is."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

from tasks.planning.plan import Plan
from tasks.planning.problem import Problem

Preemption = Literal["auto", "never", "always"]
Objective = Literal["makespan"]

MAX_JOBS_OF_MILP = 12
WORTH_S = 20.0  # seconds that a longer search must be able to save: what compiling it takes on a fresh machine
CROWDED = 10  # jobs a node beyond which switches gain little, and annealing is given more
SAME = 1e-3  # makespans this close count as equal: the plan with fewer switches is preferred


def solve(
    problem: Problem,
    *,
    time_limit_s: float = 30.0,
    seed: int = 0,
    preemption: Preemption = "auto",
    objective: Objective = "makespan",
) -> Plan:
    """The best plan found for a problem, never worse than any of `baselines.BASELINES`.

    Equal arguments give equal plans: the work is bounded by counts of iterations, and `time_limit_s` is only
    the outer guard; once it is reached, the best plan so far is returned with its gap.
    preemption: "never" keeps each job in one segment, "always" plans with switches, "auto" takes the better
    of the two. Raises ValueError for an unknown preemption or objective.
    """
    if preemption not in ("auto", "never", "always"):
        raise ValueError(f"preemption is auto, never or always, not {preemption!r}")
    if objective != "makespan":
        raise ValueError(f"objective is makespan, not {objective!r}")
    return _Search(problem, time_limit_s, seed, preemption).run()


class _Search:
    """Stages from the cheapest to the dearest, each of which may better the best plan so far."""

    def __init__(self, problem: Problem, time_limit_s: float, seed: int, preemption: Preemption) -> None:
        self.problem, self.seed, self.preemption = problem, seed, preemption
        self.ends_at = time.monotonic() + time_limit_s
        self.seconds: dict[str, float] = {}

    def run(self) -> Plan:
        from tasks.planning.bounds import preemptive_bound, rigid_bound

        with self._stage("bounds"):
            self.bound = preemptive_bound(self.problem)
            self.rigid_s, self.relaxed = self.bound.seconds, None
            if self.preemption == "never" or len(self.problem.jobs) <= 100:
                rigid_s, self.relaxed = rigid_bound(self.problem, time_limit_s=min(5.0, self._left_s()))
                self.rigid_s = max(self.rigid_s, rigid_s)
        with self._stage("heuristics"):
            self.best = self._simple()
        if self._is_small():
            with self._stage("MILP"):
                self._milp()
        if self._is_worth_it(self.rigid_s):
            with self._stage("annealing"):
                self._annealing()
        if self.preemption != "never" and self._is_worth_it(self.bound.seconds):
            with self._stage("preemptive"):
                self._preemptive()
        return self._proved()

    def _left_s(self) -> float:
        return max(0.0, self.ends_at - time.monotonic())

    def _is_over(self) -> bool:
        return time.monotonic() > self.ends_at

    def _is_worth_it(self, bound_s: float) -> bool:
        """Whether a plan could still be better by more than it costs to look for it."""
        could_save_s = self.best.makespan_s - bound_s
        return could_save_s > WORTH_S and could_save_s > 1e-5 * bound_s and not self._is_over()

    def _is_small(self) -> bool:
        return len(self.problem.jobs) <= MAX_JOBS_OF_MILP and self.problem.num_devices <= 4

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - began, 3)

    def _take(self, plan: Plan) -> None:
        """Keeps the better of two plans: the shorter, or among equals the one with fewer switches."""
        least = min(plan.makespan_s, self.best.makespan_s)
        rank = [
            (candidate.makespan_s > least * (1 + SAME), candidate.num_switches, candidate.makespan_s)
            for candidate in (self.best, plan)
        ]
        if rank[1] < rank[0]:
            self.best = plan

    def _simple(self) -> Plan:
        from tasks.planning.baselines import BASELINES
        from tasks.planning.listing import schedule
        from tasks.planning.local_search import improve

        plans = [baseline(self.problem) for baseline in BASELINES]
        if self.relaxed:
            chosen = [(job, job.options[self.relaxed[job.id]].runtime_s) for job in self.problem.jobs]
            chosen.sort(key=lambda pair: (-pair[1], pair[0].id))
            choices = [(job.id, self.relaxed[job.id]) for job, _ in chosen]
            plans.append(Plan(self.problem.name, schedule(self.problem, choices), method="pattern MILP's options"))
        best = min(plans, key=lambda plan: plan.makespan_s)
        if self._is_small() or any(job.after for job in self.problem.jobs):
            best = improve(self.problem, best, bound_s=self.bound.seconds, seed=self.seed, is_over=self._is_over)
        return best

    def _milp(self) -> None:
        from tasks.planning.listing import schedule
        from tasks.planning.local_search import improve
        from tasks.planning.time_indexed import solve_time_indexed

        if self.best.makespan_s <= self.rigid_s * (1 + 1e-4):
            return
        found = solve_time_indexed(
            self.problem, horizon_s=self.best.makespan_s, time_limit_s=self._left_s(), seed=self.seed
        )
        if found:
            plan = Plan(self.problem.name, schedule(self.problem, found), method="time-indexed MILP")
            self._take(plan)
            self._take(improve(self.problem, plan, bound_s=self.bound.seconds, seed=self.seed, is_over=self._is_over))

    def _preemptive(self) -> None:
        from tasks.planning.preemptive import plan_preemptive

        if any(job.after for job in self.problem.jobs):
            return
        pattern_bound = self.bound
        with self._stage("work prices"):
            self._sharpen_bound()
        segments = plan_preemptive(self.problem, pattern_bound, seed=self.seed, is_over=self._is_over)
        if segments:
            self._take(Plan(self.problem.name, segments, method="configuration LP"))

    def _sharpen_bound(self) -> None:
        """Takes the bound by work prices where it proves more than the pattern LP's."""
        from tasks.planning.bounds import Bound
        from tasks.planning.preemptive import work_prices
        from tasks.planning.verify import certified_bound

        certificate = work_prices(self.problem, self.bound)
        if certificate and (proved_s := certified_bound(certificate, self.problem)) > self.bound.seconds * (1 + 1e-6):
            self.bound = Bound(proved_s, certificate, "work prices")
            self.rigid_s = max(self.rigid_s, proved_s)

    def _annealing(self) -> None:
        from tasks.planning.rigid import plan_rigid

        num_jobs = len(self.problem.jobs)
        if self.preemption == "never":
            num_searches, steps = 20, max(1_500_000, 60_000 * num_jobs)
        elif num_jobs > CROWDED * len(self.problem.nodes):
            num_searches, steps = 2, 3_000_000
        else:
            num_searches, steps = 2, 300_000
        segments = plan_rigid(
            self.problem,
            self.rigid_s,
            options=self.relaxed,
            num_searches=num_searches,
            steps=steps,
            seed=self.seed,
            is_over=self._is_over,
        )
        if segments:
            self._take(Plan(self.problem.name, segments, method="annealing"))

    def _proved(self) -> Plan:
        """The best plan with the bound for its kind, and what proves it."""
        if self.preemption == "never" and self.rigid_s > self.bound.seconds:
            return replace(
                self.best,
                lower_bound_s=min(self.rigid_s, self.best.makespan_s),
                proof="pattern MILP",
                seconds=self.seconds,
            )
        return replace(
            self.best,
            lower_bound_s=min(self.bound.seconds, self.best.makespan_s),
            certificate=self.bound.certificate,
            proof=self.bound.proof,
            seconds=self.seconds,
        )

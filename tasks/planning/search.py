"""Stages of planning, run by `solve` from the cheapest to the most expensive."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Literal

from ringmaster.tasks.planning.kernels.clock import clock
from ringmaster.tasks.planning.objectives.objective import Objective, lateness_s
from ringmaster.tasks.planning.plans.plan import Plan
from ringmaster.tasks.planning.problems.parts import ProblemError
from ringmaster.tasks.planning.problems.problem import Problem

Preemption = Literal["auto", "never", "always"]

MAX_JOBS_OF_MILP, MAX_DEVICES_OF_MILP = 12, 4
WORTH_S = 5.0  # seconds that a longer search must be able to save, since it takes some itself
CROWDED = 10  # jobs per node; above it, switches gain little and annealing gets more steps
FEW = 14  # jobs up to which annealing is short, since the exhaustive search continues from its plan
SAME = 1e-3  # relative difference of makespans that count as equal; the plan with fewer switches is preferred


class PlanSearch:
    """Runs the planning stages in turn; each stage may improve the best plan so far. Arguments are those of `solve`."""

    def __init__(
        self,
        problem: Problem,
        *,
        time_limit_s: float,
        seed: int,
        preemption: Preemption,
        objective: Objective,
        least_segment_s: float,
        enough: float,
    ) -> None:
        self.problem, self.seed, self.preemption, self.objective = problem, seed, preemption, objective
        self.least_segment_s, self.enough = least_segment_s, enough
        self.ends_at = clock() + time_limit_s
        self.seconds: dict[str, float] = {}

    def run(self) -> Plan:
        """Runs the stages and returns the best plan with its bound."""
        from ringmaster.tasks.planning.bounds.bounds import preemptive_bound, rigid_bound
        from ringmaster.tasks.planning.bounds.counting import COUNTING, counted_bound_s
        from ringmaster.tasks.planning.bounds.deadlines import conflicts
        from ringmaster.tasks.planning.problems.folding import is_foldable

        if self.preemption == "auto" and not self._may_split():
            self.preemption = "never"
        with self._stage("bounds"):
            self.bound = preemptive_bound(self.problem)
            has_deadlines = any(job.deadline_s is not None for job in self.problem.jobs)
            if (has_deadlines or math.isinf(self.bound.seconds)) and (proved := list(conflicts(self.problem))):
                raise ProblemError(proved)
            self.rigid_s, self.rigid_proof, self.relaxed = self.bound.seconds, "pattern MILP", None
            if self.preemption == "never" or len(self.problem.jobs) <= 100:
                rigid_s, self.relaxed = rigid_bound(self.problem, time_limit_s=min(5.0, self._left_s()))
                self.rigid_s = max(self.rigid_s, rigid_s)
            if (counted_s := counted_bound_s(self.problem)) > self.rigid_s * (1 + 1e-9):
                self.rigid_s, self.rigid_proof = counted_s, COUNTING
        with self._stage("heuristics"):
            self.best = self._simple()
        if not self.objective.only_last_end or not is_foldable(self.problem):
            with self._stage("local search"):
                self._general()
        else:
            self._plain()
        return self._proved()

    def _plain(self) -> None:
        if self._is_small():
            with self._stage("MILP"):
                self._milp()
        if self._is_worth_it(self.rigid_s):
            with self._stage("annealing"):
                self._annealing()
        if self.preemption == "never" and self._is_worth_it(self.rigid_s):
            with self._stage("exhausted search"):
                self._exhausted()
        if self.preemption != "never" and self._is_worth_it(self.bound.seconds):
            with self._stage("preemptive"):
                self._preemptive()

    def _general(self) -> None:
        """Searches under rules that the compiled searches do not model.

        These are job order, release times and deadlines, other objectives, and nodes that are available for a limited
        time.
        """
        from ringmaster.tasks.planning.bounds.deadlines import unmet
        from ringmaster.tasks.planning.plans.local_search import PLACEMENTS, improve

        if self._only_waits() and self._is_small():
            self._milp()
        if self.preemption == "never" and self.objective.only_last_end and self._is_worth_it(self.rigid_s):
            self._annealing()
            self._exhausted()
        if not self.objective.only_last_end or not self._only_waits() or self._is_worth_it(self.bound.seconds):
            self.best = improve(
                self.problem,
                self.best,
                bound_s=self.bound.seconds,
                seed=self.seed,
                is_over=self._is_over,
                objective=self.objective,
                placements=PLACEMENTS,
            )
        if self._is_worth_searching():
            self._pieces()
        if lateness_s(self.best, self.problem) > 1e-6 * self.best.makespan_s:
            raise ProblemError([unmet(self.best, self.problem)])

    def _pieces(self) -> None:
        from ringmaster.tasks.planning.with_rules.constrained import plan_constrained

        self.best = plan_constrained(
            self.problem,
            self.best,
            bound_s=self.bound.seconds,
            objective=self.objective,
            preemptive=self.preemption != "never",
            least_s=self.least_segment_s,
            seed=self.seed,
            is_over=self._is_over,
        )

    def _is_worth_searching(self) -> bool:
        """Whether a longer search could improve the objective by more than it costs, or meet a missed deadline."""
        late_s, value, makespan_s = self.objective.rank(self.best, self.problem)
        if late_s > 1e-6 * makespan_s and not self._is_over():
            return True
        if self.objective.only_last_end:
            return self._is_worth_it(self.bound.seconds if self.preemption != "never" else self.rigid_s)
        share = 1.0 - self.objective.lower_bound(self.problem, self.bound) / value if value else 0.0
        return share > max(1e-3, self.enough) and share * makespan_s > WORTH_S and not self._is_over()

    def _only_waits(self) -> bool:
        """Whether `after` is the only constraint that keeps the problem from being plain."""
        jobs = tuple(replace(job, after=()) for job in self.problem.jobs)
        return self.objective.only_last_end and replace(self.problem, jobs=jobs).is_plain

    def _may_split(self) -> bool:
        """Whether a job is long enough for two segments of the minimum length."""
        longest_s = max(option.runtime_s for job in self.problem.jobs for option in job.options)
        return longest_s >= 2 * self.least_segment_s

    def _left_s(self) -> float:
        return max(0.0, self.ends_at - clock())

    def _is_over(self) -> bool:
        return clock() > self.ends_at

    def _is_worth_it(self, bound_s: float) -> bool:
        """Whether the makespan could still improve by more than a longer search costs."""
        could_save_s = self.best.makespan_s - bound_s
        return could_save_s > WORTH_S and could_save_s > max(1e-5, self.enough) * bound_s and not self._is_over()

    def _is_small(self) -> bool:
        return len(self.problem.jobs) <= MAX_JOBS_OF_MILP and self.problem.num_devices <= MAX_DEVICES_OF_MILP

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - began, 3)

    def _take(self, plan: Plan) -> None:
        """Replaces the best plan if the given one is shorter, or equally long with fewer switches."""
        least = min(plan.makespan_s, self.best.makespan_s)
        rank = [
            (candidate.makespan_s > least * (1 + SAME), self._num_switches(candidate), candidate.makespan_s)
            for candidate in (self.best, plan)
        ]
        if rank[1] < rank[0]:
            self.best = plan

    def _num_switches(self, plan: Plan) -> int:
        """Counts the switches of a plan, including those at the first segment of jobs that had started."""
        first = {segment.job: segment for segment in reversed(plan.segments)}
        begun = ((job, first[job.id]) for job in self.problem.jobs if job.started and job.id in first)
        return plan.num_switches + sum(not job.goes_on(s.option, s.start_s, s.devices) for job, s in begun)

    def _simple(self) -> Plan:
        from ringmaster.tasks.planning.plans.baselines import BASELINES
        from ringmaster.tasks.planning.plans.list_scheduling import NoRoomError, schedule
        from ringmaster.tasks.planning.plans.local_search import improve

        makers: list[Callable[[], Plan]] = [partial(baseline, self.problem) for baseline in BASELINES]
        if relaxed := self.relaxed:
            jobs = sorted(self.problem.jobs, key=lambda job: (-job.options[relaxed[job.id]].runtime_s, job.id))
            choices = [(job.id, relaxed[job.id]) for job in jobs]
            makers.append(lambda: Plan(self.problem.name, schedule(self.problem, choices), method="pattern MILP"))
        plans, faults = [], []
        for make in makers:
            try:
                plans.append(make())
            except NoRoomError as error:
                faults.append(f"no plan was found: {error} before they go away")
        if not plans:
            raise ProblemError(faults[:1])
        best = min(plans, key=lambda plan: self.objective.rank(plan, self.problem))
        if self._is_small() or any(job.after for job in self.problem.jobs):
            best = improve(
                self.problem,
                best,
                bound_s=self.bound.seconds,
                seed=self.seed,
                is_over=self._is_over,
                objective=self.objective,
            )
        return best

    def _milp(self) -> None:
        from ringmaster.tasks.planning.non_preemptive.time_indexed import solve_time_indexed
        from ringmaster.tasks.planning.plans.list_scheduling import schedule
        from ringmaster.tasks.planning.plans.local_search import improve

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
        from ringmaster.tasks.planning.preemptive.preemptive import plan_preemptive
        from ringmaster.tasks.planning.problems.folding import folded
        from ringmaster.tasks.planning.with_rules.constrained import exactly

        pattern_bound = self.bound
        with self._stage("work prices"):
            self._sharpen_bound()
        alike = folded(self.problem)
        segments = plan_preemptive(
            alike,
            pattern_bound,
            chosen=self.relaxed,
            seed=self.seed,
            least_run_s=self.least_segment_s,
            is_over=self._is_over,
        )
        if segments and alike is not self.problem:
            with self._stage("retiming"):
                segments = exactly(self.problem, segments, objective=self.objective, least_s=self.least_segment_s)
        if segments:
            self._take(Plan(self.problem.name, segments, method="configuration LP"))

    def _sharpen_bound(self) -> None:
        """Replaces the bound with that of the work prices where it is higher than the pattern LP's."""
        from ringmaster.tasks.planning.bounds.bounds import Bound
        from ringmaster.tasks.planning.bounds.certificates import certified_bound
        from ringmaster.tasks.planning.preemptive.preemptive import work_prices
        from ringmaster.tasks.planning.problems.folding import folded

        certificate = work_prices(folded(self.problem), self.bound)
        if certificate and (proved_s := certified_bound(certificate, self.problem)) > self.bound.seconds * (1 + 1e-6):
            self.bound = Bound(proved_s, certificate, "work prices")
            self.rigid_s = max(self.rigid_s, proved_s)

    def _annealing(self) -> None:
        from ringmaster.tasks.planning.non_preemptive.annealing import plan_rigid

        num_jobs = len(self.problem.jobs)
        if self.preemption == "never":
            few, many = (8, 300_000), (16, 3_000_000) if num_jobs <= 50 else (8, 10_000_000)
            num_searches, steps = few if num_jobs <= FEW else many
        elif num_jobs > CROWDED * len(self.problem.nodes):
            num_searches, steps = 2, 3_000_000
        else:
            num_searches, steps = 2, 300_000
        # The preemptive stage runs later and often gains more, so it gets half of the time.
        share = 1.0 if self.preemption == "never" else 0.5
        until = clock() + share * self._left_s()
        segments = plan_rigid(
            self.problem,
            self.rigid_s,
            options=self.relaxed,
            num_searches=num_searches,
            steps=steps,
            seed=self.seed,
            enough=self.enough,
            is_over=lambda: clock() > until,
        )
        if segments:
            self._take(Plan(self.problem.name, segments, method="annealing"))
        if self.preemption == "never" and any(o.num_nodes > 1 for job in self.problem.jobs for o in job.options):
            self._gangs_over_nodes()

    def _gangs_over_nodes(self) -> None:
        """Searches for gangs over several nodes by list scheduling: annealing models gangs of one node only."""
        from ringmaster.tasks.planning.plans.local_search import PLACEMENTS, improve

        start = self.best
        for seed in range(3 * self.seed, 3 * self.seed + 3):
            self._take(
                improve(
                    self.problem,
                    start,
                    bound_s=self.rigid_s,
                    seed=seed,
                    is_over=self._is_over,
                    placements=8 * PLACEMENTS,
                )
            )

    def _exhausted(self) -> None:
        """For few jobs: finds the best plan without preemption and proves that it is optimal."""
        from ringmaster.tasks.planning.non_preemptive.exhaustive import search
        from ringmaster.tasks.planning.plans.node_orders import segments_of, without_overheads

        bare = without_overheads(self.problem)
        if bare is None or any(job.running is not None for job in self.problem.jobs):
            return
        found = search(bare, lower_s=self.rigid_s, upper_s=self.best.makespan_s, is_over=self._is_over)
        if found is not None:
            self.rigid_s, self.rigid_proof = found.lower_s, "exhausted search"
        if found is not None and found.orders is not None:
            segments = segments_of(self.problem, found.orders)
            self._take(Plan(self.problem.name, segments, method="exhausted search"))

    def _proved(self) -> Plan:
        """Returns the best plan with the lower bound for its kind and the name of the proof."""
        plan = self.objective.valued(replace(self.best, seconds=self.seconds), self.problem, self.bound)
        if self.preemption == "never" and self.rigid_s > self.bound.seconds:
            return replace(plan, lower_bound_s=min(self.rigid_s, plan.makespan_s), proof=self.rigid_proof)
        return replace(
            plan,
            lower_bound_s=min(self.bound.seconds, plan.makespan_s),
            certificate=self.bound.certificate,
            proof=self.bound.proof,
        )

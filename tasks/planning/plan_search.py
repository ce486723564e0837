"""Stages of planning, run by `solve` from the cheapest to the most expensive.

Modules that need numpy, numba or a solver are imported when a stage first needs them.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Literal

from ringmaster.errors import NoRoomError, ProblemError
from ringmaster.tasks.planning.bounds.bounds import (
    COUNTING,
    Bound,
    certified_bound,
    conflicts,
    counted_bound_s,
    preemptive_bound,
    rigid_bound,
    unmet,
)
from ringmaster.tasks.planning.bounds.job_costs import folded, is_foldable, narrowed, without_overheads
from ringmaster.tasks.planning.objectives import Objective, lateness_s
from ringmaster.tasks.planning.plans.plan import Plan
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.work import WorkBudget

Preemption = Literal["auto", "never", "always"]

WORTH_S = 5.0  # seconds that a longer search must be able to save, since it takes some itself
ENOUGH_BY_EVENTS = 0.02  # share above the bound up to which a plan by events is not followed by lists of jobs
SHARE_OF_NO_QUOTAS = 0.5  # of the work, for a plan without quotas, from which the search within them begins
SHARE_OF_EVENTS = 0.7  # of the time that is left, for plans by events
FEW = 14  # jobs up to which annealing is short, since the exhaustive search continues from its plan
PER_OPTION_S = 1e-4  # work of the bounds, per option of a job
SAME = 1e-3  # relative difference of makespans that count as equal; the plan with fewer switches is preferred


class PlanSearch:
    """Runs the planning stages in turn; each stage may improve the best plan so far.

    work: limits the stages. The other arguments are those of `solve`.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        work: WorkBudget,
        seed: int,
        preemption: Preemption,
        objective: Objective,
        least_segment_s: float,
        enough: float,
    ) -> None:
        self.problem, self.seed, self.preemption, self.objective = problem, seed, preemption, objective
        self.least_segment_s, self.enough = least_segment_s, enough
        self.work = work
        self.seconds: dict[str, float] = {}

    def run(self) -> Plan:
        """Runs the stages and returns the best plan with its bound."""
        if self.preemption == "auto" and not self._may_split():
            self.preemption = "never"
        with self._stage("bounds"):
            self.bound = preemptive_bound(self.problem)
            has_deadlines = any(job.deadline_s is not None for job in self.problem.jobs)
            if (has_deadlines or math.isinf(self.bound.seconds)) and (proved := list(conflicts(self.problem))):
                raise ProblemError(proved)
            self.rigid_s, self.solver, self.relaxed = self.bound.seconds, "pattern MILP", None
            self.counted_s = counted_bound_s(self.problem)
            if self.preemption == "never" or len(self.problem.jobs) <= 100:
                limits = {"work_s": min(5.0, self.work.left_s), "time_limit_s": self.work.time_left_s}
                rigid_s, self.relaxed = rigid_bound(self.problem, **limits)
                self.rigid_s = max(self.rigid_s, rigid_s)
            self.rigid_s = max(self.rigid_s, self.counted_s)
            self.value_bound = (
                None if self.objective.only_last_end else self.objective.best_bound(self.problem, self.bound)
            )
            self.work.charge(PER_OPTION_S * sum(len(job.options) for job in self.problem.jobs))
        with self._stage("heuristics"):
            self.best = self._simple()
        if not self.objective.only_last_end or not is_foldable(self.problem):
            with self._stage("local search"):
                self._general()
        else:
            self._plain()
        return self._proved()

    def _plain(self) -> None:
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
        start, enough = self.best, 0.0
        is_by_events = not (self.problem.limits or self.objective.coefficients(self.problem).prices)
        if is_by_events and self.preemption != "never" and self._is_worth_searching():
            self._by_events()
            enough = ENOUGH_BY_EVENTS
        is_late = lateness_s(self.best, self.problem) > 1e-6 * self.best.makespan_s
        if (is_late or self._share_above_bound() > enough) and self._is_worth_searching():
            self._by_lists(start, bound_s=self.bound.seconds)
        if lateness_s(self.best, self.problem) > 1e-6 * self.best.makespan_s:
            raise ProblemError([unmet(self.best, self.problem)])

    def _by_events(self) -> None:
        from ringmaster.tasks.planning.event_search import plan_by_events

        with self.work.part(SHARE_OF_EVENTS) as work:
            new_plan = plan_by_events(
                self.problem,
                self.best,
                bound_s=self.bound.seconds,
                least_value=self.value_bound.value if self.value_bound else self.bound.seconds,
                objective=self.objective,
                least_s=self.least_segment_s,
                seed=self.seed,
                work=work,
            )
        if new_plan is not None:
            self.best = min([self.best, new_plan], key=lambda plan: self.objective.rank(plan, self.problem))

    def _by_lists(self, start: Plan, *, bound_s: float) -> None:
        """Searches from a plan by lists of jobs. bound_s: on the last end of the plans that are searched for."""
        from ringmaster.tasks.planning.list_annealing import plan_by_lists

        new_plan = plan_by_lists(
            self.problem,
            start,
            bound_s=bound_s,
            objective=self.objective,
            least_s=self.least_segment_s,
            seed=self.seed,
            work=self.work,
        )
        self.best = min([self.best, new_plan], key=lambda plan: self.objective.rank(plan, self.problem))

    def _share_above_bound(self) -> float:
        """Returns by how much of the value the best plan is above the bound."""
        value = self.objective.value(self.best, self.problem)
        least = self.value_bound.value if self.value_bound else self.bound.seconds
        return 1.0 - least / value if value else 0.0

    def _is_worth_searching(self) -> bool:
        """Whether a longer search could improve the objective by more than it costs, or meet a missed deadline."""
        late_s, _, makespan_s = self.objective.rank(self.best, self.problem)
        if late_s > 1e-6 * makespan_s and not self.work.is_over():
            return True
        if self.objective.only_last_end:
            return self._is_worth_it(self.bound.seconds if self.preemption != "never" else self.rigid_s)
        share = self._share_above_bound()
        return share > max(1e-3, self.enough) and share * makespan_s > WORTH_S and not self.work.is_over()

    def _may_split(self) -> bool:
        """Whether a job is long enough for two segments of the minimum length."""
        longest_s = max(option.runtime_s for job in self.problem.jobs for option in job.options)
        return longest_s >= 2 * self.least_segment_s

    def _is_worth_it(self, bound_s: float) -> bool:
        """Whether the makespan could still improve by more than a longer search costs."""
        could_save_s = self.best.makespan_s - bound_s
        return could_save_s > WORTH_S and could_save_s > max(1e-5, self.enough) * bound_s and not self.work.is_over()

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
        from ringmaster.tasks.planning.plans.list_scheduling import BASELINES, schedule

        makers: list[Callable[[], Plan]] = [partial(baseline, self.problem) for baseline in BASELINES]
        if relaxed := self.relaxed:
            jobs = sorted(self.problem.jobs, key=lambda job: (-job.options[relaxed[job.id]].runtime_s, job.id))
            choices = [(job.id, relaxed[job.id]) for job in jobs]
            makers.append(lambda: Plan(self.problem.name, schedule(self.problem, choices), method="pattern MILP"))
        if (ends := self.objective.coefficients(self.problem).ends) and not self.problem.is_fused:
            from ringmaster.tasks.planning.shared_speeds import plan_by_speeds

            makers.append(partial(plan_by_speeds, self.problem, ends))
        if self.problem.limits:
            makers.append(self._within_quotas)
        plans, faults = [], []
        for make in makers:
            try:
                plans.append(make())
            except NoRoomError as error:
                faults.append(f"no plan was found: {error} before they go away")
        if not plans:
            raise ProblemError(faults[:1])
        return min(plans, key=lambda plan: self.objective.rank(plan, self.problem))

    def _within_quotas(self) -> Plan:
        """Returns a plan that is searched for without quotas; where it exceeds them, its segments are placed again."""
        from ringmaster.tasks.planning.plans.list_scheduling import schedule_pieces
        from ringmaster.tasks.planning.plans.retiming import exactly
        from ringmaster.tasks.planning.plans.verify import verify

        limits = self.problem.limits
        small = narrowed(self.problem, lambda job, o: o.num_devices <= limits.get(job.user, self.problem.num_devices))
        if small is None:
            raise NoRoomError("a job that runs exceeds its quota")
        with self.work.part(SHARE_OF_NO_QUOTAS) as work:
            free = PlanSearch(
                replace(small.problem, quotas={}),
                work=work,
                seed=self.seed,
                preemption=self.preemption,
                objective=self.objective,
                least_segment_s=self.least_segment_s,
                enough=self.enough,
            ).run()
        segments = small.original(free.segments)
        plan = Plan(self.problem.name, tuple(segments), method=free.method)
        if not verify(plan, self.problem):
            return plan
        in_order = sorted(segments, key=lambda segment: (segment.start_s, segment.job))
        placed = schedule_pieces(self.problem, [(s.job, s.option, s.work) for s in in_order])
        exact = exactly(self.problem, placed, objective=self.objective, least_s=self.least_segment_s)
        return replace(plan, segments=exact or placed)

    def _preemptive(self) -> None:
        from ringmaster.tasks.planning.plans.retiming import exactly
        from ringmaster.tasks.planning.preemptive import plan_preemptive

        pattern_bound = self.bound
        with self._stage("work prices"):
            self._sharpen_bound()
        alike = folded(self.problem)
        segments = plan_preemptive(
            alike,
            pattern_bound,
            seed=self.seed,
            least_run_s=self.least_segment_s,
            work=self.work,
        )
        if segments and alike is not self.problem:
            with self._stage("retiming"):
                segments = exactly(self.problem, segments, objective=self.objective, least_s=self.least_segment_s)
        if segments:
            self._take(Plan(self.problem.name, segments, method="configuration LP"))

    def _sharpen_bound(self) -> None:
        """Replaces the bound with that of the work prices where it is higher than the pattern LP's."""
        from ringmaster.tasks.planning.preemptive import work_prices

        certificate = work_prices(folded(self.problem), self.bound)
        if certificate and (proved_s := certified_bound(certificate, self.problem)) > self.bound.seconds * (1 + 1e-6):
            self.bound = Bound(proved_s, certificate, "work prices")

    def _annealing(self) -> None:
        from ringmaster.tasks.planning.rigid_search import plan_without_preemption

        num_jobs = len(self.problem.jobs)
        if self.preemption == "never":
            few, many = (8, 300_000), (16, 3_000_000) if num_jobs <= 50 else (8, 11_000_000)
            num_searches, steps = few if num_jobs <= FEW else many
        else:
            num_searches, steps = 2, 300_000
        # The preemptive stage runs later and often gains more, so it gets half of the work.
        share = 1.0 if self.preemption == "never" else 0.5
        with self.work.part(share) as work:
            segments = plan_without_preemption(
                self.problem,
                self.rigid_s,
                options=self.relaxed,
                num_searches=num_searches,
                steps=steps,
                seed=self.seed,
                enough=self.enough,
                work=work,
            )
        if segments:
            self._take(Plan(self.problem.name, segments, method="annealing"))
        if self.preemption == "never" and any(o.num_nodes > 1 for job in self.problem.jobs for o in job.options):
            self._by_lists(self.best, bound_s=self.rigid_s)  # annealing models gangs of one node only

    def _exhausted(self) -> None:
        """For few jobs: finds the best plan without preemption and proves that it is optimal."""
        from ringmaster.tasks.planning.plans.list_scheduling import segments_of
        from ringmaster.tasks.planning.rigid_search import search

        bare = without_overheads(self.problem)
        if bare is None or any(job.running is not None for job in self.problem.jobs):
            return
        proof = search(bare, lower_s=self.rigid_s, upper_s=self.best.makespan_s, budget=self.work)
        if proof is not None:
            (self.rigid_s, orders), self.solver = proof, "exhausted search"
            if orders is not None:
                self._take(Plan(self.problem.name, segments_of(self.problem, orders), method="exhausted search"))

    def _proved(self) -> Plan:
        """Returns the best plan with its lower bounds and their proofs."""
        plan = replace(self.best, seconds=self.seconds)
        plan = self.objective.valued(plan, self.problem, self.bound, best=self.value_bound)
        proved = self.bound
        if self.preemption == "never" and self.counted_s > proved.seconds * (1 + 1e-9):
            proved = Bound(self.counted_s, None, COUNTING)
        plan = replace(
            plan,
            lower_bound_s=min(proved.seconds, plan.makespan_s),
            certificate=proved.certificate,
            proof=proved.proof,
        )
        if self.preemption == "never" and self.rigid_s > proved.seconds:
            return replace(plan, solver_bound_s=min(self.rigid_s, plan.makespan_s), solver=self.solver)
        return plan

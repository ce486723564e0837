"""The replanner of a running batch: applies `replan_policy` to the events of gangs and runs its solver in the
background.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

from ringmaster.tasks.background_worker import in_a_thread
from ringmaster.tasks.cluster import Cluster
from ringmaster.tasks.execution.dispatch import DeviceId, PlannedSegment, in_steps, waits_of
from ringmaster.tasks.execution.forecast import Draws, EarliestEnds, ForecastConditions, options_of, seconds_left
from ringmaster.tasks.execution.job_price import JobPrice, price_of
from ringmaster.tasks.execution.job_table import keeps_layout
from ringmaster.tasks.execution.plan_simulator import OngoingSegment, PlanSimulator
from ringmaster.tasks.execution.progress import RunningSegment
from ringmaster.tasks.execution.replan_policy import (
    EPS_S,
    ExploredJob,
    RemainingProblem,
    ReplanPolicy,
    ReplanTrigger,
    could_gain,
    explored,
    is_worth_it,
    plan_rest,
    plannable,
    remaining,
)
from ringmaster.tasks.planning import Plan, Problem
from ringmaster.tasks.planning.bounds.bounds import preemptive_bound
from ringmaster.tasks.planning.plans.plan import Certificate
from ringmaster.tasks.profiling.machine_load import CurrentLoad, MachineLoad
from ringmaster.tasks.profiling.search import planning_problem, switch_cost_s
from ringmaster.tasks.profiling.speed_beliefs import SpeedBelief, SpeedBeliefs, errors_of
from ringmaster.techniques import Job, Profile
from ringmaster.techniques.profiles import PREDICTED
from ringmaster.text import enumerated

logger = logging.getLogger(__name__)

# A plan must also gain the cost of making it, as the machine may be training on the same cores.
POLICY = ReplanPolicy(worth_s=5.0)
RETRY_S = 5.0  # before planning again after a needed plan could not be made
BLIND_S = 1.0  # before the next look if no end can be forecast: segments are about to stop, or their node is gone
REPORTS_S = 0.2  # between two reports of a gang whose steps are shorter
LOOKS = 5  # checks of the forecast between two plans by the clock
LOOK_SHARE = 0.05  # of the time, that such checks take at most: a forecast of a thousand jobs takes part of a second

PLANNING_SHARE = 0.1  # of the time, that plans that were not requested take at most

Background = Callable[[Callable[[], Plan]], "Future[Plan]"]
"""Runs a solver in the background."""


@dataclass(frozen=True, kw_only=True)
class RemainingWork:
    """The work that is left of a batch, with the segments that run and are planned of it.

    cluster: the devices.
    jobs: the jobs that are left.
    profiles: the options of each job.
    steps: the steps done, by job; for running jobs as reported.
    running, planned: the segments that run, and those that are still to be started.
    out: devices that must not be used.
    member_steps: the steps of jobs that are trained in the gangs of other jobs.
    """

    cluster: Cluster
    jobs: Sequence[Job]
    profiles: Mapping[str, Sequence[Profile]]
    steps: Mapping[str, int]
    running: Sequence[RunningSegment]
    planned: Sequence[PlannedSegment]
    out: Collection[DeviceId] = ()
    member_steps: Mapping[str, int] = field(default_factory=dict)

    def only(self, names: Collection[str]) -> RemainingWork:
        """Returns the work of some of the jobs."""
        return replace(
            self,
            jobs=[job for job in self.jobs if job.name in names],
            steps={name: step for name, step in self.steps.items() if name in names},
            running=[running for running in self.running if running.segment.job in names],
            planned=[segment for segment in self.planned if segment.job in names],
        )


@dataclass(frozen=True, kw_only=True)
class PendingPlan:
    """A plan that is being made. It is void once another plan is followed.

    rest: the problem that is planned.
    why: the reason.
    steps: the step of each job from which it is planned.
    plan: the future plan.
    began_s: when planning began, by the replanner's clock.
    begins_s: that moment by the wall clock, the time 0 of the plan.
    generation: the replanner's generation when planning began; `void` starts another one.
    is_needed: jobs, devices or options have changed, so that the plan is followed whatever it gains.
    """

    rest: RemainingProblem
    why: str
    steps: Mapping[str, int]
    plan: Future[Plan]
    began_s: float
    begins_s: float
    generation: int
    is_needed: bool = False


class Replanner:
    """Decides when to re-plan the rest of a batch and whether to follow the new plan. Called by one thread.

    name: the name of the problems that are planned.
    make_plan: solves a problem.
    add_terms: adds the terms other than the jobs to a problem.
    policy: the parameters of re-planning.
    conditions: what determines the batch's end in addition to the speeds of its options, for predictions.
    clock: monotonic seconds.
    wall_clock: seconds since the epoch, by which segments wait for their time.
    background: runs the solver; by default on a thread.
    """

    def __init__(
        self,
        *,
        name: str,
        make_plan: Callable[[Problem], Plan],
        add_terms: Callable[[Problem], Problem] = lambda problem: problem,
        policy: ReplanPolicy = POLICY,
        conditions: ForecastConditions | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        background: Background | None = None,
    ) -> None:
        self._name, self._policy, self._clock, self._wall_clock = name, policy, clock, wall_clock
        self._make_plan, self._add_terms = make_plan, add_terms
        self._background = background or partial(in_a_thread, "replanning")
        self._began_s, self.conditions = clock(), conditions or ForecastConditions()
        self._beliefs, self._when = SpeedBeliefs(), ReplanTrigger(policy)
        self._load = CurrentLoad(self.conditions.load.ratio)
        self._pending_plan: PendingPlan | None = None
        self._certificate: Certificate | None = None  # of the plan that is followed
        self._switches_s: dict[int, float] = {}  # by segment, what its start and a checkpoint took without load
        self._heard_s: dict[str, float] = {}  # by job, when its gang last reported
        # `_blind_s`: until when no improvement is looked for.
        self._look_s, self._blind_s, self._retry_s, self._generation = 0.0, 0.0, 0.0, 0
        self._stuck: set[str] = set()  # jobs without devices, as last logged
        self.failures: list[BaseException] = []  # of needed plans, since the last one that was made

    def handle_event(self, running: RunningSegment) -> None:
        """Records the measured speed of a running segment, and the load of the machine."""
        job = running.segment.job
        self._heard_s[job] = self._now_s()
        if (switch_s := running.switch_s) is not None:
            self._switches_s[running.number] = switch_s
        self._load.note(running.newest_load, now_s=self._now_s())
        expected_s = running.profile.under_load(1.0).restricted_to(running.members).gang_step_s
        if (step_s := running.step_s) and expected_s > 0:  # a command may report no seconds
            errors = errors_of(running.profile)
            self._beliefs.note(
                job,
                running.segment.option,
                step_s / running.load / expected_s,
                technique=running.profile.technique,
                errors=replace(errors, measurement=max(errors.measurement, running.step_error)),
                segment=running.number,
            )

    def forget(self, job: str) -> None:
        """Drops a job's measured speeds and the pending plan, as the job's options have changed."""
        self._beliefs.forget(job)
        self.void()

    def pursue(self, objective: str) -> None:
        """Changes the objective of the policy."""
        self._policy = replace(self._policy, objective=objective)

    def void(self) -> None:
        """Discards the pending plan, as something has changed."""
        self._generation += 1
        self._pending_plan = None

    def void_improvement(self) -> None:
        """Discards the pending plan, unless it was requested."""
        if self._pending_plan is not None and not self._pending_plan.is_needed:
            self.void()

    def planned(self, state: RemainingWork, *, certificate: Certificate | None = None) -> None:
        """Records that a plan was made and is followed from now on."""
        self.void()
        self._certificate = certificate
        state, left = self._plannable(state)
        if left is not None:
            self._expect(self.timeline(state, left))

    def seconds_to_look(self, *, is_running: bool, is_wanted: bool) -> float:
        """Returns the seconds until `poll`, or `demand` if a plan is requested, may have something to do."""
        if self._pending_plan is not None or not (is_running or is_wanted):
            return math.inf
        then_s = self._retry_s if is_wanted else max(self._blind_s, min(self._look_s, self._when.next_s))
        left_s = then_s - self._now_s()
        return left_s if left_s > EPS_S else 0.0

    def demand(self, state: RemainingWork, *, why: str) -> PendingPlan | None:
        """Starts to plan what is left, whatever the plan gains, where `seconds_to_look` is 0.

        Returns None if nothing can be planned.
        """
        state, left = self._plannable(state)
        return None if left is None else self._begin(state, why=why, is_needed=True)

    def poll(self, state: RemainingWork) -> PendingPlan | None:
        """Starts to re-plan if the policy says so, where `seconds_to_look` is 0. Does not wait for the plan.

        Returns the pending plan, None if no plan is started.
        """
        now_s = self._now_s()
        self._blind_s = now_s + BLIND_S  # avoids another look at once if nothing can be forecast yet
        state, left = self._plannable(state)
        ends_s = {} if left is None or not state.running else _ends(self.timeline(state, left))
        if left is None or not ends_s:
            return None
        self._blind_s = 0.0
        took_s = self._now_s() - now_s
        self._look_s = now_s + max(self._policy.least * self._when.first_s / LOOKS, took_s / LOOK_SHARE)
        deadlines_s = {job.id: now_s + job.deadline_s for job in left.jobs if job.deadline_s is not None}
        why = self._when.why_now(now_s, ends_s, deadlines_s=deadlines_s, noise=self._load.error)
        if why is None:
            return None
        self._when.planned(now_s, ends_s)
        rest = self._rest(state)
        left_s = max(ends_s.values()) - now_s
        if rest is None or not could_gain(rest, left_s, policy=self._policy):
            return None
        return self._begin(state, why=why, is_needed=False)

    def judge(self, pending_plan: PendingPlan, state: RemainingWork) -> list[PlannedSegment] | None:
        """Returns the segments of a pending plan if it is worth following from the current state, else None."""
        if pending_plan.generation != self._generation:
            return None
        self._pending_plan = None
        self._blind_s = self._now_s() + (self._now_s() - pending_plan.began_s) / PLANNING_SHARE
        if error := pending_plan.plan.exception():
            # A failed improvement does no harm: the current plan stays valid.
            if str(error) not in {str(before) for before in self.failures}:  # log repeated failures once
                logger.warning("the rest of %s could not be planned again: %s", self._name, error, exc_info=error)
            if pending_plan.is_needed:
                self._retry_s = self._now_s() + RETRY_S
                self.failures.append(error)
            return None
        totals = {job.name: job.total_steps for job in state.jobs if job.name in pending_plan.steps}
        whole = {job: totals.get(job, step) for job, step in pending_plan.steps.items()}
        plan = pending_plan.plan.result()
        fresh = [
            segment
            for segment in in_steps(
                plan,
                num_steps=whole,
                steps_done=pending_plan.steps,
                waits=waits_of(plan, pending_plan.rest.left),
                begins_s=pending_plan.begins_s,
            )
            if segment.job in totals and (segment.last_step > state.steps[segment.job] or is_end(segment, totals))
        ]
        if pending_plan.is_needed:
            self.failures.clear()
            # Jobs added since planning began keep their segments; another plan is requested already.
            news = [r.segment for r in state.running if r.segment.job not in pending_plan.steps]
            return [*news, *fresh, *(s for s in state.planned if s.job not in pending_plan.steps)]
        state, left = self._plannable(state)
        if left is None:
            return None
        optimistic = self._left(state, optimism=self._policy.optimism)
        now = self.timeline(state, optimistic)
        ahead_s = self._now_s() - self._wall_clock()
        simulated = [segment.by_clock(ahead_s) for segment in fresh]
        return fresh if is_worth_it(now, simulated, policy=self._policy, noise=self._load.error) else None

    def explored(self, state: RemainingWork, planned: Sequence[PlannedSegment]) -> list[PlannedSegment]:
        """Returns planned segments of the current state with short ones that try options where that is worth it."""
        if not state.jobs:
            return list(planned)
        active = {running.segment.job for running in state.running}
        free = {
            job.name: job
            for job in state.jobs
            if not keeps_layout(job) and not any(profile.members for profile in state.profiles[job.name])
        }
        left = self._left(state)
        jobs = {
            each.id: ExploredJob(
                options=each.options,
                beliefs=[self._belief(each.id, k, profile) for k, profile in enumerate(state.profiles[each.id])],
                step=state.steps[each.id],
                total_steps=free[each.id].total_steps,
                is_running=each.id in active,
                known=[k for k, profile in enumerate(state.profiles[each.id]) if profile.source != PREDICTED],
            )
            for each in left.jobs
            if each.id in free
        }
        segments = explored(
            planned,
            jobs,
            switch_cost_s=left.switch_cost_s,
            most=self._policy.most_explored,
            noise=self._load.error,
            num_runs=1 + len(self.conditions.earlier),
        )
        return [self._with_reason(each, state) if each.is_trial else each for each in segments]

    def _with_reason(self, trial: PlannedSegment, state: RemainingWork) -> PlannedSegment:
        option = _in_words(state.profiles[trial.job][trial.option])
        return replace(trial, reason=f"measures {option} up to step {trial.last_step}")

    def best_option(self, state: RemainingWork, running: PlannedSegment, planned: PlannedSegment) -> int:
        """Returns the option under which the rest of a job that runs ends first: the planned, or one that has run.

        running: the segment that has measured an option; a change costs a switch, and must exceed the measured noise.
        planned: the segment that follows on the same devices.
        """
        left = self._left(state.only([running.job]))
        (row,) = left.jobs
        profiles, used = state.profiles[running.job], row.options[running.option]

        def left_s(option: int) -> float:
            if option == running.option:
                return used.runtime_s
            other = row.options[option]
            return other.runtime_s * (1.0 + self._load.error) + other.startup_s + left.switch_cost_s

        alike = [
            k
            for k, option in enumerate(row.options)
            if (option.num_devices, option.num_nodes, option.device_type)
            == (used.num_devices, used.num_nodes, used.device_type)
            and (k == planned.option or self._belief(running.job, k, profiles[k]).is_measured)
        ]
        return min(alike, key=left_s)

    def seconds_left(self, state: RemainingWork) -> tuple[dict[str, Draws], EarliestEnds | None]:
        """Returns draws of the seconds until each job ends by the plan that is followed, and the least by any plan."""
        state, left = self._plannable(state)
        if left is None:
            return {}, None
        least = EarliestEnds.of_profiles(
            left,
            state.profiles,
            beliefs=self._beliefs,
            certificate=self._certificate,
            load=self._load.ratio,
            silences_s={
                each.segment.job: self._now_s() - self._heard_s.get(each.segment.job, 0.0) for each in state.running
            },
        )
        return seconds_left(self.timeline(state, left), self._beliefs, options_of(state.profiles)), least

    @property
    def present_conditions(self) -> ForecastConditions:
        """The conditions with the load of the machine now."""
        if self._load.mean is None:
            return self.conditions
        load = MachineLoad(ratio=self._load.ratio, spread=self._load.error)
        return replace(self.conditions, load=load, seen=tuple(self._load.seen))

    @property
    def run_load(self) -> float | None:
        """The mean load of the machine since the begin; None before it is known."""
        return self._load.mean

    def price(self, state: RemainingWork, job: str) -> tuple[Problem, JobPrice] | None:
        """Returns what a job costs of which nothing is planned yet, with the problem; None where it has no place now.

        state: with that job.
        """
        state, left = self._plannable(state)
        if left is None or job not in state.steps:
            return None
        others = state.only([name for name in state.steps if name != job])
        bounds_s = tuple(
            0.0 if not part.jobs or (rest := self._rest(part, optimism=0.0)) is None
            else preemptive_bound(rest.problem).seconds
            for part in (others, state)
        )  # fmt: skip
        (last_step,) = (each.total_steps for each in state.jobs if each.name == job)
        now = self.timeline(state, left)
        unreported_s = max((stretch.step_s for stretch in now.running.values()), default=0.0)
        price = price_of(
            now, job, last_step=last_step, policy=self._policy, bounds_s=(bounds_s[0], bounds_s[1]),
            slack_s=unreported_s + REPORTS_S if now.running else 0.0, out=_out(state, left),
        )  # fmt: skip
        return None if price is None else (left, price)

    def timeline(self, state: RemainingWork, left: Problem | None = None) -> PlanSimulator:
        """Returns a simulator of the batch from now on, at the speeds that are known."""
        now_s, problem = self._now_s(), left or self._left(state)
        totals = {job.name: job.total_steps for job in state.jobs}

        def step_s(job: str, option: int) -> float:
            return problem.job(job).options[option].runtime_s / max(1, totals[job] - state.steps[job])

        stretches = []
        for running in state.running:
            job, option = running.segment.job, running.segment.option
            starts_s = 0.0 if running.is_ready else state.profiles[job][option].startup_s
            last_step = state.steps[job] if running.is_stopping else max(running.segment.last_step, state.steps[job])
            stretches.append(
                OngoingSegment(
                    segment=replace(running.segment, last_step=last_step),
                    first_step=state.steps[job],
                    works_from_s=now_s + starts_s,
                    step_s=step_s(job, option),
                    is_over_end=running.is_over_end,
                )
            )
        active = {running.segment.job for running in state.running}
        stand = [job for job, step in state.steps.items() if step > 0 and job not in active]
        ahead_s = now_s - self._wall_clock()
        return PlanSimulator(
            problem,
            [segment.by_clock(ahead_s) for segment in state.planned],
            num_steps=totals,
            step_s=step_s,
            steps=state.steps,
            running=stretches,
            ran={job: PlannedSegment(job=job, option=-1, last_step=0, devices=(), start_s=0, end_s=0) for job in stand},
            now_s=now_s,
            problem_begins_s=now_s,
        )

    def _begin(self, state: RemainingWork, *, why: str, is_needed: bool) -> PendingPlan | None:
        rest = self._rest(state)
        if rest is None:
            return None
        began_s, begins_s = self._now_s(), self._wall_clock()
        plan = self._background(partial(plan_rest, rest, self._make_plan))
        self._pending_plan = PendingPlan(
            rest=rest,
            why=why,
            steps=dict(state.steps),
            plan=plan,
            began_s=began_s,
            begins_s=begins_s,
            generation=self._generation,
            is_needed=is_needed,
        )
        return self._pending_plan

    def _rest(self, state: RemainingWork, *, optimism: float | None = None) -> RemainingProblem | None:
        """Returns the problem to plan; None if some job has no option for the devices that are there."""
        left = self._left(state, optimism=self._policy.optimism if optimism is None else optimism)
        there = set(state.cluster.lease_names()) - set(state.out)
        goes_on = [r.segment for r in state.running if not r.is_stopping and there.issuperset(r.segment.devices)]
        return remaining(
            left,
            running={segment.job: segment for segment in goes_on},
            started=[job for job, step in state.steps.items() if step > 0],
            out=_out(state, left),
        )

    def _plannable(self, state: RemainingWork) -> tuple[RemainingWork, Problem | None]:
        """Returns the part of a state that can be planned, with its problem; None instead of the problem if nothing
        can.

        Jobs without an option for the existing devices wait for other devices.
        """
        if not state.jobs or not state.cluster.nodes:
            return state.only(()), None
        left = self._left(state)
        names = plannable(left, out=_out(state, left))
        self._say_stuck({job.id for job in left.jobs} - names)
        if len(names) == len(left.jobs):
            return state, left
        state = state.only(names)
        return state, self._left(state) if state.jobs else None

    def _say_stuck(self, jobs: set[str]) -> None:
        """Logs the jobs that have no devices, and those that have devices again, on each change."""
        if outcome := self._stuck - jobs:
            logger.info("devices are there again for %s: %s", self._name, enumerated(sorted(outcome)))
        if jobs - self._stuck:
            logger.warning("no devices are there for %s: %s", self._name, enumerated(sorted(jobs)))
        self._stuck = jobs

    def _now_s(self) -> float:
        """Returns the seconds since this object was made, which is about when the batch began."""
        return self._clock() - self._began_s

    def _belief(self, job: str, option: int, profile: Profile) -> SpeedBelief:
        return self._beliefs.of(job, option, technique=profile.technique, errors=errors_of(profile))

    def _left(self, state: RemainingWork, *, optimism: float = 0.0) -> Problem:
        """Returns the rest of each job at the speeds that are believed. Running segments have no start-up left.

        optimism: see `ReplanPolicy`.
        """
        options = {running.segment.job: running.segment.option for running in state.running}
        at_load = {
            job.name: [profile.under_load(self._load.ratio) for profile in state.profiles[job.name]]
            for job in state.jobs
        }
        profiles = {
            job: [
                replace(
                    profile.at_pace(self._belief(job, k, profile).ratio(optimism=optimism)),
                    startup_s=0.0 if options.get(job) == k else profile.startup_s,
                )
                for k, profile in enumerate(job_profiles)
            ]
            for job, job_profiles in at_load.items()
        }
        cost_s = switch_cost_s([profile for job_profiles in at_load.values() for profile in job_profiles])
        if self._switches_s:
            cost_s = max(cost_s, statistics.median(self._switches_s.values()) * self._load.ratio)
        problem = planning_problem(
            state.jobs,
            profiles,
            state.cluster,
            name=self._name,
            steps_done={**state.member_steps, **state.steps},
            with_missing=True,
        )
        return self._add_terms(replace(problem, switch_cost_s=cost_s))

    def _expect(self, ahead: PlanSimulator) -> None:
        self._when.planned(self._now_s(), _ends(ahead))
        self._look_s = self._now_s() + self._policy.least * self._when.first_s / LOOKS


def _in_words(profile: Profile) -> str:
    """Returns technique and config: "ddp with micro_batch 8, recompute none"."""
    config = ", ".join(f"{key} {value}" for key, value in profile.config.items())
    return f"{profile.technique} with {config}" if config else profile.technique


def _out(state: RemainingWork, left: Problem) -> set[DeviceId]:
    """Returns the devices of the problem that must not be used or do not exist."""
    there = {node.name for node in state.cluster.nodes}
    return {*state.out, *((n.id, i) for n in left.nodes if n.id not in there for i in range(n.num_devices))}


def is_end(segment: PlannedSegment, totals: Mapping[str, int]) -> bool:
    """Whether a segment is the last one of its job."""
    return segment.last_step == totals[segment.job]


def _ends(ahead: PlanSimulator) -> dict[str, float]:
    ahead.finish()
    return ahead.ended_s

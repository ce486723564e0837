"""A discrete-event simulation of execution, prediction errors, failures and re-planning: what a plan is worth.

Dispatch and re-planning are the executor's own code, on a `PlanSimulator`. Each job's true runtime is the predicted one
times a factor. The factor is unknown before the job has run, and is measured as soon as it runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Literal

from ringmaster.tasks.execution.dispatch import DeviceId, PlannedSegment, in_steps
from ringmaster.tasks.execution.execution_events import Prediction
from ringmaster.tasks.execution.forecast import EarliestEnds, predict, seconds_left
from ringmaster.tasks.execution.plan_simulator import OngoingSegment, PlanSimulator, SimulatedSegment
from ringmaster.tasks.execution.replan_policy import (
    ExploredJob,
    ReplanPolicy,
    ReplanTrigger,
    could_gain,
    explored,
    is_worth_it,
    plan_rest,
    remaining,
)
from ringmaster.tasks.execution.starter import checkpoint_interval_s
from ringmaster.tasks.planning import Plan, Problem, solve
from ringmaster.tasks.planning.fusion import as_executed
from ringmaster.tasks.planning.objectives import MAKESPAN, objective_by_name
from ringmaster.tasks.planning.problems.problem_parts import MIN_RUNTIME_S
from ringmaster.tasks.profiling.speed_beliefs import SpeedBelief, SpeedBeliefs, SpeedErrors

DAY_S = 86_400.0
REPAIR_S = 600.0
MIN_SAVE_S = 0.1
SHARES = 10**9  # steps of a job without a number of steps: shares of its work

Replan = Literal["never", "completions", "clock"]
MakePlan = Callable[[Problem], Plan]


@dataclass(frozen=True)
class SimulationResult:
    """The result of a simulation.

    makespan_s: when the last job ended.
    num_switches: how often jobs switched.
    num_plans, num_adopted: the plans that were made, and those of them that were followed.
    num_failures: the gangs that failed.
    value: the value of the plan's objective; None where that is the makespan.
    ended_s: when each job ended.
    predictions: the predictions at the times that were requested.
    segments: all segments, in order of their ends.
    """

    makespan_s: float
    num_switches: int
    num_plans: int
    num_adopted: int
    num_failures: int
    value: float | None = None
    ended_s: Mapping[str, float] = field(default_factory=dict, compare=False)
    predictions: tuple[Prediction, ...] = field(default=(), compare=False)
    segments: tuple[SimulatedSegment, ...] = field(default=(), compare=False)


def simulate(
    problem: Problem,
    plan: Plan,
    *,
    noise: float = 0.1,
    option_noise: float = 0.0,
    failures_per_day: float = 0.0,
    repair_s: float = REPAIR_S,
    seed: int = 0,
    replan: Replan = "never",
    policy: ReplanPolicy | None = None,
    num_steps: Mapping[str, int] | None = None,
    make_plan: MakePlan | None = None,
    factors: Mapping[tuple[str, int], float] | None = None,
    errors: SpeedErrors | None = None,
    predict_at_s: Sequence[float] = (),
    arrivals: bool = False,
) -> SimulationResult:
    """Simulates a plan with each job's true runtime off by N(0, noise) of itself, and with random device failures.

    option_noise: standard deviation of the logarithm of a further error, of each option of a job.
    failures_per_day: of one device. It is back after `repair_s`. A gang on it loses its work since its last checkpoint;
        gangs checkpoint at the executor's interval.
    replan: "never"; at "completions" of jobs; or on the "clock" and when measurements differ too much from the
        forecast, as the executor does by `policy`.
    num_steps: the steps of each job, so that its segments end on whole steps. None: they end on any share of the work.
    policy, make_plan: by default those of the executor and `solve`, for the plan's objective.
    factors: the true over the predicted runtime by job and option, instead of drawn ones.
    errors: the errors of predictions that are believed in; by default those that are drawn.
    predict_at_s: when ends are predicted.
    arrivals: a job with a release is unknown before it, as on a pool to which it is submitted then; `plan` has only the
        other jobs.

    Fused groups of the plan stay as they are, each as a job with its lead job's name. Raises ValueError if a job
    changes its group, and if a node has a time until which it is available, which the executor does not support either.
    """
    problem, plan = as_executed(problem, plan)
    if leaving := [node.id for node in problem.nodes if node.available_until_s is not None]:
        raise ValueError(f"{problem.name}: nodes that go away cannot be simulated. To fix: no `until` on {leaving}")
    factor = factors or _factors(problem, noise, option_noise, seed=seed)
    world = _World(problem, factor, failures_per_day=failures_per_day, repair_s=repair_s, seed=seed)
    errors = errors or SpeedErrors(machine=0.0, technique=0.0, job=noise, option=option_noise)
    steps = num_steps or {job.id: SHARES for job in problem.jobs}
    solver = make_plan or (lambda rest: solve(rest, seed=seed, objective=plan.objective))
    policy = policy or ReplanPolicy(objective=plan.objective)
    run = _Run(problem, plan, world, errors, steps, replan, policy, solver, predict_at_s, arrivals=arrivals)
    return run.run()


def clairvoyant(
    problem: Problem,
    *,
    noise: float,
    option_noise: float = 0.0,
    seed: int,
    objective: str = MAKESPAN.name,
    make_plan: MakePlan | None = None,
) -> Plan:
    """Returns the plan for the true runtimes that `simulate` draws with the same noise and seed.

    For a problem with options for fused groups, pass the one that is executed (`as_executed`).
    """
    factor = _factors(problem, noise, option_noise, seed=seed)
    solver = make_plan or partial(solve, seed=seed, objective=objective)
    return solver(_scaled(problem, lambda job, option: factor[job, option]))


def _factors(problem: Problem, noise: float, option_noise: float, *, seed: int) -> dict[tuple[str, int], float]:
    """Returns the true over the predicted runtime of each option of each job."""
    of_jobs, of_options = Random(seed), Random(f"options {seed}")
    factors = {}
    for job in problem.jobs:
        factor = max(0.1, 1.0 + of_jobs.gauss(0.0, noise))
        for option in range(len(job.options)):
            factors[job.id, option] = factor * math.exp(of_options.gauss(0.0, option_noise))
    return factors


def _scaled(problem: Problem, ratio: Callable[[str, int], float]) -> Problem:
    """Returns the problem with the runtime of each option times its ratio."""
    jobs = (
        replace(
            job, options=tuple(replace(o, runtime_s=o.runtime_s * ratio(job.id, k)) for k, o in enumerate(job.options))
        )
        for job in problem.jobs
    )
    return replace(problem, jobs=tuple(jobs))


class _World:
    """The truth of a simulation: the factor on each predicted runtime, and when which device fails."""

    def __init__(
        self,
        problem: Problem,
        factor: Mapping[tuple[str, int], float],
        *,
        failures_per_day: float,
        repair_s: float,
        seed: int,
    ) -> None:
        self._random, self.factor = Random(f"failures {seed}"), factor
        self.repair_s, self.mtbf_s = repair_s, DAY_S / failures_per_day if failures_per_day else math.inf
        self._devices = [(node.id, i) for node in problem.nodes for i in range(node.num_devices)]
        self.switch_cost_s = problem.switch_cost_s
        self.fails_at_s = math.inf
        self.draw_failure(0.0)

    def draw_failure(self, now_s: float) -> DeviceId:
        """Returns the device that fails now, and draws the time of the next failure."""
        if self.mtbf_s < math.inf:
            self.fails_at_s = now_s + self._random.expovariate(len(self._devices) / self.mtbf_s)
        return self._random.choice(self._devices)

    def kept_step(self, stretch: OngoingSegment, now_s: float) -> int:
        """Returns the step of a gang's last checkpoint. Writing one is taken to cost half of the switch cost."""
        save_s = max(self.switch_cost_s / 2, MIN_SAVE_S)
        every_s = checkpoint_interval_s(save_s, num_devices=len(stretch.segment.devices), mtbf_s=self.mtbf_s)
        saved_s = (now_s - stretch.works_from_s) // every_s * every_s
        return stretch.first_step + max(0, int(saved_s / stretch.step_s))


class _Run:
    """One execution of a plan in a world."""

    def __init__(
        self,
        problem: Problem,
        plan: Plan,
        world: _World,
        errors: SpeedErrors,
        num_steps: Mapping[str, int],
        replan: Replan,
        policy: ReplanPolicy,
        make_plan: MakePlan,
        predict_at_s: Sequence[float],
        *,
        arrivals: bool,
    ) -> None:
        self.arrive_s = sorted({job.release_s for job in problem.jobs if job.release_s > 0}) if arrivals else []
        self.certificate = plan.certificate
        self.problem, self.world, self.num_steps, self.policy = problem, world, num_steps, policy
        self.replan, self.make_plan, self.objective = replan, make_plan, plan.objective
        self.jobs = {job.id: job for job in problem.jobs}
        self.beliefs, self.errors, self.when = SpeedBeliefs(), errors, ReplanTrigger(policy)
        self.num_plans = self.num_adopted = 1
        self.num_failures = 0
        self.predict_at_s, self.predictions = sorted(predict_at_s), list[Prediction]()
        planned = self._explored(problem, in_steps(plan, num_steps=num_steps, steps_done={}), steps={}, running=())
        self.now = PlanSimulator(problem, planned, num_steps=num_steps, step_s=self._true_step_s)
        self._expect()

    def run(self) -> SimulationResult:
        while self.arrive_s or not self.now.is_over:
            ended = set(self.now.ended_s)
            clock_s = self.when.next_s if self.replan == "clock" else math.inf
            while self.predict_at_s and self.predict_at_s[0] <= self.now.now_s:
                self.predict_at_s.pop(0)
                self.predictions.append(self._prediction())
            until_s = min(clock_s, self.world.fails_at_s, *self.predict_at_s, *self.arrive_s[:1])
            happened = self.now.advance(until_s)
            assert happened or until_s < math.inf, "a job can never start"
            if not happened and self.now.now_s >= self.world.fails_at_s:
                self._fail()
            self._measure()
            if self.arrive_s and self.now.now_s >= self.arrive_s[0]:
                self.arrive_s.pop(0)
                self._replan(is_needed=True)
            elif self._is_time(ended):
                self._replan()
        value = None
        if self.objective != MAKESPAN.name:
            of = objective_by_name(self.objective).coefficients(self.problem)
            value = of.value(self.now.ended_s, self.now.held_s.items())
        return SimulationResult(
            self.now.now_s,
            self.now.num_switches,
            self.num_plans,
            self.num_adopted,
            self.num_failures,
            value,
            dict(self.now.ended_s),
            tuple(self.predictions),
            tuple(self.now.segments),
        )

    def _prediction(self) -> Prediction:
        techniques = {
            (job.id, k): option.technique for job in self.problem.jobs for k, option in enumerate(job.options)
        }
        options = {key: (technique, self.errors) for key, technique in techniques.items()}
        ahead = self.now.fork(self._believed_step_s)
        ahead.problem = replace(self.problem, jobs=tuple(replace(job, release_s=0.0) for job in self.problem.jobs))
        left = seconds_left(ahead, self.beliefs, options)
        rest = _scaled(self._left({job: self.now.step_of(job) for job in left}), self._ratio)
        least = EarliestEnds(rest, options, beliefs=self.beliefs, certificate=self.certificate)
        return predict(
            left,
            made_s=self.now.now_s,
            earliest_s=least.of_jobs(),
            earliest_last_s=least.of_last(list(left)),
        )

    def _is_time(self, ended: Collection[str]) -> bool:
        if self.replan == "never" or self.now.is_over:
            return False
        if self.replan == "completions":
            return set(self.now.ended_s) != set(ended)
        return self.when.why_now(self.now.now_s, self._forecast_s()) is not None

    def _fail(self) -> None:
        now_s = self.now.now_s
        device = self.world.draw_failure(now_s)
        failed = self.now.fail(
            device,
            back_s=now_s + self.world.repair_s,
            kept_step=lambda stretch: self.world.kept_step(stretch, now_s),
        )
        self.num_failures += failed is not None

    def _replan(self, *, is_needed: bool = False) -> None:
        now = self.now
        unknown_s = min(self.arrive_s, default=math.inf)
        todo = [job for job in self.problem.jobs if job.id not in now.ended_s and job.release_s < unknown_s]
        steps = {job.id: now.step_of(job.id) for job in todo}
        left = self._left(steps)
        rest = remaining(
            _scaled(left, partial(self._ratio, optimism=self.policy.optimism)),
            running={job: stretch.segment for job, stretch in now.running.items()},
            started=[job for job in now.ran if job in steps],
            out=now.out,
        )
        left_s = max(self._forecast_s().values(), default=now.now_s) - now.now_s
        if rest is not None and (is_needed or could_gain(rest, left_s, policy=self.policy)):
            self.num_plans += 1
            plan = plan_rest(rest, self.make_plan)
            fresh = in_steps(plan, num_steps=self.num_steps, steps_done=steps)
            optimistic = partial(self._believed_step_s, optimism=self.policy.optimism)
            if is_needed or is_worth_it(now.fork(optimistic), fresh, policy=self.policy):
                self.certificate = plan.certificate
                now.adopt(self._explored(left, fresh, steps=steps, running=now.running))
                self.num_adopted += 1
        self._expect()

    def _left(self, steps: Mapping[str, int]) -> Problem:
        """Returns what is left of each job at the predicted speeds."""
        now_s, jobs = self.now.now_s, []
        for job_id, step in steps.items():
            job = self.jobs[job_id]
            share = 1.0 - step / self.num_steps[job_id]
            jobs.append(
                replace(
                    job,
                    options=tuple(replace(o, runtime_s=max(MIN_RUNTIME_S, o.runtime_s * share)) for o in job.options),
                    after=tuple(other for other in job.after if other in steps),
                    release_s=max(0.0, job.release_s - now_s),
                    deadline_s=None if job.deadline_s is None else max(0.0, job.deadline_s - now_s),
                )
            )
        return replace(self.problem, jobs=tuple(jobs))

    def _measure(self) -> None:
        """Records the speed of each job that has begun to work."""
        for job, stretch in self.now.running.items():
            if self.now.now_s > stretch.works_from_s:
                self._note(job, stretch.segment.option)
        for job, segment in self.now.ran.items():
            self._note(job, segment.option)

    def _note(self, job: str, option: int) -> None:
        technique = self.jobs[job].options[option].technique
        self.beliefs.note(job, option, self.world.factor[job, option], technique=technique, errors=self.errors)

    def _explored(
        self, left: Problem, planned: list[PlannedSegment], *, steps: Mapping[str, int], running: Collection[str]
    ) -> list[PlannedSegment]:
        """Returns the planned segments of a plan of `left`, with short ones that try options where that is worth it."""
        if self.replan != "clock":
            return planned
        jobs = {
            job.id: ExploredJob(
                options=job.options,
                beliefs=[self._belief(job.id, option) for option in range(len(job.options))],
                step=steps.get(job.id, 0),
                total_steps=self.num_steps[job.id],
                is_running=job.id in running,
            )
            for job in _scaled(left, self._ratio).jobs
        }
        return explored(planned, jobs, switch_cost_s=left.switch_cost_s, most=self.policy.most_explored)

    def _expect(self) -> None:
        self.when.planned(self.now.now_s, self._forecast_s())

    def _forecast_s(self) -> dict[str, float]:
        """Returns when each job would end by what is known now."""
        ahead = self.now.fork(self._believed_step_s)
        ahead.finish()
        return {job: end_s for job, end_s in ahead.ended_s.items() if job not in self.now.ended_s}

    def _predicted_step_s(self, job: str, option: int) -> float:
        return self.jobs[job].options[option].runtime_s / self.num_steps[job]

    def _true_step_s(self, job: str, option: int) -> float:
        return self._predicted_step_s(job, option) * self.world.factor[job, option]

    def _believed_step_s(self, job: str, option: int, *, optimism: float = 0.0) -> float:
        return self._predicted_step_s(job, option) * self._ratio(job, option, optimism=optimism)

    def _ratio(self, job: str, option: int, *, optimism: float = 0.0) -> float:
        return self._belief(job, option).ratio(optimism=optimism)

    def _belief(self, job: str, option: int) -> SpeedBelief:
        technique = self.jobs[job].options[option].technique
        return self.beliefs.of(job, option, technique=technique, errors=self.errors)

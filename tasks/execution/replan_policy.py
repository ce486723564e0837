"""The re-planning policy: when to re-plan the rest of a batch, what to plan, and whether to follow the new plan.

The policy has no clock and no I/O. The executor and `simulate` share it: both report their observations to it, act on
its decisions, and run the solver in between. Predictions err by tens of per cent. A batch that uses the measured speeds
and re-plans ends within a few per cent of a clairvoyant plan.

Exploration: options that have not run are tried in short real segments where that is worth more than it costs.

Let a plan run job j under option b for the rest of its work, and let p be another option that fits on the same devices.
With c_o = t_o (n_o + r_j), where t_o is the believed runtime of that rest under option o on n_o devices, trying p gains

    E[max(0, c_b - c_p)] - max(0, c_b - E[c_p])

device-seconds in expectation, as the better of both is used once they are known. This is the value of information
(Howard, Information Value Theory, 1966). Options are tried one after another: for a further one, c_b is what is
expected of the best of those before it, so that each must gain beyond them. c_p / c_b is log-normal, so the expectation
has the closed form of an option's price. The price of a device-second is that of the plan's bound on the makespan,
equal for all jobs; r_j is the further price of a second of job j, in devices: the least one under which no option beats
the planned one. It is 0 for a job that takes the cheapest option, and large for a job that is spread over many devices
as it decides the end. Where no other job starts after it, devices that it leaves would stay idle, and its seconds count
alone.

What is measured has an error, on a machine with other work above all. Where the logarithm of c_p / c_b has the spread s
and its measurement the error e, what a trial may change is what will be believed after it, whose spread is
s^2 / (s^2 + e^2)^(1/2). What is gained, is gained in each later run of the jobs, too: after n runs, n more are expected
(Laplace's rule of succession).

At the end of its trials, a job continues under the option that is best by then, which may be the one that was tried
last. Trying p costs a switch, two for a job that runs, and the devices' time that p leaves unused or wastes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist

from ringmaster.tasks.execution.dispatch import DeviceId, PlannedSegment, by_node
from ringmaster.tasks.execution.plan_simulator import PlanSimulator
from ringmaster.tasks.planning import Option, Plan, PlanningNode, Problem
from ringmaster.tasks.planning.bounds.bounds import preemptive_bound
from ringmaster.tasks.planning.objectives import Objective, objective_by_name, plan_giving_up_bounds
from ringmaster.tasks.planning.problems.problem_parts import CurrentRun, PlanningJob
from ringmaster.tasks.profiling.speed_beliefs import SpeedBelief

MIN_STEPS = 6  # of a segment that tries an option; the first of them warms up and is not measured
MIN_TRIED_S = 1.0
MAX_SHARE = 0.1  # of the job's remaining steps

EPS_S = 1e-6  # rounding error of sums of seconds

PRICES = (0.0, *(2.0**k for k in range(-6, 11)))  # of a second of a job, in devices


@dataclass(frozen=True, kw_only=True)
class ExploredJob:
    """What is known of a job of which options may be tried.

    options: what is left of the job, at the runtimes that are believed.
    beliefs: the belief about each option's speed.
    step: the steps that are done.
    total_steps: its last step.
    is_running: whether the job runs now, so that another option interrupts it.
    known: the options that earlier runs have measured, which are not tried again.
    """

    options: Sequence[Option]
    beliefs: Sequence[SpeedBelief]
    step: int
    total_steps: int
    is_running: bool = False
    known: Collection[int] = ()


def explored(
    planned: Sequence[PlannedSegment],
    jobs: Mapping[str, ExploredJob],
    *,
    switch_cost_s: float,
    most: int,
    noise: float = 0.0,
    num_runs: int = 1,
) -> list[PlannedSegment]:
    """Returns the planned segments with short segments before the first one of each job where these are worth it.

    planned: in order of their start.
    jobs: the jobs that may change their options.
    most: the most options of a job to try.
    noise: the relative error of measured speeds that more steps do not reduce.
    num_runs: the runs of the jobs that are expected from now on, this one included, which all use what is measured.
    """
    segments: list[PlannedSegment] = []
    seen: set[str] = set()
    terms = _TrialTerms(switch_cost_s=switch_cost_s, most=most, noise=noise, num_runs=num_runs)
    for segment in planned:
        if segment.job in jobs and segment.job not in seen:
            others_follow = any(each.job != segment.job and each.start_s > segment.start_s for each in planned)
            trials = _trying_segments(segment, jobs[segment.job], terms, is_last=not others_follow)
            segments += trials
            segment = replace(segment, reason="continues, now that options are measured") if trials else segment
        seen.add(segment.job)
        segments.append(segment)
    return segments


@dataclass(frozen=True, kw_only=True)
class _TrialTerms:
    """What decides about trials, for all jobs; see `explored`."""

    switch_cost_s: float
    most: int
    noise: float
    num_runs: int


def _trying_segments(
    segment: PlannedSegment, job: ExploredJob, terms: _TrialTerms, *, is_last: bool
) -> list[PlannedSegment]:
    """Returns the segments that try options. is_last: whether no other job would use the devices that it leaves."""
    segments: list[PlannedSegment] = []
    step, left = job.step, job.total_steps - job.step
    if left <= 0:  # it is evaluated and exported now
        return segments
    price, saved = PRICES[-1] if is_last else _price(job.options, segment.option), 0.0
    options = {option for option in range(len(job.options)) if _may_try(option, segment, job)}
    while options and len(segments) < terms.most:
        trials = [_OptionTrial.of(k, segment, job, terms, price=price, saved=saved) for k in options]
        best = max(trials, key=lambda trial: (trial.worth_s, -trial.option))
        if best.worth_s <= 0:
            break
        options.remove(best.option)
        if best.num_steps > MAX_SHARE * left or step + best.num_steps >= segment.last_step:
            continue
        step, saved = step + best.num_steps, saved + best.saves
        devices = segment.devices[: job.options[best.option].num_devices]
        segments.append(replace(segment, option=best.option, last_step=step, devices=devices, is_trial=True))
    return segments


def _num_steps(job: ExploredJob, option: int, *, switch_cost_s: float) -> int:
    step_s = job.options[option].runtime_s / (job.total_steps - job.step)
    return max(MIN_STEPS, math.ceil(max(MIN_TRIED_S, switch_cost_s) / step_s))


def _may_try(option: int, segment: PlannedSegment, job: ExploredJob) -> bool:
    """Whether an option was never measured, and fits on the devices of a planned segment."""
    tried, used = job.options[option], job.options[segment.option]
    fits = tried.num_devices <= len(segment.devices) and (tried.num_nodes, tried.device_type) == (
        used.num_nodes,
        used.device_type,
    )
    is_new = option != segment.option and option not in job.known
    return fits and is_new and not (job.beliefs[option].is_measured or tried.jobs or used.jobs)


@dataclass(frozen=True)
class _OptionTrial:
    """A short segment that tries an option.

    saves: the part of the planned option's cost that it is expected to save beyond what earlier trials save.
    worth_s: the device-seconds that it gains in expectation beyond its cost.
    """

    option: int
    num_steps: int
    saves: float
    worth_s: float

    @classmethod
    def of(
        cls,
        option: int,
        segment: PlannedSegment,
        job: ExploredJob,
        terms: _TrialTerms,
        *,
        price: float,
        saved: float,
    ) -> _OptionTrial:
        """Returns the trial of an option.

        saved: the part of the planned option's cost that the trials before it are expected to save.
        """
        tried, used = job.options[option], job.options[segment.option]
        cost_used = used.runtime_s * (used.num_devices + price)
        ratio = tried.runtime_s * (tried.num_devices + price) / (cost_used * (1.0 - saved))
        spread = job.beliefs[option].spread_relative_to(job.beliefs[segment.option])
        spread *= spread / math.hypot(spread, terms.noise) if spread else 1.0
        saves = (1.0 - saved) * (expected_saving(math.log(ratio), spread) - max(0.0, 1.0 - ratio))
        held = len(segment.devices) + price
        num_steps = _num_steps(job, option, switch_cost_s=terms.switch_cost_s)
        share = num_steps / (job.total_steps - job.step)
        switches_s = (2 if job.is_running else 1) * (terms.switch_cost_s + tried.startup_s) * held
        wasted_s = held * share * tried.runtime_s - share * cost_used
        return cls(option, num_steps, saves, terms.num_runs * cost_used * saves - switches_s - wasted_s)


def expected_saving(mean: float, spread: float) -> float:
    """Returns E[max(0, 1 - exp(X))] for X ~ N(mean, spread^2)."""
    if spread <= 0:
        return max(0.0, 1.0 - math.exp(mean))
    cdf = NormalDist().cdf
    return cdf(-mean / spread) - math.exp(mean + spread**2 / 2) * cdf(-mean / spread - spread)


def _price(options: Sequence[Option], planned: int) -> float:
    """Returns the least price of a second of the job, in devices, under which the planned option is nearest to best."""

    def regret(price: float) -> float:
        costs = [option.runtime_s * (option.num_devices + price) for option in options]
        return round(costs[planned] / min(costs), 9)

    return min(PRICES, key=regret)


@dataclass(frozen=True, kw_only=True)
class ReplanPolicy:
    """The parameters that decide when to re-plan and when to follow the new plan; see `ReplanTrigger` and
    `is_worth_it`.

    every: the interval between plans, as a share of the rest of the makespan.
    least: the shortest interval between two plans by the clock, as a share of the first makespan.
    surprise: the change of a job's forecast end, as a share of what is left, that triggers re-planning at once.
    worth: the least gain of a new plan, as a share of what is left.
    per_switch: the further gain for each additional switch, as a share of the whole makespan.
    worth_s: the least gain in seconds.
    optimism: the standard deviations of its own error by which an option that has not run counts as faster than it is
        believed to be when a plan is made and judged, so that it is tried where it may be better.
    most_explored: the most options of a job that are tried before its next planned segment (`explored`).
    objective: the name of the objective to reduce, in seconds (`Coefficients.in_seconds`): the last end, for "weighted"
        the weighted mean end, for "cost" the time for which all devices would cost as much.
    """

    every: float = 0.1
    least: float = 0.02
    surprise: float = 0.05
    worth: float = 0.005
    per_switch: float = 0.001
    worth_s: float = 0.0
    optimism: float = 0.5
    most_explored: int = 8
    objective: str = "makespan"


@dataclass
class ReplanTrigger:
    """Decides when to re-plan: by the clock, and when observations differ too much from the forecast."""

    policy: ReplanPolicy = field(default_factory=ReplanPolicy)
    first_s: float = 0.0
    next_s: float = math.inf
    expected_s: Mapping[str, float] = field(default_factory=dict)
    endangered: frozenset[str] = frozenset()

    def planned(self, now_s: float, ends_s: Mapping[str, float]) -> None:
        """Records that the rest was planned, or considered for it, at `now_s`.

        ends_s: the forecast end of each job.
        """
        left_s = max(ends_s.values(), default=now_s) - now_s
        self.first_s = self.first_s or left_s
        self.next_s = now_s + max(self.policy.every * left_s, self.policy.least * self.first_s)
        self.expected_s = dict(ends_s)

    def why_now(
        self,
        now_s: float,
        ends_s: Mapping[str, float],
        *,
        deadlines_s: Mapping[str, float] | None = None,
        noise: float = 0.0,
    ) -> str | None:
        """Returns the reason to re-plan now, None if there is none.

        A deadline that is in danger is a reason once, not for as long as it is in danger.

        ends_s: the forecast end of each job by what is known now.
        deadlines_s: the deadline of each job that has one.
        noise: the relative error of measured speeds, which is no surprise.
        """
        late_s = {job: ends_s[job] - at_s for job, at_s in (deadlines_s or {}).items() if ends_s.get(job, 0.0) > at_s}
        fresh = sorted(set(late_s) - self.endangered)
        self.endangered = frozenset(late_s)
        if fresh:
            return "in danger of missing their deadlines: " + ", ".join(
                f"{job} by {late_s[job]:.0f} s" for job in fresh
            )
        if now_s + EPS_S >= self.next_s:
            return "the speeds measured since the last plan"
        left_s = max(ends_s.values(), default=now_s) - now_s
        off_s = {job: end_s - self.expected_s[job] for job, end_s in ends_s.items() if job in self.expected_s}
        worst = max(off_s, key=lambda job: abs(off_s[job]), default=None)
        if worst is None or abs(off_s[worst]) <= (self.policy.surprise + noise) * left_s:
            return None
        return f"{worst} is {'late' if off_s[worst] > 0 else 'early'} by {abs(off_s[worst]):.0f} s"


@dataclass(frozen=True, kw_only=True)
class RemainingProblem:
    """The rest of a batch as a problem that has only the usable devices and the options that can run on them.

    problem: numbers devices and options without gaps.
    left: the same with the real numbers.
    devices: the real numbers of each node's devices.
    options: the real numbers of each job's options.
    """

    problem: Problem
    left: Problem
    devices: Mapping[str, tuple[int, ...]]
    options: Mapping[str, tuple[int, ...]]

    def real(self, plan: Plan) -> Plan:
        """Returns a plan of `problem` with the real numbers of devices and options."""
        segments = tuple(
            replace(
                segment,
                option=self.options[segment.job][segment.option],
                devices=tuple((node, tuple(self.devices[node][i] for i in ids)) for node, ids in segment.devices),
            )
            for segment in plan.segments
        )
        return replace(plan, segments=segments)


def remaining(
    left: Problem,
    *,
    running: Mapping[str, PlannedSegment],
    started: Collection[str],
    out: Collection[DeviceId] = (),
) -> RemainingProblem | None:
    """Returns the rest to plan, on the devices that are there; None if some job has no option for them.

    left: what is left of each job, on all devices.
    running: by job, the running segment that continues; a new plan prefers to keep it.
    started: the jobs that do not run and have a checkpoint.
    out: the devices that are not there now.
    """
    nodes, devices = _usable_nodes(left, out)
    runs = runs_on(nodes)
    options = {job.id: tuple(k for k, option in enumerate(job.options) if runs(option)) for job in left.jobs}
    if not all(options.values()):
        return None
    jobs = []
    for job in left.jobs:
        kept = options[job.id]
        now = running.get(job.id)
        gang = None
        if now is not None and now.option in kept and all(i in devices.get(node, ()) for node, i in now.devices):
            numbered = ((node, devices[node].index(number)) for node, number in sorted(now.devices))
            gang = CurrentRun(kept.index(now.option), by_node(numbered))
        is_started = now is not None or job.id in started
        jobs.append(replace(job, options=tuple(job.options[k] for k in kept), running=gang, started=is_started))
    problem = replace(left, nodes=nodes, jobs=tuple(jobs))
    return RemainingProblem(problem=problem, left=left, devices=devices, options=options)


def plannable(left: Problem, *, out: Collection[DeviceId] = ()) -> frozenset[str]:
    """Returns the jobs that have an option for the devices that are there and depend on no job that has none."""
    return frozenset(job.id for job in runnable(left.jobs, _usable_nodes(left, out)[0]))


def runnable(jobs: Sequence[PlanningJob], nodes: Sequence[PlanningNode]) -> tuple[PlanningJob, ...]:
    """Returns the jobs that have an option for the nodes, and do not wait for one that has none."""
    runs = runs_on(nodes)
    stuck = {job.id for job in jobs if not any(map(runs, job.options))}
    while more := {job.id for job in jobs if job.id not in stuck and stuck.intersection(job.after)}:
        stuck |= more
    return tuple(job for job in jobs if job.id not in stuck)


def runs_on(nodes: Sequence[PlanningNode]) -> Callable[[Option], bool]:
    """Returns a function that says whether the nodes can run an option. Thousands of options have few sizes."""
    known: dict[tuple[str, int, int, int], bool] = {}

    def runs(option: Option) -> bool:
        size = option.device_type, option.num_devices, option.num_nodes, option.host_memory_bytes
        if size not in known:
            known[size] = sum(option.runs_on(node) for node in nodes) >= option.num_nodes
        return known[size]

    return runs


def _usable_nodes(
    left: Problem, out: Collection[DeviceId]
) -> tuple[tuple[PlanningNode, ...], dict[str, tuple[int, ...]]]:
    """Returns the nodes with the devices that are there, and the real numbers of these, by node."""
    devices = {n.id: tuple(i for i in range(n.num_devices) if (n.id, i) not in out) for n in left.nodes}
    return tuple(replace(n, num_devices=len(devices[n.id])) for n in left.nodes if devices[n.id]), devices


def could_gain(rest: RemainingProblem, left_s: float, *, policy: ReplanPolicy) -> bool:
    """Whether any plan of the rest could be worth following, given that the current one takes `left_s` more seconds.

    The bound of the pattern LP decides this in milliseconds. It often makes a solver run unnecessary, and always if
    only one job is left.
    """
    has_deadlines = any(job.deadline_s is not None for job in rest.problem.jobs)
    if has_deadlines or not objective_by_name(policy.objective).only_last_end:
        return True
    could_gain_s = left_s - preemptive_bound(rest.problem).seconds
    return could_gain_s > max(policy.worth * left_s, policy.worth_s)


def plan_rest(rest: RemainingProblem, make_plan: Callable[[Problem], Plan]) -> Plan:
    """Plans the rest. Gives up budgets, then few deadlines, where necessary: jobs that miss theirs are planned too."""
    plan, _ = plan_giving_up_bounds(rest.problem, make_plan)
    return rest.real(plan)


def is_worth_it(
    now: PlanSimulator, fresh: Sequence[PlannedSegment], *, policy: ReplanPolicy, noise: float = 0.0
) -> bool:
    """Whether following `fresh` from now on gains more than it costs.

    Both plans are simulated to their ends by the dispatch rules, so that each pays for the switches that it makes.
    `now` continues at the speeds that are assumed. Additional switches must gain more than their own seconds, because
    forecasts err and the next plan may undo them. They must also gain more than the measured speeds may be wrong by.

    noise: the relative error of measured speeds.
    """
    kept, new = now.fork(), now.fork()
    new.adopt(fresh)
    kept_s, new_s = left_s(kept, now, policy), left_s(new, now, policy)
    if new_s == math.inf:
        return False
    more_switches = max(0, new.num_switches - kept.num_switches)
    price_s = max(policy.worth_s, policy.worth * new_s) + policy.per_switch * more_switches * (now.now_s + new_s)
    price_s += noise * new_s if more_switches else 0.0
    late_s = kept.late_s - new.late_s
    return kept_s == math.inf or (late_s > price_s or (late_s >= 0 and kept_s - new_s > price_s))


def left_s(ahead: PlanSimulator, now: PlanSimulator, policy: ReplanPolicy) -> float:
    """Returns the objective in seconds from `now`, over the jobs that end in `ahead`, which is simulated to its end."""
    if ahead.finish() == math.inf:
        return math.inf
    objective = objective_by_name(policy.objective)
    if ahead.problem.has_series and not objective.only_last_end:
        return objective.value(ahead.plan_since(now), ahead.problem) / _value_per_second(now, objective)
    ends_s = {job: end_s - now.now_s for job, end_s in ahead.ended_s.items() if job not in now.ended_s}
    held_before_s = now.held_s
    held_s = {node: held - held_before_s.get(node, 0.0) for node, held in ahead.held_s.items()}
    num_devices = {node.id: node.num_devices for node in ahead.problem.nodes}
    of = objective.coefficients(ahead.problem)
    return of.in_seconds(ends_s, held_s, num_devices=num_devices)


def _value_per_second(now: PlanSimulator, objective: Objective) -> float:
    """Returns the mean value of a second of the plan that is followed, where values depend on the time.

    1 where nothing can end by that plan, or it is free.
    """
    kept = now.fork()
    plan = kept.plan_since(now) if kept.finish() < math.inf else None
    value = objective.value(plan, now.problem) if plan is not None and plan.segments else 0.0
    return value / plan.makespan_s if plan is not None and value > 0 else 1.0

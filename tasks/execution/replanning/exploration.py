"""Exploration: options that have not run are tried in short real segments where that is worth more than it costs.

Let a plan run job j under option b for the rest of its work, and let p be another option that fits on the same devices.
With c_o = t_o (n_o + r_j), where t_o is the believed runtime of that rest under option o on n_o devices, trying p gains

    E[max(0, c_b - c_p)] - max(0, c_b - E[c_p])

device-seconds in expectation, as the better of both is used once they are known. This is the value of information
(Howard, Information Value Theory, 1966). Options are tried one after another: for a further one, c_b is what is
expected of the best of those before it, so that each must gain beyond them. c_p / c_b is log-normal, so the expectation
has the closed form of an option's price. The price of a device-second is that of the plan's bound on the makespan,
equal for all jobs; r_j is the further price of a second of job j, in devices: the least one under which no option beats
the planned one. It is 0 for a job that takes the cheapest option, and large for a job that is spread over many devices
as it decides the end.

Trying p costs a switch, two for a job that runs, and the part of the devices' time that p leaves unused or wastes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from ringmaster.tasks.execution.dispatch import PlannedSegment
from ringmaster.tasks.planning import Option
from ringmaster.tasks.profiling.speed_beliefs import SpeedBelief

LEAST_STEPS = 6  # of a segment that tries an option; the first of them warms up and is not measured
LEAST_TRIED_S = 1.0
MOST_SHARE = 0.02  # of the job's remaining steps
PRICES = (0.0, *(2.0**k for k in range(-6, 11)))  # of a second of a job, in devices


@dataclass(frozen=True, kw_only=True)
class ExploredJob:
    """What is known of a job of which options may be tried.

    options: what is left of the job, at the runtimes that are believed.
    beliefs: the belief about each option's speed.
    step: the steps that are done.
    total_steps: its last step.
    is_running: whether the job runs now, so that another option interrupts it.
    """

    options: Sequence[Option]
    beliefs: Sequence[SpeedBelief]
    step: int
    total_steps: int
    is_running: bool = False


def explored(
    planned: Sequence[PlannedSegment],
    jobs: Mapping[str, ExploredJob],
    *,
    switch_cost_s: float,
    most: int,
) -> list[PlannedSegment]:
    """Returns the planned segments with short segments before the first one of each job where these are worth it.

    planned: in order of their start.
    jobs: the jobs that may change their options.
    most: the most options of a job to try.
    """
    found: list[PlannedSegment] = []
    seen: set[str] = set()
    for segment in planned:
        if segment.job in jobs and segment.job not in seen:
            found += _trying_segments(segment, jobs[segment.job], switch_cost_s=switch_cost_s, most=most)
        seen.add(segment.job)
        found.append(segment)
    return found


def _trying_segments(
    segment: PlannedSegment, job: ExploredJob, *, switch_cost_s: float, most: int
) -> list[PlannedSegment]:
    found: list[PlannedSegment] = []
    step, left = job.step, job.total_steps - job.step
    if left <= 0:  # it is evaluated and exported now
        return found
    price, saved = _price(job.options, segment.option), 0.0
    options = {option for option in range(len(job.options)) if _may_try(option, segment, job)}
    while options and len(found) < most:
        trials = [_Trial.of(k, segment, job, price=price, saved=saved, switch_cost_s=switch_cost_s) for k in options]
        best = max(trials, key=lambda trial: (trial.worth_s, -trial.option))
        if best.worth_s <= 0:
            break
        options.remove(best.option)
        if best.num_steps > MOST_SHARE * left or step + best.num_steps >= segment.last_step:
            continue
        step, saved = step + best.num_steps, saved + best.saves
        devices = segment.devices[: job.options[best.option].num_devices]
        found.append(replace(segment, option=best.option, last_step=step, devices=devices))
    return found


def _num_steps(job: ExploredJob, option: int, *, switch_cost_s: float) -> int:
    step_s = job.options[option].runtime_s / (job.total_steps - job.step)
    return max(LEAST_STEPS, math.ceil(max(LEAST_TRIED_S, switch_cost_s) / step_s))


def _may_try(option: int, segment: PlannedSegment, job: ExploredJob) -> bool:
    """Whether an option has not run, and fits on the devices of a planned segment."""
    tried, used = job.options[option], job.options[segment.option]
    fits = tried.num_devices <= len(segment.devices) and (tried.num_nodes, tried.device_type) == (
        used.num_nodes,
        used.device_type,
    )
    return fits and option != segment.option and not (job.beliefs[option].is_measured or tried.jobs or used.jobs)


@dataclass(frozen=True)
class _Trial:
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
        cls, option: int, segment: PlannedSegment, job: ExploredJob, *, price: float, saved: float, switch_cost_s: float
    ) -> _Trial:
        """Returns the trial of an option.

        saved: the part of the planned option's cost that the trials before it are expected to save.
        """
        tried, used = job.options[option], job.options[segment.option]
        cost_used = used.runtime_s * (used.num_devices + price)
        ratio = tried.runtime_s * (tried.num_devices + price) / (cost_used * (1.0 - saved))
        spread = job.beliefs[option].spread_beside(job.beliefs[segment.option])
        saves = (1.0 - saved) * (expected_saving(math.log(ratio), spread) - max(0.0, 1.0 - ratio))
        held = len(segment.devices) + price
        num_steps = _num_steps(job, option, switch_cost_s=switch_cost_s)
        share = num_steps / (job.total_steps - job.step)
        num_switches = 2 if job.is_running else 1
        switches_s = num_switches * (switch_cost_s + tried.startup_s) * held
        wasted_s = held * share * tried.runtime_s - share * cost_used
        return cls(option, num_steps, saves, cost_used * saves - switches_s - wasted_s)


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

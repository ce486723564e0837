"""Exploration: options that have not run are tried in short real segments where that is worth more than it costs.

Let a plan run job j under option b for the rest of its work, and let p be another option that fits on the same devices.
With c_o = t_o (n_o + r_j), where t_o is the believed runtime of that rest under option o on n_o devices, trying p gains

    E[max(0, c_b - c_p)] - max(0, c_b - E[c_p])

device-seconds in expectation, as the better of both is used once they are known. This is the value of information
(Howard, Information Value Theory, 1966). c_p / c_b is log-normal, so the expectation has the closed form of an option's
price. The price of a device-second is that of the plan's bound on the makespan, equal for all jobs; r_j is the further
price of a second of job j, in devices: the least one under which no option beats the planned one. It is 0 for a job
that takes the cheapest option, and large for a job that is spread over many devices as it decides the end.

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
    worth = {
        option: worth_s
        for option in range(len(job.options))
        if (worth_s := _worth_s(option, segment, job, switch_cost_s=switch_cost_s)) > 0
    }
    found: list[PlannedSegment] = []
    step, left = job.step, job.total_steps - job.step
    for option in sorted(worth, key=lambda k: -worth[k])[:most]:
        num_steps = _num_steps(job, option, switch_cost_s=switch_cost_s)
        if num_steps > MOST_SHARE * left or step + num_steps >= segment.last_step:
            continue
        step += num_steps
        devices = segment.devices[: job.options[option].num_devices]
        found.append(replace(segment, option=option, last_step=step, devices=devices))
    return found


def _num_steps(job: ExploredJob, option: int, *, switch_cost_s: float) -> int:
    step_s = job.options[option].runtime_s / (job.total_steps - job.step)
    return max(LEAST_STEPS, math.ceil(max(LEAST_TRIED_S, switch_cost_s) / step_s))


def _worth_s(option: int, segment: PlannedSegment, job: ExploredJob, *, switch_cost_s: float) -> float:
    """Returns the device-seconds that trying an option gains in expectation beyond its cost."""
    tried, used = job.options[option], job.options[segment.option]
    fits = tried.num_devices <= len(segment.devices) and (tried.num_nodes, tried.device_type) == (
        used.num_nodes,
        used.device_type,
    )
    if option == segment.option or job.beliefs[option].is_measured or not fits or tried.jobs or used.jobs:
        return 0.0
    price = _price(job.options, segment.option)
    cost_used = used.runtime_s * (used.num_devices + price)
    ratio = tried.runtime_s * (tried.num_devices + price) / cost_used
    spread = job.beliefs[option].spread_beside(job.beliefs[segment.option])
    gain_s = cost_used * (expected_saving(math.log(ratio), spread) - max(0.0, 1.0 - ratio))
    held = len(segment.devices) + price
    left = job.total_steps - job.step
    share = _num_steps(job, option, switch_cost_s=switch_cost_s) / left if left else 1.0
    tried_s = share * tried.runtime_s
    num_switches = 2 if job.is_running else 1
    switches_s = num_switches * (switch_cost_s + tried.startup_s) * held
    return gain_s - switches_s - (held * tried_s - share * cost_used)


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

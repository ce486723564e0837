"""Mean completion of jobs that arrive unknown, on four types of devices: Ringmaster, Sia's style, and a bound.

usage: python -m benchmarks.simulation.online [--jobs N] [--nodes N] [--load SHARE] [--work S] [--rules RULE ...]
           [--table]

Jobs arrive at random on nodes of eight devices. Each has sixteen options: gangs of 1, 2, 4 and 8 devices of four types.
True runtimes are the predicted ones times a factor of the job (25 %), which both schedulers know once it has run. Both
re-plan at the beginning of each round of six minutes, and pay 60 s for a job that is moved.

- Ringmaster: `solve` for the mean completion of all jobs that are there, followed by the executor's dispatch rules.
- Sia's style with goodput (`benchmarks.planning.rounds`): each round maximises the sum over jobs of (r G)^p by a linear
  program, G being the speed over that of the job's slowest option. All speeds are known exactly.

The bound is that of a clairvoyant who knows all jobs and true runtimes, and who may divide them at any moment for free.
With prices q(k, i) of a device of type k in window i, a job that ends in window i pays at least, for any m,

    m + begin_i + min(0, |i| (1 - g_i)) - sum_{h < i} |h| g_h        g_h = max(0, max_o (m / runtime_o - q(k_o, h) n_o))

where |h| is the part of window h after the job's release and begin_i that of window i; so the sum over jobs of the
least such cost, less all that the devices can earn, bounds the sum of the ends. Prices follow a subgradient.
"""

import argparse
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import partial

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array

from benchmarks.page import write_section
from benchmarks.planning.rounds import ROUND_S, SIA_POWER, SIA_WAITS
from ringmaster.tasks.execution.dispatch import PlannedSegment, in_steps
from ringmaster.tasks.execution.plan_simulator import PlanSimulator
from ringmaster.tasks.execution.replan_policy import plan_rest, remaining
from ringmaster.tasks.planning import Option, Plan, PlanningJob, PlanningNode, Problem, solve
from ringmaster.tasks.planning.objectives import MeanCompletion
from ringmaster.tasks.planning.shared_speeds import plan_by_speeds

TYPES = {"a": 1.0, "b": 0.6, "c": 0.45, "d": 0.3}  # of devices, with their mean speeds
SIZES, DEVICES_A_NODE, SWITCH_S, STEPS = (1, 2, 4, 8), 8, 60.0, 10**6
MEAN_HOURS, ERROR = 2.0, 0.25
GOAL, GOAL_BELOW_SIA, GOAL_PLAN_S = 1.10, 0.25, 10.0
WINDOWS, MULTIPLIERS, ITERATIONS = 64, 40, 40


@dataclass(frozen=True)
class Workload:
    """Jobs in the order of their arrivals, with predicted runtimes; `factor` has the true over the predicted ones."""

    nodes: tuple[PlanningNode, ...]
    jobs: tuple[PlanningJob, ...]
    factor: Mapping[str, float]

    def true_s(self, job: PlanningJob) -> list[float]:
        return [option.runtime_s * self.factor[job.id] for option in job.options]


@dataclass(frozen=True)
class Outcome:
    """The ends of all jobs, the switches, and the seconds of each plan."""

    ends_s: Mapping[str, float]
    num_switches: int
    plans_s: Sequence[float]


def workload(*, num_jobs: int, num_nodes: int, load: float, seed: int) -> Workload:
    """Returns jobs of which the least device-seconds per second take a share of all devices."""
    numbers = random.Random(seed)
    kinds = list(TYPES)
    nodes = tuple(PlanningNode(f"n{i}", DEVICES_A_NODE, kinds[i % len(kinds)]) for i in range(num_nodes))
    per_second = load * DEVICES_A_NODE * sum(TYPES[node.device_type] for node in nodes)
    jobs, factor, now_s = [], {}, 0.0
    for i in range(num_jobs):
        hours, scales = MEAN_HOURS * numbers.lognormvariate(-0.6, 1.1), numbers.uniform(0.4, 0.95)
        speeds = {kind: speed * numbers.uniform(0.8, 1.25) for kind, speed in TYPES.items()}
        options = tuple(
            Option("ddp", size, round(3600 * hours / speeds[kind] / size**scales, 1), device_type=kind)
            for kind in kinds
            for size in SIZES
        )
        now_s += numbers.expovariate(per_second / (3600 * MEAN_HOURS))
        jobs.append(PlanningJob(f"j{i}", options, release_s=now_s))
        factor[f"j{i}"] = math.exp(numbers.gauss(0.0, ERROR))
    return Workload(nodes, tuple(jobs), factor)


def ringmaster(load: Workload, *, work_s: float, is_first_alone: bool = False) -> Outcome:
    """Plans at the beginning of each round, and follows the plan by the executor's rules.

    is_first_alone: whether the first plan of the search is followed, which takes the least time.
    """

    def make_plan(problem: Problem) -> Plan:
        if is_first_alone:
            return plan_by_speeds(problem, MeanCompletion().coefficients(problem).ends)
        return solve(problem, work_s=work_s, objective=MeanCompletion.name)

    ends_s, plans_s, num_switches = dict[str, float](), list[float](), 0
    by_id, waiting, active = {job.id: job for job in load.jobs}, list(load.jobs), list[str]()
    steps, running, ran, now_s = dict[str, int](), (), dict[str, PlannedSegment](), 0.0
    while waiting or active:
        if not active:
            now_s = max(now_s, math.ceil(waiting[0].release_s / ROUND_S) * ROUND_S)
        while waiting and waiting[0].release_s <= now_s:
            active.append(waiting.pop(0).id)
            steps[active[-1]] = 0
        known = {job: load.factor[job] if job in ran or any(r.segment.job == job for r in running) else 1.0
                 for job in active}  # fmt: skip
        left = Problem(
            "online", load.nodes, tuple(_left(by_id[job], steps[job], known[job]) for job in active), SWITCH_S
        )
        rest = remaining(
            left,
            running={each.segment.job: each.segment for each in running},
            started=[job for job in active if job in ran],
        )
        assert rest is not None
        began_s = time.process_time()
        plan = plan_rest(rest, make_plan)
        plans_s.append(time.process_time() - began_s)
        whole = dict.fromkeys(active, STEPS)
        simulator = PlanSimulator(
            replace(left, jobs=tuple(by_id[job] if not by_id[job].release_s else replace(by_id[job], release_s=0.0)
                                     for job in active)),
            (),
            num_steps=whole,
            step_s=lambda job, k: by_id[job].options[k].runtime_s * load.factor[job] / STEPS,
            steps={job: steps[job] for job in active},
            running=running,
            ran={job: segment for job, segment in ran.items() if job in steps},
            now_s=now_s,
        )  # fmt: skip
        simulator.adopt(in_steps(plan, num_steps=whole, steps_done={job: steps[job] for job in active}))
        until_s = now_s + ROUND_S
        while simulator.now_s < until_s - 1e-6 and not simulator.is_over:
            simulator.advance(until_s)
        ends_s |= simulator.ended_s
        num_switches += simulator.num_switches
        now_s = until_s
        active = [job for job in active if job not in simulator.ended_s]
        steps = {job: simulator.step_of(job) for job in active}
        running = tuple(simulator.running.values())
        ran = {job: segment for job, segment in simulator.ran.items() if job in steps}
    return Outcome(ends_s, num_switches, plans_s)


def _left(job: PlanningJob, step: int, factor: float) -> PlanningJob:
    share = max(1e-6, 1.0 - step / STEPS) * factor
    options = tuple(replace(option, runtime_s=max(0.1, option.runtime_s * share)) for option in job.options)
    return replace(job, options=options, release_s=0.0)


def sia_style(load: Workload, **_: float) -> Outcome:
    """Plays the rule round by round; gangs that keep their option stay where they are."""
    by_id, waiting = {job.id: job for job in load.jobs}, list(load.jobs)
    left, placed, restarts = dict[str, float](), dict[str, tuple[int, str, tuple[int, ...]]](), dict[str, int]()
    ends_s, plans_s, num_switches, now_s = dict[str, float](), list[float](), 0, 0.0
    while waiting or left:
        if not left:
            now_s = max(now_s, math.ceil(waiting[0].release_s / ROUND_S) * ROUND_S)
        while waiting and waiting[0].release_s <= now_s:
            left[waiting.pop(0).id] = 1.0
        began_s = time.process_time()
        choice = _sia_choice(load, by_id, list(left), placed, restarts, now_s)
        plans_s.append(time.process_time() - began_s)
        new = _placed(load, by_id, choice, placed)
        for job, where in new.items():
            is_moved = job in restarts and placed.get(job) != where
            num_switches += is_moved
            restarts[job] = restarts.get(job, 0) + is_moved
            runtime_s = load.true_s(by_id[job])[where[0]]
            paid_s = SWITCH_S if is_moved else 0.0
            needs_s = paid_s + left[job] * runtime_s
            if needs_s <= ROUND_S:
                ends_s[job] = now_s + needs_s
                del left[job]
            else:
                left[job] -= (ROUND_S - paid_s) / runtime_s
        placed = {job: where for job, where in new.items() if job in left}
        now_s += ROUND_S
    return Outcome(ends_s, num_switches, plans_s)


def _sia_choice(
    load: Workload,
    by_id: Mapping[str, PlanningJob],
    jobs: Sequence[str],
    placed: Mapping[str, tuple[int, str, tuple[int, ...]]],
    restarts: Mapping[str, int],
    now_s: float,
) -> dict[str, int]:
    """Returns the options of a round, by a linear program of which few values are fractions."""
    gains, rows, columns, amounts = [], [], [], []
    kinds = list(TYPES)
    keys = [(job, k) for job in jobs for k in range(len(by_id[job].options))]
    number = {job: i for i, job in enumerate(jobs)}
    for c, (job, k) in enumerate(keys):
        options = by_id[job].options
        slowest_s = max(option.runtime_s for option in options)
        age_s = now_s - by_id[job].release_s + SWITCH_S
        is_free = job not in restarts or (job in placed and placed[job][0] == k)
        restart = 1.0 if is_free else max(1e-3, (age_s - SWITCH_S - restarts[job] * SWITCH_S) / age_s)
        gains.append(SIA_WAITS - (restart * slowest_s / options[k].runtime_s) ** SIA_POWER)
        rows += [number[job], len(jobs) + kinds.index(options[k].device_type)]
        columns += [c, c]
        amounts += [1.0, float(options[k].num_devices)]
    there = [sum(node.num_devices for node in load.nodes if node.device_type == kind) for kind in kinds]
    most = [1.0] * len(jobs) + [float(count) for count in there]
    matrix = csr_array((amounts, (rows, columns)), shape=(len(most), len(keys)))
    found = linprog(-np.array(gains), A_ub=matrix, b_ub=most, bounds=(0.0, 1.0), method="highs")
    free, choice = dict(zip(kinds, there, strict=True)), dict[str, int]()
    for c in np.argsort(-found.x, kind="stable"):
        job, k = keys[c]
        option = by_id[job].options[k]
        if job not in choice and found.x[c] > 1e-6 and option.num_devices <= free[option.device_type]:
            choice[job] = k
            free[option.device_type] -= option.num_devices
    return choice


def _placed(
    load: Workload,
    by_id: Mapping[str, PlanningJob],
    choice: Mapping[str, int],
    placed: Mapping[str, tuple[int, str, tuple[int, ...]]],
) -> dict[str, tuple[int, str, tuple[int, ...]]]:
    """Returns where gangs run. If a new gang of a type finds no node, all gangs of the type are placed again."""
    result = {}
    for kind in TYPES:
        own = {job: k for job, k in choice.items() if by_id[job].options[k].device_type == kind}
        stays = {job: placed[job] for job, k in own.items() if job in placed and placed[job][0] == k}
        fitted = _fitted(load, by_id, own, stays, kind)
        result |= fitted if fitted is not None else _fitted(load, by_id, own, {}, kind) or stays
    return result


def _fitted(
    load: Workload,
    by_id: Mapping[str, PlanningJob],
    choice: Mapping[str, int],
    stays: Mapping[str, tuple[int, str, tuple[int, ...]]],
    kind: str,
) -> dict[str, tuple[int, str, tuple[int, ...]]] | None:
    free = {node.id: set(range(node.num_devices)) for node in load.nodes if node.device_type == kind}
    for _, node, ids in stays.values():
        free[node] -= set(ids)
    found = dict(stays)
    for job, k in sorted(choice.items(), key=lambda row: -by_id[row[0]].options[row[1]].num_devices):
        size = by_id[job].options[k].num_devices
        if job in stays:
            continue
        fits = [node for node, ids in free.items() if len(ids) >= size]
        if not fits:
            return None
        node = min(fits, key=lambda name: len(free[name]))
        ids = tuple(sorted(free[node])[:size])
        free[node] -= set(ids)
        found[job] = (k, node, ids)
    return found


class ClairvoyantBound:
    """The bound of the module's head on the sum of the ends of all jobs, for any prices >= 0."""

    def __init__(self, load: Workload, *, horizon_s: float) -> None:
        kinds = list(TYPES)
        options = load.jobs[0].options
        self.kinds = np.array([kinds.index(option.device_type) for option in options])
        self.devices = np.array([float(option.num_devices) for option in options])
        self.speeds = 1.0 / np.array([load.true_s(job) for job in load.jobs])
        self.releases_s = np.array([job.release_s for job in load.jobs])
        self.begins_s = np.linspace(0.0, horizon_s, WINDOWS)
        self.ends_s = np.append(self.begins_s[1:], math.inf)
        counts = [sum(node.num_devices for node in load.nodes if node.device_type == kind) for kind in kinds]
        self.capacity = np.outer(counts, np.append(np.diff(self.begins_s), 0.0))

    def best(self) -> float:
        """Returns the best bound on the mean of end - release that a subgradient finds."""
        prices = np.outer(list(TYPES.values()), np.linspace(1.0, 0.0, WINDOWS)) * 0.5
        best_s, step = -math.inf, 0.5
        for i in range(ITERATIONS):
            total_s, used = self.of(prices)
            best_s = max(best_s, total_s)
            over = np.clip(used[:, :-1] / self.capacity[:, :-1] - 1.0, -1.0, 1.0)
            prices[:, :-1] = np.maximum(prices[:, :-1] * np.exp(step * over), 1e-6)
            step = 0.5 / math.sqrt(1 + i)
        return (best_s - self.releases_s.sum()) / len(self.releases_s)

    def of(self, prices: np.ndarray) -> tuple[float, np.ndarray]:
        """Returns the bound on the sum of the ends at these prices, and about how much of each device is used."""
        total_s, used = -float((prices * self.capacity).sum()), np.zeros_like(prices)
        for first in range(0, len(self.speeds), 250):
            cost_s, own = self._of_jobs(slice(first, first + 250), prices)
            total_s += cost_s
            used += own
        return total_s, used

    def _of_jobs(self, rows: slice, prices: np.ndarray) -> tuple[float, np.ndarray]:
        speeds, releases_s = self.speeds[rows], self.releases_s[rows]
        fastest_s = 1.0 / speeds.max(axis=1)
        # m is at least the fastest runtime, up to what the whole work can cost on the slowest devices.
        multipliers = fastest_s[:, None] * np.geomspace(1.0, 60.0, MULTIPLIERS)[None, :]  # job, m
        gain = np.zeros((len(speeds), WINDOWS, MULTIPLIERS))
        for o, (kind, devices) in enumerate(zip(self.kinds, self.devices, strict=True)):
            own = multipliers[:, None, :] * speeds[:, o, None, None] - (prices[kind] * devices)[None, :, None]
            np.maximum(gain, own, out=gain)
        begins_s = np.maximum(self.begins_s[None, :], releases_s[:, None])  # job, window
        length_s = np.maximum(0.0, self.ends_s[None, :] - begins_s)
        last = length_s.shape[1] - 1
        finite_s = length_s.copy()
        finite_s[:, last] = 0.0
        earned = np.cumsum(finite_s[:, :, None] * gain, axis=1)
        before = np.concatenate([np.zeros_like(earned[:, :1]), earned[:, :-1]], axis=1)
        inside = np.minimum(0.0, finite_s[:, :, None] * (1.0 - gain))
        cost = multipliers[:, None, :] + begins_s[:, :, None] + inside - before
        cost[:, last] = self.begins_s[-1]  # whoever ends in the last window ends after its begin
        best_m = cost.argmax(axis=2)
        by_window = np.take_along_axis(cost, best_m[:, :, None], axis=2)[:, :, 0]
        by_window[finite_s <= 0.0] = np.inf
        by_window[:, last] = self.begins_s[-1]
        window = by_window.argmin(axis=1)
        total_s = float(np.take_along_axis(by_window, window[:, None], axis=1).sum())
        return total_s, self._used(speeds, multipliers, best_m, window, finite_s, prices)

    def _used(self, speeds, multipliers, best_m, window, length_s, prices) -> np.ndarray:
        """Returns the device-seconds by type and window that jobs take in the windows in which a second pays off."""
        jobs = np.arange(len(speeds))
        m = multipliers[jobs, best_m[jobs, window]]
        net = m[:, None, None] * speeds[:, None, :] - (prices[self.kinds] * self.devices[:, None]).T[None, :, :]
        option = net.argmax(axis=2)  # job, window
        runs = (np.take_along_axis(net, option[:, :, None], axis=2)[:, :, 0] > 0) & (
            np.arange(WINDOWS)[None, :] <= window[:, None]
        )
        seconds = np.where(runs, length_s, 0.0)
        work = (seconds * speeds[jobs[:, None], option]).sum(axis=1)
        seconds = seconds / np.maximum(work, 1e-9)[:, None]  # so that each does its work once
        used = np.zeros_like(prices)
        for kind in range(len(prices)):
            amounts = np.where(self.kinds[option] == kind, seconds * self.devices[option], 0.0)
            used[kind] = amounts.sum(axis=0)
        return used


RULES: Mapping[str, Callable[..., Outcome]] = {
    "Ringmaster": ringmaster,
    "Ringmaster-first-plans": partial(ringmaster, is_first_alone=True),
    "Sia-style": sia_style,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=5000)
    parser.add_argument("--nodes", type=int, default=256)
    parser.add_argument("--load", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=float, default=1.0, help="of a plan, in seconds of an idle machine")
    parser.add_argument("--rules", nargs="*", choices=RULES, default=list(RULES))
    parser.add_argument("--table", action="store_true", help="write the table in docs/benchmarks.md")
    chosen = parser.parse_args()
    load = workload(num_jobs=chosen.jobs, num_nodes=chosen.nodes, load=chosen.load, seed=chosen.seed)
    outcomes = {name: RULES[name](load, work_s=chosen.work) for name in chosen.rules}
    last_s = max(max(outcome.ends_s.values()) for outcome in outcomes.values())
    bound_s = ClairvoyantBound(load, horizon_s=last_s).best()
    released = {job.id: job.release_s for job in load.jobs}
    lines = [
        "| scheduler | mean end - arrival | over the bound | switches a job | plans | "
        "processor seconds of a plan, median, worst |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, outcome in outcomes.items():
        mean_s = statistics.fmean(end_s - released[job] for job, end_s in outcome.ends_s.items())
        plan_s = f"{statistics.median(outcome.plans_s):.1f}, {max(outcome.plans_s):.1f}"
        switches = outcome.num_switches / len(load.jobs)
        ratio = f"{mean_s / 60:.1f} min | {mean_s / bound_s:.3f}"
        lines.append(f"| {name} | {ratio} | {switches:.2f} | {len(outcome.plans_s)} | {plan_s} |")
    lines.append(f"| clairvoyant's bound | {bound_s / 60:.1f} min | 1 | | | |")
    print("\n".join(lines))
    if chosen.table:
        size = f"{chosen.jobs:,} arrivals, {chosen.nodes * DEVICES_A_NODE:,} devices of 4 types, load {chosen.load:g}"
        about = f"{date.today().isoformat()}, {os.cpu_count()} cores; {size}."
        write_section("online", [about, "", *lines])


if __name__ == "__main__":
    main()

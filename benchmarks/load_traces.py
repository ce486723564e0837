"""Predicted ends on machines whose load changes: how many lie in their 90 % intervals, on recorded and drawn traces.

    python -m benchmarks.load_traces [--machines N] [--table]

A batch runs again and again on one machine, at random times of a trace of its load. It takes so many seconds on a quiet
machine, with an error of 10 % that nothing explains. Before each run its end is predicted by the load at hand, which is
measured with an error of 5 %, and by the earlier runs. Traces are drawn of three kinds (processes that come and go, a
load that drifts, builds of twenty minutes every two hours), and one was recorded on two cores that seven developers
shared: the mean number of processes that were ready, of two seconds every few seconds. `--table` writes the table
between the markers in docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from bisect import bisect
from collections.abc import Callable, Sequence
from datetime import date
from itertools import chain, islice, pairwise
from operator import itemgetter
from pathlib import Path

import numpy as np

from benchmarks.page import write_section
from ringmaster.tasks.execution.forecast import ForecastConditions, errors_in, predict
from ringmaster.tasks.profiling.machine_load import CurrentLoad, MachineLoad

RECORDED = Path(__file__).with_name("load_trace.csv")
LENGTHS_S = (30.0, 120.0, 600.0, 1800.0)
NUM_CORES, DAY_S, EVERY_S = 2, 86_400.0, 10.0
UNEXPLAINED, OF_LOAD, OF_SPEED = 0.1, 0.05, 0.05
RUNS, NUM_EARLIER = 12, 20

Trace = Sequence[tuple[float, float]]
"""The seconds of each change, and the load from then on."""


def load_of(num_others: float) -> float:
    """Returns the load of a gang of as many threads as there are cores, where so many other threads are ready."""
    return (NUM_CORES + num_others) / NUM_CORES


def coming_and_going(draw: random.Random) -> Trace:
    """Processes that arrive every five minutes and take four, in the mean; each machine has its own rate."""
    rate, changes = draw.uniform(0.3, 2.0) / 300, list[tuple[float, int]]()
    at_s = 0.0
    while at_s < DAY_S:
        at_s += draw.expovariate(rate)
        changes += [(at_s, 1), (at_s + draw.expovariate(1 / 240), -1)]
    trace, number = [(0.0, 1.0)], 0
    for at_s, change in sorted(changes):
        number += change
        trace.append((at_s, load_of(number)))
    return trace


def drifting(draw: random.Random) -> Trace:
    """A load whose logarithm is an Ornstein-Uhlenbeck process with a time constant of ten minutes to two hours."""
    mean, deviation, time_s = draw.uniform(0.3, 1.5), draw.uniform(0.2, 0.6), draw.uniform(600.0, 7200.0)
    keeps, x, trace = math.exp(-EVERY_S / time_s), draw.gauss(mean, deviation), []
    for number in range(int(DAY_S / EVERY_S)):
        trace.append((number * EVERY_S, math.exp(max(x, 0.0))))
        x = mean + keeps * (x - mean) + math.sqrt(1 - keeps**2) * draw.gauss(0.0, deviation)
    return trace


def building(draw: random.Random) -> Trace:
    """A machine that is quiet but for builds of about twenty minutes every two hours."""
    trace, at_s = [(0.0, 1.0)], draw.uniform(0.0, 7200.0)
    while at_s < DAY_S:
        trace += [(at_s, load_of(draw.uniform(2.0, 8.0))), (at_s + draw.uniform(900.0, 1500.0), 1.0)]
        at_s += draw.uniform(6000.0, 8400.0)
    return trace


def recorded(draw: random.Random) -> Trace:
    """The recorded trace, from any time on, again and again."""
    rows = [tuple(map(float, line.split(","))) for line in RECORDED.read_text().splitlines()]
    loads = [(at_s - rows[0][0], load_of(number)) for at_s, number in rows]
    span_s, trace, from_s = loads[-1][0] + EVERY_S, list[tuple[float, float]](), -draw.uniform(0.0, loads[-1][0])
    while from_s < DAY_S:
        trace += [(from_s + at_s, load) for at_s, load in loads]
        from_s += span_s
    return trace


def quiet(draw: random.Random) -> Trace:
    """A machine without other work."""
    return [(0.0, 1.0)]


KINDS: dict[str, Callable[[random.Random], Trace]] = {
    "processes that come and go": coming_and_going,
    "drifting": drifting,
    "builds": building,
    "recorded": recorded,
    "quiet": quiet,
}


def finished_s(trace: Trace, begin_s: float, work_s: float) -> float:
    """Returns the seconds that work takes from `begin_s` on which takes `work_s` on a quiet machine."""
    left_s, now_s = work_s, begin_s
    from_then_on = islice(trace, max(_place(trace, begin_s), 0), None)
    for (_, load), (until_s, _) in pairwise(chain(from_then_on, [(math.inf, 1.0)])):
        if (until_s - now_s) / load >= left_s:
            return now_s + left_s * load - begin_s
        left_s -= (until_s - now_s) / load
        now_s = until_s
    raise AssertionError("the last load is there for good")


def at_half_time(trace: Trace, begin_s: float, *, length_s: float, work_s: float) -> tuple[bool, float]:
    """Returns the same for a first run of which half is done, whose steps have been measured at the load by then."""
    half_s, end_s = (finished_s(trace, begin_s, share * work_s) for share in (0.5, 1.0))
    load, now_s = CurrentLoad(), 0.0
    while now_s < half_s:
        now_s = min(now_s + 2.0, half_s)
        load.note(load_at(trace, begin_s + now_s), now_s=now_s)
    errors = np.exp(0.02 * np.linspace(-2.0, 2.0, 200))
    conditions = ForecastConditions(load=MachineLoad(ratio=load.ratio, spread=load.error), seen=tuple(load.seen))
    shown = predict({"a": 0.5 * work_s * load.ratio * errors}, conditions=conditions, made_s=half_s)
    return shown.low_s <= end_s <= shown.high_s, (shown.high_s - shown.low_s) / shown.makespan_s


def load_at(trace: Trace, now_s: float) -> float:
    """Returns the load of a trace at a time."""
    return trace[_place(trace, now_s)][1]


def _place(trace: Trace, now_s: float) -> int:
    """Returns the place of the newest load at a time; -1 before the first one."""
    return bisect(trace, now_s, key=itemgetter(0)) - 1


def replayed(kind: str, *, length_s: float, seed: int) -> list[tuple[bool, float]]:
    """Returns for each run whether its end lies in its interval, and the interval's width, relative to the end.

    The last row is of the first run, at half time.
    """
    draw = random.Random(f"{kind} {length_s} {seed}")
    trace, metrics, found = KINDS[kind](draw), list[dict[str, float]](), list[tuple[bool, float]]()
    errors = np.exp(OF_SPEED * np.linspace(-2.0, 2.0, 200))
    for _ in range(RUNS):
        begin_s = draw.uniform(0.0, DAY_S - 10 * length_s)
        load = load_at(trace, begin_s)
        seen = max(1.0, load * math.exp(draw.gauss(0.0, OF_LOAD)))
        work_s = length_s * math.exp(draw.gauss(0.0, UNEXPLAINED))
        actual_s = finished_s(trace, begin_s, work_s)
        conditions = ForecastConditions(
            load=MachineLoad(ratio=seen, spread=OF_LOAD), earlier=errors_in(metrics[-NUM_EARLIER:])
        )
        shown = predict({"a": length_s * seen * errors}, conditions=conditions)
        found.append((shown.low_s <= actual_s <= shown.high_s, (shown.high_s - shown.low_s) / shown.makespan_s))
        metrics.append(
            {
                "makespan_s": actual_s,
                "uncorrected_makespan_s": shown.uncorrected_s or 0.0,
                "prediction_spread": shown.spread,
                "machine_load": seen,
                "run_load": max(1.0, actual_s / work_s * math.exp(draw.gauss(0.0, OF_LOAD / 2))),
            }
        )
        if len(metrics) == 1:
            half_time = at_half_time(trace, begin_s, length_s=length_s, work_s=work_s)
    return [*found, half_time]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=40, help="of each kind and length")
    parser.add_argument("--table", action="store_true")
    chosen = parser.parse_args()
    lines = [
        "| load | in the 90 % interval | width, median | in first runs | in these, at half time | width |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    changing: list[list[tuple[bool, float]]] = []
    for kind in KINDS:
        runs = [replayed(kind, length_s=s, seed=seed) for s in LENGTHS_S for seed in range(chosen.machines)]
        lines.append(line(kind, runs))
        changing += runs if kind != "quiet" else []
    lines.append(line("**all but quiet**", changing))
    print("\n".join(lines))
    if chosen.table:
        about = f"{date.today().isoformat()}, {chosen.machines} machines of each kind and length, {RUNS} runs on each."
        write_section("load-traces", [about, "", *lines])


def line(kind: str, runs: Sequence[Sequence[tuple[bool, float]]]) -> str:
    """Returns a row of the table about the runs on some machines."""
    cells = []
    for rows in ([row for run in runs for row in run[:-1]], [run[0] for run in runs], [run[-1] for run in runs]):
        inside, width = statistics.mean(is_in for is_in, _ in rows), statistics.median(width for _, width in rows)
        cells += [f"{inside:.1%}", f"{width:.0%}"]
    return f"| {kind} | {' | '.join(cells[:3] + cells[4:])} |"


if __name__ == "__main__":
    main()

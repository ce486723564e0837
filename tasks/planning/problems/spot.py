"""Nodes that may be evicted at any time, such as spot instances, as nodes on which everything takes longer.

A gang that is evicted loses what it did since its last checkpoint, starts again elsewhere or later, and may be evicted
while it restarts. If evictions are a Poisson process with rate lam on each of n nodes, R seconds pass for a restart and
c seconds between checkpoints, a job takes on average

    slowdown  =  exp(n lam R)  (exp(n lam c) - 1) / (n lam c)

times as long (Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation
Computer Systems 22, 2006, the complete model for exponential failures; the runtimes here include saving). Segments of a
job take their shares of this, so one factor for each option and type of nodes turns the problem into an ordinary one:
its runtimes are the expected ones.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ringmaster.tasks.planning.problems.parts import Node, Option, PlanningJob, ProblemError

HOUR_S = 3600.0
LEAST_INTERVAL_S = 60.0  # between checkpoints, where the problem does not say how often they are saved
ON_DEMAND = "on-demand"  # the type of nodes without one that are never evicted: options of type "" run on any node
_Row = tuple[int, Option]  # index of an option, and the option on one type of nodes
MOST_SLOWDOWN = 100.0  # an option that is evicted so often that it takes longer than this is left out


def slowdown(evictions_per_hour: float, *, interval_s: float, restart_s: float) -> float:
    """Returns the factor by which evictions lengthen a job on average; infinite where it is too large for a float.

    evictions_per_hour: of all nodes of the gang together.
    interval_s: seconds between checkpoints. restart_s: seconds from an eviction until the job trains again.
    """
    rate = evictions_per_hour / HOUR_S
    if not rate:
        return 1.0
    try:
        return math.exp(rate * restart_s) * math.expm1(rate * interval_s) / (rate * interval_s)
    except OverflowError:
        return math.inf


def interval_of(option: Option, evictions_per_hour: float) -> float:
    """Returns the seconds between checkpoints by Young's formula, sqrt(2 save / rate), and at least a minute."""
    return max(LEAST_INTERVAL_S, math.sqrt(2.0 * option.save_s * HOUR_S / evictions_per_hour))


def with_evictions(
    nodes: Sequence[Node],
    jobs: Sequence[PlanningJob],
    evictions_per_hour: Mapping[str, float],
    *,
    switch_cost_s: float,
    interval_s: float | None = None,
) -> tuple[tuple[Node, ...], tuple[PlanningJob, ...]]:
    """Returns the nodes and jobs of a problem with expected runtimes, where some nodes may be evicted.

    A node that may be evicted gets a device type of its own. An option keeps its index on the first type of nodes that
    can run it, where those come first that are never evicted; options on other types are appended.

    evictions_per_hour: by node id. interval_s: seconds between checkpoints; None for `interval_of`.

    Raises ProblemError where a job has no option left, or runs on nodes of several types.
    """
    rate_of = {node.id: evictions_per_hour.get(node.id, 0.0) for node in nodes}
    typed = tuple(replace(node, device_type=_kind(node, rate_of[node.id])) for node in nodes)
    rates = {new.device_type: rate_of[new.id] for new in typed}
    kinds = sorted(rates, key=lambda kind: (rates[kind], kind))
    hosts = {kind: [node for node in nodes if _kind(node, rate_of[node.id]) == kind] for kind in kinds}

    def variant(option: Option, kind: str) -> Option | None:
        if sum(option.runs_on(node) for node in hosts[kind]) < option.num_nodes:
            return None
        rate, factor = option.num_nodes * rates[kind], 1.0
        if rate:
            between_s = interval_of(option, rate) if interval_s is None else interval_s
            factor = slowdown(rate, interval_s=between_s, restart_s=switch_cost_s + option.startup_s)
        slower = replace(option, device_type=kind, runtime_s=option.runtime_s * factor)
        return slower if factor <= MOST_SLOWDOWN else None

    rows = {
        job.id: _ordered(job, [[variant(option, kind) for kind in kinds] for option in job.options]) for job in jobs
    }
    kind_of = {node.id: node.device_type for node in typed}
    if faults := [fault for job in jobs for fault in _faults(job, rows[job.id], kind_of)]:
        raise ProblemError(faults)
    return typed, tuple(_expanded(job, rows[job.id], kind_of) for job in jobs)


def _kind(node: Node, rate: float) -> str:
    return f"{node.device_type} evicted {rate:g}/h".strip() if rate else node.device_type or ON_DEMAND


def _ordered(job: PlanningJob, variants: Sequence[Sequence[Option | None]]) -> list[_Row]:
    """Returns the first variant of each option in the order of the options, then all others."""
    rows = [[(k, new) for new in row if new is not None] for k, row in enumerate(variants)]
    return [*(row[0] for row in rows if row), *(each for row in rows for each in row[1:])]


def _place_of_running(job: PlanningJob, rows: Sequence[_Row], kind_of: Mapping[str, str]) -> int | None:
    """Returns the index of the variant that a job runs at time 0; None where there is none."""
    assert job.running is not None
    kinds = {kind_of[node] for node, _ in job.running.devices}
    alike = (i for i, (k, new) in enumerate(rows) if k == job.running.option and {new.device_type} == kinds)
    return next(alike, None)


def _faults(job: PlanningJob, rows: Sequence[_Row], kind_of: Mapping[str, str]) -> Iterator[str]:
    for k in sorted(set(range(len(job.options))) - {k for k, _ in rows}):
        yield (
            f"job {job.id}, option {k}: no nodes that are evicted equally often can run it, or they are evicted too "
            "often for it to get on. To fix: remove the option, or give a shorter checkpoint_interval"
        )
    if job.running is not None and _place_of_running(job, rows, kind_of) is None:
        yield f"job {job.id}, running: its nodes are not evicted equally often. To fix: leave `running` out"


def _expanded(job: PlanningJob, rows: Sequence[_Row], kind_of: Mapping[str, str]) -> PlanningJob:
    place = None if job.running is None else _place_of_running(job, rows, kind_of)
    running = None if job.running is None or place is None else replace(job.running, option=place)
    return replace(job, options=tuple(new for _, new in rows), running=running)

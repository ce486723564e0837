"""Introspection: when to plan the rest of a batch anew, of what, and whether the new plan is worth following.

A policy without clock and I/O, shared by the executor and by `simulate`: both tell it what they see, do what it
decides, and run the solver in between, where and when they like. Predictions err by tens of per cent; a batch that
learns its speeds as they are measured, and plans the rest anew, ends within a few per cent of what a clairvoyant could.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ringmaster.tasks.execution.dispatch import DeviceId, PlannedSegment
from ringmaster.tasks.execution.timeline import Timeline
from ringmaster.tasks.planning import Node, Option, Plan, Problem
from ringmaster.tasks.planning.bounds import preemptive_bound
from ringmaster.tasks.planning.problem import Running
from ringmaster.tasks.planning.search import Objective
from ringmaster.tasks.planning.terms import plan_giving_up_deadlines

EPS_S = 1e-6  # of sums of seconds
SHARED = 0.9  # share of the variance of a job's error (of its logarithm) that all of its options have in common


class Speeds:
    """How much slower each job is than predicted, by what was measured under the options that it has run under.

    The logarithm of an error is taken for the sum of the job's own (a share `shared` of the variance) and the option's.
    A measured option is believed; the others of its job by the mean of those that were measured, shrunk towards no
    error by n rho / (n rho + 1 - rho), the posterior mean after n measurements under a normal prior.
    """

    def __init__(self, *, shared: float = SHARED) -> None:
        self._shared = shared
        self._logs: dict[str, dict[int, float]] = {}

    def note(self, job: str, option: int, ratio: float) -> None:
        """Seconds of a step under that option over those that were predicted; the newest measurement counts."""
        self._logs.setdefault(job, {})[option] = math.log(ratio)

    def forget(self, job: str) -> None:
        """Drops what is known of a job, whose options have changed."""
        self._logs.pop(job, None)

    def ratio(self, job: str, option: int) -> float:
        """By what to multiply a predicted runtime; 1 for a job of which nothing is known."""
        logs = self._logs.get(job, {})
        if option in logs or not logs:
            return math.exp(logs.get(option, 0.0))
        known = len(logs) * self._shared
        return math.exp(known / (known + 1 - self._shared) * sum(logs.values()) / len(logs))


@dataclass(frozen=True, kw_only=True)
class Policy:
    """When to plan anew and when to follow the new plan; see `When` and `is_worth_it`.

    every: share of what is left of the makespan after which the rest is planned anew. least: the shortest time between
    two plans by the clock, as a share of the first makespan. surprise: how far, as a share of what is left, a job's
    forecast end may move before the rest is planned at once. worth, per_switch: what a new plan must gain: a share of
    what is left in any case, and a share of the whole makespan for each switch that it has more. worth_s: what it must
    gain at least, in seconds.
    objective: what is to gain: the last end, or for "weighted" the mean end by weight; "cost" is judged by its end.
    """

    every: float = 0.1
    least: float = 0.02
    surprise: float = 0.05
    worth: float = 0.005
    per_switch: float = 0.001
    worth_s: float = 0.0
    objective: Objective = "makespan"


@dataclass
class When:
    """Decides when to plan anew: on a clock, and when what is seen differs too much from what was expected."""

    policy: Policy = field(default_factory=Policy)
    first_s: float = 0.0
    next_s: float = math.inf
    expected_s: Mapping[str, float] = field(default_factory=dict)
    endangered: frozenset[str] = frozenset()

    def planned(self, now_s: float, ends_s: Mapping[str, float]) -> None:
        """The rest was planned, or looked at, at `now_s`: ends_s is when each job is forecast to end."""
        left_s = max(ends_s.values(), default=now_s) - now_s
        self.first_s = self.first_s or left_s
        self.next_s = now_s + max(self.policy.every * left_s, self.policy.least * self.first_s)
        self.expected_s = dict(ends_s)

    def why_now(
        self, now_s: float, ends_s: Mapping[str, float], *, deadlines_s: Mapping[str, float] | None = None
    ) -> str | None:
        """The reason to plan anew now, if there is one; ends_s: when each job is forecast to end by what is known.

        deadlines_s: when jobs shall have ended. One that is in danger is a reason once, not for as long as it is.
        """
        late_s = {job: ends_s[job] - at_s for job, at_s in (deadlines_s or {}).items() if ends_s.get(job, 0.0) > at_s}
        fresh = sorted(set(late_s) - self.endangered)
        self.endangered = frozenset(late_s)
        if fresh:
            return "in danger of missing their deadlines: " + ", ".join(
                f"{job} by {late_s[job]:.0f} s" for job in fresh
            )
        if now_s + EPS_S >= self.next_s:
            return "the clock"
        left_s = max(ends_s.values(), default=now_s) - now_s
        off_s = {job: end_s - self.expected_s[job] for job, end_s in ends_s.items() if job in self.expected_s}
        worst = max(off_s, key=lambda job: abs(off_s[job]), default=None)
        if worst is None or abs(off_s[worst]) <= self.policy.surprise * left_s:
            return None
        return f"{worst} is {'late' if off_s[worst] > 0 else 'early'} by {abs(off_s[worst]):.0f} s"


@dataclass(frozen=True, kw_only=True)
class Rest:
    """What is left, as a problem of the devices that are there and the options that they can run.

    devices: the numbers of each node's devices, of which the problem knows only how many there are. options: likewise
    the numbers of each job's options.
    """

    problem: Problem
    devices: Mapping[str, tuple[int, ...]]
    options: Mapping[str, tuple[int, ...]]

    def real(self, plan: Plan) -> Plan:
        """A plan of the problem, with the real numbers of devices and options."""
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
    speeds: Speeds | None = None,
    running: Mapping[str, PlannedSegment],
    started: Collection[str],
    out: Collection[DeviceId] = (),
) -> Rest | None:
    """What to plan anew: what is left, at the speeds that were measured, on the devices that are there.

    left: what is left of each job, on all devices, at the predicted speeds, which `speeds` corrects. running: by job,
    what goes on now, which a new plan prefers. started: the jobs that stand still with a checkpoint. out: devices that
    are not there now. None where some job has no option for what is there.
    """
    known = speeds or Speeds()
    devices = {n.id: tuple(i for i in range(n.num_devices) if (n.id, i) not in out) for n in left.nodes}
    nodes = tuple(replace(n, num_devices=len(devices[n.id])) for n in left.nodes if devices[n.id])
    options = {job.id: tuple(k for k, o in enumerate(job.options) if _has_room(o, nodes)) for job in left.jobs}
    if not all(options.values()):
        return None
    jobs = []
    for job in left.jobs:
        kept = options[job.id]
        corrected = tuple(
            replace(job.options[k], runtime_s=job.options[k].runtime_s * known.ratio(job.id, k)) for k in kept
        )
        now = running.get(job.id)
        gang = None
        if now is not None and now.option in kept and all(i in devices.get(node, ()) for node, i in now.devices):
            gang = Running(kept.index(now.option), _by_node(now.devices, devices))
        is_started = now is not None or job.id in started
        jobs.append(replace(job, options=corrected, running=gang, started=is_started))
    return Rest(problem=replace(left, nodes=nodes, jobs=tuple(jobs)), devices=devices, options=options)


def plannable(left: Problem, *, out: Collection[DeviceId] = ()) -> frozenset[str]:
    """The jobs that have an option for the devices that are there, and do not wait for one that has none."""
    counts = {n.id: sum((n.id, i) not in out for i in range(n.num_devices)) for n in left.nodes}
    nodes = tuple(replace(n, num_devices=counts[n.id]) for n in left.nodes if counts[n.id])
    found = {job.id for job in left.jobs if any(_has_room(option, nodes) for option in job.options)}
    known = {job.id for job in left.jobs}
    while stuck := {j.id for j in left.jobs if j.id in found and any(o in known and o not in found for o in j.after)}:
        found -= stuck
    return frozenset(found)


def could_gain(rest: Rest, left_s: float, *, policy: Policy) -> bool:
    """Whether any plan of the rest could be worth following, where the present one takes `left_s` more seconds.

    The pattern LP's bound says so in milliseconds: often, and always when only one job is left, no solver is needed.
    """
    if policy.objective != "makespan" or any(job.deadline_s is not None for job in rest.problem.jobs):
        return True
    could_gain_s = left_s - preemptive_bound(rest.problem).seconds
    return could_gain_s > max(policy.worth * left_s, policy.worth_s)


def plan_rest(rest: Rest, make_plan: Callable[[Problem], Plan]) -> Plan:
    """Plans what is left, giving up as few deadlines as it must: what is late shall end too."""
    plan, _ = plan_giving_up_deadlines(rest.problem, make_plan)
    return rest.real(plan)


def is_worth_it(now: Timeline, fresh: Sequence[PlannedSegment], *, policy: Policy) -> bool:
    """Whether following `fresh` from now on gains more than it costs; `now` goes on at the speeds that are believed.

    Both plans are played to their ends by the dispatch rules, so that each pays the switches that it makes. Those that
    the new one has more of must gain something beyond their seconds: forecasts err, and the next plan may undo them.
    """
    kept, new = now.fork(), now.fork()
    new.adopt(fresh)
    kept_s, new_s = _left_s(kept, now, policy), _left_s(new, now, policy)
    if new_s == math.inf:
        return False
    more_switches = max(0, new.num_switches - kept.num_switches)
    price_s = max(policy.worth_s, policy.worth * new_s) + policy.per_switch * more_switches * (now.now_s + new_s)
    late_s = kept.late_s - new.late_s
    return kept_s == math.inf or (late_s > price_s or (late_s >= 0 and kept_s - new_s > price_s))


def _left_s(ahead: Timeline, now: Timeline, policy: Policy) -> float:
    """Seconds from `now` to the last end of what is played to its end, or to the mean end by weight."""
    end_s = ahead.finish()
    if policy.objective != "weighted" or end_s == math.inf:
        return end_s - now.now_s
    weights = {job.id: job.weight for job in ahead.problem.jobs if job.id not in now.ended_s}
    total = sum(weights.values())
    return sum(w * (ahead.ended_s[job] - now.now_s) for job, w in weights.items()) / total if total else 0.0


def _has_room(option: Option, nodes: Sequence[Node]) -> bool:
    return sum(option.runs_on(node) for node in nodes) >= option.num_nodes


def _by_node(
    gang: Sequence[DeviceId], devices: Mapping[str, tuple[int, ...]]
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """A gang as segments have it, its devices numbered without gaps."""
    found: dict[str, list[int]] = {}
    for node, device in sorted(gang):
        found.setdefault(node, []).append(devices[node].index(device))
    return tuple((node, tuple(ids)) for node, ids in found.items())

"""The price of a further job: what it delays, and for whom, before it is started.

The rest of the plan is simulated by the dispatch rules (`PlanSimulator`), without the job and with it. The job is tried
on the devices that are free first, before all that waits there and after it, under the options that are quickest and
those that take the fewest device-seconds. The place is taken that leaves the objective best, and of equal ones that in
which the job ends first. The plan with the job in that place is then followed, so the delays are those of that plan.

How much later the last job ends is proved within an interval, for the speeds that are believed. Let E and E' be the
ends of the simulated plans without the job and with it, and L and L' what no plan can beat (`preemptive_bound`). The
executor leaves a plan for a better one only, so the batch would have ended in [L, E], ends in [L', E'], and thus ends

    max(0, L' - E - s) to E' - L + s

later, where s is the time of the steps that running gangs have not reported yet. A clone in a running batch costs no
more than this, whatever is planned meanwhile.
"""

import heapq
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ringmaster.tasks.execution.dispatch import DeviceId, PlannedSegment, by_node
from ringmaster.tasks.execution.job_progress import range_text
from ringmaster.tasks.execution.plan_simulator import PlanSimulator
from ringmaster.tasks.execution.replan_policy import ReplanPolicy, left_s
from ringmaster.tasks.planning import Option, Plan, PlanningNode, Segment
from ringmaster.tasks.planning.durations import seconds_text

MAX_OPTIONS = 2  # of the quickest ones, and of those that take the fewest device-seconds
MIN_DELAY_S = 0.05
MAX_NAMED = 5
METHOD = "one more job in the plan"


@dataclass(frozen=True, kw_only=True)
class JobPrice:
    """What a further job costs the others. Seconds from now.

    segment: where the job is planned.
    is_first: whether it precedes all that waits for its devices; else it follows it.
    plan: the plan with the job, at the believed speeds.
    ends_s: when the job ends by it.
    delays_s: by job, how much later it ends by it.
    least_s, most_s: the proved interval of how much later the last job ends; the plan that is made for the new job may
        also be a better one for the others, so the least may be negative.
    """

    segment: PlannedSegment
    is_first: bool
    plan: Plan
    ends_s: float
    delays_s: Mapping[str, float] = field(default_factory=dict)
    least_s: float = 0.0
    most_s: float = 0.0

    def in_words(self) -> str:
        """Returns the price in a sentence."""
        last = "the last job ends no later" if self.most_s < 0.5 else ""
        last = last or f"the last job ends {range_text(max(0.0, self.least_s), self.most_s)} later"
        worst = heapq.nlargest(MAX_NAMED, self.delays_s, key=lambda job: self.delays_s[job])
        named = [f"{job.rpartition('/')[2]} by {seconds_text(self.delays_s[job])}" for job in worst]
        more = f" and {len(self.delays_s) - len(named)} more" if len(self.delays_s) > len(named) else ""
        delayed = f"it delays {', '.join(named)}{more}" if named else "it delays no job"
        return f"{last}; by the plan {delayed}, and it ends in {seconds_text(self.ends_s)}"


def price_of(
    now: PlanSimulator,
    job: str,
    *,
    last_step: int,
    policy: ReplanPolicy,
    bounds_s: tuple[float, float],
    slack_s: float = 0.0,
    out: Collection[DeviceId] = (),
) -> JobPrice | None:
    """Returns the price of a job of the problem of `now` of which nothing is planned; None where it has no place now.

    last_step: the steps of the job.
    bounds_s: what no plan of the rest can beat, without the job and with it.
    slack_s: the time of the steps that running gangs have not reported yet.
    out: devices that must not be used.
    """  # fmt: skip
    kept = now.fork()
    if kept.finish() == math.inf or job not in {row.id for row in now.problem.jobs}:
        return None
    tried: list[tuple[tuple[float, float, float], PlannedSegment, bool, PlanSimulator]] = []
    for segment, is_first in _places(now, kept, job, last_step=last_step, out=out):
        new = now.fork()
        new.insert(segment, is_first=is_first)
        value_s = left_s(new, now, policy)
        if job in new.ended_s:
            tried.append(((round(new.late_s, 3), round(value_s, 3), new.ended_s[job]), segment, is_first, new))
    if not tried:
        return None
    _, segment, is_first, new = min(tried, key=lambda each: each[0])
    later_s = {other: new.ended_s[other] - end_s for other, end_s in kept.ended_s.items() if other in new.ended_s}
    without_s, with_s = bounds_s
    kept_s, new_s = (max([now.now_s, *ends_s.values()]) - now.now_s for ends_s in (kept.ended_s, new.ended_s))
    return JobPrice(
        segment=segment,
        is_first=is_first,
        plan=_as_plan(now, new),
        ends_s=new.ended_s[job] - now.now_s,
        delays_s={other: delay_s for other, delay_s in later_s.items() if delay_s >= MIN_DELAY_S},
        least_s=with_s - kept_s - slack_s,
        most_s=max(0.0, new_s - without_s) + slack_s,
    )


def _places(
    now: PlanSimulator, kept: PlanSimulator, job: str, *, last_step: int, out: Collection[DeviceId]
) -> Iterator[tuple[PlannedSegment, bool]]:
    """Yields the segments to try, each with whether it precedes all that waits."""
    idle = now.fork()
    idle.planned = []
    idle.finish()
    known = enumerate(now.problem.job(job).options)
    options = {k: option for k, option in known if not option.jobs and math.isfinite(option.runtime_s)}
    cheap = heapq.nsmallest(MAX_OPTIONS, options, key=lambda k: options[k].runtime_s * options[k].num_devices)
    quick = heapq.nsmallest(MAX_OPTIONS, options, key=lambda k: options[k].runtime_s)
    for ahead, is_first in ((idle, True), (kept, False)):
        free_s = {device: each.ends_s for each in ahead.segments for device in each.stretch.segment.devices}
        for k in dict.fromkeys([*cheap, *quick]):
            if devices := _gang(options[k], now.problem.nodes, free_s, out=out):
                segment = PlannedSegment(
                    job=job, option=k, last_step=last_step, devices=devices, start_s=0.0, end_s=0.0
                )
                yield segment, is_first


def _gang(
    option: Option, nodes: Sequence[PlanningNode], free_s: Mapping[DeviceId, float], *, out: Collection[DeviceId]
) -> tuple[DeviceId, ...]:
    """Returns the devices for an option that are free first; none where there are too few."""
    size = option.num_devices // option.num_nodes
    rooms = []
    for node in nodes:
        usable = [(node.id, number) for number in range(node.num_devices) if (node.id, number) not in out]
        usable.sort(key=lambda device: free_s.get(device, 0.0))
        if len(usable) >= size and option.runs_on(node):
            rooms.append((free_s.get(usable[size - 1], 0.0), usable[:size]))
    rooms.sort(key=lambda room: room[0])
    if len(rooms) < option.num_nodes:
        return ()
    return tuple(device for _, devices in rooms[: option.num_nodes] for device in sorted(devices))


def _as_plan(now: PlanSimulator, new: PlanSimulator) -> Plan:
    """Returns what was simulated from `now` on as a plan of the problem."""
    rows = []
    for each in new.segments[len(now.segments) :]:
        stretch, segment = each.stretch, each.stretch.segment
        num_steps = segment.last_step - stretch.first_step
        row = Segment(
            job=segment.job,
            option=segment.option,
            start_s=each.starts_s - now.now_s,
            end_s=each.ends_s - now.now_s,
            work=num_steps / max(1, new.steps[segment.job] - now.step_of(segment.job)),
            overhead_s=max(0.0, each.ends_s - each.starts_s - num_steps * stretch.step_s),
            devices=by_node(segment.devices),
        )
        rows.append(row)
    return Plan(now.problem.name, tuple(rows), method=METHOD)

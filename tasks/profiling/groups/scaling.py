"""Prediction of a group's speed and memory from its jobs' own profiles and measurements of a few groups.

A step of a group S takes

    fixed_s + kappa * sum of alone_s(i) for i in S

where alone_s(i) is the time of a step of job i when it runs alone. Kernels are started, and the base's weights are
read, once for all jobs, while the arithmetic adds up. Memory is that of the base, plus an amount for each job. Both are
lines through the measurements; a job alone is a group of one. If no group was measured, kappa is 1: a group then saves
only the starts.

On several devices alone_s(i) is the time of a step of job i alone on as many devices, with its batch divided as in the
group. Until a group was measured there, kappa is that of fewer devices: the same share of a step is paid once for all
jobs.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ringmaster.tasks.profiling.groups.candidates import Group, Solo
from ringmaster.tasks.profiling.groups.layouts import AGAIN, ONE_DEVICE, SHARDED, Layout
from ringmaster.techniques import Profile
from ringmaster.techniques.profile import PREDICTED, GroupMember
from ringmaster.techniques.training.fused.group_requirements import NAME
from ringmaster.techniques.turns import AT_ONCE


@dataclass(frozen=True)
class Line:
    """The line y = `fixed` + `slope` x."""

    fixed: float
    slope: float

    def at(self, x: float) -> float:
        """Returns y at x."""
        return self.fixed + self.slope * x


def fitted(points: Sequence[Point], *, lone_slope: float) -> Line:
    """Returns the least-squares line of relative errors, with a slope and an intercept of at least zero.

    lone_slope: the slope of a line through a single point, or through points of one x. All y are positive.
    """
    xs = {x for x, _ in points}
    if len(xs) == 1:
        x, y = xs.pop(), sum(y for _, y in points) / len(points)
        slope = min(lone_slope, y / x) if x else lone_slope
        return Line(y - slope * x, slope)
    weights = [1 / y**2 for _, y in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    xx = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    xy = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True))
    slope = max(xy / xx, 0.0)
    if (fixed := mean_y - slope * mean_x) >= 0:
        return Line(fixed, slope)
    through_zero = sum(w * x * y for w, (x, y) in zip(weights, points, strict=True))
    return Line(0.0, through_zero / sum(w * x * x for w, (x, _) in zip(weights, points, strict=True)))


Point = tuple[float, float]

LEAST_STARTUP_S = 1e-3


@dataclass(frozen=True, kw_only=True)
class Laws:
    """The fitted lines of a class of jobs.

    step: the seconds of a group's step, by the sum of its jobs' step seconds when they run alone.
    startup: the seconds of a group's start, by the number of jobs.
    peak: the bytes on a device, by the bytes that the jobs need there beside the base.
    layout: the layout for which the lines hold.
    """

    step: Line
    startup: Line
    peak: Line
    layout: Layout = ONE_DEVICE

    def profile(self, group: Group, *, is_measured: bool, at_once: int | None = None) -> Profile:
        """Returns the profile of a group; the seconds that do not depend on its members are those of the lead job.

        at_once: the number of jobs that are trained at a time. A job that joins later takes as long as one that is
            there from the start.
        """
        lead, *others = group
        ends = lead.profile
        in_turns = at_once is not None and at_once < len(group)
        largest = sorted(group, key=lambda solo: -solo.own_bytes)[:at_once]
        return Profile(
            technique=NAME,
            config={**self.layout.config, AT_ONCE: at_once} if in_turns else self.layout.config,
            num_devices=self.layout.num_devices,
            num_ranks=self.layout.num_devices,
            step_s=self.step.at(lead.profile.step_s),
            peak_bytes=int(self.peak.at(own_bytes(largest))),
            startup_s=self.startup.at(len(group)),
            save_s=ends.save_s,
            evaluate_s=ends.evaluate_s,
            export_s=ends.export_s,
            stall_s=sum(solo.stall_s for solo in group),  # all jobs are saved
            source="measured" if is_measured and not in_turns else PREDICTED,
            own_step_s=self.step.slope * lead.profile.step_s,
            members=tuple(
                GroupMember(
                    job=solo.job.name,
                    num_steps=solo.job.total_steps,
                    step_s=self.step.slope * solo.profile.step_s,
                    end_s=solo.end_s,
                )
                for solo in others
            ),
        )


def laws_of(
    members: Group,
    measured: Sequence[tuple[Group, Profile]],
    *,
    layout: Layout = ONE_DEVICE,
    kappa: float = 1.0,
) -> Laws:
    """Fits the lines of a class of jobs on gangs of a layout.

    measured: groups of its jobs, with the profile that a trial measured; its step is that of the whole group.
    kappa: the slope of the step's line if nothing was measured.
    """
    alone_s = statistics.mean(solo.profile.step_s for solo in members)
    start_s = statistics.mean(solo.profile.startup_s for solo in members)
    own = statistics.mean(solo.own_bytes for solo in members)
    peak = statistics.mean(_peak_bytes(solo, layout) for solo in members)
    return Laws(
        step=fitted([(alone_s, alone_s), *((step_s_alone(g), p.step_s) for g, p in measured)], lone_slope=kappa),
        startup=fitted(
            [(x, max(y, LEAST_STARTUP_S)) for x, y in [(1, start_s), *((len(g), p.startup_s) for g, p in measured)]],
            lone_slope=0.0,
        ),
        peak=fitted([(own, peak), *((own_bytes(g), p.peak_bytes) for g, p in measured)], lone_slope=1.0),
        layout=layout,
    )


def step_s_alone(group: Group) -> float:
    """Returns the seconds of one step of each job alone, one after another."""
    return sum(solo.profile.step_s for solo in group)


def own_bytes(group: Sequence[Solo]) -> int:
    """Returns the bytes that the jobs need beside the base."""
    return sum(solo.own_bytes for solo in group)


def _peak_bytes(solo: Solo, layout: Layout) -> int:
    """Returns the peak bytes of a group of one job.

    A profile whose step divides the batch further, or stores the base otherwise, does not show this peak.
    """
    if layout.is_of(solo.profile.config, solo.job):
        return solo.profile.peak_bytes
    needed = solo.base_bytes + solo.own_bytes
    needs_less = layout.base == SHARDED or layout.recompute == AGAIN
    return needed if needs_less else max(solo.profile.peak_bytes, needed)

"""What a group will take, from what its jobs take alone and what was measured of a few groups.

A step of a group S takes

    fixed_s + kappa * sum of alone_s(i) for i in S

where alone_s(i) is what a step of job i takes by itself: kernels are started, and the base's weights read, once for
all, while the arithmetic adds up. Memory is the base's, and so much for each job. Both are lines through what was
measured; a job alone is a group of one. Where no group was measured kappa is 1: being together then saves starts only.

On several devices alone_s(i) is what a step of job i takes by itself on as many, its batch divided as in the group.
Until a group was measured there, kappa is that of fewer devices: the same share of a step is paid once for all.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ringmaster.tasks.profiling.grouping import Group, Solo
from ringmaster.tasks.profiling.layouts import AGAIN, ONE_DEVICE, SHARDED, Layout
from ringmaster.tasks.profiling.lines import Line, fitted
from ringmaster.tasks.profiling.over_nodes import PREDICTED
from ringmaster.techniques import Profile
from ringmaster.techniques.profiles import Fellow
from ringmaster.techniques.shared_base import NAME
from ringmaster.techniques.turns import AT_ONCE

LEAST_STARTUP_S = 1e-3


@dataclass(frozen=True, kw_only=True)
class Laws:
    """Of a class of jobs. step: seconds, by those that a step of each job takes alone. startup: seconds, by the number
    of jobs. peak: bytes of a device, by those that the jobs need there beside the base.
    """

    step: Line
    startup: Line
    peak: Line
    layout: Layout = ONE_DEVICE

    def profile(self, group: Group, *, is_measured: bool, at_once: int | None = None) -> Profile:
        """Of a group; its leader has the seconds that do not depend on who is in it.

        at_once: how many are trained at a time. One that joins takes as long as one that is there from the start.
        """
        leader, *others = group
        ends = leader.profile
        in_turns = at_once is not None and at_once < len(group)
        largest = sorted(group, key=lambda solo: -solo.own_bytes)[:at_once]
        return Profile(
            technique=NAME,
            config={**self.layout.config, AT_ONCE: at_once} if in_turns else self.layout.config,
            num_devices=self.layout.num_devices,
            num_ranks=self.layout.num_devices,
            step_s=self.step.at(leader.profile.step_s),
            peak_bytes=int(self.peak.at(own_bytes(largest))),
            startup_s=self.startup.at(len(group)),
            save_s=ends.save_s,
            evaluate_s=ends.evaluate_s,
            export_s=ends.export_s,
            stall_s=sum(solo.stall_s for solo in group),  # all of them are saved
            source="measured" if is_measured and not in_turns else PREDICTED,
            own_step_s=self.step.slope * leader.profile.step_s,
            fellows=tuple(
                Fellow(
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
    """The laws of a class on gangs of a layout; measured: groups of its jobs, with what a trial found, the step being
    that of all. kappa: where nothing was measured.
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
    """Seconds of a step of each job by itself, one after another."""
    return sum(solo.profile.step_s for solo in group)


def own_bytes(group: Sequence[Solo]) -> int:
    """What the jobs need beside the base."""
    return sum(solo.own_bytes for solo in group)


def _peak_bytes(solo: Solo, layout: Layout) -> int:
    """Of a group of one. A step that divides the batch further, or has the base otherwise, says nothing of that."""
    if layout.is_of(solo.profile.config, solo.job):
        return solo.profile.peak_bytes
    needed = solo.base_bytes + solo.own_bytes
    needs_less = layout.base == SHARDED or layout.recompute == AGAIN
    return needed if needs_less else max(solo.profile.peak_bytes, needed)

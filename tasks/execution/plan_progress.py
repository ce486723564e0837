"""The planned and the running segments of an executor: what may start, what continues and what must stop. No I/O."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ringmaster.tasks.execution.dispatch import DeviceId, PlannedSegment, end_of, hand_over, startable
from ringmaster.tasks.execution.progress import RunningSegment
from ringmaster.techniques.processes.reporter import STOP, until

NOTICE_S = 1.0  # how long before a segment's end it is decided whether it goes on

Command = tuple[int, str]
"""The number of a segment, and the command to send to its gang."""


class PlanProgress:
    """The planned segments, and the running ones by their number in the journal.

    Methods that change running segments return the commands to send to their gangs.

    totals: the steps of each job.
    after: the jobs that each job depends on.
    """

    def __init__(self, *, totals: Mapping[str, int], after: Mapping[str, Collection[str]]) -> None:
        self.planned: list[PlannedSegment] = []
        self.running: dict[int, RunningSegment] = {}
        self._totals, self._after = totals, after

    @property
    def active_jobs(self) -> set[str]:
        """The jobs that running gangs train."""
        return {job for running in self.running.values() for job in running.jobs}

    def startable(self, *, done_jobs: Collection[str], steps: Mapping[str, int]) -> list[PlannedSegment]:
        """Removes segments that their jobs have passed, and returns those that may start now.

        steps: the steps done, by job.
        """
        self.planned = [s for s in self.planned if s.last_step > steps[s.job] or s.last_step == self._totals[s.job]]
        beside = {job for running in self.running.values() for job in running.members}
        return startable(self.planned, running=self._segments(), done_jobs=done_jobs, after=self._after, beside=beside)

    def begun(self, segments: Sequence[PlannedSegment]) -> None:
        """Removes planned segments that have been started."""
        started = {id(segment) for segment in segments}
        self.planned = [segment for segment in self.planned if id(segment) not in started]

    def exchange(self, devices: Mapping[DeviceId, DeviceId]) -> None:
        """Plans what is to start on each of the devices for the other one of its pair, in both directions."""
        other = {**devices, **{there: here for here, there in devices.items()}}
        self.planned = [
            replace(segment, devices=tuple(other.get(device, device) for device in segment.devices))
            if not other.keys().isdisjoint(segment.devices)
            else segment
            for segment in self.planned
        ]

    def drop(self, job: str) -> None:
        """Removes all planned segments of a job."""
        self.planned = [segment for segment in self.planned if segment.job != job]

    def put_back(self, running: RunningSegment) -> None:
        """Puts the rest of a segment back in front of the plan.

        Does nothing if the segment was replaced and the plan continues its job in another way.
        """
        job = running.segment.job
        is_replaced = running.is_stopping or running.is_over_end
        if not (is_replaced and any(segment.job == job for segment in self.planned)):
            self.planned.insert(0, running.segment)

    def follow(self, fresh: Sequence[PlannedSegment]) -> list[Command]:
        """Follows a new plan. Gangs that it leaves in place continue; the others are commanded to stop."""
        new = hand_over(fresh, running=self._segments())
        self.planned = list(new.planned)
        commands: list[Command] = []
        for running in self.running.values():
            last_step = new.stays.get(running.segment.job)
            if last_step is None:
                commands += _stop(running)
            elif running.is_stopping or not running.may_go_on(last_step):  # it starts again on the same gang
                self.planned.insert(0, replace(running.segment, last_step=last_step))
            else:
                running.is_over_end = False
                commands += _move_end(running, last_step)
        return commands

    def reconsider_ends(self, *, done_jobs: Collection[str]) -> list[Command]:
        """Decides which gangs go on beyond their planned end.

        A gang that is about to end goes on if no ready segment waits for its devices. A gang that has gone on so stops
        once one waits.
        """
        commands: list[Command] = []
        for running in self.running.values():
            segment = running.segment
            is_at_end = running.is_over_end or running.step >= segment.last_step
            if running.is_stopping or not (is_at_end or _left_s(running) <= NOTICE_S) or not self._has_more(running):
                continue
            over = {r.segment.job for r in self.running.values() if r.is_over_end}
            end = end_of(
                segment, self.planned, running=self._segments(), done_jobs=done_jobs, after=self._after, over=over
            )
            if isinstance(end, PlannedSegment):
                if not running.may_go_on(end.last_step):
                    continue
                self.planned.remove(end)
                commands += _move_end(running, end.last_step)
            elif end == "ends" and is_at_end:
                commands += _stop(running)
            elif end == "goes on" and not running.is_over_end and running.may_go_on(self._totals[segment.job]):
                running.is_over_end = True
                commands += _move_end(running, self._totals[segment.job])
        return commands

    def _has_more(self, running: RunningSegment) -> bool:
        return any(segment.job == running.segment.job for segment in self.planned)

    def _segments(self) -> list[PlannedSegment]:
        return [running.segment for running in self.running.values()]


def _left_s(running: RunningSegment) -> float:
    """Returns the seconds until a gang has done its planned steps; infinity if its speed is not known yet."""
    step_s = running.step_s
    return (running.segment.last_step - running.step) * step_s if step_s else math.inf


def _move_end(running: RunningSegment, last_step: int) -> list[Command]:
    running.segment = replace(running.segment, last_step=last_step)
    if last_step <= running.ordered_step:
        return []
    running.ordered_step = last_step
    return [(running.number, until(last_step))]


def _stop(running: RunningSegment) -> list[Command]:
    if running.is_stopping:
        return []
    running.is_stopping = True
    return [(running.number, STOP)]

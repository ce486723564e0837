"""The plan that a batch follows and the segments that run: what may start, what goes on and what must stop. No I/O."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ringmaster.tasks.execution.dispatch import PlannedSegment, end_of, hand_over, startable
from ringmaster.tasks.execution.progress import RunningSegment
from ringmaster.techniques.engine.reporter import STOP, until

NOTICE_S = 1.0  # before a segment's end it is decided whether it goes on

Command = tuple[str, str]
"""The folder of a gang, and what it is told."""


class Course:
    """What is planned and what runs, by its number in the journal. Methods that change it return what gangs are told.

    totals: steps of each job. after: the jobs that each job waits for.
    """

    def __init__(self, *, totals: Mapping[str, int], after: Mapping[str, Collection[str]]) -> None:
        self.planned: list[PlannedSegment] = []
        self.running: dict[int, RunningSegment] = {}
        self._totals, self._after = totals, after

    @property
    def active_jobs(self) -> set[str]:
        """The jobs that run."""
        return {job for running in self.running.values() for job in running.jobs}

    def startable(self, *, done_jobs: Collection[str], steps: Mapping[str, int]) -> list[PlannedSegment]:
        """The segments that may start now. steps: done, by job; what a job has passed already is taken out."""
        self.planned = [s for s in self.planned if s.last_step > steps[s.job] or s.last_step == self._totals[s.job]]
        beside = {job for running in self.running.values() for job in running.fellows}
        return startable(self.planned, running=self._segments(), done_jobs=done_jobs, after=self._after, beside=beside)

    def drop(self, job: str) -> None:
        """Plans nothing more of a job."""
        self.planned = [segment for segment in self.planned if segment.job != job]

    def put_back(self, running: RunningSegment) -> None:
        """What is left of a segment comes first again, unless the plan goes on with its job in another way."""
        job = running.segment.job
        is_replaced = running.is_stopping or running.is_over_end
        if not (is_replaced and any(segment.job == job for segment in self.planned)):
            self.planned.insert(0, running.segment)

    def follow(self, fresh: Sequence[PlannedSegment]) -> list[Command]:
        """Follows another plan: gangs that need not move never notice, the others are told to stop."""
        new = hand_over(fresh, running=self._segments())
        self.planned = list(new.planned)
        commands: list[Command] = []
        for running in self.running.values():
            last_step = new.stays.get(running.segment.job)
            if last_step is None:
                commands += _stop(running)
            elif running.is_stopping or not running.may_go_on(last_step):  # it begins again where it was
                self.planned.insert(0, replace(running.segment, last_step=last_step))
            else:
                running.is_over_end = False
                commands += _move_end(running, last_step)
        return commands

    def reconsider_ends(self, *, done_jobs: Collection[str]) -> list[Command]:
        """Lets gangs that are about to end go on where nobody ready waits for their devices, and stops those that have
        gone on so where somebody does."""
        commands: list[Command] = []
        for running in self.running.values():
            segment = running.segment
            left_s = max(0, segment.last_step - running.step) * (running.step_s or math.inf)
            is_at_end = running.is_over_end or running.step >= segment.last_step
            if running.is_stopping or not (is_at_end or left_s <= NOTICE_S) or not self._has_more(running):
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


def _move_end(running: RunningSegment, last_step: int) -> list[Command]:
    running.segment = replace(running.segment, last_step=last_step)
    if last_step <= running.ordered_step:
        return []
    running.ordered_step = last_step
    return [(running.folder, until(last_step))]


def _stop(running: RunningSegment) -> list[Command]:
    if running.is_stopping:
        return []
    running.is_stopping = True
    return [(running.folder, STOP)]

"""What follows from how a segment ended: retries by kind, and when a job is given up.

done: the job goes on with its next segment, or is finished. preempted, lost: again at once, as often as it happens:
nobody's fault. crashed: again from the last checkpoint, after a pause that doubles, three times at most without
progress. out of memory: never again with that option; the rest is planned anew. invalid (a factory that raises, a loss
that is no number): the job has failed, the others go on. cancelled: the job stops where it is.

A gang that trains a group ends for its leader, and each fellow has an outcome of its own. Where the gang cannot go on
as it is (three crashes, no memory under any option), the group parts before any job is given up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ringmaster.tasks.execution.course import Course
from ringmaster.tasks.execution.directions import EVALUATED
from ringmaster.tasks.execution.events import ExecutionEvent, JobEnded
from ringmaster.tasks.execution.journal import CANCELLED, DONE, ENDED, FAILED, PAUSED, RUNNING, STOPPED, WAITING
from ringmaster.tasks.execution.progress import RunningSegment
from ringmaster.tasks.execution.roster import Roster
from ringmaster.techniques.engine.gang import Outcome

MOST_ATTEMPTS = 3  # of a segment that crashes without getting any further
FIRST_PAUSE_S = 1.0  # before a crashed segment is tried again; what crashed it may pass


class Verdicts:
    """Decides for one executor. `want` asks for a new plan, with the reason; `hold_back` keeps a job from starting."""

    def __init__(
        self,
        roster: Roster,
        course: Course,
        *,
        tell: Callable[[ExecutionEvent], None],
        want: Callable[[str], None],
        hold_back: Callable[[str, float], None],
        forget_speed: Callable[[str], None],
    ) -> None:
        self._roster, self._course = roster, course
        self._tell, self._want, self._hold_back, self._forget_speed = tell, want, hold_back, forget_speed

    def decide(self, running: RunningSegment, outcome: Outcome) -> str:
        """Acts on an outcome; says in words what follows."""
        act = {
            "done": self._on_done,
            "preempted": self._on_preempted,
            "lost": self._on_lost,
            "cancelled": self._on_cancelled,
            "crashed": self._on_crashed,
            "out_of_memory": self._on_out_of_memory,
            "invalid": self._on_invalid,
        }[outcome.status]
        said = act(running, outcome)
        for name, its in dict(outcome.result.get("fellows", {})).items():
            self.follow(running, self._roster.listed(name, beside=running.segment.job), its)
        for fellow in running.fellows:  # of which nothing was said: the gang did not come to its end in order
            if self._roster.records[fellow].status == RUNNING:
                self._goes_on(fellow, self._roster.records[fellow].step)
        self.part_if_need_be(running.segment.job)
        return said

    def follow(self, running: RunningSegment, fellow: str, outcome: Mapping[str, Any]) -> None:
        """Acts on how a fellow has left a gang; what was told before changes nothing."""
        running.fellows.discard(fellow)
        record = self._roster.records[fellow]
        if record.status in ENDED:
            self._roster.write(fellow, step=max(record.step, outcome.get("step", 0)))
        elif outcome["status"] == "invalid":
            self.fail(fellow, outcome["message"])
        elif outcome["status"] == "done" and self._roster.is_whole(fellow, outcome["step"]):
            self._finish(fellow, outcome)
        elif record.status == PAUSED:
            self._roster.write(fellow, step=outcome["step"])
        elif outcome["status"] == "done" and outcome["step"] >= self._roster.totals[fellow]:
            self._roster.rest(fellow, outcome["step"])
        else:
            self._goes_on(fellow, outcome["step"])

    def _goes_on(self, fellow: str, step: int) -> None:
        self._roster.write(fellow, status=WAITING, step=step)
        if self._roster.groups.leader_of(fellow) is None:
            self._want(f"{fellow} goes on by itself")

    def part_if_need_be(self, leader: str) -> None:
        """Lets the fellows of a job go on by themselves where it has nothing to train any more, or for now."""
        if leader not in self._course.active_jobs and self._roster.groups.must_part(leader):
            self.part(leader, why=f"{leader} trains no further")

    def part(self, leader: str, *, why: str) -> None:
        """Has each job of a group go on by itself, which is to be planned."""
        self._roster.groups.part(leader)
        self._course.drop(leader)
        self._forget_speed(leader)
        self._want(f"{why}: those that it was trained with go on by themselves")

    def fail(self, job: str, message: str) -> str:
        """Gives a job up, and with it those that adapt its model; the others go on."""
        self._end(job, status=FAILED, message=message)
        return "the job has failed"

    def cancel(self, job: str, message: str) -> str:
        """Ends a job for good where it stands; what it has checkpointed stays."""
        self._end(job, status=CANCELLED, message=message)
        return "the job is cancelled"

    def stop_early(self, job: str, message: str) -> str:
        """Ends a job that is not worth going on with: its last checkpoint stays, and what was measured last."""
        evaluated = self._roster.records[job].details.get(EVALUATED, {})
        if evaluated:
            self._roster.write(job, details={"metrics": evaluated["metrics"]})
        self._end(job, status=STOPPED, message=message)
        return "the job is stopped early"

    def fail_orphans(self) -> None:
        """Gives up the jobs that adapt a model which will not come."""
        while orphans := self._roster.orphans():
            job, reason = orphans[0]
            self._end(job, status=FAILED, message=reason)

    def _end(self, job: str, *, status: str, message: str) -> None:
        self._course.drop(job)
        record = self._roster.write(job, status=status, message=message)
        self._roster.groups.ended(job)
        self._tell(JobEnded(job=job, status=status, message=message, details=record.details))
        self.fail_orphans()

    def _on_done(self, running: RunningSegment, outcome: Outcome) -> str:
        job, step = running.segment.job, outcome.result["step"]
        self._roster.attempts.pop(job, None)
        is_end = self._roster.is_whole(job, step)
        if self._is_dismissed(job) and not (is_end and self._roster.records[job].status == PAUSED):
            return self._dismissed(job, step)
        if not is_end and step >= self._roster.totals[job]:
            self._course.drop(job)
            self._roster.rest(job, step)
            return "the job rests"
        if not is_end:
            self._roster.write(job, status=WAITING, step=step)
            if step < running.segment.last_step:  # it was to go on, and had ended before it heard so
                self._course.put_back(running)
            if not any(segment.job == job for segment in self._course.planned):  # its goal was raised meanwhile
                self._want(f"{job} may train on")
            return "goes on with its next segment"
        # A checkpoint of its end may have been found by a segment that was planned before it: nothing is left to do.
        self._course.drop(job)
        self._finish(job, outcome.result)
        return "the job is done"

    def _finish(self, job: str, result: Mapping[str, Any]) -> None:
        """A job has come to its end, and its model is there."""
        place, local = self._roster.place_of(job), self._roster.entries[job].local_job
        details = {"metrics": result["metrics"], "model_dir": str(place.model_dir(local.name))}
        if compared := result.get("compared"):
            details["compared"] = compared
        record = self._roster.write(job, status=DONE, step=result["step"], message="", details=details)
        self._roster.groups.ended(job)
        self._tell(JobEnded(job=job, status=DONE, message="", details={**record.details, "step": result["step"]}))

    def _on_preempted(self, running: RunningSegment, outcome: Outcome) -> str:
        job, step = running.segment.job, outcome.result["step"]
        if self._is_dismissed(job):
            return self._dismissed(job, step)
        self._roster.write(job, status=WAITING, step=step)
        self._course.put_back(running)
        return "stopped at a checkpoint"

    def _on_lost(self, running: RunningSegment, outcome: Outcome) -> str:
        job = running.segment.job
        if self._is_dismissed(job):
            return self._dismissed(job, self._roster.records[job].step)
        self._roster.write(job, status=WAITING)
        self._course.drop(job)  # its node is gone: where it goes on is to be planned
        self._want(f"{job} has lost its devices")
        return "again from the last checkpoint, elsewhere"

    def _on_cancelled(self, running: RunningSegment, outcome: Outcome) -> str:
        job = running.segment.job
        if step := outcome.result.get("step"):
            self._roster.write(job, step=step)
        if self._roster.records[job].status in ENDED:
            return "the job is cancelled"
        return self.cancel(job, "cancelled by hand: its run was cancelled")

    def _on_crashed(self, running: RunningSegment, outcome: Outcome) -> str:
        job = running.segment.job
        if self._is_dismissed(job):
            return self._dismissed(job, self._roster.records[job].step)
        made_progress = self._roster.records[job].step > running.first_step
        attempts = self._roster.count_crash(job, made_progress=made_progress)
        if attempts >= MOST_ATTEMPTS and self._roster.groups.fellows(job):
            self._roster.attempts.pop(job)
            self._roster.write(job, status=WAITING)
            self.part(job, why=f"the gang of {job} crashed {MOST_ATTEMPTS} times, the last time: {outcome.message}")
            return "each of its jobs by itself"
        if attempts >= MOST_ATTEMPTS:
            return self.fail(job, f"crashed {MOST_ATTEMPTS} times, the last time: {outcome.message}")
        self._roster.write(job, status=WAITING)
        self._course.put_back(running)
        if attempts > 1:
            self._hold_back(job, FIRST_PAUSE_S * 2.0 ** (attempts - 2))
        return f"again from the last checkpoint (attempt {attempts + 1} of {MOST_ATTEMPTS})"

    def _on_out_of_memory(self, running: RunningSegment, outcome: Outcome) -> str:
        job = running.segment.job
        profile = running.profile
        self._course.drop(job)
        is_last = not self._roster.strike_out(job, profile)
        self._forget_speed(job)  # its options are numbered anew
        parts = is_last and self._roster.groups.leads(job)
        may_go_on = parts or not is_last
        if may_go_on and not self._is_dismissed(job):
            self._roster.write(job, status=WAITING)  # first: whoever takes over finds no group where it has parted
        if parts:
            self.part(job, why=f"the gang of {job} ran out of memory")
        if self._is_cancelled(job) or (may_go_on and self._is_dismissed(job)):
            return self._dismissed(job, self._roster.records[job].step)
        if not may_go_on:
            return self.fail(job, f"ran out of memory under its last option: {outcome.message}")
        self._want(f"{job} ran out of memory under {profile.technique} on {profile.num_devices}")
        return "planned anew without that option"

    def _on_invalid(self, running: RunningSegment, outcome: Outcome) -> str:
        job = running.segment.job
        if self._is_cancelled(job):
            return self._dismissed(job, self._roster.records[job].step)
        return self.fail(job, outcome.message)

    def _is_dismissed(self, job: str) -> bool:
        """Whether the job was paused, cancelled or stopped early while it ran."""
        return self._roster.records[job].status in (PAUSED, CANCELLED, STOPPED)

    def _is_cancelled(self, job: str) -> bool:
        """Whether the job was ended while it ran: whatever its gang came to, that was told and stays."""
        return self._roster.records[job].status in (CANCELLED, STOPPED)

    def _dismissed(self, job: str, step: int) -> str:
        record = self._roster.write(job, step=step)
        return f"the job is {record.status}"

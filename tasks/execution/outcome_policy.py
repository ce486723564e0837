"""The policy that follows the outcome of a segment: retries by kind, and when a job fails.

done: the job continues with its next segment, or is finished.
preempted, lost: the job is retried at once, any number of times, as it did not cause the outcome.
crashed: the job is restarted from its last checkpoint, first at once, then after a pause that doubles; it fails at the
    third crash without progress, or at the second one with the same error of the job's code.
out of memory: the option is removed for good and the rest is re-planned.
invalid (a factory raises, a loss is not finite): the job fails, the others continue.

The outcome of a gang that trains a group is that of its lead job; each member has an outcome of its own. If the gang
cannot continue as it is (three crashes, no memory under any option), the group parts before any job fails.
"""

from collections.abc import Callable

from ringmaster.tasks.execution.execution_events import ExecutionEvent, JobEnded
from ringmaster.tasks.execution.job_table import JobTable
from ringmaster.tasks.execution.progress import PlanProgress, RunningSegment
from ringmaster.tasks.storage.journal import ENDED, JobStatus
from ringmaster.techniques.processes.gang_events import JobResult, Outcome, OutcomeStatus
from ringmaster.text import printable_lines

MAX_ATTEMPTS = 3  # of a segment that crashes without progress
FIRST_PAUSE_S = 1.0  # before a crashed segment is retried, as the cause may be transient


class OutcomePolicy:
    """Decides for one executor.

    notify: receives execution events.
    request_plan: requests a new plan, with the reason.
    hold_back: keeps a job from starting for some seconds.
    forget_speed: drops the measured speeds of a job whose options change.
    """

    def __init__(
        self,
        job_table: JobTable,
        plan_progress: PlanProgress,
        *,
        notify: Callable[[ExecutionEvent], None],
        request_plan: Callable[[str], None],
        hold_back: Callable[[str, float], None],
        forget_speed: Callable[[str], None],
    ) -> None:
        self._job_table, self._plan_progress = job_table, plan_progress
        self._notify, self._request_plan, self._hold_back, self._forget_speed = (
            notify,
            request_plan,
            hold_back,
            forget_speed,
        )
        self._newest_error: dict[str, str] = {}  # of a job's code, in its newest crash

    def decide(self, running: RunningSegment, outcome: Outcome) -> str:
        """Acts on an outcome. Returns a description of what follows."""
        job, status = running.segment.job, outcome.status
        act = {
            OutcomeStatus.DONE: self._on_done,
            OutcomeStatus.PREEMPTED: self._on_preempted,
            OutcomeStatus.LOST: self._on_lost,
            OutcomeStatus.CRASHED: self._on_crashed,
            OutcomeStatus.OUT_OF_MEMORY: self._on_out_of_memory,
            OutcomeStatus.INVALID: self._on_invalid,
        }[status]
        is_early = status in (OutcomeStatus.PREEMPTED, OutcomeStatus.LOST, OutcomeStatus.CRASHED)
        if is_early and self._trains_no_further(job):
            is_in_order = status == OutcomeStatus.PREEMPTED
            record = self._job_table.records[job]
            decision = self._keep_status(job, outcome.result.steps_done if is_in_order else record.step)
        else:
            decision = act(running, outcome)
        for name, result in (outcome.result.members or {}).items():
            self.end_member(running, self._job_table.name_of(name, in_batch_of=job), result)
        for member in running.members:  # not reported: the gang did not end in order
            if self._job_table.records[member].status == JobStatus.RUNNING:
                self._goes_on(member, self._job_table.records[member].step)
        self.split_group_if_needed(job)
        return decision

    def end_member(self, running: RunningSegment, member: str, result: JobResult) -> None:
        """Acts on a member's end in a gang. A repeated report changes nothing."""
        running.lose(member)
        record = self._job_table.records[member]
        if record.status in ENDED:
            self._job_table.write(member, step=max(record.step, result.step or 0))
        elif result.status == OutcomeStatus.INVALID:
            self.fail(member, printable_lines(result.message))
        elif result.status == OutcomeStatus.DONE and self._job_table.is_whole(member, result.steps_done):
            self._finish(member, result)
        elif record.status == JobStatus.PAUSED:
            self._job_table.write(member, step=result.steps_done)
        elif result.status == OutcomeStatus.DONE and result.steps_done >= self._job_table.totals[member]:
            self._rest(member, result.steps_done)
        else:
            self._goes_on(member, result.steps_done)

    def _rest(self, job: str, step: int) -> None:
        self._job_table.rest(job, step)
        if not self._job_table.rests(job):
            self._request_plan(f"{job} evaluated again")

    def _goes_on(self, member: str, step: int) -> None:
        self._job_table.write(member, status=JobStatus.WAITING, step=step)
        if self._job_table.groups.lead_of(member) is None:
            self._request_plan(f"{member} continues alone")

    def split_group_if_needed(self, lead: str) -> None:
        """Lets the members of a lead job continue without it if it has nothing to train, for good or for now."""
        if lead in self._plan_progress.active_jobs or not self._job_table.groups.must_split(lead):
            return
        if (new := self._job_table.groups.hand_over(lead)) is None:
            self._split(lead, why=f"{lead} trains no further", is_final=False)
            return
        self._plan_progress.drop(lead)
        for job in (lead, new):
            self._forget_speed(job)  # its options are renumbered
        self._request_plan(f"{lead} trains no further: {new} leads its group")

    def regroup(self, *, num_devices: Callable[[str], int]) -> None:
        """Divides the steered jobs that continue and that no gang trains into groups anew; see `GroupTable.regroup`."""
        changed = self._job_table.groups.regroup(num_devices=num_devices, active=self._plan_progress.active_jobs)
        for job in changed:
            self._plan_progress.drop(job)
            self._forget_speed(job)  # its options are renumbered
        if changed:
            self._request_plan(f"{len(changed)} jobs are grouped anew")

    def _split(self, lead: str, *, why: str, is_final: bool) -> None:
        """Dissolves a group and requests a plan in which each of its jobs continues alone."""
        self._job_table.groups.split(lead, is_final=is_final)
        self._plan_progress.drop(lead)
        self._forget_speed(lead)
        self._request_plan(f"{why}: the other jobs of its group continue alone")

    def fail(self, job: str, message: str) -> str:
        """Fails a job, and the jobs that adapt its model; the others continue."""
        self._close(job, status=JobStatus.FAILED, message=message)
        self.fail_orphans()
        return "the job has failed"

    def cancel(self, *jobs: str, message: str) -> None:
        """Cancels jobs for good. Their checkpoints stay.

        A job that adapts another one is cancelled with it where both are named, and fails where it is not named.
        """
        for job in jobs:
            self._close(job, status=JobStatus.CANCELLED, message=message)
        self.fail_orphans()

    def stop_early(self, job: str, message: str) -> None:
        """Ends a job that is not worth continuing. Its last checkpoint and its last metrics stay."""
        if evaluated := self._job_table.records[job].evaluated:
            self._job_table.write(job, metrics=evaluated.metrics, num_rows=evaluated.num_rows)
        self._close(job, status=JobStatus.STOPPED, message=message)
        self.fail_orphans()

    def fail_orphans(self) -> None:
        """Fails the jobs that adapt a model which will not be trained."""
        while (orphan := next(self._job_table.orphans(), None)) is not None:
            job, reason = orphan
            self._close(job, status=JobStatus.FAILED, message=reason)

    def _close(self, job: str, *, status: JobStatus, message: str) -> None:
        self._plan_progress.drop(job)
        record = self._job_table.write(job, status=status, message=message)
        self._job_table.groups.remove_member(job)
        self._notify(JobEnded(record=record))

    def _on_done(self, running: RunningSegment, outcome: Outcome) -> str:
        job, result = running.segment.job, outcome.result
        step = result.steps_done
        self._job_table.attempts.pop(job, None)
        is_end = self._job_table.is_whole(job, step) or bool(result.ended_early)
        if self._trains_no_further(job) and not (is_end and self._job_table.records[job].status == JobStatus.PAUSED):
            return self._keep_status(job, step)
        if not is_end and step >= self._job_table.totals[job]:
            self._plan_progress.drop(job)
            self._rest(job, step)
            return "the job rests"
        if not is_end:
            self._job_table.write(job, status=JobStatus.WAITING, step=step)
            if step < running.segment.last_step:  # its end was moved, but it ended before the command arrived
                self._plan_progress.put_back(running)
            if not self._plan_progress.has_more(job):  # its goal was raised meanwhile
                self._request_plan(f"{job} may train on")
            return "continues with its next segment"
        # An earlier segment may have found a checkpoint of the last step: drop the segments planned after it.
        self._plan_progress.drop(job)
        self._finish(job, result)
        return "the job is done"

    def _finish(self, job: str, result: JobResult) -> None:
        """Ends a job that has reached its last step and has written its model."""
        entry = self._job_table.entries[job]
        record = self._job_table.write(
            job,
            status=JobStatus.DONE,
            step=result.steps_done,
            message="; ".join(filter(None, (feature.final_message(result) for feature in entry.job.features))),
            metrics=result.final_metrics,
            num_rows=result.num_rows,
            compared=result.compared or (),
            ended_early=result.ended_early,
            model_dir=str(entry.paths.model_dir(entry.job_in_batch.name)),
        )
        self._job_table.groups.remove_member(job)
        self._notify(JobEnded(record=record))

    def _on_preempted(self, running: RunningSegment, outcome: Outcome) -> str:
        self._job_table.write(running.segment.job, status=JobStatus.WAITING, step=outcome.result.steps_done)
        self._plan_progress.put_back(running)
        return "stopped at a checkpoint"

    def _on_lost(self, running: RunningSegment, outcome: Outcome) -> str:
        job = running.segment.job
        self._job_table.write(job, status=JobStatus.WAITING)
        self._plan_progress.drop(job)  # its node is lost: the new plan decides where it continues
        self._request_plan(f"{job} has lost its devices")
        return "again from the last checkpoint, elsewhere"

    def _on_crashed(self, running: RunningSegment, outcome: Outcome) -> str:
        job = running.segment.job
        made_progress = self._job_table.records[job].step > running.first_step
        attempts = self._job_table.count_crash(job, made_progress=made_progress)
        newest, error = self._newest_error.pop(job, None), outcome.message if outcome.is_of_code else None
        is_last = attempts >= MAX_ATTEMPTS or (attempts > 1 and error is not None and error == newest)
        if is_last and self._job_table.groups.members(job):
            self._job_table.attempts.pop(job)
            self._job_table.write(job, status=JobStatus.WAITING)
            why = f"the gang of {job} crashed {attempts} times, the last time: {outcome.message}"
            self._split(job, why=why, is_final=True)
            return "each of its jobs continues alone"
        if is_last:
            return self.fail(job, f"{outcome.message} (crashed {attempts} times)")  # the cause first
        if error is not None:
            self._newest_error[job] = error
        self._job_table.write(job, status=JobStatus.WAITING)
        self._plan_progress.put_back(running)
        if attempts > 1:
            self._hold_back(job, FIRST_PAUSE_S * 2.0 ** (attempts - 2))
        return f"again from the last checkpoint (attempt {attempts + 1} of {MAX_ATTEMPTS})"

    def _on_out_of_memory(self, running: RunningSegment, outcome: Outcome) -> str:
        job, profile = running.segment.job, running.profile
        self._plan_progress.drop(job)
        is_last = not self._job_table.strike_out(job, profile)
        self._forget_speed(job)  # its options are renumbered
        parts, trains_no_further = is_last and self._job_table.groups.leads(job), self._trains_no_further(job)
        may_go_on = parts or not is_last
        if may_go_on and not trains_no_further:  # first: after a failover no group is found where it has parted
            self._job_table.write(job, status=JobStatus.WAITING)
        if parts:
            self._split(job, why=f"the gang of {job} ran out of memory", is_final=True)
        if self._is_over(job) or (may_go_on and trains_no_further):
            return self._keep_status(job, self._job_table.records[job].step)
        if not may_go_on:
            return self.fail(job, f"ran out of memory under its last option: {outcome.message}")
        self._request_plan(f"{job} ran out of memory under {profile.technique} on {profile.num_devices}")
        return "planned again without that option"

    def _on_invalid(self, running: RunningSegment, outcome: Outcome) -> str:
        job = running.segment.job
        if self._is_over(job):
            return self._keep_status(job, self._job_table.records[job].step)
        return self.fail(job, outcome.message)

    def _trains_no_further(self, job: str) -> bool:
        """Whether the job was paused, or has ended without its gang, while it ran."""
        return self._job_table.records[job].status == JobStatus.PAUSED or self._is_over(job)

    def _is_over(self, job: str) -> bool:
        """Whether the job was cancelled, failed or stopped early while it ran. Its end has been reported and stays."""
        return self._job_table.records[job].status in (JobStatus.CANCELLED, JobStatus.FAILED, JobStatus.STOPPED)

    def _keep_status(self, job: str, step: int) -> str:
        """Writes the step that a job has reached. Its status stays."""
        record = self._job_table.write(job, step=step)
        return f"the job is {record.status}"

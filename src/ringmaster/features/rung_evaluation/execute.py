"""Requests of a sweep about parts of the held-out rows: gangs that evaluate go on, end, or are followed by others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ringmaster.codec import to_json
from ringmaster.features.rung_evaluation.row_parts import ENOUGH, PARTS, end_of, place_of, rows_up_to
from ringmaster.tasks.execution.executor_hooks import ExecutorHook
from ringmaster.tasks.execution.job_rules import JobRule
from ringmaster.tasks.execution.steering import SteeringRequest
from ringmaster.tasks.storage.journal import ENDED, JobRecord, JobStatus, RecordFeature
from ringmaster.techniques import Job
from ringmaster.techniques.job_specs import EvaluationSlice
from ringmaster.techniques.processes.gang_events import EvaluationReported


@dataclass(frozen=True, kw_only=True)
class NextPart(RecordFeature):
    """The part of the rows that a job is evaluated on when its gang has ended."""

    next_part: EvaluationSlice | None = None


def next_part_of(record: JobRecord) -> EvaluationSlice | None:
    """Returns the part that the next gang of a job evaluates, where the gang that runs does not."""
    kept = record.feature(NextPart)
    return None if kept is None else kept.next_part


class PartRule(JobRule):
    """A job at its goal does not rest while a part of the rows is to be evaluated."""

    def changes(self, job: Job, record: JobRecord) -> Mapping[str, Any]:
        """Returns what changes in the record of a job that no gang trains."""
        part = next_part_of(record)
        return {} if part is None or record.status != JobStatus.WAITING else part_changes(job, record, part)


def part_changes(job: Job, record: JobRecord, part: EvaluationSlice) -> Mapping[str, Any]:
    """Returns what changes in the record of a job that is to be evaluated on a further part.

    Nothing does for a job that has ended, has trained on, or was evaluated on it already. While a gang trains the job,
    the part is kept for the next one, as the gang may end before it is told to go on.
    """
    if record.status in ENDED or record.step > part.step or part in job.evaluation.parts:
        return {}
    if record.status == JobStatus.RUNNING:
        return {"features": (NextPart(next_part=part),)}
    evaluated = replace(job, evaluation=replace(job.evaluation, parts=(*job.evaluation.parts, part)))
    like = record.like or job.name
    return {"settled": to_json(evaluated), "like": like, "rested": None, "features": (NextPart(),)}


class PartHook(ExecutorHook):
    """Applies what a sweep requests about parts, and tells the gangs that evaluate them."""

    def steer(self, steering: SteeringRequest) -> None:
        """Applies a steering request, before its goals are."""
        table, parts = self._execution.job_table, steering.of_features.get(PARTS, {})
        for name, goal in steering.goals.items():
            if goal > (table.records[name].goal or 0):
                self._forget(name)
        if waiting := [name for name in parts if table.records[name].status != JobStatus.RUNNING]:
            others = f" and {len(waiting) - 3} others" if len(waiting) > 3 else ""
            self._execution.request_plan(f"{', '.join(waiting[:3])}{others} evaluated on more rows")
        for name, part in parts.items():
            table.change(name, part_changes(table.entries[name].job_in_batch, table.records[name], part))
            self._command(name, step=part.step, share=part.end)
        for name, step in steering.of_features.get(ENOUGH, {}).items():
            self._forget(name)
            self._command(name, step=step, share=0.0)

    def handle_evaluation(self, job: str, report: EvaluationReported) -> None:
        """Forgets the next part of a job whose gang has gone on to its end, or has evaluated all rows."""
        part = next_part_of(self._execution.job_table.records[job])
        if part is None or part.step != report.step:
            return
        if report.part is None or end_of(report.part) >= place_of(part.end, report.part.whole):
            self._forget(job)

    def _forget(self, name: str) -> None:
        if next_part_of(self._execution.job_table.records[name]) is not None:
            self._execution.job_table.write(name, features=(NextPart(),))

    def _command(self, job: str, *, step: int, share: float) -> None:
        """Lets the gang that evaluates a job, if one does, go on up to a share of the rows."""
        name = self._execution.job_table.entries[job].job_in_batch.name
        self._execution.command(job, rows_up_to(name, step=step, share=share))


EXECUTOR_HOOKS = (PartHook,)
JOB_RULES = (PartRule(),)
RECORD_FEATURES = (NextPart,)
STEERED_VALUES = ((PARTS, EvaluationSlice), (ENOUGH, int))

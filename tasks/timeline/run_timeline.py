"""The timeline of a batch or a pool by device: the first plan, and the past, running and future segments.

These are pure values. `reader.py` reads them from a journal's database; `drawing.py` draws them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ringmaster.codec import stored_as, to_json
from ringmaster.tasks.execution.dispatch import DeviceId
from ringmaster.tasks.execution.execution_events import PredictedEnd
from ringmaster.tasks.execution.job_progress import JobFigures
from ringmaster.tasks.planning.durations import compared_with_plan, seconds_text
from ringmaster.tasks.planning.series_bands import SeriesBand
from ringmaster.tasks.storage.journal import ENDED, JobStatus
from ringmaster.techniques.processes.gang_events import OutcomeStatus

FAULTS = (
    OutcomeStatus.CRASHED,
    OutcomeStatus.INVALID,
    OutcomeStatus.OUT_OF_MEMORY,
    OutcomeStatus.LOST,
)  # outcomes of segments that pictures mark
NOW_RUNNING, TO_COME, AT_FIRST = "running", "to come", "original plan"


@dataclass(frozen=True, kw_only=True)
class TimelineSpan:
    """A job on a gang for some time, in seconds from the timeline's beginning.

    status: a segment's outcome ("done", "preempted", "crashed", ...), "running" (`end_s` is a forecast), "to come", or
        "original plan".
    number: the segment's number in the journal.
    members: the other jobs that the gang trains.
    """

    job: str
    technique: str
    devices: tuple[DeviceId, ...]
    start_s: float
    end_s: float
    status: str
    number: int | None = None
    message: str = ""
    members: tuple[str, ...] = stored_as("fellows", default=())

    @property
    def is_fault(self) -> bool:
        """Whether the segment failed."""
        return self.status in FAULTS

    @property
    def label(self) -> str:
        """The label of its box, where space permits."""
        others = f" +{len(self.members)}" if self.members else ""
        return f"{self.job}{others} · {self.technique}"

    @property
    def jobs(self) -> tuple[str, ...]:
        """All jobs that the gang trains."""
        return self.job, *self.members


@dataclass(frozen=True, kw_only=True)
class JobLine:
    """The state of a job.

    num_steps: the job's steps, None if unknown.
    technique, num_devices: those of its newest segment, or of the next one.
    ends_s: when it ended or is forecast to end, None if nothing is planned for it.
    figures: its loss, speed and memory while it runs.
    predicted: its predicted end with the interval, of a job that has not ended.
    """

    name: str
    status: str
    step: int
    num_steps: int | None = None
    technique: str = ""
    num_devices: int = 0
    ends_s: float | None = None
    message: str = ""
    figures: JobFigures = field(default_factory=JobFigures)
    predicted: PredictedEnd | None = None


@dataclass(frozen=True, kw_only=True)
class TimelineNote:
    """A decision, or the event that caused one."""

    at_s: float
    text: str


@dataclass(frozen=True, kw_only=True)
class NodeLine:
    """A node of a pool.

    health: by device number (as text), why the device is not used.
    """

    name: str
    num_devices: int
    status: str
    health: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class RunTimeline:
    """A batch or a pool at one time.

    zero_s: the time since the epoch from which all other times count.
    rows: the nodes with their numbers of devices, from top to bottom.
    first, past, running, coming: the spans of the first plan, and those that have ended, run, and are to come.
    is_over: whether all jobs have ended, or no executor continues them.
    predicted: the predicted end of each batch that has not ended, by its id; empty of a batch that runs alone.
    bands: the prices and the carbon over time by which plans were made.
    """

    name: str
    zero_s: float
    now_s: float
    rows: tuple[tuple[str, int], ...] = ()
    first: tuple[TimelineSpan, ...] = ()
    past: tuple[TimelineSpan, ...] = ()
    running: tuple[TimelineSpan, ...] = ()
    coming: tuple[TimelineSpan, ...] = ()
    jobs: tuple[JobLine, ...] = ()
    notes: tuple[TimelineNote, ...] = ()
    nodes: tuple[NodeLine, ...] = ()
    is_over: bool = False
    predicted: Mapping[str, PredictedEnd] = field(default_factory=dict)
    bands: tuple[SeriesBand, ...] = ()

    @property
    def real(self) -> tuple[TimelineSpan, ...]:
        """The past, running and future spans, in order of their start."""
        return tuple(sorted((*self.past, *self.running, *self.coming), key=lambda span: (span.start_s, span.end_s)))

    @property
    def is_interrupted(self) -> bool:
        """Whether nothing continues the jobs, and some have not ended."""
        return self.is_over and any(job.status not in ENDED for job in self.jobs)

    @property
    def ends_s(self) -> float | None:
        """When the last job ended or is forecast to end."""
        return max((span.end_s for span in self.real), default=None)

    @property
    def planned_end_s(self) -> float | None:
        """When the last job should have ended by the first plan."""
        return max((span.end_s for span in self.first), default=None)

    @property
    def width_s(self) -> float:
        """The time up to which there is something to draw."""
        return max(self.ends_s or 0.0, self.planned_end_s or 0.0, self.now_s if not self.is_over else 0.0) or 1.0

    def only(self, batch: str) -> RunTimeline:
        """Returns the timeline of one batch of a pool, from its own beginning, with job names as within the batch."""
        mark = f"{batch}/"

        def of(spans: Sequence[TimelineSpan]) -> tuple[TimelineSpan, ...]:
            own = [span for span in spans if span.job.startswith(mark)]
            return tuple(_renamed(span, mark) for span in own)

        lines = tuple(replace(j, name=j.name.removeprefix(mark)) for j in self.jobs if j.name.startswith(mark))
        is_over = bool(lines) and all(line.status in ENDED for line in lines)
        one = replace(
            self,
            name=batch,
            first=of(self.first),
            past=of(self.past),
            running=of(self.running),
            coming=of(self.coming),
            jobs=lines,
            is_over=is_over,
            predicted={key: end for key, end in self.predicted.items() if key == batch},
        )
        return one.later(min((span.start_s for span in (*one.first, *one.real)), default=0.0))

    def later(self, seconds: float) -> RunTimeline:
        """Returns the timeline with its beginning moved `seconds` later."""

        def of(spans: Sequence[TimelineSpan]) -> tuple[TimelineSpan, ...]:
            return tuple(replace(s, start_s=s.start_s - seconds, end_s=s.end_s - seconds) for s in spans)

        lines = [
            replace(
                job,
                ends_s=None if job.ends_s is None else job.ends_s - seconds,
                predicted=None if job.predicted is None else job.predicted.later(-seconds),
            )
            for job in self.jobs
        ]
        notes = [replace(note, at_s=note.at_s - seconds) for note in self.notes if note.at_s >= seconds]
        return replace(
            self,
            zero_s=self.zero_s + seconds,
            now_s=self.now_s - seconds,
            first=of(self.first),
            past=of(self.past),
            running=of(self.running),
            coming=of(self.coming),
            jobs=tuple(lines),
            notes=tuple(notes),
            predicted={batch: end.later(-seconds) for batch, end in self.predicted.items()},
            bands=tuple(band.later(seconds) for band in self.bands),
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON object that `ringmaster watch --json` prints."""
        data: dict[str, Any] = to_json(self)
        return {**data, "ends_s": self.ends_s, "planned_end_s": self.planned_end_s}


def headline(run_timeline: RunTimeline) -> list[str]:
    """Returns a summary in words: the number of jobs by status, and the end compared with the first plan."""
    counts: dict[str, int] = {}
    for job in run_timeline.jobs:
        counts[job.status] = counts.get(job.status, 0) + 1
    lines = [", ".join(f"{number} {status}" for status, number in counts.items()) or "no jobs yet"]
    ends_s, planned_s = run_timeline.ends_s, run_timeline.planned_end_s
    if len(run_timeline.predicted) == 1 and not run_timeline.is_over:
        (predicted,) = run_timeline.predicted.values()
        ends_s = predicted.end_s
        lines.append(f"predicted end after {end_text(predicted)}")
    elif ends_s is not None:
        lines.append(f"{'ended' if run_timeline.is_over else 'forecast to end'} after {seconds_text(ends_s)}")
    if ends_s is not None and planned_s:
        is_whole = all(job.status == JobStatus.DONE or job.status not in ENDED for job in run_timeline.jobs)
        than = compared_with_plan(ends_s, planned_s, is_whole=is_whole and not run_timeline.is_interrupted)
        lines.append(f"{than} ({seconds_text(planned_s)})")
    return lines


def end_text(predicted: PredictedEnd) -> str:
    """Returns a predicted end with the certified earliest and the latest one: "21 s (15 to 25 s)"."""
    earliest_s, latest_s = predicted.bounds_s
    low, end, high = (seconds_text(max(0.0, s), like=latest_s) for s in (earliest_s, predicted.end_s, latest_s))
    return f"{end} ({low.rpartition(' ')[0]} to {high})"


def _renamed(span: TimelineSpan, mark: str) -> TimelineSpan:
    """Returns a span with job names as within their batch."""
    members = tuple(member.removeprefix(mark) for member in span.members)
    return replace(span, job=span.job.removeprefix(mark), members=members)

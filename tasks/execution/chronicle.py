"""What was planned first, what happened, what runs and what comes, by device: pure values, to be drawn.

`historian.py` reads them from a journal's database, `chronicle_svg.py` and `chronicle_text.py` draw them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ringmaster.tasks.execution.dispatch import DeviceId
from ringmaster.tasks.execution.journal import ENDED
from ringmaster.tasks.execution.orders import LOST
from ringmaster.tasks.planning.drawing import seconds_text
from ringmaster.techniques.engine.gang import CRASHED, INVALID, OUT_OF_MEMORY
from ringmaster.techniques.values import to_json

FAULTS = (CRASHED, INVALID, OUT_OF_MEMORY, LOST)  # outcomes of segments that a picture marks
NOW_RUNNING, TO_COME, AT_FIRST = "running", "to come", "planned first"


@dataclass(frozen=True, kw_only=True)
class Span:
    """A job on a gang for some time, in seconds from the chronicle's beginning.

    status: a segment's outcome ("done", "preempted", "crashed", ...), "running" (its end is a forecast), "to come", or
    "planned first". number: of the segment in the journal. fellows: the jobs that the gang trains beside its own.
    """

    job: str
    technique: str
    devices: tuple[DeviceId, ...]
    start_s: float
    end_s: float
    status: str
    number: int | None = None
    message: str = ""
    fellows: tuple[str, ...] = ()

    @property
    def is_fault(self) -> bool:
        """Whether it failed."""
        return self.status in FAULTS

    @property
    def label(self) -> str:
        """What it is called where there is room."""
        beside = f" +{len(self.fellows)}" if self.fellows else ""
        return f"{self.job}{beside} · {self.technique}"

    @property
    def jobs(self) -> tuple[str, ...]:
        """All that the gang trains."""
        return self.job, *self.fellows


@dataclass(frozen=True, kw_only=True)
class JobLine:
    """Where a job stands. ends_s: when it ended, or is forecast to; None where nothing is planned for it.

    num_steps: in all, None where that is not known. technique, num_devices: of its newest segment, or the next one.
    """

    name: str
    status: str
    step: int
    num_steps: int | None = None
    technique: str = ""
    num_devices: int = 0
    ends_s: float | None = None
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class Note:
    """A decision, or what called for one."""

    at_s: float
    text: str


@dataclass(frozen=True, kw_only=True)
class NodeLine:
    """A node of a pool. health: by device number (as text), why the device is not used."""

    name: str
    num_devices: int
    status: str
    health: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Chronicle:
    """A batch or a pool at a moment. zero_s: seconds since the epoch from which all others count.

    rows: nodes with their numbers of devices, from the top down. is_over: all jobs have ended, or nobody goes on.
    """

    name: str
    zero_s: float
    now_s: float
    rows: tuple[tuple[str, int], ...] = ()
    first: tuple[Span, ...] = ()
    past: tuple[Span, ...] = ()
    running: tuple[Span, ...] = ()
    coming: tuple[Span, ...] = ()
    jobs: tuple[JobLine, ...] = ()
    notes: tuple[Note, ...] = ()
    nodes: tuple[NodeLine, ...] = ()
    is_over: bool = False

    @property
    def real(self) -> tuple[Span, ...]:
        """What happened, runs and comes, in order of its start."""
        return tuple(sorted((*self.past, *self.running, *self.coming), key=lambda span: (span.start_s, span.end_s)))

    @property
    def ends_s(self) -> float | None:
        """When the last job ended or is forecast to end."""
        return max((span.end_s for span in self.real), default=None)

    @property
    def planned_end_s(self) -> float | None:
        """When all should have ended by what was planned first."""
        return max((span.end_s for span in self.first), default=None)

    @property
    def width_s(self) -> float:
        """Up to when there is something to draw."""
        return max(self.ends_s or 0.0, self.planned_end_s or 0.0, self.now_s if not self.is_over else 0.0) or 1.0

    def only(self, batch: str) -> Chronicle:
        """The same of one batch of a pool, its jobs by their names within it, from its own beginning."""
        mark = f"{batch}/"

        def of(spans: Sequence[Span]) -> tuple[Span, ...]:
            mine = [span for span in spans if span.job.startswith(mark)]
            return tuple(_renamed(span, mark) for span in mine)

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
        )
        begins_s = min((span.start_s for span in (*one.first, *one.real)), default=0.0)
        return one.later(begins_s)

    def later(self, seconds: float) -> Chronicle:
        """The same, its beginning moved to a later moment."""

        def of(spans: Sequence[Span]) -> tuple[Span, ...]:
            return tuple(replace(s, start_s=s.start_s - seconds, end_s=s.end_s - seconds) for s in spans)

        lines = [j if j.ends_s is None else replace(j, ends_s=j.ends_s - seconds) for j in self.jobs]
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
        )

    def to_json(self) -> dict[str, Any]:
        """The JSON object that `ringmaster watch --json` prints."""
        data: dict[str, Any] = to_json(self)
        return {**data, "ends_s": self.ends_s, "planned_end_s": self.planned_end_s}


def headline(chronicle: Chronicle) -> list[str]:
    """What a picture says in words: how many jobs stand how, and when it ends beside what was planned."""
    counts: dict[str, int] = {}
    for job in chronicle.jobs:
        counts[job.status] = counts.get(job.status, 0) + 1
    said = [", ".join(f"{number} {status}" for status, number in counts.items()) or "no jobs yet"]
    ends_s, planned_s = chronicle.ends_s, chronicle.planned_end_s
    if ends_s is not None:
        said.append(f"{'ended' if chronicle.is_over else 'forecast to end'} after {seconds_text(ends_s)}")
    if ends_s is not None and planned_s:
        said.append(f"planned first {seconds_text(planned_s)} ({ends_s / planned_s - 1:+.1%})")
    return said


def _renamed(span: Span, mark: str) -> Span:
    """A span with the names that its batch has for its jobs."""
    fellows = tuple(fellow.removeprefix(mark) for fellow in span.fellows)
    return replace(span, job=span.job.removeprefix(mark), fellows=fellows)

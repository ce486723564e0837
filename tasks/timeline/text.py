"""Run timelines for a terminal: one row per device, in characters that show the state without colours too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ringmaster.tasks.planning.gantt import seconds_text
from ringmaster.tasks.planning.gantt_text import LETTERS, Bar, Piece, pieces
from ringmaster.tasks.timeline.run_timeline import NOW_RUNNING, TO_COME, RunTimeline, Span, end_text
from ringmaster.text import printable

RUNNING_FILL, TO_COME_FILL, FAULT_MARK, NOW_MARK = "▒", "░", "✗", "▲"
MOST_DEVICES_TWICE = 8  # up to this number, each device has a second row with its first plan
FIGURES = ("loss", "samples/s", "tokens/s", "memory")  # of running jobs
JOB_COLUMNS = ("", "job", "status", "step", *FIGURES, "technique", "ends after", "message")
KEY = f"letters: done  {RUNNING_FILL} running  {TO_COME_FILL} to come  {FAULT_MARK} failed  · idle"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A device, or the first plan of a device."""

    name: str
    pieces: tuple[Piece, ...]
    is_first_plan: bool = False


def letters(run_timeline: RunTimeline) -> dict[str, str]:
    """Returns a letter for each job. Letters repeat beyond 52 jobs."""
    names = [job.name for job in run_timeline.jobs] or [span.job for span in run_timeline.first]
    return {name: LETTERS[i % len(LETTERS)] for i, name in enumerate(dict.fromkeys(names))}


def margin_of(run_timeline: RunTimeline) -> int:
    """Returns the number of columns for the devices' names."""
    return min(24, max([len("planned"), *(len(f"{node}:{number - 1}") for node, number in run_timeline.rows)]))


def num_rows(run_timeline: RunTimeline) -> int:
    """Returns the number of rows if their number were unlimited."""
    return sum(number for _, number in run_timeline.rows) * (2 if _is_twice(run_timeline) else 1)


def _is_twice(run_timeline: RunTimeline) -> bool:
    return bool(run_timeline.first) and sum(number for _, number in run_timeline.rows) <= MOST_DEVICES_TWICE


def rows(run_timeline: RunTimeline, columns: int, *, most: int = 64) -> tuple[list[Row], int]:
    """Returns at most `most` rows whose pieces fill `columns` cells each, and the number of omitted devices."""
    letter = letters(run_timeline)
    is_twice = _is_twice(run_timeline)
    real, first = _by_device(run_timeline.real), _by_device(run_timeline.first)
    devices = [(node, device) for node, number in run_timeline.rows for device in range(number)]
    shown = devices[: max(1, most // (2 if is_twice else 1))]
    found = []
    for node, device in shown:
        bars = [_bar(span, letter, is_named=span.devices[0] == (node, device)) for span in real.get((node, device), ())]
        cells = tuple(pieces(bars, columns, end_s=run_timeline.width_s))
        found.append(Row(name=f"{node}:{device}", pieces=tuple(_marked(cell) for cell in cells)))
        if is_twice:
            planned = [_bar(s, letter, is_named=False) for s in first.get((node, device), ())]
            cells = tuple(pieces(planned, columns, end_s=run_timeline.width_s))
            found.append(Row(name="planned", pieces=cells, is_first_plan=True))
    return found, len(devices) - len(shown)


def axis(run_timeline: RunTimeline, columns: int) -> str:
    """Returns the line below the rows: some times, each at its column, and the current time."""
    end_s = run_timeline.width_s
    line = [" "] * (columns + 1)
    marks = [("0", 0.0), *((seconds_text(end_s * quarter / 4, like=end_s), quarter / 4) for quarter in range(1, 5))]
    if not run_timeline.is_over:
        marks.insert(0, (f"{NOW_MARK} now", min(run_timeline.now_s / end_s, 1.0)))
    for said, share in marks:
        at = min(round(columns * share), columns + 1 - len(said))
        if set(line[max(0, at - 1) : at + len(said) + 1]) == {" "}:
            line[at : at + len(said)] = said
    return "".join(line)


def _by_device(spans: Sequence[Span]) -> dict[tuple[str, int], list[Span]]:
    found: dict[tuple[str, int], list[Span]] = {}
    for span in sorted(spans, key=lambda span: (span.start_s, span.end_s)):
        for device in span.devices:
            found.setdefault(device, []).append(span)
    return found


def _bar(span: Span, letter: dict[str, str], *, is_named: bool) -> Bar:
    own = letter.get(span.job, "?")
    fill = {NOW_RUNNING: RUNNING_FILL, TO_COME: TO_COME_FILL}.get(span.status, own)
    return Bar(span.start_s, span.end_s, fill, own, span.label if is_named else "", span)


def _marked(piece: Piece) -> Piece:
    """Returns the piece with its end marked if its segment failed."""
    if not isinstance(piece.of, Span) or not piece.of.is_fault:
        return piece
    return Piece(piece.text[:-1] + FAULT_MARK, piece.of, min(piece.num_named, len(piece.text) - 1))


def job_table(run_timeline: RunTimeline, most: int) -> tuple[list[str], list[list[str]]]:
    """Returns the columns and the rows of a table of jobs. Columns of figures that no job has are left out."""
    rows = job_texts(run_timeline, most)
    shown = [i for i, name in enumerate(JOB_COLUMNS) if name not in FIGURES or any(row[i] for row in rows)]
    return [JOB_COLUMNS[i] for i in shown], [[row[i] for i in shown] for row in rows]


def job_texts(run_timeline: RunTimeline, most: int) -> list[tuple[str, ...]]:
    """Returns the rows of a table of jobs, running jobs first, with the cells of `JOB_COLUMNS`.

    The message of a running job says what its gang does other than to train.
    """
    letter = letters(run_timeline)
    order = {"running": 0, "failed": 1, "waiting": 2, "paused": 3, "cancelled": 4, "done": 5}
    found: list[tuple[str, ...]] = []
    for job in sorted(run_timeline.jobs, key=lambda job: order.get(job.status, 9))[:most]:
        step = f"{job.step}/{job.num_steps}" if job.num_steps else str(job.step)
        option = f"{job.technique} x{job.num_devices}" if job.technique else ""
        ends = "" if job.ends_s is None else seconds_text(max(0.0, job.ends_s))
        if job.predicted is not None:
            ends = end_text(job.predicted)
        message = printable(job.message or job.figures.phase, limit=60)
        name = printable(job.name)
        found.append((letter[job.name], name, job.status, step, *job.figures.cells, option, ends, message))
    return found

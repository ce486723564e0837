"""Run timelines drawn: as a self-contained SVG picture, and for a terminal in characters that show the state.

Both have one row per device. In the picture, the first plan is a strip at the bottom of the row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ringmaster.tasks.planning.durations import seconds_text
from ringmaster.tasks.planning.gantt import (
    Bar,
    Frame,
    GanttBox,
    GanttCells,
    colours,
    label,
    letters,
    pieces,
    stripes,
)
from ringmaster.tasks.planning.series_bands import STYLE as BAND_STYLE
from ringmaster.tasks.planning.series_bands import bands_tall, bands_until, draw_bands
from ringmaster.tasks.timeline.run_timeline import (
    AT_FIRST,
    NOW_RUNNING,
    TO_COME,
    RunTimeline,
    TimelineSpan,
    end_text,
    headline,
)
from ringmaster.text import printable, xml

RUNNING_FILL, TO_COME_FILL, FAULT_MARK = "▒", "░", "✗"
MAX_DEVICES_TWICE = 8  # up to this number, each device has a second row with its first plan
FIGURES = ("loss", "samples/s", "tokens/s", "memory")  # of running jobs
JOB_COLUMNS = ("", "job", "status", "step", *FIGURES, "technique", "ends after", "message")
KEY = f"letters: done  {RUNNING_FILL} running  {TO_COME_FILL} to come  {FAULT_MARK} failed  · idle"


@dataclass(frozen=True, kw_only=True)
class DeviceRow:
    """A device, or the first plan of a device."""

    name: str
    pieces: tuple[GanttCells, ...]
    is_first_plan: bool = False


def letters_of(run_timeline: RunTimeline) -> dict[str, str]:
    """Returns a letter for each job. Letters repeat beyond 52 jobs."""
    return letters([job.name for job in run_timeline.jobs] or [span.job for span in run_timeline.first])


def num_rows(run_timeline: RunTimeline) -> int:
    """Returns the number of rows if their number were unlimited."""
    return sum(number for _, number in run_timeline.rows) * (2 if _is_twice(run_timeline) else 1)


def _is_twice(run_timeline: RunTimeline) -> bool:
    return bool(run_timeline.first) and sum(number for _, number in run_timeline.rows) <= MAX_DEVICES_TWICE


def rows(run_timeline: RunTimeline, columns: int, *, most: int = 64) -> tuple[list[DeviceRow], int]:
    """Returns at most `most` rows whose pieces fill `columns` cells each, and the number of omitted devices."""
    letter = letters_of(run_timeline)
    is_twice = _is_twice(run_timeline)
    real, first = _by_device(run_timeline.real), _by_device(run_timeline.first)
    devices = [(node, device) for node, number in run_timeline.rows for device in range(number)]
    shown = devices[: max(1, most // (2 if is_twice else 1))]
    result = []
    for node, device in shown:
        bars = [_bar(span, letter, is_named=span.devices[0] == (node, device)) for span in real.get((node, device), ())]
        cells = tuple(pieces(bars, columns, end_s=run_timeline.width_s))
        result.append(DeviceRow(name=f"{node}:{device}", pieces=tuple(_marked(cell) for cell in cells)))
        if is_twice:
            planned = [_bar(s, letter, is_named=False) for s in first.get((node, device), ())]
            cells = tuple(pieces(planned, columns, end_s=run_timeline.width_s))
            result.append(DeviceRow(name="planned", pieces=cells, is_first_plan=True))
    return result, len(devices) - len(shown)


def _by_device(spans: Sequence[TimelineSpan]) -> dict[tuple[str, int], list[TimelineSpan]]:
    result: dict[tuple[str, int], list[TimelineSpan]] = {}
    for span in sorted(spans, key=lambda span: (span.start_s, span.end_s)):
        for device in span.devices:
            result.setdefault(device, []).append(span)
    return result


def _bar(span: TimelineSpan, letter: dict[str, str], *, is_named: bool) -> Bar:
    own = letter.get(span.job, "?")
    fill = {NOW_RUNNING: RUNNING_FILL, TO_COME: TO_COME_FILL}.get(span.status, own)
    return Bar(span.start_s, span.end_s, fill, own, span.label if is_named else "", span)


def _marked(piece: GanttCells) -> GanttCells:
    """Returns the piece with its end marked if its segment failed."""
    if not isinstance(piece.of, TimelineSpan) or not piece.of.is_fault:
        return piece
    return GanttCells(piece.text[:-1] + FAULT_MARK, piece.of, min(piece.num_named, len(piece.text) - 1))


def job_table(run_timeline: RunTimeline, most: int) -> tuple[list[str], list[list[str]]]:
    """Returns the columns and the rows of a table of jobs. Columns of figures that no job has are left out."""
    rows = job_texts(run_timeline, most)
    shown = [i for i, name in enumerate(JOB_COLUMNS) if name not in FIGURES or any(row[i] for row in rows)]
    return [JOB_COLUMNS[i] for i in shown], [[row[i] for i in shown] for row in rows]


def job_texts(run_timeline: RunTimeline, most: int) -> list[tuple[str, ...]]:
    """Returns the rows of a table of jobs, running jobs first, with the cells of `JOB_COLUMNS`.

    The message of a running job describes what its gang does other than to train.
    """
    letter = letters_of(run_timeline)
    order = {"running": 0, "failed": 1, "waiting": 2, "paused": 3, "cancelled": 4, "done": 5}
    result: list[tuple[str, ...]] = []
    for job in sorted(run_timeline.jobs, key=lambda job: order.get(job.status, 9))[:most]:
        step = f"{job.step}/{job.num_steps}" if job.num_steps else str(job.step)
        option = f"{job.technique} x{job.num_devices}" if job.technique else ""
        ends = "" if job.ends_s is None else seconds_text(max(0.0, job.ends_s))
        if job.predicted is not None:
            ends = end_text(job.predicted)
        message = printable(job.message or job.figures.phase, limit=60)
        name = printable(job.name)
        result.append((letter[job.name], name, job.status, step, *job.figures.cells, option, ends, message))
    return result


MAX_SPANS = 6000  # to draw, the longest of each kind: more could not be distinguished
MAX_TITLED = 400  # with more spans, boxes have no titles and like ones are merged into one path: a fifth of the size
STRIP = 0.3  # share of a row's height for the first plan
FAILED, PLANNED = "#c1121f", "#9aa5ae"
STYLE = (
    ".now{stroke:#1d5fbf;stroke-width:1.5}.nowat{font-size:11px;text-anchor:end;fill:#1d5fbf;font-weight:600}"
    f".fault{{stroke:{FAILED};stroke-width:2}}"
)


def render_svg(run_timeline: RunTimeline, *, titles: bool = True) -> str:
    """Returns the timeline as an SVG document. Past segments are solid, running ones striped, future ones dashed.

    titles: whether boxes have tooltips; pictures embedded in other pages show none.
    """
    bands = bands_until(run_timeline.bands, run_timeline.width_s)
    frame = Frame(run_timeline.rows or [("", 1)], end_s=run_timeline.width_s, below=bands_tall(bands))
    first, real, left_out = _the_longest(run_timeline)
    has_strip = bool(first) and frame.row >= 9
    is_titled = titles and len(first) + len(real) <= MAX_TITLED
    colour_of = colours(span.technique for span in (*run_timeline.first, *run_timeline.real))
    keys = colour_of | {NOW_RUNNING: "url(#running)", TO_COME: "#ffffff", "failed": FAILED}
    value = headline(run_timeline)
    if left_out:
        value.append(f"the {left_out} shortest segments are left out")
    if first and not has_strip:
        value.append("no space for the original plan")
    bottom = 1.0 - STRIP if has_strip else 1.0
    sheet = _SpanDrawing(frame, is_titled=is_titled)
    for span in first if has_strip else ():
        for box in frame.cells(span.devices, span.start_s, span.end_s, top=bottom):
            sheet.box(box, fill=PLANNED, stroke="#ffffff")
        sheet.end(span)
    for span in real:
        _draw(span, sheet, colour_of[span.technique], now_s=run_timeline.now_s, bottom=bottom)
        sheet.end(span)
    content = [*draw_bands(bands, x=frame.x, end_s=frame.end_s, top=frame.bottom), *sheet.drawn()]
    if not run_timeline.is_over:
        text = f"now, after {seconds_text(run_timeline.now_s)}"
        content.append(frame.line(run_timeline.now_s, text=text, title="now", style=("now", "nowat")))
    fills = keys | ({AT_FIRST: PLANNED} if has_strip else {})
    pattern, style = stripes("running", opacity=0.2), STYLE + (BAND_STYLE if bands else "")
    return frame.document(run_timeline.name, value, fills=fills, content=content, style=style, defs=pattern)


class _SpanDrawing:
    """Collects the drawn spans: each alone with its title, or all boxes that look alike as one path."""

    def __init__(self, frame: Frame, *, is_titled: bool) -> None:
        self.frame, self._is_titled = frame, is_titled
        self._paths: dict[str, list[str]] = {}
        self._drawn: list[str] = []
        self._of_span: list[str] = []

    def box(self, box: GanttBox, *, fill: str, stroke: str = "#5b6873", more: str = "") -> None:
        """Adds a box of the current span."""
        if self._is_titled:
            self._of_span.append(self.frame.rect(box, fill=fill, stroke=stroke, more=more))
            return
        self._paths.setdefault(
            f'fill="{fill}" stroke="{stroke}" stroke-width="{0.8 if self.frame.row > 6 else 0.3}" {more}', []
        ).append(f"M{box.x:.1f} {box.y:.1f}h{box.wide:.1f}v{box.tall:.1f}h-{box.wide:.1f}z")

    def add(self, part: str) -> None:
        """Adds another element of the current span."""
        if part:
            self._of_span.append(part)

    def end(self, span: TimelineSpan) -> None:
        """Completes the current span."""
        if self._is_titled:
            text = (
                f"{span.job}: {span.technique} on {len(span.devices)} devices, {seconds_text(span.start_s)} to "
                f"{seconds_text(span.end_s)}, {span.status}{f': {span.message}' if span.message else ''}"
            )
            self._of_span = [f"<g><title>{xml(text)}</title>{''.join(self._of_span)}</g>"]
        self._drawn += self._of_span
        self._of_span = []

    def drawn(self) -> list[str]:
        """Returns all elements, labels above boxes."""
        return [f'<path d="{"".join(path)}" {look}/>' for look, path in self._paths.items()] + self._drawn


def _the_longest(run_timeline: RunTimeline) -> tuple[list[TimelineSpan], list[TimelineSpan], int]:
    """Returns the longest spans of the first plan and of the actual run, and the number of omitted spans.

    Each of the two has at most half of `MAX_SPANS`.
    """
    kept = []
    for spans in (run_timeline.first, run_timeline.real):
        by_length = sorted(spans, key=lambda span: span.start_s - span.end_s)
        kept.append(sorted(by_length[: MAX_SPANS // 2], key=lambda span: span.start_s))
    return kept[0], kept[1], len(run_timeline.first) + len(run_timeline.real) - len(kept[0]) - len(kept[1])


def _draw(span: TimelineSpan, sheet: _SpanDrawing, colour: str, *, now_s: float, bottom: float) -> None:
    """Draws a segment's boxes, with its label in the first of them."""
    for i, box in enumerate(sheet.frame.cells(span.devices, span.start_s, span.end_s, bottom=bottom)):
        if span.status == TO_COME:
            sheet.box(box, fill=colour, more='fill-opacity=".3" stroke-dasharray="4 3"')
        elif span.status == NOW_RUNNING:
            sheet.box(box, fill=colour, more='fill-opacity=".45" stroke-dasharray="4 3"')
            ran = GanttBox(box.x, box.y, max(0.8, min(box.wide, (now_s - span.start_s) * sheet.frame.scale)), box.tall)
            sheet.box(ran, fill=colour)
            sheet.box(ran, fill="url(#running)")
        else:
            sheet.box(box, fill=colour, stroke=FAILED if span.is_fault else "#5b6873")
            if span.is_fault:
                sheet.add(_cross(box))
        if i == 0:
            sheet.add(label(box, span.label, least=5))


def _cross(box: GanttBox) -> str:
    """Returns a small red cross at the end of a failed segment."""
    half = min(5.0, box.tall / 2)
    x, y = box.x + box.wide, box.y + box.tall / 2
    return (
        f'<path d="M{x - half:.1f} {y - half:.1f}L{x + half:.1f} {y + half:.1f}'
        f'M{x - half:.1f} {y + half:.1f}L{x + half:.1f} {y - half:.1f}" class="fault"/>'
    )

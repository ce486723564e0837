"""Run timelines as self-contained SVG pictures: one row per device, with the first plan in a strip at its bottom."""

from __future__ import annotations

from ringmaster.tasks.planning.gantt import Box, Frame, colours, label, legend, seconds_text, stripes
from ringmaster.tasks.timeline.run_timeline import AT_FIRST, NOW_RUNNING, TO_COME, RunTimeline, Span, headline
from ringmaster.text import xml

MOST_SPANS = 6000  # to draw, the longest of each kind: more could not be distinguished
MOST_TITLED = 400  # with more spans, boxes have no titles and like ones are merged into one path: a fifth of the size
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
    frame = Frame(run_timeline.rows or [("", 1)], end_s=run_timeline.width_s)
    first, real, left_out = _the_longest(run_timeline)
    has_strip = bool(first) and frame.row >= 9
    is_titled = titles and len(first) + len(real) <= MOST_TITLED
    colour_of = colours(span.technique for span in (*run_timeline.first, *run_timeline.real))
    keys = colour_of | {NOW_RUNNING: "url(#running)", TO_COME: "#ffffff", "failed": FAILED}
    said = headline(run_timeline)
    if left_out:
        said.append(f"the {left_out} shortest segments are left out")
    if first and not has_strip:
        said.append("no space for what was planned first")
    parts = [
        frame.head(run_timeline.name, said, style=STYLE, defs=stripes("running", opacity=0.2)),
        legend(keys | ({AT_FIRST: PLANNED} if has_strip else {})),
        frame.axis(),
        *frame.ground(),
    ]
    bottom = 1.0 - STRIP if has_strip else 1.0
    sheet = _Sheet(frame, is_titled=is_titled)
    for span in first if has_strip else ():
        for box in frame.cells(span.devices, span.start_s, span.end_s, top=bottom):
            sheet.box(box, fill=PLANNED, stroke="#ffffff")
        sheet.end(span)
    for span in real:
        _draw(span, sheet, colour_of[span.technique], now_s=run_timeline.now_s, bottom=bottom)
        sheet.end(span)
    parts += sheet.drawn()
    if not run_timeline.is_over:
        said_now = f"now, after {seconds_text(run_timeline.now_s)}"
        parts.append(frame.line(run_timeline.now_s, said=said_now, title="now", style=("now", "nowat")))
    return "\n".join([*parts, "</svg>"])


class _Sheet:
    """Collects the drawn spans: each alone with its title, or all boxes that look alike as one path."""

    def __init__(self, frame: Frame, *, is_titled: bool) -> None:
        self.frame, self._is_titled = frame, is_titled
        self._paths: dict[str, list[str]] = {}
        self._drawn: list[str] = []
        self._of_span: list[str] = []

    def box(self, box: Box, *, fill: str, stroke: str = "#5b6873", more: str = "") -> None:
        """Adds a box of the current span."""
        if self._is_titled:
            self._of_span.append(self.frame.rect(box, fill=fill, stroke=stroke, more=more))
            return
        look = f'fill="{fill}" stroke="{stroke}" stroke-width="{0.8 if self.frame.row > 6 else 0.3}" {more}'
        self._paths.setdefault(look, []).append(
            f"M{box.x:.1f} {box.y:.1f}h{box.wide:.1f}v{box.tall:.1f}h-{box.wide:.1f}z"
        )

    def add(self, part: str) -> None:
        """Adds another element of the current span."""
        if part:
            self._of_span.append(part)

    def end(self, span: Span) -> None:
        """Completes the current span."""
        if self._is_titled:
            said = (
                f"{span.job}: {span.technique} on {len(span.devices)} devices, {seconds_text(span.start_s)} to "
                f"{seconds_text(span.end_s)}, {span.status}{f': {span.message}' if span.message else ''}"
            )
            self._of_span = [f"<g><title>{xml(said)}</title>{''.join(self._of_span)}</g>"]
        self._drawn += self._of_span
        self._of_span = []

    def drawn(self) -> list[str]:
        """Returns all elements, labels above boxes."""
        return [f'<path d="{"".join(path)}" {look}/>' for look, path in self._paths.items()] + self._drawn


def _the_longest(run_timeline: RunTimeline) -> tuple[list[Span], list[Span], int]:
    """Returns the longest spans of the first plan and of the actual run, and the number of omitted spans.

    Each of the two has at most half of `MOST_SPANS`.
    """
    kept = []
    for spans in (run_timeline.first, run_timeline.real):
        by_length = sorted(spans, key=lambda span: span.start_s - span.end_s)
        kept.append(sorted(by_length[: MOST_SPANS // 2], key=lambda span: span.start_s))
    return kept[0], kept[1], len(run_timeline.first) + len(run_timeline.real) - len(kept[0]) - len(kept[1])


def _draw(span: Span, sheet: _Sheet, colour: str, *, now_s: float, bottom: float) -> None:
    """Draws a segment's boxes, with its label in the first of them."""
    for i, box in enumerate(sheet.frame.cells(span.devices, span.start_s, span.end_s, bottom=bottom)):
        if span.status == TO_COME:
            sheet.box(box, fill=colour, more='fill-opacity=".3" stroke-dasharray="4 3"')
        elif span.status == NOW_RUNNING:
            sheet.box(box, fill=colour, more='fill-opacity=".45" stroke-dasharray="4 3"')
            ran = Box(box.x, box.y, max(0.8, min(box.wide, (now_s - span.start_s) * sheet.frame.scale)), box.tall)
            sheet.box(ran, fill=colour)
            sheet.box(ran, fill="url(#running)")
        else:
            sheet.box(box, fill=colour, stroke=FAILED if span.is_fault else "#5b6873")
            if span.is_fault:
                sheet.add(_cross(box))
        if i == 0:
            sheet.add(label(box, span.label, least=5))


def _cross(box: Box) -> str:
    """Returns a small red cross at the end of a failed segment."""
    half = min(5.0, box.tall / 2)
    x, y = box.x + box.wide, box.y + box.tall / 2
    return (
        f'<path d="M{x - half:.1f} {y - half:.1f}L{x + half:.1f} {y + half:.1f}'
        f'M{x - half:.1f} {y + half:.1f}L{x + half:.1f} {y - half:.1f}" class="fault"/>'
    )

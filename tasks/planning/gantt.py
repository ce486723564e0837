"""Gantt charts of plans, as self-contained SVG and as text for a terminal, and the drawing of devices over time.

An SVG has a row per device; hovering over a job in a browser highlights all its segments. The text has a row per
device, and a line per job with its segments.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import floor, log10

from ringmaster.tasks.planning.durations import counted, seconds_text
from ringmaster.tasks.planning.plans.plan import Plan, Segment
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.series_bands import STYLE as BAND_STYLE
from ringmaster.tasks.planning.series_bands import bands_tall, draw_bands, power_sentence, series_bands, series_of
from ringmaster.text import printable, xml

# Colour-blind safe, after Okabe & Ito and Paul Tol; text on them is dark.
COLOURS = ["#9ecae9", "#f8cf7c", "#a9d8b8", "#f4b6b6", "#cfc0e4", "#dbd2a0", "#b4c4f0", "#f3bf92", "#a5d8d2", "#cfcfcf"]
WIDTH, LEFT, TOP, RIGHT, NODE_GAP = 1200, 110, 92, 24, 10
STYLE = (
    "text{font-family:system-ui,'DejaVu Sans',sans-serif;fill:#22303c}"
    ".title{font-size:18px;font-weight:600}.subtitle{font-size:13px;fill:#52616d}"
    ".name{font-size:12px;text-anchor:end;font-weight:600}"
    ".device{font-size:10px;text-anchor:end;fill:#7b8894}"
    ".tick{font-size:11px;text-anchor:middle;fill:#52616d}"
    ".legend{font-size:12px}.label{font-size:11px}.node{fill:#f3f5f7}.grid{stroke:#dde3e8}"
)


@dataclass(frozen=True)
class GanttBox:
    """A rectangle in pixels: adjacent devices during some time."""

    x: float
    y: float
    wide: float
    tall: float


class Frame:
    """Maps devices and seconds to pixels.

    nodes: name and number of devices of each node, from the top down.
    below: the pixels that are left free under the devices.
    """

    def __init__(self, nodes: Iterable[tuple[str, int]], *, end_s: float, below: float = 0.0) -> None:
        self.nodes, self.end_s = tuple(nodes), end_s
        self.row = max(3.0, min(30.0, 880.0 / sum(number for _, number in self.nodes)))
        self.scale = (WIDTH - LEFT - RIGHT) / (end_s * 1.01)
        y, self.top_of = float(TOP), dict[str, float]()
        gap = NODE_GAP if self.row >= 9 else 2
        for name, number in self.nodes:
            self.top_of[name] = y
            y += self.row * number + gap
        self.bottom = y - gap
        self.height = self.bottom + below + 44

    def x(self, seconds: float) -> float:
        """The horizontal pixel of a time."""
        return LEFT + seconds * self.scale

    def head(self, title: str, lines: Sequence[str], *, style: str = "", defs: str = "") -> str:
        """The beginning of the document: size, styles and headline."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height:.0f}" width="{WIDTH}" '
            f'height="{self.height:.0f}" role="img" aria-label="Gantt chart of {xml(title)}">\n'
            f"<style>{STYLE}{style}</style>\n"
            f"<defs>{defs}</defs>\n"
            f'<rect width="{WIDTH}" height="{self.height:.0f}" fill="#ffffff"/>\n'
            f'<text x="{LEFT}" y="28" class="title">{xml(title, limit=80)}</text>'
            f'<text x="{LEFT}" y="48" class="subtitle">{xml(" · ".join(lines))}</text>'
        )

    def ground(self) -> Iterator[str]:
        """Yields the background: a field per node, and the names of nodes and devices where there is space."""
        for name, number in self.nodes:
            y, tall = self.top_of[name], self.row * number
            yield (
                f'<rect x="{LEFT}" y="{y:.1f}" width="{WIDTH - LEFT - RIGHT}" height="{tall:.1f}" class="node"/>'
                f'<text x="{LEFT - 34}" y="{y + tall / 2 + 4:.1f}" class="name">{xml(name, limit=10)}</text>'
            )
            if self.row >= 9:
                for d in range(number):
                    yield f'<text x="{LEFT - 8}" y="{y + self.row * (d + 0.5) + 3.5:.1f}" class="device">{d}</text>'

    def axis(self) -> str:
        """Grid lines at round times, with their labels."""
        unit, unit_s = ("h", 3600.0) if self.end_s >= 7200 else ("min", 60.0) if self.end_s >= 300 else ("s", 1.0)
        step = round_step(self.end_s / unit_s / 8)
        parts, value = [], 0.0
        while value * unit_s <= self.end_s * 1.0001:
            x = self.x(value * unit_s)
            parts.append(
                f'<line x1="{x:.1f}" y1="{TOP - 4}" x2="{x:.1f}" y2="{self.height - 38:.1f}" class="grid"/>'
                f'<text x="{x:.1f}" y="{self.height - 22:.1f}" class="tick">{value:g}</text>'
            )
            value = round(value + step, 9)
        x = WIDTH - RIGHT
        return "".join(parts) + f'<text x="{x}" y="{self.height - 6:.1f}" class="device">time in {unit}</text>'

    def document(
        self,
        title: str,
        lines: Sequence[str],
        *,
        fills: Mapping[str, str],
        content: Iterable[str],
        style: str = "",
        defs: str = "",
    ) -> str:
        """Returns the SVG document of a chart: headline, legend, axis, background, and the content above them.

        fills: those of the legend, by name. style, defs: CSS and patterns that the content uses.
        """
        head = self.head(title, lines, style=style, defs=defs)
        return "\n".join([head, legend(fills), self.axis(), *self.ground(), *content, "</svg>"])

    def line(self, seconds: float, *, text: str, title: str, style: tuple[str, str]) -> str:
        """A time that is marked across all devices.

        style: the CSS classes of the line and of its text.
        """
        x = self.x(seconds)
        return (
            f'<line x1="{x:.1f}" y1="{TOP - 12}" x2="{x:.1f}" y2="{self.height - 38:.1f}" class="{style[0]}">'
            f"<title>{xml(title)}</title></line>"
            f'<text x="{x - 5:.1f}" y="{TOP - 6}" class="{style[1]}">{xml(text)}</text>'
        )

    def boxes(self, gang: Iterable[tuple[str, Sequence[int]]], start_s: float, end_s: float) -> Iterator[GanttBox]:
        """Yields one box for each run of adjacent devices of a gang."""
        x, wide = self.x(start_s), max(0.8, (end_s - start_s) * self.scale)
        for node, ids in gang:
            for run in _neighbours(ids):
                tall = len(run) * self.row - min(1.5, self.row / 4)
                yield GanttBox(x, self.top_of[node] + run[0] * self.row, wide, tall)

    def cells(
        self, gang: Iterable[tuple[str, int]], start_s: float, end_s: float, *, top: float = 0.0, bottom: float = 1.0
    ) -> Iterator[GanttBox]:
        """Yields one box for each device of a gang.

        top, bottom: the vertical extent of the box, as shares of the row.
        """
        x, wide = self.x(start_s), max(0.8, (end_s - start_s) * self.scale)
        gap = min(1.5, self.row / 4)
        for node, device in gang:
            y = self.top_of[node] + (device + top) * self.row
            yield GanttBox(x, y, wide, max(1.0, (bottom - top) * self.row - gap))

    def rect(self, box: GanttBox, *, fill: str, stroke: str = "#5b6873", more: str = "") -> str:
        """A box with its border.

        more: further attributes.
        """
        return (
            f'<rect x="{box.x:.2f}" y="{box.y:.2f}" width="{box.wide:.2f}" height="{box.tall:.2f}" '
            f'rx="{min(3.0, self.row / 5):.1f}" fill="{fill}" stroke="{stroke}" '
            f'stroke-width="{0.8 if self.row > 6 else 0.3}"{more and f" {more}"}/>'
        )


def label(box: GanttBox, text: str, *, indent: float = 0.0, least: int = 3) -> str:
    """A label with as much of a text as fits into a box.

    Returns nothing where fewer than `least` letters fit.
    """
    letters = int((box.wide - indent - 8) / 6.1)
    if box.tall < 10 or letters < min(least, len(text)):
        return ""
    shown = xml(text, limit=letters)
    return f'<text x="{box.x + indent + 5:.1f}" y="{box.y + box.tall / 2 + 4:.1f}" class="label">{shown}</text>'


def legend(fill_of: Mapping[str, str]) -> str:
    """The legend of the fills, in one line."""
    parts, x = [], float(LEFT)
    for name, fill in fill_of.items():
        parts.append(
            f'<rect x="{x:.0f}" y="60" width="13" height="13" rx="2" fill="{fill}" stroke="#5b6873"/>'
            f'<text x="{x + 19:.0f}" y="71" class="legend">{xml(name)}</text>'
        )
        x += 40 + 7.5 * len(name)
    return "".join(parts)


def colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name."""
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(sorted(set(names)))}


def stripes(name: str, *, opacity: float) -> str:
    """The definition of a pattern of slanted lines, used as the fill `url(#NAME)`."""
    return (
        f'<pattern id="{name}" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<rect width="2.5" height="5" fill="#22303c" opacity="{opacity:g}"/></pattern>'
    )


def round_step(value: float) -> float:
    """Returns the least of 1, 2, 2.5, 5 times a power of ten that is at least `value`."""
    power = 10.0 ** floor(log10(value))
    return next(power * m for m in (1.0, 2.0, 2.5, 5.0, 10.0) if power * m >= value * (1 - 1e-9))


def _neighbours(ids: Sequence[int]) -> list[list[int]]:
    """Returns the runs of adjacent devices."""
    ranked = groupby(enumerate(sorted(ids)), key=lambda pair: pair[1] - pair[0])
    return [[device for _, device in run] for _, run in ranked]


MAX_LINKED = 300  # segments above which hovering highlights nothing: the styles would make the file too large
BOUND_STYLE = (
    ".bound{stroke:#c1121f;stroke-dasharray:5 4}.least{font-size:11px;text-anchor:end;fill:#a30f1a}"  # the bound's line
)


def render_svg(plan: Plan, problem: Problem) -> str:
    """Draws the plan as SVG: a row per device, a box per segment, coloured by technique, with hatched overhead."""
    bands = series_bands(series_of(problem))
    frame = Frame(
        [(node.id, node.num_devices) for node in problem.nodes], end_s=plan.makespan_s or 1.0, below=bands_tall(bands)
    )
    colour_of = colours(_technique(segment, problem) for segment in plan.segments)
    number = {job.id: i for i, job in enumerate(problem.jobs)} if len(plan.segments) <= MAX_LINKED else {}
    # All jobs fade except the one under the pointer.
    pointed_at = "".join(f"svg:has(.j{i}:hover) .job:not(.j{i}){{opacity:.25}}" for i in range(len(number)))
    parts = [*draw_bands(bands, x=frame.x, end_s=frame.end_s, top=frame.bottom)]
    for segment in plan.segments:
        boxes = _boxes(segment, problem, frame, colour_of[_technique(segment, problem)])
        parts.append(f'<g class="job j{number.get(segment.job, 0)}">{"".join(boxes)}</g>')
    if plan.best_bound_s:
        least = f"no plan ends before {seconds_text(plan.best_bound_s)}"
        title = "no plan ends before this, by these runtimes"
        parts.append(frame.line(plan.best_bound_s, text=least, title=title, style=("bound", "least")))
    return frame.document(
        plan.problem_name,
        [*_headline(plan), *filter(None, [power_sentence(problem)])],
        fills=colour_of | {"switch or start-up": "url(#switch)"},
        content=parts,
        style=BOUND_STYLE + pointed_at + (BAND_STYLE if bands else ""),
        defs=stripes("switch", opacity=0.6),
    )


def job_label(segment: Segment, problem: Problem) -> str:
    """The label of a segment: its job, the number of further jobs that are trained with it, and its technique."""
    others = jobs_trained_with(segment, problem)
    return f"{segment.job}{f' +{len(others)}' if others else ''} · {_technique(segment, problem)}"


def jobs_trained_with(segment: Segment, problem: Problem) -> tuple[str, ...]:
    """The other jobs that a segment trains: members of its job, and jobs of its option."""
    job = problem.job(segment.job)
    return (*job.members, *job.options[segment.option].jobs)


def _technique(segment: Segment, problem: Problem) -> str:
    return problem.job(segment.job).options[segment.option].technique


def _headline(plan: Plan) -> list[str]:
    parts = [f"makespan {seconds_text(plan.makespan_s)}"]
    if plan.value is not None:
        least = "" if plan.gap is None else f", no plan is below {plan.value_bound:.4g} (gap {plan.gap:.2%})"
        parts.append(f"{plan.objective} {plan.value:.4g}{least}")
    elif plan.best_bound_s and plan.gap is not None:
        parts.append(f"no plan beats {seconds_text(plan.best_bound_s)} (gap {plan.gap:.2%})")
    return [*parts, f"{counted(len(plan.segments), 'segment')}, {counted(plan.num_switches, 'switch', 'switches')}"]


def _boxes(segment: Segment, problem: Problem, frame: Frame, colour: str) -> list[str]:
    """Draws a segment's boxes, with a label where it fits and a hatched start for the overhead."""
    option = problem.job(segment.job).options[segment.option]
    title = (
        f"{segment.job}: {option.technique} on {sum(len(ids) for _, ids in segment.devices)} devices, "
        f"{seconds_text(segment.start_s)} to {seconds_text(segment.end_s)}, {segment.work:.1%} of its work"
    )
    if others := jobs_trained_with(segment, problem):
        title += f", together with {', '.join(others)}"
    parts = [f"<title>{xml(title)}</title>"]
    least = 2.5 if segment.overhead_s > 0 else 0.0  # minimum visible width
    for box in frame.boxes(segment.devices, segment.start_s, segment.end_s):
        paid = min(box.wide / 2, max(least, segment.overhead_s * frame.scale))
        parts.append(frame.rect(box, fill=colour))
        if paid:
            parts.append(
                f'<rect x="{box.x:.2f}" y="{box.y:.2f}" width="{paid:.2f}" height="{box.tall:.2f}" '
                'fill="url(#switch)"/>'
            )
        parts.append(label(box, job_label(segment, problem), indent=paid))
    return parts


LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
IDLE = "·"


@dataclass(frozen=True)
class Bar:
    """An interval of one device's time.

    fill: the character of its cells.
    letter: the character of the first cell, followed by `name` where there is space.
    name: the name of the object.
    of: the object that the bar represents.
    """

    start_s: float
    end_s: float
    fill: str
    letter: str
    name: str
    of: object


@dataclass(frozen=True)
class GanttCells:
    """Adjacent cells of a row, of one bar or idle (`of` is None); the first `num_named` cells show a name."""

    text: str
    of: object
    num_named: int = 0


def letters(names: Iterable[str]) -> dict[str, str]:
    """A letter for each name; beyond 52 names they repeat."""
    return {name: LETTERS[i % len(LETTERS)] for i, name in enumerate(dict.fromkeys(names))}


def margin_of(nodes: Iterable[tuple[str, int]], *others: str) -> int:
    """The number of columns for the names of devices, and for other names; nodes: name and number of devices."""
    return min(24, max(map(len, [*others, *(f"{node}:{number - 1}" for node, number in nodes)])))


def rows(plan: Plan, problem: Problem, columns: int) -> list[tuple[str, list[GanttCells]]]:
    """Returns for each device its name, and pieces that fill `columns` cells together.

    The first row of a gang shows the job's name. A bar shorter than a cell may be covered by its neighbour.
    """
    letter, end_s = letters(job.id for job in problem.jobs), plan.makespan_s or 1.0
    by_device: dict[tuple[str, int], list[Segment]] = {}
    for segment in sorted(plan.segments, key=lambda s: s.start_s):
        for node, ids in segment.devices:
            for device in ids:
                by_device.setdefault((node, device), []).append(segment)

    def name_on(segment: Segment, device: tuple[str, int]) -> str:
        node, ids = segment.devices[0]
        return job_label(segment, problem) if device == (node, ids[0]) else ""

    device_rows = []
    for node_ in problem.nodes:
        for device in range(node_.num_devices):
            bars = [
                Bar(s.start_s, s.end_s, letter[s.job], letter[s.job], name_on(s, (node_.id, device)), s)
                for s in by_device.get((node_.id, device), [])
            ]
            device_rows.append((f"{node_.id}:{device}", pieces(bars, columns, end_s=end_s)))
    return device_rows


def pieces(bars: Sequence[Bar], columns: int, *, end_s: float) -> list[GanttCells]:
    """Returns pieces that fill `columns` cells together.

    A bar shorter than a cell may be covered by its neighbour.

    bars: in the order of their starts, from 0 to `end_s`.
    """
    cells: list[GanttCells] = []
    at = 0
    for bar in bars:
        first = max(at, min(columns - 1, round(bar.start_s / end_s * columns)))
        last = min(columns, max(first + 1, round(bar.end_s / end_s * columns)))
        if first > at:
            cells.append(GanttCells(IDLE * (first - at), None))
        if last > first:
            name = _bar_text(bar, last - first)
            cells.append(GanttCells(name + bar.fill * (last - first - len(name)), bar.of, len(name)))
        at = max(at, last)
    return [*cells, GanttCells(IDLE * (columns - at), None)]


NOW_MARK = "▲"


def axis(end_s: float, columns: int, *, now_s: float | None = None) -> str:
    """The line below the rows: some times, each at its column where there is space, and the current time."""
    line = [" "] * (columns + 1)
    marks = [("0", 0.0), *((seconds_text(end_s * quarter / 4, like=end_s), quarter / 4) for quarter in range(1, 5))]
    if now_s is not None:
        marks.insert(0, (f"{NOW_MARK} now", min(now_s / end_s, 1.0)))
    for value, share in marks:
        at = min(round(columns * share), columns + 1 - len(value))
        if set(line[max(0, at - 1) : at + len(value) + 1]) == {" "}:
            line[at : at + len(value)] = value
    return "".join(line)


def job_lines(plan: Plan, problem: Problem, width: int) -> list[str]:
    """A line per job: its letter, its name, and its segments."""
    letter, ran = letters(job.id for job in problem.jobs), dict[str, list[str]]()
    for segment in sorted(plan.segments, key=lambda s: s.start_s):
        option = problem.job(segment.job).options[segment.option]
        when = f"{seconds_text(segment.start_s)}..{seconds_text(segment.end_s)}"
        does = f"{option.technique} x{option.num_devices} {when}"
        ran.setdefault(segment.job, []).append(does)
        for name in option.jobs:
            ran.setdefault(name, []).append(f"with {segment.job}, {does}")
    lines = (f"{letter[job.id]}  {job.id}: {', then '.join(ran.get(job.id, []))}" for job in problem.jobs)
    return [printable(line, limit=max(width, 40)) for line in lines]


def _bar_text(bar: Bar, length: int) -> str:
    """The text at the beginning of a bar: its letter and name where at least four characters of it fit."""
    if bar.name and length >= 7:
        return f"{bar.letter} {printable(bar.name, limit=length - 3)} "
    return bar.letter if bar.letter != bar.fill else ""

"""What depends on the time, under a Gantt chart: for each kind of series a band with a step line per kind of node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.problems.problem_parts import Steps
from ringmaster.tasks.planning.problems.series import steps_from
from ringmaster.text import enumerated, xml

BAND_TALL, BAND_GAP = 52.0, 14.0
MAX_LINES = 3  # of a band; further nodes are named by their number
LINES = ("#b3541e", "#2b6cb0", "#4a5568")
STYLE = (
    ".band{fill:#f8f6f2}.series{fill:none;stroke-width:1.8}.zero{stroke:#c9c3b8}"
    ".unit{font-size:11px;text-anchor:end;fill:#52616d}.scale{font-size:10px;text-anchor:end;fill:#7b8894}"
    ".which{font-size:10px}"
)
KINDS = (
    ("price_steps", "price", "per device-hour", 3600.0),
    ("energy_price_steps", "energy", "per kWh", 1.0),
    ("carbon_steps", "carbon", "g CO2e per kWh", 1.0),
)
"""By attribute of nodes: the name, the unit, and its size in that of the problem."""


@dataclass(frozen=True, kw_only=True)
class SeriesBand:
    """The series of one kind. lines: of nodes with the same values, their names and the values in `unit`."""

    name: str
    unit: str
    lines: tuple[tuple[tuple[str, ...], Steps], ...]

    @property
    def largest(self) -> float:
        """The largest value that a line has."""
        return max(value for _, steps in self.lines for _, value in steps)

    def later(self, seconds: float) -> SeriesBand:
        """Returns the band with its beginning moved `seconds` later."""
        return replace(self, lines=tuple((nodes, _from(steps, seconds)) for nodes, steps in self.lines))


def _from(steps: Steps, seconds: float) -> Steps:
    """Returns steps with their time 0 moved later; the first of them may begin after it."""
    is_within = bool(steps) and steps[0][0] <= seconds and seconds > 0
    return steps_from(steps, seconds) if is_within else tuple((at_s - seconds, value) for at_s, value in steps)


SeriesOfNodes = Mapping[str, Mapping[str, Steps]]
"""By attribute of `KINDS`, and by node, the values in the unit of their kind."""


def series_of(problem: Problem) -> SeriesOfNodes:
    """Returns the series of a problem's nodes. Nodes with the same values share them."""
    result: dict[str, dict[str, Steps]] = {}
    for attribute, _, _, size in KINDS:
        known: dict[Steps, Steps] = {}
        for node in problem.nodes:
            if steps := getattr(node, attribute):
                if steps not in known:
                    known[steps] = tuple((at_s, value * size) for at_s, value in steps)
                result.setdefault(attribute, {})[node.id] = known[steps]
    return result


def joined(before: SeriesOfNodes, after: SeriesOfNodes, *, at_s: float) -> SeriesOfNodes:
    """Returns series of which others, from their time 0, take the place at a time; nodes may have only one of both."""
    result: dict[str, dict[str, Steps]] = {}
    for attribute in dict.fromkeys([*before, *after]):
        own, others = before.get(attribute, {}), after.get(attribute, {})
        for node in dict.fromkeys([*own, *others]):
            steps = [step for step in own.get(node, ()) if step[0] < at_s or node not in others]
            for later_s, value in others.get(node, ()):
                if not steps or steps[-1][1] != value:
                    steps.append((at_s + later_s, value))
            result.setdefault(attribute, {})[node] = tuple(steps)
    return result


def series_bands(series: SeriesOfNodes) -> tuple[SeriesBand, ...]:
    """Returns a band for each kind of series that some node has."""
    bands = []
    for attribute, name, unit, _ in KINDS:
        nodes: dict[Steps, list[str]] = {}
        for node, steps in series.get(attribute, {}).items():
            nodes.setdefault(steps, []).append(node)
        if nodes:
            lines = tuple((tuple(names), steps) for steps, names in nodes.items())
            bands.append(SeriesBand(name=name, unit=unit, lines=lines))
    return tuple(bands)


def bands_until(bands: Sequence[SeriesBand], end_s: float) -> tuple[SeriesBand, ...]:
    """Returns bands up to a time, without lines that begin later, as those of nodes that joined since."""
    result = []
    for band in bands:
        lines = [(nodes, tuple(step for step in steps if step[0] < end_s)) for nodes, steps in band.lines]
        if known := tuple((nodes, steps) for nodes, steps in lines if steps):
            result.append(replace(band, lines=known))
    return tuple(result)


def power_sentence(problem: Problem) -> str | None:
    """Returns what power the devices are planned with, and who says so; None where energy does not count."""
    nodes: dict[tuple[float, str], list[str]] = {}
    for node in problem.nodes:
        if node.energy_price_steps or node.carbon_steps:
            nodes.setdefault((node.power_w, node.power_source or "given"), []).append(node.id)
    if not nodes:
        return None
    texts = [
        f"{power_w:.4g} W{f' on {enumerated(names, most=MAX_LINES)}' if len(nodes) > 1 else ''} ({source})"
        for (power_w, source), names in nodes.items()
    ]
    return f"power of a device: {enumerated(texts, most=MAX_LINES)}"


def bands_tall(bands: Sequence[SeriesBand]) -> float:
    """Returns the pixels that bands take under the devices."""
    return len(bands) * (BAND_TALL + BAND_GAP)


ToPixel = Callable[[float], float]


def draw_bands(bands: Sequence[SeriesBand], *, x: ToPixel, end_s: float, top: float) -> Iterator[str]:
    """Yields the bands as SVG, from a vertical pixel down. x: returns the horizontal pixel of a time, up to `end_s`."""
    for number, band in enumerate(bands):
        y = top + BAND_GAP + number * (BAND_TALL + BAND_GAP)
        yield "".join(_band(band, x, end_s=end_s, top=y))


def _band(band: SeriesBand, x: ToPixel, *, end_s: float, top: float) -> Iterator[str]:
    left, right = x(0.0), x(end_s)
    largest = band.largest or 1.0
    bottom = top + BAND_TALL

    def y(value: float) -> float:
        return bottom - (BAND_TALL - 6.0) * value / largest

    yield f'<rect x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{BAND_TALL:.1f}" class="band"/>'
    yield f'<line x1="{left:.1f}" y1="{bottom:.1f}" x2="{right:.1f}" y2="{bottom:.1f}" class="zero"/>'
    yield f'<text x="{left - 8:.1f}" y="{top + 22:.1f}" class="unit">{xml(band.name)}</text>'
    yield f'<text x="{left - 8:.1f}" y="{top + 36:.1f}" class="scale">{xml(band.unit)}</text>'
    yield f'<text x="{left - 8:.1f}" y="{top + 9:.1f}" class="scale">{largest:.3g}</text>'
    yield f'<text x="{left - 8:.1f}" y="{bottom:.1f}" class="scale">0</text>'
    shown = band.lines[:MAX_LINES]
    for k, (nodes, steps) in enumerate(shown):
        path = _path([(max(0.0, at_s), value) for at_s, value in steps if at_s < end_s], x, y, right=right)
        values = "; ".join(f"{value:.4g}" for _, value in steps[:24])
        title = f"{band.name} {band.unit} on {', '.join(nodes[:8])}: {values}"
        yield f'<path d="{path}" class="series" stroke="{LINES[k]}"><title>{xml(title)}</title></path>'
        if len(band.lines) > 1:
            text = nodes[0] if len(nodes) == 1 else f"{nodes[0]} and {len(nodes) - 1} more"
            text_x = left + 6 + 120 * k
            style = f'class="which" style="fill:{LINES[k]}"'
            yield f'<text x="{text_x:.1f}" y="{top + 11:.1f}" {style}>{xml(text, limit=18)}</text>'
    if len(band.lines) > len(shown):
        text = f"and {len(band.lines) - len(shown)} other series"
        yield f'<text x="{left + 6 + 120 * len(shown):.1f}" y="{top + 11:.1f}" class="which">{xml(text)}</text>'


def _path(steps: Sequence[tuple[float, float]], x: ToPixel, y: ToPixel, *, right: float) -> str:
    """Returns the step line of values as an SVG path."""
    parts = [f"M{x(steps[0][0]):.1f} {y(steps[0][1]):.1f}"]
    parts += [f"H{x(at_s):.1f}V{y(value):.1f}" for _, (at_s, value) in pairwise(steps)]
    return "".join([*parts, f"H{right:.1f}"])

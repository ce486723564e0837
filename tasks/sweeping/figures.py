"""Figures of a sweep as SVG: its trials in parallel coordinates, and their learning curves with the rungs.

An axis holds what is drawn. A value so bad that all others would be drawn on one spot is cut: it is drawn at the edge,
with a triangle that the legend explains.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ringmaster.tasks.planning.gantt import round_step
from ringmaster.tasks.sweeping.ranking import Reports, last
from ringmaster.tasks.sweeping.space import CategoricalRange, Parameter, Values
from ringmaster.techniques.metric import metric_named
from ringmaster.text import page_template

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 960, 440, 80, 180, 84, 60
MAX_NAMED, NAME_HEIGHT = 10, 14
"""The number of the best trials whose lines have names, and the distance of two names, in pixels."""
MARKS = ("line", "line done", "line best")
"""The classes of lines in the style sheet, by rank: stopped early or failed, trained to the end, the best."""
MAX_TICKS, TICKS, MAX_TICK_CHARACTERS = 12, 5, 16
"""The most ticks of an axis of names, about as many as an axis of numbers has, and the most characters of one."""
CHARACTER_WIDTH = 7
CUT_BEYOND = 4.0
"""A value is cut where an axis for all values would be so many times as long as one for the better three quarters."""
FIGURE = page_template("""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 440" width="960" height="440" \
role="img" aria-label="{{ title | xml }}">
<style>text{font-family:system-ui,'DejaVu Sans',sans-serif;fill:#22303c;paint-order:stroke;stroke:#fff;stroke-width:3px}
.title{font-size:18px;font-weight:600}.note{font-size:13px;fill:#52616d}
.name{font-size:12px;font-weight:600;text-anchor:middle}.tick{font-size:11px;fill:#52616d}
.axis{stroke:#52616d}.grid{stroke:#dde3e8}.rung{stroke:#9aa5ae;stroke-dasharray:3 4}.leader{stroke:#c3cbd1}
.line{stroke:#9aa5ae;fill:#9aa5ae;stroke-width:1}.done{stroke:#1f6f8b;fill:#1f6f8b;stroke-width:1.6}
.best{stroke:#c0702a;fill:#c0702a;stroke-width:3}polyline.line{fill:none}circle.line,path.line{stroke:none}
</style>
<rect width="960" height="440" fill="#ffffff"/>
<text x="20" y="26" class="title">{{ title | xml(limit=90) }}</text>
{% for item in legend %}
<line x1="{{ item.x }}" y1="42" x2="{{ item.x + 18 }}" y2="42" class="{{ item.mark }}"/>
<text x="{{ item.x + 24 }}" y="46" class="note">{{ item.text | xml }}</text>
{% endfor %}
<text x="940" y="46" class="note" text-anchor="end">{{ "higher" if is_high_good else "lower" }} {{ objective | xml }} \
is better</text>
{% for axis in axes %}
<line x1="{{ axis.x }}" y1="84" x2="{{ axis.x }}" y2="380" class="axis"/>
{% endfor %}
{% for y, text in rows %}
<line x1="80" y1="{{ y }}" x2="780" y2="{{ y }}" class="grid"/>
{% endfor %}
{% for x, step in rungs %}
<line x1="{{ x }}" y1="84" x2="{{ x }}" y2="380" class="rung"/>
{% endfor %}
{% for line in lines | sort(attribute="rank") %}
<polyline points="{% for x, y in line.points %}{{ x }},{{ y }} {% endfor %}" class="{{ line.mark }}">\
<title>{{ line.title | xml }}</title></polyline>
{% if rungs %}{% for x, y in line.points %}<circle cx="{{ x }}" cy="{{ y }}" r="2.5" class="{{ line.mark }}"/>
{% endfor %}{% endif %}
{% for x, y, direction in line.cut %}
<path d="M {{ x - 5 }} {{ y }} h 10 l -5 {{ 8 * direction }} z" class="{{ line.mark }} cut"/>
{% endfor %}
{% if line.label_y is not none %}
<line x1="{{ line.points[-1][0] + 3 }}" y1="{{ line.points[-1][1] }}" x2="{{ label_x - 4 }}" y2="{{ line.label_y }}" \
class="leader"/>
<text x="{{ label_x }}" y="{{ line.label_y + 4 }}" class="tick">{{ line.label | xml(limit=22) }}</text>
{% endif %}
{% endfor %}
{% for axis in axes %}
<text x="{{ axis.x }}" y="70" class="name">{{ axis.name | xml }}</text>
{% for y, text in axis.ticks %}
<line x1="{{ axis.x - 4 }}" y1="{{ y }}" x2="{{ axis.x }}" y2="{{ y }}" class="axis"/>
<text x="{{ axis.x - 7 }}" y="{{ y + 4 }}" class="tick" text-anchor="end">{{ text | xml }}</text>
{% endfor %}
{% endfor %}
{% for y, text in rows %}
<text x="72" y="{{ y + 4 }}" class="tick" text-anchor="end">{{ text }}</text>
{% endfor %}
{% for x, step in rungs %}
<text x="{{ x }}" y="396" class="tick" text-anchor="middle">{{ step }}</text>
{% endfor %}
{% if rungs %}<text x="430" y="426" class="note" text-anchor="middle">steps</text>{% endif %}
{% if num_cut %}<text x="20" y="426" class="note">{{ "▼" if is_high_good else "▲" }} {{ num_cut }} \
beyond the axis, the {{ "lowest" if is_high_good else "highest" }} {{ furthest }}</text>{% endif %}
{% if num_missing %}<text x="940" y="426" class="note" text-anchor="end">not drawn: {{ num_missing }} \
without {{ objective | xml }}</text>{% endif %}
</svg>
""")


@dataclass(frozen=True, kw_only=True)
class NumberAxis:
    """An axis of numbers, from its low end at the bottom to its high end at the top."""

    low: float
    high: float
    is_log: bool = False

    def share(self, value: float) -> float:
        """Returns the position of a value, from 0 at the bottom to 1 at the top; beyond the ends, that of the end."""
        low, high, at = self.low, self.high, min(max(value, self.low), self.high)
        if self.is_log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        return (at - low) / (high - low) if high > low else 0.5

    def holds(self, value: float) -> bool:
        """Returns whether a value is on the axis, and not beyond one of its ends."""
        return self.low <= value <= self.high

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """The heights and texts of ticks at round numbers."""
        numbers = self._powers() if self.is_log else []
        if len(numbers) < 2:
            numbers = self._round_numbers()
        return [(_y(self.share(number)), f"{number:.6g}") for number in numbers]

    def _round_numbers(self) -> list[float]:
        if self.high <= self.low:
            return [self.low]
        step = round_step((self.high - self.low) / TICKS)
        first, end = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [float(f"{number * step:.12g}") for number in range(first, end + 1)]

    def _powers(self) -> list[float]:
        """Powers of ten and, where there are few, their double and fivefold."""
        first, end = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        factors = (1, 2, 5) if end - first <= 2 else (1,)
        every = 1 + (end - first) // MAX_TICKS
        numbers = (factor * 10.0**power for power in range(first, end + 1, every) for factor in factors)
        return [number for number in numbers if self.low * (1 - 1e-9) <= number <= self.high * (1 + 1e-9)]


@dataclass(frozen=True, kw_only=True)
class NameAxis:
    """An axis of listed values at equal distances, from the first at the bottom to the last at the top."""

    values: Sequence[Any]

    @cached_property
    def texts(self) -> list[str]:
        """The values as JSON, in which true is not 1, each once."""
        return list(dict.fromkeys(map(_json, self.values)))

    def share(self, value: Any) -> float:
        """Returns the position of a value, from 0 at the bottom to 1 at the top."""
        return self.texts.index(_json(value)) / (len(self.texts) - 1) if len(self.texts) > 1 else 0.5

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """The heights and texts of the values, of many only of some; long texts without their common beginning."""
        every = -(-len(self.texts) // MAX_TICKS)
        plain = [re.sub(r"""[{}"]""", "", text) for text in self.texts]
        long = [text for text in plain if len(text) > MAX_TICK_CHARACTERS]
        common = _num_common(long) if len(long) > 1 else 0
        shown = [f"…{text[common:]}" if common and text in long else text for text in plain]
        heights = [i / (len(shown) - 1) if len(shown) > 1 else 0.5 for i in range(len(shown))]
        return [(_y(heights[i]), _cut(shown[i], MAX_TICK_CHARACTERS)) for i in range(0, len(shown), every)]


@dataclass(frozen=True, kw_only=True)
class DrawnLine:
    """The line of a trial.

    mark: its class of the style sheet. rank: lines of higher rank are drawn over others. cut: where a value is beyond
    the axis, with 1 for below it and -1 for above. label, label_y: its name, and the height of it; None for no name.
    """

    points: Sequence[tuple[float, float]]
    mark: str
    rank: int
    title: str
    cut: Sequence[tuple[float, float, int]] = ()
    label: str = ""
    label_y: float | None = None


@dataclass(frozen=True, kw_only=True)
class SweepFigures:
    """The figures of a sweep as SVG.

    reports: by trial and step. done: the trials that were trained completely. ranked: trials with a value of the
    objective, the best first. best: the best one that is done; None for none. metrics: others that have an axis.
    notes: what to say of the last values of trials.
    """

    name: str
    objective: str
    reports: Reports
    done: Sequence[str]
    ranked: Sequence[str] = ()
    best: str | None = None
    metrics: Sequence[str] = ()
    notes: Mapping[str, str] = field(default_factory=dict)

    def parallel_coordinates(self, space: Sequence[Parameter], values: Mapping[str, Values]) -> str:
        """Draws a line for each trial with a measured objective, through its values and metrics to its objective."""
        measured = {name: value for name in values if math.isfinite(value := self._final(name, self.objective))}
        objective = objective_axis([*measured.values()], is_high_good=self._is_high_good)
        drawn = {name: {p.key: values[name][p.key] for p in space if p.key in values[name]} for name in measured}
        axes: dict[str, NumberAxis | NameAxis] = {
            p.key: _axis_of(p, [each[p.key] for each in drawn.values() if p.key in each]) for p in space
        }
        for metric in self.metrics:
            finals = {name: value for name in measured if math.isfinite(value := self._final(name, metric))}
            axes[f"held-out {metric}"] = _plain_axis([*finals.values()])
            for name, value in finals.items():
                drawn[name][f"held-out {metric}"] = value
        places = {key: round(LEFT + i * (WIDTH - LEFT - RIGHT) / len(axes), 1) for i, key in enumerate(axes)}
        end = float(WIDTH - RIGHT)
        room = int((end - LEFT) / len(axes) / CHARACTER_WIDTH) - 1
        names = {key: key.removeprefix("held-out ") for key in axes}
        shown = [
            {"x": places[key], "name": name if len(name) <= room else f"…{name[1 - room :]}", "ticks": axes[key].ticks}
            for key, name in names.items()
        ]
        shown.append({"x": end, "name": self.objective, "ticks": objective.ticks})
        lines = []
        for name, value in measured.items():
            points = [(places[key], _y(axes[key].share(drawn[name][key]))) for key in axes if key in drawn[name]]
            chosen = ", ".join(f"{key} {each}" for key, each in values[name].items())
            title = f"{name}: {chosen}: {self.objective} {value:.4g}"
            lines.append(self._line(name, [*points, (end, _y(objective.share(value)))], [value], objective, title))
        return self._drawn(
            "parallel coordinates", lines, measured.values(), objective,
            num_missing=len(values) - len(measured), axes=shown, rows=[], rungs=[],
        )  # fmt: skip

    def _final(self, name: str, metric: str) -> float:
        """The last value of a metric of a trial, or NaN."""
        return last(self.reports.get(name, {})).get(metric, math.nan)

    def learning_curves(self, rungs: Sequence[int]) -> str:
        """Draws the objective of each trial over its steps."""
        curves = {
            name: sorted(
                (s, m[self.objective]) for s, m in steps.items() if math.isfinite(m.get(self.objective, math.nan))
            )
            for name, steps in self.reports.items()
        }
        most = max((step for steps in self.reports.values() for step in steps), default=1)
        values = [value for curve in curves.values() for _, value in curve]
        axis = objective_axis(values, is_high_good=self._is_high_good)

        def x(step: float) -> float:
            return round(LEFT + step / most * (WIDTH - LEFT - RIGHT), 1)

        lines = []
        for name, curve in curves.items():
            if curve:
                points = [(x(step), _y(axis.share(value))) for step, value in curve]
                title = f"{name}: {self.objective} {curve[-1][1]:.4g} at step {curve[-1][0]}"
                title += f", {self.notes[name]}" if name in self.notes else ""
                lines.append(self._line(name, points, [value for _, value in curve], axis, title))
        title, marks = f"held-out {self.objective} over steps", list[tuple[float, object]]()
        for step in reversed(rungs):  # the last one has a text; others where there is room before the next
            is_free = not marks or x(step) + CHARACTER_WIDTH * len(str(most)) <= min(at for at, text in marks if text)
            marks.append((x(step), step if is_free else ""))
        num_missing = sum(not curve for curve in curves.values())
        return self._drawn(
            title, lines, values, axis, num_missing=num_missing, axes=[], rows=axis.ticks, rungs=marks
        )  # fmt: skip

    def _line(
        self,
        name: str,
        points: Sequence[tuple[float, float]],
        values: Sequence[float],
        axis: NumberAxis,
        title: str,
    ) -> DrawnLine:
        """The line of a trial. values: of the objective, at the last points."""
        ends = zip(points[len(points) - len(values) :], values, strict=True)
        cut = [(x, y, -1 if value > axis.high else 1) for (x, y), value in ends if not axis.holds(value)]
        rank = 2 if name == self.best else int(name in self.done)
        label = f"{name} {values[-1]:.4g}" if name in self.ranked[:MAX_NAMED] else ""
        return DrawnLine(points=points, mark=MARKS[rank], rank=rank, title=title, cut=cut, label=label)

    def _drawn(
        self,
        title: str,
        lines: Iterable[DrawnLine],
        values: Iterable[float],
        axis: NumberAxis,
        *,
        num_missing: int,
        **content: Any,
    ) -> str:
        cut = [value for value in values if not axis.holds(value)]
        return (
            FIGURE.render(
                title=f"{self.name}: {title}",
                objective=self.objective,
                is_high_good=self._is_high_good,
                legend=self._legend(),
                lines=_with_label_heights(lines),
                label_x=WIDTH - RIGHT + 22,
                num_cut=f"{len(cut)} value{'s are' if len(cut) != 1 else ' is'}" if cut else "",
                num_missing=f"{num_missing} trial{'s' if num_missing != 1 else ''}" if num_missing else "",
                furthest=f"{(min if self._is_high_good else max)(cut):.4g}" if cut else "",
                **content,
            )
            + "\n"
        )

    def _legend(self) -> list[dict[str, Any]]:
        texts = ([(2, f"{self.best:.24}, the best")] if self.best is not None else []) + [
            (1, "trained to the end"), (0, "stopped early, or failed"),
        ]  # fmt: skip
        items, x = [], 20
        for rank, text in texts:
            items.append({"x": x, "mark": MARKS[rank], "text": text})
            x += 44 + 7 * len(text)
        return items

    @property
    def _is_high_good(self) -> bool:
        return metric_named(self.objective).higher_is_better


def objective_axis(values: Sequence[float], *, is_high_good: bool) -> NumberAxis:
    """Returns the axis of an objective: for all values, unless the worst ones would hide the differences of others."""
    if not values:
        return NumberAxis(low=0.0, high=1.0)
    ordered = sorted(values, reverse=is_high_good)  # the best first
    first, usual, worst = ordered[0], ordered[3 * (len(ordered) - 1) // 4], ordered[-1]
    if abs(worst - first) > CUT_BEYOND * abs(usual - first) > 0:
        worst = next(value for value in reversed(ordered) if abs(value - first) <= 2 * abs(usual - first))
    return _plain_axis([first, worst])


def _plain_axis(values: Sequence[float]) -> NumberAxis:
    """The axis of numbers, with some room at both ends."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = (high - low) * 0.04 or abs(high) * 0.05 or 1.0
    return NumberAxis(low=low - room, high=high + room)


def _axis_of(parameter: Parameter, values: Sequence[Any]) -> NumberAxis | NameAxis:
    """The axis of a parameter, with the values of trials that are outside of its range, such as those of added jobs."""
    numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
    if isinstance(parameter, CategoricalRange) or len(numbers) < len(values):
        listed = [*(parameter.values if isinstance(parameter, CategoricalRange) else ()), *values]
        are_numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in listed)
        return NameAxis(values=sorted(listed) if are_numbers else listed)
    low, high = min([parameter.low, *numbers]), max([parameter.high, *numbers])
    return NumberAxis(low=low, high=high, is_log=parameter.is_log and low > 0)


def _with_label_heights(lines: Iterable[DrawnLine]) -> list[DrawnLine]:
    """Lines that end at the right with the heights of their names, which keep their order and a distance."""
    lines = list(lines)
    named = sorted(
        (line for line in lines if line.label and line.points[-1][0] == WIDTH - RIGHT),
        key=lambda line: line.points[-1][1],
    )
    heights: list[float] = []
    for line in named:
        heights.append(max(line.points[-1][1], heights[-1] + NAME_HEIGHT if heights else TOP))
    for place in range(len(heights) - 1, -1, -1):
        limit = heights[place + 1] - NAME_HEIGHT if place + 1 < len(heights) else HEIGHT - BOTTOM
        heights[place] = min(heights[place], limit)
    placed = {id(line): height for line, height in zip(named, heights, strict=True)}
    return [replace(line, label_y=placed.get(id(line))) for line in lines]


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _num_common(texts: Sequence[str]) -> int:
    """Returns the number of characters with which all texts begin, up to the key that differs."""
    pairs = enumerate(zip(*texts, strict=False))
    common = next((i for i, characters in pairs if len({*characters}) > 1), min(map(len, texts)))
    return texts[0].rfind(", ", 0, common) + 2 if ", " in texts[0][:common] else common


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _y(share: float) -> float:
    return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)

"""The trials of a sweep over two objectives as SVG, with their Pareto front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ringmaster.tasks.sweeping.figures import NumberAxis, objective_axis
from ringmaster.techniques.metric import metric_named
from ringmaster.text import page_template

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 960, 440, 80, 180, 84, 60
MAX_NAMED, NAME_HEIGHT = 12, 14
"""The most trials of the front whose names are written, and the distance of two names that lie together, in pixels."""
MARKS = {
    "front": "on the front",
    "done": "trained to the end",
    "broken": "breaks a constraint",
    "left": "stopped early",
}
"""The classes of points in the style sheet, and their texts in the legend."""
FIGURE = page_template("""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 440" width="960" height="440" \
role="img" aria-label="{{ title | xml }}">
<style>text{font-family:system-ui,'DejaVu Sans',sans-serif;fill:#22303c;paint-order:stroke;stroke:#fff;stroke-width:3px}
.title{font-size:18px;font-weight:600}.note{font-size:13px;fill:#52616d}.tick{font-size:11px;fill:#52616d}
.axis{stroke:#52616d}.grid{stroke:#dde3e8}.line{stroke:#c0702a;stroke-width:1.6;fill:none}
.front{fill:#c0702a}.done{fill:#1f6f8b}.broken{fill:#fff;stroke:#1f6f8b;stroke-width:1.6}.left{fill:#9aa5ae}
</style>
<rect width="960" height="440" fill="#ffffff"/>
<text x="20" y="26" class="title">{{ title | xml(limit=90) }}</text>
{% for item in legend %}
<circle cx="{{ item.x }}" cy="42" r="4.5" class="{{ item.mark }}"/>
<text x="{{ item.x + 12 }}" y="46" class="note">{{ item.text | xml }}</text>
{% endfor %}
{% for y, text in y_ticks %}
<line x1="80" y1="{{ y }}" x2="780" y2="{{ y }}" class="grid"/>
<text x="72" y="{{ y + 4 }}" class="tick" text-anchor="end">{{ text }}</text>
{% endfor %}
{% for x, text in x_ticks %}
<line x1="{{ x }}" y1="84" x2="{{ x }}" y2="380" class="grid"/>
<text x="{{ x }}" y="396" class="tick" text-anchor="middle">{{ text }}</text>
{% endfor %}
<line x1="80" y1="84" x2="80" y2="380" class="axis"/>
<line x1="80" y1="380" x2="780" y2="380" class="axis"/>
{% if line %}
<polyline points="{% for x, y in line %}{{ x }},{{ y }} {% endfor %}" class="line"/>
{% endif %}
{% for point in points %}
<circle cx="{{ point.x }}" cy="{{ point.y }}" r="{{ 5 if point.mark == "front" else 4 }}" class="{{ point.mark }}">\
<title>{{ point.title | xml }}</title></circle>
{% endfor %}
{% for name in names %}
<text x="{{ name.x + 8 }}" y="{{ name.y + 17 }}" class="tick">{{ name.text | xml(limit=22) }}</text>
{% endfor %}
<text x="20" y="70" class="note">{{ y_title | xml }}</text>
<text x="780" y="426" class="note" text-anchor="end">{{ x_title | xml }}</text>
{% if num_cut %}<text x="20" y="426" class="note">{{ num_cut }} at the edge, beyond an axis</text>{% endif %}
{% if num_missing %}<text x="940" y="46" class="note" text-anchor="end">not drawn: {{ num_missing }} without a value\
</text>{% endif %}
</svg>
""")


@dataclass(frozen=True, kw_only=True)
class DrawnTrial:
    """A trial of a sweep with several objectives.

    values: its last ones, by objective. front: the number of its front, 1 for the Pareto front; None for none.
    infeasible: what breaks constraints, in words. is_done: whether it was trained to its end.
    """

    name: str
    values: Mapping[str, float]
    front: int | None
    infeasible: str
    is_done: bool

    @property
    def mark(self) -> str:
        """The class of its point."""
        if self.front == 1:
            return "front"
        if not self.is_done:
            return "left"
        return "broken" if self.infeasible else "done"


def draw_front(title: str, trials: Sequence[DrawnTrial], *, x: str, y: str, has_line: bool) -> str:
    """Returns a drawing of trials over two objectives, the points of the Pareto front last.

    has_line: whether to draw the line below which, or above which, no trial is; of two objectives out of several, there
    is none.
    """
    drawn = [trial for trial in trials if x in trial.values and y in trial.values]
    drawn.sort(key=lambda trial: list(MARKS)[::-1].index(trial.mark))
    axes = {
        metric: objective_axis(
            [trial.values[metric] for trial in drawn], is_high_good=metric_named(metric).higher_is_better
        )
        for metric in (x, y)
    }
    places = {trial.name: (_x(axes[x], trial.values[x]), _y(axes[y], trial.values[y])) for trial in drawn}
    front = sorted((trial for trial in drawn if trial.mark == "front"), key=lambda trial: places[trial.name])
    is_beyond = [not all(axes[metric].holds(trial.values[metric]) for metric in (x, y)) for trial in drawn]
    points = [
        {
            "x": places[trial.name][0],
            "y": places[trial.name][1],
            "mark": trial.mark,
            "title": f"{trial.name}: {x} {trial.values[x]:.4g}, {y} {trial.values[y]:.4g}"
            + (f": {trial.infeasible}" if trial.infeasible else ""),
        }
        for trial in drawn
    ]
    num_missing = len(trials) - len(drawn)
    return FIGURE.render(
        title=title,
        legend=_legend([trial.mark for trial in drawn]),
        points=points,
        names=_names(front[:MAX_NAMED], places),
        line=_line([places[trial.name] for trial in front], x=x, y=y) if has_line else [],
        x_ticks=[(_x(axes[x], float(text)), text) for _, text in axes[x].ticks],
        y_ticks=axes[y].ticks,
        x_title=f"{x} ({_better(x)} is better)",
        y_title=f"{y} ({_better(y)} is better)",
        num_cut=f"{sum(is_beyond)} trial{'s' if sum(is_beyond) != 1 else ''}" if any(is_beyond) else "",
        num_missing=f"{num_missing} trial{'s' if num_missing != 1 else ''}" if num_missing else "",
    )


def _legend(marks: Sequence[str]) -> list[dict[str, object]]:
    """The kinds of points that are drawn."""
    items, place = list[dict[str, object]](), 26
    for mark, text in MARKS.items():
        if mark in marks:
            items.append({"x": place, "mark": mark, "text": text})
            place += 40 + 7 * len(text)
    return items


def _names(front: Sequence[DrawnTrial], places: Mapping[str, tuple[float, float]]) -> list[dict[str, object]]:
    """The names of trials beside their points; one that would cover another one is moved down."""
    result, taken = list[dict[str, object]](), list[tuple[float, float]]()
    for trial in sorted(front, key=lambda trial: places[trial.name][1]):
        left, height = places[trial.name]
        for other_left, other_height in taken:
            if abs(left - other_left) < 7 * len(trial.name) and height < other_height + NAME_HEIGHT:
                height = max(height, other_height + NAME_HEIGHT)
        height = min(height, HEIGHT - BOTTOM - 22)  # above the axis
        taken.append((left, height))
        result.append({"x": left, "y": height, "text": trial.name})
    return result


def _line(front: Sequence[tuple[float, float]], *, x: str, y: str) -> list[tuple[float, float]]:
    """The corners of what the front attains, from the left; each corner is as bad as both of its neighbours."""
    is_right_good, is_top_good = metric_named(x).higher_is_better, metric_named(y).higher_is_better
    result = list(front[:1])
    for (left, left_y), (right, right_y) in pairwise(front):
        worse_y = max(left_y, right_y) if is_top_good else min(left_y, right_y)
        result += [(left if is_right_good else right, worse_y), (right, right_y)]
    return result


def _better(metric: str) -> str:
    return "higher" if metric_named(metric).higher_is_better else "lower"


def _x(axis: NumberAxis, value: float) -> float:
    return round(LEFT + axis.share(value) * (WIDTH - LEFT - RIGHT), 1)


def _y(axis: NumberAxis, value: float) -> float:
    return round(HEIGHT - BOTTOM - axis.share(value) * (HEIGHT - TOP - BOTTOM), 1)

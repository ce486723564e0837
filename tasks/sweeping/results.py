"""Results of a sweep: its leaderboard, two SVG figures, their recording in MLflow, and the best trial as a challenger.

The figures are the trials in parallel coordinates, and their learning curves with the rungs.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringmaster.model_lineage import model_pages
from ringmaster.model_lineage.ledger.ledger import Ledger
from ringmaster.model_lineage.records import CHALLENGER, ModelRecord
from ringmaster.tasks.storage.journal import JobStatus
from ringmaster.tasks.sweeping.scheduler import SweepScheduler
from ringmaster.tasks.sweeping.space import CategoricalRange, Parameter, Values
from ringmaster.techniques.metric import metric_named
from ringmaster.text import markdown, page_template

LEADERBOARD, PARALLEL, CURVES = "sweep/leaderboard.json", "sweep/parallel_coordinates.svg", "sweep/learning_curves.svg"


def figures(sweep_scheduler: SweepScheduler, rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Returns the figures of a sweep as SVG, by the paths of their artifacts."""
    spec, won = sweep_scheduler.spec, best(rows)
    drawn = SweepFigures(
        name=spec.name,
        objective=spec.objective,
        reports=sweep_scheduler.reports,
        done=[row["job"] for row in rows if row["status"] == JobStatus.DONE],
        best=None if won is None else won["job"],
    )
    rungs = spec.stopping.rungs(max((trial.total for trial in sweep_scheduler.trials()), default=1))
    return {
        PARALLEL: drawn.parallel_coordinates(spec.space, sweep_scheduler.values),
        CURVES: drawn.learning_curves(rungs),
    }


def record(ledger: Ledger, run_id: str, rows: Sequence[Mapping[str, Any]], drawn: Mapping[str, str]) -> None:
    """Writes the leaderboard and the figures into the batch's run and its note. A repeated call changes nothing.

    Raises LedgerError if MLflow cannot store them.
    """
    ledger.write_table(run_id, LEADERBOARD, rows)
    for path, svg in drawn.items():
        ledger.write_svg(run_id, path, svg)
    note = ledger.note(run_id)
    mark = model_pages.picture("Parallel coordinates", run_id, PARALLEL)
    if mark not in note:
        curves = model_pages.picture("Learning curves", run_id, CURVES)
        path = model_pages.artifact_path(ledger.experiment_of(run_id), run_id, LEADERBOARD)
        board = f"All of them: {model_pages.link('leaderboard', path)}."
        ledger.set_note(run_id, f"{_sentence(rows)} {board}\n\n{mark}\n\n{curves}\n\n{note}")


def challenge(ledger: Ledger, uri: str, name: str) -> ModelRecord:
    """Registers a recorded model as a version of `name` and makes it the challenger.

    Raises LedgerError if the model does not exist.
    """
    model = ledger.add_version(ledger.resolve_model(uri), name)
    assert model.version is not None, "a version that was made just now"
    ledger.set_alias(name, CHALLENGER, model.version)
    return model


def _sentence(rows: Sequence[Mapping[str, Any]]) -> str:
    won, num_done = best(rows), sum(row["status"] == JobStatus.DONE for row in rows)
    text = "no trial has come to its end" if won is None else f"the best is **{markdown(won['job'])}**"
    return f"Of {len(rows)} trials {num_done} were trained to their end; {text}."


Reports = Mapping[str, Mapping[int, Mapping[str, float]]]
"""The metrics on held-out data, by trial and step."""


def leaderboard(
    trials: Sequence[str],
    *,
    objective: str,
    values: Mapping[str, Values],
    reports: Reports,
    jobs: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Returns a row per trial: completed trials ordered by the objective, then the others by their number of steps.

    values: by trial, as far as proposed. jobs: the rows of a batch's result. A trial without a finite value of the
    objective has no rank; the first completed one is the best.
    """
    ended = {row["name"]: row for row in jobs}
    sign = -1.0 if metric_named(objective).higher_is_better else 1.0

    def order(name: str) -> tuple[bool, int, float]:
        value = last(reports.get(name, {})).get(objective, math.nan)
        is_done = ended[name]["status"] == JobStatus.DONE
        return not is_done, 0 if is_done else -max(reports.get(name, {}), default=0), sign * value

    ranked = [name for name in trials if math.isfinite(last(reports.get(name, {})).get(objective, math.nan))]
    ranked.sort(key=order)
    return [
        _row(name, place if name in ranked else None, values=values, reports=reports, job=ended[name])
        for place, name in enumerate([*ranked, *(name for name in trials if name not in ranked)], start=1)
    ]


def best(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Returns the row of the best trial, or None if no trial has completed."""
    return next((dict(row) for row in rows if row["status"] == JobStatus.DONE and row["rank"] is not None), None)


def last(reports: Mapping[int, Mapping[str, float]]) -> Mapping[str, float]:
    """Returns the last metrics of a trial."""
    return reports[max(reports)] if reports else {}


def _row(
    name: str, rank: int | None, *, values: Mapping[str, Values], reports: Reports, job: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "rank": rank,
        "job": name,
        **{f"held-out {key}": _figure(value) for key, value in last(reports.get(name, {})).items()},
        **{
            key: str(value) if isinstance(value, (list, dict)) else value for key, value in values.get(name, {}).items()
        },
        "status": job["status"],
        "steps": job["num_steps"],
        "device seconds": round(sum(s["device_s"] for s in job["segments"]), 1),
        "model": job["model_uri"],
    }


def _figure(value: float) -> float | None:
    """Rounds a metric for tables; a value that is not finite, which JSON lacks, becomes None."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 440, 80, 80, 80, 60
FIGURE = page_template("""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 440" width="900" height="440" \
role="img" aria-label="{{ title | xml }}">
<style>text{font-family:system-ui,'DejaVu Sans',sans-serif;fill:#22303c}
.title{font-size:18px;font-weight:600}.said{font-size:13px;fill:#52616d}
.name{font-size:12px;font-weight:600;text-anchor:middle}.tick{font-size:11px;fill:#52616d}
.axis{stroke:#52616d}.grid{stroke:#dde3e8}.rung{stroke:#9aa5ae;stroke-dasharray:3 4}
.line{stroke:#9aa5ae;fill:#9aa5ae;stroke-width:1}.done{stroke:#1f6f8b;fill:#1f6f8b;stroke-width:1.6}
.best{stroke:#c0702a;fill:#c0702a;stroke-width:3}polyline.line{fill:none}circle.line{stroke:none}
</style>
<rect width="900" height="440" fill="#ffffff"/>
<text x="20" y="26" class="title">{{ title | xml(limit=90) }}</text><text x="20" y="46" class="said">\
{% if best is not none %}<tspan fill="#c0702a">— {{ best | xml }}, the best</tspan>{% endif %}
<tspan fill="#1f6f8b" dx="14">— to the end</tspan><tspan fill="#9aa5ae" dx="14">— stopped early</tspan>\
<tspan dx="14">{{ "higher" if is_high_good else "lower" }} {{ objective | xml }} is better</tspan></text>
{% for axis in axes %}
<line x1="{{ axis.x }}" y1="80" x2="{{ axis.x }}" y2="380" class="axis"/>
<text x="{{ axis.x }}" y="68" class="name">{{ axis.name | xml }}</text>
{% for y, text in axis.ticks %}
<text x="{{ axis.x + 6 }}" y="{{ y + 4 }}" class="tick">{{ text | xml }}</text>
{% endfor %}
{% endfor %}
{% for y, text in rows %}
<line x1="80" y1="{{ y }}" x2="820" y2="{{ y }}" class="grid"/>
<text x="72" y="{{ y + 4 }}" class="tick" text-anchor="end">{{ text }}</text>
{% endfor %}
{% for x, step in rungs %}
<line x1="{{ x }}" y1="80" x2="{{ x }}" y2="380" class="rung"/>
<text x="{{ x }}" y="396" class="tick" text-anchor="middle">{{ step }}</text>
{% endfor %}
{% if rungs %}<text x="450" y="426" class="said" text-anchor="middle">steps</text>{% endif %}
{% for line in lines | sort(attribute="rank") %}
{% set class = ["line", "line done", "line best"][line.rank] %}
<polyline points="{% for x, y in line.points %}{{ x }},{{ y }} {% endfor %}" class="{{ class }}">\
<title>{{ line.title | xml }}</title></polyline>
{% if rungs %}{% for x, y in line.points %}<circle cx="{{ x }}" cy="{{ y }}" r="2.5" class="{{ class }}"/>
{% endfor %}{% endif %}
{% endfor %}
</svg>
""")


@dataclass(frozen=True, kw_only=True)
class SweepFigures:
    """The figures of a sweep as SVG.

    reports: by trial and step. done: the trials that were trained to their end. best: the best one; None for none.
    """

    name: str
    objective: str
    reports: Reports
    done: Sequence[str]
    best: str | None

    def parallel_coordinates(self, space: Sequence[Parameter], values: Mapping[str, Values]) -> str:
        """Draws a line for each trial with a measured objective, through its values to its objective."""
        measured = {name: last(self.reports.get(name, {})).get(self.objective, math.nan) for name in values}
        measured = {name: value for name, value in measured.items() if math.isfinite(value)}
        low, high = self._limits(list(measured.values()))
        at = [round(LEFT + i * (WIDTH - LEFT - RIGHT) / len(space), 1) for i in range(len(space) + 1)]
        axes = [{"x": x, "name": p.key, "ticks": _ticks(p)} for p, x in zip(space, at, strict=False)]
        ticks = [(_y(i / 2), f"{low + (high - low) * i / 2:.4g}") for i in range(3)]
        axes.append({"x": at[-1], "name": self.objective, "ticks": ticks})
        lines = []
        for name, value in measured.items():
            heights = [*(_share(p, values[name][p.key]) for p in space), _clipped(value, low, high)]
            chosen = ", ".join(f"{key} {each}" for key, each in values[name].items())
            title = f"{name}: {chosen}: {self.objective} {value:.4g}"
            lines.append(self._line(name, zip(at, map(_y, heights), strict=True), title=title))
        return self._drawn("parallel coordinates", axes=axes, rows=[], rungs=[], lines=lines)

    def learning_curves(self, rungs: Sequence[int]) -> str:
        """Draws the objective of each trial over its steps. Very bad values are clipped to the edge."""
        curves = {
            name: sorted(
                (s, m[self.objective]) for s, m in steps.items() if math.isfinite(m.get(self.objective, math.nan))
            )
            for name, steps in self.reports.items()
            if steps
        }
        most = max((step for steps in self.reports.values() for step in steps), default=1)
        low, high = self._limits([value for curve in curves.values() for _, value in curve])

        def x(step: float) -> float:
            return round(LEFT + step / most * (WIDTH - LEFT - RIGHT), 1)

        lines = []
        for name, curve in curves.items():
            points = [(x(step), _y(_clipped(value, low, high))) for step, value in curve]
            title = f"{name}: {self.objective} {curve[-1][1]:.4g} at step {curve[-1][0]}" if curve else name
            lines.append(self._line(name, points, title=title))
        rows = [(_y(i / 4), f"{low + (high - low) * i / 4:.4g}") for i in range(5)]
        title = f"held-out {self.objective} over steps"
        return self._drawn(title, axes=[], rows=rows, rungs=[(x(step), step) for step in rungs], lines=lines)

    def _line(self, name: str, points: Iterable[tuple[float, float]], *, title: str) -> dict[str, Any]:
        rank = 2 if name == self.best else int(name in self.done)
        return {"points": list(points), "rank": rank, "title": title}

    def _drawn(self, title: str, **content: Any) -> str:
        common = {"best": self.best, "objective": self.objective, "is_high_good": self._is_high_good}
        return FIGURE.render(title=f"{self.name}: {title}", **common, **content) + "\n"

    @property
    def _is_high_good(self) -> bool:
        return metric_named(self.objective).higher_is_better

    def _limits(self, values: Sequence[float]) -> tuple[float, float]:
        """Returns the ends of an axis: all good values, and bad ones only as far as three of four trials justify."""
        if not values:
            return 0.0, 1.0
        ordered = sorted(values, reverse=self._is_high_good)  # the best first
        first, usual, end = ordered[0], ordered[3 * (len(ordered) - 1) // 4], ordered[-1]
        far = usual + (usual - first)
        worst = max(end, far) if self._is_high_good else min(end, far)
        low, high = min(first, worst), max(first, worst)
        room = (high - low) * 0.04 or abs(high) * 0.05 or 1.0
        return low - room, high + room


def _ticks(parameter: Parameter) -> list[tuple[float, str]]:
    """Returns the height and the text of each tick of a parameter's axis."""
    if isinstance(parameter, CategoricalRange):
        return [(_y(_share(parameter, value)), str(value)[:18]) for value in parameter.values]
    low, high, shares = parameter.low, parameter.high, [i / 4 for i in range(5)]
    if parameter.is_log:
        return [(_y(share), f"{low * (high / low) ** share:.3g}") for share in shares]
    return [(_y(share), f"{low + (high - low) * share:.3g}") for share in shares]


def _share(parameter: Parameter, value: Any) -> float:
    """Returns the position of a value on its axis, from 0 at the bottom to 1 at the top."""
    if isinstance(parameter, CategoricalRange):
        return parameter.values.index(value) / (len(parameter.values) - 1) if len(parameter.values) > 1 else 0.5
    low, high, at = parameter.low, parameter.high, float(value)
    if parameter.is_log:
        low, high, at = math.log(low), math.log(high), math.log(at)
    return (at - low) / (high - low)


def _clipped(value: float, low: float, high: float) -> float:
    return (min(max(value, low), high) - low) / (high - low)


def _y(share: float) -> float:
    return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)

"""Results of a sweep: its leaderboard, two SVG figures, their recording in MLflow, and the best trial as a challenger.

The figures are the trials in parallel coordinates, and their learning curves with the rungs.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ringmaster.model_lineage import model_pages
from ringmaster.model_lineage.ledger.ledger import Ledger
from ringmaster.model_lineage.records import CHALLENGER, ModelRecord
from ringmaster.tasks.storage.journal import JobStatus
from ringmaster.tasks.sweeping.scheduler import SweepScheduler
from ringmaster.tasks.sweeping.space import CategoricalRange, Parameter, Values
from ringmaster.techniques.metric import metric_named
from ringmaster.text import markdown, xml

LEADERBOARD, PARALLEL, CURVES = "sweep/leaderboard.json", "sweep/parallel_coordinates.svg", "sweep/learning_curves.svg"


def figures(sweep_scheduler: SweepScheduler, rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Returns the figures of a sweep as SVG, by the paths of their artifacts."""
    spec, won = sweep_scheduler.spec, best(rows)
    common: dict[str, Any] = {
        "objective": spec.objective,
        "reports": sweep_scheduler.reports,
        "done": [row["job"] for row in rows if row["status"] == JobStatus.DONE],
        "best": None if won is None else won["job"],
    }
    totals = {trial.total for trial in sweep_scheduler.trials()}
    rungs = spec.stopping.rungs(max(totals, default=1))
    return {
        PARALLEL: parallel_coordinates(spec.name, spec.space, values=sweep_scheduler.values, **common),
        CURVES: learning_curves(spec.name, rungs=rungs, **common),
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
BEST, DONE, STOPPED = "#c0702a", "#1f6f8b", "#9aa5ae"
STYLE = (
    "text{font-family:system-ui,'DejaVu Sans',sans-serif;fill:#22303c}"
    ".title{font-size:18px;font-weight:600}.said{font-size:13px;fill:#52616d}"
    ".name{font-size:12px;font-weight:600;text-anchor:middle}.tick{font-size:11px;fill:#52616d}"
    ".axis{stroke:#52616d}.grid{stroke:#dde3e8}.rung{stroke:#9aa5ae;stroke-dasharray:3 4}polyline{fill:none}"
)


def parallel_coordinates(
    title: str,
    space: Sequence[Parameter],
    *,
    objective: str,
    values: Mapping[str, Values],
    reports: Reports,
    done: Sequence[str],
    best: str | None,
) -> str:
    """Draws a line for each trial with a measured objective, through its values to its objective."""
    trials = [name for name in values if math.isfinite(_objective(name, reports, objective))]
    axes = [*space, objective]
    gap = (WIDTH - LEFT - RIGHT) / (len(axes) - 1)
    places = {
        name: [*(_share(p, values[name][p.key]) for p in space), *_heights([name], trials, reports, objective)]
        for name in trials
    }
    body: list[str] = []
    for i, axis in enumerate(axes):
        body += _axis(axis, LEFT + i * gap, ends=_ends(trials, reports, objective))
    for name in sorted(trials, key=lambda name: (name == best, name in done)):
        points = [(LEFT + i * gap, _y(share)) for i, share in enumerate(places[name])]
        body.append(
            _line(points, *_look(name, done=done, best=best), title=_words(name, values[name], reports, objective))
        )
    return _sheet(f"{title}: parallel coordinates", body, best=best, objective=objective)


def learning_curves(
    title: str,
    *,
    objective: str,
    reports: Reports,
    rungs: Sequence[int],
    done: Sequence[str],
    best: str | None,
) -> str:
    """Draws the objective of each trial over its steps. Very bad values are clipped to the edge."""
    trials = [name for name in reports if reports[name]]
    most = max((step for name in trials for step in reports[name]), default=1)
    result = [m[objective] for n in trials for m in reports[n].values() if math.isfinite(m.get(objective, math.nan))]
    low, high = _limits(result, is_high_good=metric_named(objective).higher_is_better)

    def x(step: float) -> float:
        return LEFT + step / most * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return _y((min(max(value, low), high) - low) / (high - low))

    body: list[str] = []
    for i in range(5):
        value = low + (high - low) * i / 4
        body.append(f'<line x1="{LEFT}" y1="{y(value):.1f}" x2="{WIDTH - RIGHT}" y2="{y(value):.1f}" class="grid"/>')
        body.append(f'<text x="{LEFT - 8}" y="{y(value) + 4:.1f}" class="tick" text-anchor="end">{value:.4g}</text>')
    for step in rungs:
        body.append(f'<line x1="{x(step):.1f}" y1="{TOP}" x2="{x(step):.1f}" y2="{HEIGHT - BOTTOM}" class="rung"/>')
        where = f'x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 16}"'
        body.append(f'<text {where} class="tick" text-anchor="middle">{step}</text>')
    body.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 14}" class="said" text-anchor="middle">steps</text>')
    for name in sorted(trials, key=lambda name: (name == best, name in done)):
        measured = sorted(
            (s, m[objective]) for s, m in reports[name].items() if math.isfinite(m.get(objective, math.nan))
        )
        points = [(x(step), y(value)) for step, value in measured]
        colour, width = _look(name, done=done, best=best)
        text = f"{name}: {objective} {measured[-1][1]:.4g} at step {measured[-1][0]}" if measured else name
        body.append(_line(points, colour, width, title=text))
        body += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2.5" fill="{colour}"/>' for px, py in points]
    return _sheet(f"{title}: held-out {objective} over steps", body, best=best, objective=objective)


def _sheet(title: str, body: Sequence[str], *, best: str | None, objective: str) -> str:
    way = "higher" if metric_named(objective).higher_is_better else "lower"
    legend = f'<tspan fill="{DONE}">— to the end</tspan><tspan fill="{STOPPED}" dx="14">— stopped early</tspan>'
    if best is not None:
        legend = f'<tspan fill="{BEST}">— {xml(best)}, the best</tspan>' + legend.replace("<tspan", '<tspan dx="14"', 1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="{xml(title)}">\n<style>{STYLE}</style>\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>\n'
        f'<text x="20" y="26" class="title">{xml(title, limit=90)}</text>'
        f'<text x="20" y="46" class="said">{legend}<tspan dx="14">{way} {xml(objective)} is better</tspan></text>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _axis(axis: Parameter | str, x: float, *, ends: tuple[float, float]) -> Iterator[str]:
    name = axis if isinstance(axis, str) else axis.key
    yield f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}" class="axis"/>'
    yield f'<text x="{x:.1f}" y="{TOP - 12}" class="name">{xml(name)}</text>'
    if isinstance(axis, CategoricalRange):
        ticks = [(_share(axis, value), str(value)[:18]) for value in axis.values]
    elif isinstance(axis, str):
        ticks = [(i / 2, f"{ends[0] + (ends[1] - ends[0]) * i / 2:.4g}") for i in range(3)]
    elif axis.is_log:
        ticks = [(i / 4, f"{axis.low * (axis.high / axis.low) ** (i / 4):.3g}") for i in range(5)]
    else:
        ticks = [(i / 4, f"{axis.low + (axis.high - axis.low) * i / 4:.3g}") for i in range(5)]
    for share, text in ticks:
        yield f'<text x="{x + 6:.1f}" y="{_y(share) + 4:.1f}" class="tick">{xml(text)}</text>'


def _share(parameter: Parameter, value: Any) -> float:
    """Returns the position of a value on its axis, from 0 at the bottom to 1 at the top."""
    if isinstance(parameter, CategoricalRange):
        return parameter.values.index(value) / (len(parameter.values) - 1) if len(parameter.values) > 1 else 0.5
    low, high, at = parameter.low, parameter.high, float(value)
    if parameter.is_log:
        low, high, at = math.log(low), math.log(high), math.log(at)
    return (at - low) / (high - low)


def _heights(names: Sequence[str], trials: Sequence[str], reports: Reports, objective: str) -> list[float]:
    low, high = _ends(trials, reports, objective)
    return [(min(max(_objective(n, reports, objective), low), high) - low) / (high - low) for n in names]


def _ends(trials: Sequence[str], reports: Reports, objective: str) -> tuple[float, float]:
    return _limits(
        [_objective(n, reports, objective) for n in trials], is_high_good=metric_named(objective).higher_is_better
    )


def _limits(values: Sequence[float], *, is_high_good: bool) -> tuple[float, float]:
    """Returns the ends of an axis: all good values, and bad ones only as far as three of four trials justify."""
    if not values:
        return 0.0, 1.0
    ordered = sorted(values, reverse=is_high_good)  # the best first
    first, usual, end = ordered[0], ordered[3 * (len(ordered) - 1) // 4], ordered[-1]
    far = usual + (usual - first)
    worst = max(end, far) if is_high_good else min(end, far)
    low, high = min(first, worst), max(first, worst)
    room = (high - low) * 0.04 or abs(high) * 0.05 or 1.0
    return low - room, high + room


def _objective(name: str, reports: Reports, objective: str) -> float:
    return last(reports.get(name, {})).get(objective, math.nan)


def _words(name: str, values: Values, reports: Reports, objective: str) -> str:
    text = ", ".join(f"{key} {value}" for key, value in values.items())
    return f"{name}: {text}: {objective} {_objective(name, reports, objective):.4g}"


def _look(name: str, *, done: Sequence[str], best: str | None) -> tuple[str, float]:
    return (BEST, 3.0) if name == best else (DONE, 1.6) if name in done else (STOPPED, 1.0)


def _line(points: Sequence[tuple[float, float]], colour: str, width: float, *, title: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" stroke="{colour}" stroke-width="{width}"><title>{xml(title)}</title></polyline>'


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

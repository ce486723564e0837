"""Recording of an examination in MLflow: tables, metrics, and an SVG figure of the metrics by slice.

The figure has a panel per metric, a line per slice, and a dot with its interval per model.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from ringmaster.codec import to_json
from ringmaster.model_lineage import Ledger, MetricPoint, ModelRecord
from ringmaster.tasks.evaluation.examination import ALL, ExaminationResult, SliceMetric
from ringmaster.techniques.metric import metric_named
from ringmaster.text import xml

FOLDER = "evaluation"  # of the artifacts
METRICS = "test"  # prefix of the metrics, as `eval` is that of the metrics during training


def record(ledger: Ledger, model: ModelRecord, examined: ExaminationResult, *, other: str | None = None) -> None:
    """Writes the results to the run that made the model, replacing earlier ones.

    other: the name of the model compared with, or None. Nothing is recorded for a model without a run.
    """
    if (run := model.run_id) is None:
        return
    if examined.measured:
        ledger.write_table(run, f"{FOLDER}/metrics.json", [to_json(line) for line in examined.measured])
        title = model.uri.removeprefix("models:/")
        ledger.write_svg(run, f"{FOLDER}/metrics.svg", figure(title, examined.measured, other=other))
        points = [
            MetricPoint(f"{METRICS}/{line.metric}{suffix}", value)
            for line in examined.measured
            if line.slice == ALL
            for suffix, value in (("", line.value), ("_low", line.low), ("_high", line.high))
        ]
        ledger.log_metrics(run, points)
    for name, rows in tables(examined).items():
        if rows:
            ledger.write_table(run, f"{FOLDER}/{name}.json", rows)


def tables(examined: ExaminationResult) -> dict[str, list[dict[str, Any]]]:
    """Returns the tables of tests and of assertions, with a row for each."""
    return {
        "tests": [
            {
                "test": result.test,
                "kind": result.kind,
                "num_cases": result.num_cases,
                "failures": result.num_failures,
                "allowed": f"{result.max_failures:.1%}",
                "passed": result.passed,
                "examples": "\n".join(result.examples) or result.fault,
            }
            for result in examined.tests
        ],
        "assertions": [
            {
                "assertion": result.assertion,
                "kind": result.kind,
                "num_rows": result.num_rows,
                "failures": result.num_failures,
                "allowed": f"{result.max_failures:.1%}",
                "passed": result.passed,
                "examples": "\n".join(result.examples) or result.why,
            }
            for result in examined.assertions
        ],
    }


WIDTH, LEFT, RIGHT, TOP, LINE, GAP = 900, 220, 190, 76, 26, 58
OWN, OTHER = "#1f6f8b", "#c0702a"
STYLE = (
    "text{font-family:system-ui,'DejaVu Sans',sans-serif;fill:#22303c}"
    ".title{font-size:18px;font-weight:600}.said{font-size:13px;fill:#52616d}.metric{font-size:14px;font-weight:600}"
    ".name{font-size:12px;text-anchor:end}.tick{font-size:11px;text-anchor:middle;fill:#52616d}"
    ".value{font-size:11px;fill:#52616d}.field{fill:#f3f5f7}.grid{stroke:#dde3e8}"
)


def figure(title: str, measured: Sequence[SliceMetric], *, other: str | None = None) -> str:
    """Returns the figure of the measured metrics. other: the name of the model compared with, or None."""
    metrics = list(dict.fromkeys(line.metric for line in measured))
    fields: list[str] = []
    top = float(TOP)
    for metric in metrics:
        lines = [line for line in measured if line.metric == metric]
        fields += _field(metric, lines, top=top)
        top += LINE * len(lines) + GAP
    text = f"dots: metric; bars: {measured[0].level:.0%} interval" if measured else "nothing was measured"
    legend = ""
    if other is not None:
        legend = f'<text x="{LEFT}" y="64" class="said"><tspan fill="{OWN}">● this model</tspan>'
        legend += f'<tspan fill="{OTHER}" dx="14">● {xml(other)}</tspan></text>'
        text += "; at the right, the gain over the other on the same rows"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top:.0f}" width="{WIDTH}" height="{top:.0f}" '
        f'role="img" aria-label="Metrics of {xml(title)}">\n<style>{STYLE}</style>\n'
        f'<rect width="{WIDTH}" height="{top:.0f}" fill="#ffffff"/>\n'
        f'<text x="20" y="26" class="title">{xml(title, limit=90)}</text><text x="20" y="46" class="said">{text}</text>'
        f"{legend}\n" + "\n".join(fields) + "\n</svg>\n"
    )


def _field(metric: str, lines: Sequence[SliceMetric], *, top: float) -> Iterator[str]:
    values = [v for line in lines for v in (line.value, line.low, line.high, line.other) if v is not None]
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    low, high = low - room, high + room
    if metric_named(metric).share_of is not None:
        low, high = max(low, 0.0), min(high, 1.0)

    def x(value: float) -> float:
        return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    bottom = top + LINE * len(lines)
    yield f'<text x="20" y="{top + 8:.0f}" class="metric">{xml(metric)}</text>'
    yield f'<rect x="{LEFT}" y="{top:.0f}" width="{WIDTH - LEFT - RIGHT}" height="{bottom - top:.0f}" class="field"/>'
    for i in range(5):
        tick = low + (high - low) * i / 4
        yield f'<line x1="{x(tick):.1f}" y1="{top:.0f}" x2="{x(tick):.1f}" y2="{bottom:.0f}" class="grid"/>'
        yield f'<text x="{x(tick):.1f}" y="{bottom + 15:.0f}" class="tick">{tick:.4g}</text>'
    for i, line in enumerate(lines):
        y = top + LINE * (i + 0.5)
        name = f"{line.slice} ({line.num_rows})"
        yield f'<text x="{LEFT - 10}" y="{y + 4:.1f}" class="name">{xml(name, limit=34)}</text>'
        if math.isfinite(line.low) and math.isfinite(line.high):
            yield (
                f'<line x1="{x(line.low):.1f}" y1="{y:.1f}" x2="{x(line.high):.1f}" y2="{y:.1f}" stroke="{OWN}" '
                'stroke-width="3" stroke-opacity="0.45"/>'
            )
        if line.other is not None and math.isfinite(line.other):
            yield _dot(x(line.other), y, OTHER, f"the other: {line.other:.4g}")
        if math.isfinite(line.value):
            yield _dot(x(line.value), y, OWN, f"{line.value:.4g} ({line.low:.4g} to {line.high:.4g})")
        yield f'<text x="{WIDTH - RIGHT + 10}" y="{y + 4:.1f}" class="value">{xml(_metric_text(line))}</text>'


def _metric_text(line: SliceMetric) -> str:
    if line.gain is None or line.p_better is None or line.p_worse is None:
        return f"{line.value:.4g}"
    p = min(line.p_better, line.p_worse)
    return f"{line.value:.4g}, gain {line.gain:+.3g} (p {p:.2g})"


def _dot(x: float, y: float, colour: str, title: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}"><title>{xml(title)}</title></circle>'

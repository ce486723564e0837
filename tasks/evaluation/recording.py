"""Recording of an examination in MLflow: tables, metrics, and an SVG figure of the metrics by slice.

The figure has a panel per metric, a line per slice, and a dot with its interval per model.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from ringmaster.codec import to_json
from ringmaster.model_lineage import Ledger, MetricPoint, ModelRecord
from ringmaster.tasks.evaluation.examination import ALL, ExaminationResult, SliceMetric
from ringmaster.techniques.metric import metric_named
from ringmaster.text import page_template

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


TOP, LINE, GAP = 76, 26, 58
LEFT, RANGE = 220, 490  # where the values lie, in pixels
FIGURE = page_template("""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 {{ height }}" width="900" height="{{ height }}" \
role="img" aria-label="Metrics of {{ title | xml }}">
<style>text{font-family:system-ui,'DejaVu Sans',sans-serif;fill:#22303c}
.title{font-size:18px;font-weight:600}.said{font-size:13px;fill:#52616d}.metric{font-size:14px;font-weight:600}
.name{font-size:12px;text-anchor:end}.tick{font-size:11px;text-anchor:middle;fill:#52616d}
.value{font-size:11px;fill:#52616d}.field{fill:#f3f5f7}.grid{stroke:#dde3e8}
.interval{stroke:#1f6f8b;stroke-width:3;stroke-opacity:0.45}.own{fill:#1f6f8b}.other{fill:#c0702a}</style>
<rect width="900" height="{{ height }}" fill="#ffffff"/>
<text x="20" y="26" class="title">{{ title | xml(limit=90) }}</text><text x="20" y="46" class="said">
{% if level is none %}nothing was measured
{% else %}dots: metric; bars: {{ "%.0f" % (100 * level) }}% interval{% endif %}
{% if other is not none %}; at the right, the gain over the other on the same rows{% endif %}
</text>
{% if other is not none %}
<text x="220" y="64" class="said"><tspan class="own">● this model</tspan>\
<tspan class="other" dx="14">● {{ other | xml }}</tspan></text>
{% endif %}
{% for field in fields %}
<text x="20" y="{{ field.top + 8 }}" class="metric">{{ field.metric | xml }}</text>
<rect x="220" y="{{ field.top }}" width="490" height="{{ field.bottom - field.top }}" class="field"/>
{% for tick in field.ticks %}
{% set x = field.x(tick) %}
<line x1="{{ x }}" y1="{{ field.top }}" x2="{{ x }}" y2="{{ field.bottom }}" class="grid"/>
<text x="{{ x }}" y="{{ field.bottom + 15 }}" class="tick">{{ "%.4g" % tick }}</text>
{% endfor %}
{% for line in field.lines %}
{% set y = field.top + 13 + 26 * loop.index0 %}
<text x="210" y="{{ y + 4 }}" class="name">{{ (line.slice ~ " (" ~ line.num_rows ~ ")") | xml(limit=34) }}</text>
{% if line.low is finite and line.high is finite %}
<line x1="{{ field.x(line.low) }}" y1="{{ y }}" x2="{{ field.x(line.high) }}" y2="{{ y }}" class="interval"/>
{% endif %}
{% if line.other is finite %}
<circle cx="{{ field.x(line.other) }}" cy="{{ y }}" r="4.5" class="other">\
<title>the other: {{ "%.4g" % line.other }}</title></circle>
{% endif %}
{% if line.value is finite %}
<circle cx="{{ field.x(line.value) }}" cy="{{ y }}" r="4.5" class="own">\
<title>{{ "%.4g (%.4g to %.4g)" % (line.value, line.low, line.high) }}</title></circle>
{% endif %}
<text x="720" y="{{ y + 4 }}" class="value">{{ "%.4g" % line.value }}\
{% if none not in (line.gain, line.p_better, line.p_worse) %}, gain {{ "%+.3g" % line.gain }} \
(p {{ "%.2g" % ([line.p_better, line.p_worse] | min) }}){% endif %}
</text>
{% endfor %}
{% endfor %}
</svg>
""")


def figure(title: str, measured: Sequence[SliceMetric], *, other: str | None = None) -> str:
    """Returns the figure of the measured metrics. other: the name of the model compared with, or None."""
    fields: list[dict[str, Any]] = []
    top = TOP
    for metric in dict.fromkeys(line.metric for line in measured):
        lines = [line for line in measured if line.metric == metric]
        low, high = _ends(metric, lines)
        fields.append(
            {
                "metric": metric,
                "lines": lines,
                "top": top,
                "bottom": top + LINE * len(lines),
                "x": partial(_pixel, low=low, high=high),
                "ticks": [low + (high - low) * i / 4 for i in range(5)],
            }
        )
        top += LINE * len(lines) + GAP
    level = measured[0].level if measured else None
    return FIGURE.render(title=title, other=other, level=level, fields=fields, height=top) + "\n"


def _ends(metric: str, lines: Sequence[SliceMetric]) -> tuple[float, float]:
    """Returns the ends of the axis of a metric, with room on both sides of its values."""
    values = [v for line in lines for v in (line.value, line.low, line.high, line.other) if v is not None]
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    if metric_named(metric).share_of is not None:
        return max(low - room, 0.0), min(high + room, 1.0)
    return low - room, high + room


def _pixel(value: float, *, low: float, high: float) -> float:
    return round(LEFT + (value - low) / (high - low) * RANGE, 1)

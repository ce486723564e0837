"""Recording of an examination in MLflow: tables, a figure and metrics on the model's run."""

from __future__ import annotations

from typing import Any

from ringmaster.codec import to_json
from ringmaster.model_lineage import Ledger, MetricPoint, ModelRecord
from ringmaster.tasks.evaluation.drawing import figure
from ringmaster.tasks.evaluation.examination import Examined
from ringmaster.tasks.evaluation.slices import ALL

FOLDER = "evaluation"  # of the artifacts
METRICS = "test"  # prefix of the metrics, as `eval` is that of the metrics during training


def record(ledger: Ledger, model: ModelRecord, examined: Examined, *, other: str | None = None) -> None:
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


def tables(examined: Examined) -> dict[str, list[dict[str, Any]]]:
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

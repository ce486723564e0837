"""The final report of a batch: durations and costs compared with the plan, in words that claim no more than is
known."""

import io
from dataclasses import replace
from pathlib import Path

import pytest

from ringmaster.flows.batch.result import BatchResult, are_measured
from ringmaster.flows.output import TextConsole
from ringmaster.flows.reports.plan_report import print_report
from ringmaster.tasks.execution.execution_events import Prediction
from ringmaster.tasks.planning.durations import compared_with_plan
from tests.unit.execution.fakes import profile

SEGMENT = {"technique": "single", "devices": ["n:cpu:0"], "seconds": 4.0, "num_devices": 1, "device_s": 4.0}
JOB = {"name": "a", "status": "done", "segments": [SEGMENT], "num_steps": 20, "metrics": {"loss": 0.5}, "message": ""}
JOB |= {"model_dir": "/runs/tiny/models/a", "model_uri": "models:/tiny.a/1"}
RESULT = BatchResult(
    batch="tiny",
    status="done",
    plan={"makespan_s": 6.0, "lower_bound_s": 5.0, "gap": 0.2, "objective": "makespan", "value": 6.0},
    makespan_s=4.0,
    objective="makespan",
    value=4.0,
    current_practice_s=12.0,
    idle_s=0.0,
    num_trials=0,
    profiling_s=2.0,
    jobs=(JOB,),
    prediction=Prediction(makespan_s=5.5, low_s=3.0, high_s=9.0, load=1.0, spread=0.2, num_earlier=0),
)


def report(result):
    console = TextConsole(file=io.StringIO(), width=140, force_terminal=False)
    print_report(result, console, home=Path("/home"))
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("actual_s", "text"),
    [
        (4.0, "33 % faster than planned"),
        (6.03, "as planned"),
        (9.0, "50 % slower than planned"),
        (15.0, "2.5 times as long as planned"),
    ],
)
def test_an_actual_duration_is_compared_in_words(actual_s, text):
    assert compared_with_plan(actual_s, 6.0) == text


@pytest.mark.parametrize("status", ["failed", "cancelled", "stopped", "waiting"])
def test_what_did_not_end_is_not_compared_with_the_plan(status):
    text = report(replace(RESULT, jobs=(JOB, JOB | {"name": "b", "status": status})))
    assert "not all that was planned was done" in text
    assert "faster than planned" not in text
    assert "faster than planned" in report(RESULT)


def test_a_plan_from_predictions_claims_no_bound_and_has_one_number():
    text = report(RESULT)
    assert "lower bound" not in text
    assert "off by" not in text
    assert "from predicted runtimes; likely 3.0 to 9.0 s in 90 % of runs" in text
    assert "5.5" not in text  # the middle of the prediction is a second number for the makespan


def test_a_bound_from_measured_runtimes_is_shown_and_one_that_the_run_has_beaten_claims_nothing():
    kept = report(replace(RESULT, is_measured=True, makespan_s=5.5))
    assert "no plan with the measured runtimes is shorter; gap 20.0%" in kept
    beaten = report(replace(RESULT, is_measured=True))
    assert "no plan with" not in beaten
    assert "the jobs ran faster than that" in beaten


def test_the_report_says_where_the_models_are_and_what_to_do_next():
    text = report(RESULT)
    assert "/runs/tiny/models" in text and "models:/tiny.a/1" in text
    assert "ringmaster lineage show models:/tiny.a/1" in text
    assert "--resume" not in text
    failed = report(replace(RESULT, status="failed", jobs=(JOB, JOB | {"name": "b c", "status": "failed"})))
    assert "ringmaster logs tiny 'b c'" in failed
    assert "ringmaster run BATCH.yaml --resume" in failed


def test_runtimes_are_measured_only_if_all_of_them_are():
    measured, predicted = profile(), replace(profile(), source="predicted")
    assert are_measured({"a": (measured,), "b": (replace(measured, source="corrected"),)})
    assert not are_measured({"a": (measured,), "b": (measured, predicted)})

"""The JSON forms of a gang's events are those that earlier releases have stored."""

import math

import pytest

from ringmaster.codec import from_json, to_json
from ringmaster.techniques.preflight_result import Preflight
from ringmaster.techniques.processes.gang_events import (
    Beat,
    CheckpointFailed,
    CheckpointSaved,
    DataProgress,
    DeviceTelemetry,
    EvaluationReported,
    JobOfGroupEnded,
    JobReady,
    JobResult,
    ModelFailed,
    OtherEvent,
    Outcome,
    OutcomeStatus,
    PhaseStarted,
    PreflightDone,
    PreflightFailed,
    PreflightStarted,
    RankExited,
    RankFailed,
    RankResult,
    RankStarted,
    ReferenceTimed,
    RefusedEvent,
    RowsScored,
    ScoringProgress,
    Steps,
    TrialMeasured,
    event_from_json,
    event_or_refusal,
    event_to_json,
)
from tests.unit.profiling.solos import FACTS

STEPS = {"first_step": 4, "losses": [2.0, 1.5], "seconds": [0.1, 0.2], "wall_s": 5.0}
REFERENCE = {"kind": "cpu x1", "mean_s": 2.0, "fastest_s": 1.0, "spread": 0.1}
DEVICES = {"0": {"kind": "gpu", "utilization": 0.9}}
PREFLIGHT = Preflight(job="a", data={"num_samples": 8}, facts=FACTS, candidates=(), refusals=())
RESULT = {
    "status": "done",
    "first_step": 0,
    "step": 10,
    "metrics": {"loss": 0.5},
    "num_evaluated_rows": 7,
    "compared": [{"model": "a", "metrics": {"loss": 0.5}}],
    "reached_target": True,
    "startup_s": 1.5,
    "save_s": 0.1,
    "evaluate_s": 0.2,
    "export_s": 0.3,
    "fellows": {"b": {"status": "left", "message": "m", "step": 4}},
    "environment": {"python": "3.11"},
}
FORMS = [
    (RankStarted(pid=7), {"event": "started", "pid": 7}),
    (Beat(), {"event": "beat"}),
    (PhaseStarted(phase="saving", timeout_s=3.0), {"event": "phase", "phase": "saving", "timeout_s": 3.0}),
    (RankFailed(kind=OutcomeStatus.INVALID, message="m"), {"event": "failed", "kind": "invalid", "message": "m"}),
    (RankResult(result=JobResult(step=3)), {"event": "result", "result": {"step": 3}}),
    (RankExited(status=-9, fenced=True), {"event": "exit", "status": -9, "fenced": True}),
    (PreflightStarted(job="a"), {"event": "surveying", "job": "a"}),
    (DataProgress(job="a", progress="3 MB"), {"event": "preparing", "job": "a", "progress": "3 MB"}),
    (PreflightDone(preflight=PREFLIGHT), {"event": "survey", "survey": to_json(PREFLIGHT)}),
    (PreflightFailed(job="a", message="m"), {"event": "fault", "job": "a", "message": "m"}),
    (TrialMeasured(profile={"step_s": 0.1}), {"event": "measured", "profile": {"step_s": 0.1}}),
    (ReferenceTimed(kind="cpu x1", mean_s=2.0, fastest_s=1.0, spread=0.1), {"event": "reference", **REFERENCE}),
    (JobReady(step=0, startup_s=1.5), {"event": "ready", "step": 0, "startup_s": 1.5}),
    (JobReady(job="a", step=3), {"event": "ready", "job": "a", "step": 3}),
    (Steps(first_step=4, losses=(2.0, 1.5), seconds=(0.1, 0.2), wall_s=5.0), {"event": "steps", **STEPS}),
    (Steps(first_step=4, seconds=(0.1,)), {"event": "steps", "first_step": 4, "seconds": [0.1]}),
    (RowsScored(model="a", kind="causal", file="f"), {"event": "scores", "model": "a", "kind": "causal", "file": "f"}),
    (ScoringProgress(num_done=1, num_rows=2), {"event": "scoring_progress", "num_done": 1, "num_rows": 2}),
    (ModelFailed(model="a", message="m"), {"event": "model_failed", "model": "a", "message": "m"}),
    (EvaluationReported(step=2, metrics={"loss": 1.0}), {"event": "metrics", "step": 2, "metrics": {"loss": 1.0}}),
    (CheckpointSaved(step=2, seconds=0.1), {"event": "checkpoint", "step": 2, "seconds": 0.1}),
    (
        CheckpointSaved(job="b", step=2, seconds=0.1, stall_s=0.0),
        {"event": "checkpoint", "job": "b", "step": 2, "seconds": 0.1, "stall_s": 0.0},
    ),
    (CheckpointFailed(step=2, message="full"), {"event": "checkpoint_failed", "step": 2, "message": "full"}),
    (
        CheckpointFailed(step=2, message="full", waits=True),
        {"event": "checkpoint_failed", "step": 2, "message": "full", "waits": True},
    ),
    (
        JobOfGroupEnded(job="b", outcome=JobResult(status=OutcomeStatus.LEFT, step=2)),
        {"event": "ended", "job": "b", "outcome": {"status": "left", "step": 2}},
    ),
    (
        DeviceTelemetry(wall_s=1.0, node="", devices=DEVICES),
        {"event": "telemetry", "wall_s": 1.0, "node": "", "devices": DEVICES},
    ),
    (
        Outcome(status=OutcomeStatus.DONE, result=JobResult(step=10)),
        {"event": "outcome", "status": "done", "message": "", "result": {"step": 10}, "was_killed": False},
    ),
    (
        Outcome.of(
            JobResult(
                status=OutcomeStatus.DONE,
                first_step=0,
                step=10,
                metrics={"loss": 0.5},
                num_rows=7,
                compared=({"model": "a", "metrics": {"loss": 0.5}},),
                ended_early=True,
                startup_s=1.5,
                save_s=0.1,
                evaluate_s=0.2,
                export_s=0.3,
                members={"b": JobResult(status=OutcomeStatus.LEFT, message="m", step=4)},
                others={"environment": {"python": "3.11"}},
            )
        ),
        {"event": "outcome", "status": "done", "message": "", "result": RESULT, "was_killed": False},
    ),
    (OtherEvent(content={"event": "epoch", "number": 3}), {"event": "epoch", "number": 3}),
]


@pytest.mark.parametrize(("event", "content"), FORMS, ids=[form["event"] for _, form in FORMS])
def test_the_form_of_an_event_is_fixed_and_read_back(event, content):
    assert event_to_json(event) == content
    assert event_from_json(content) == event


@pytest.mark.parametrize(("event", "content"), FORMS[:-1], ids=[form["event"] for _, form in FORMS[:-1]])
def test_what_another_release_has_added_to_an_event_is_ignored(event, content):
    assert event_from_json({**content, "colour": "red"}) == event


def test_an_event_that_lacks_a_field_is_refused():
    with pytest.raises(ValueError, match="EvaluationReported"):
        event_from_json({"event": "metrics", "metrics": {}})


def test_a_phase_without_a_limit_is_read_where_a_database_cannot_store_infinity():
    assert event_from_json({"event": "phase", "phase": "p"}) == PhaseStarted(phase="p", timeout_s=math.inf)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({"event": "metrics", "step": 2, "metrics": {"acc[/top5]": 1.0}}, "'acc[/top5]' cannot have this name"),
        ({"event": "metrics", "step": 2, "metrics": {"acc": "high"}}, "metric 'acc' is 'high'"),
        ({"event": "metrics", "step": 2, "metrics": 1.0}, "an object is wanted"),
        ({"event": "metrics", "step": -2, "metrics": {}}, "a step is a whole number from 0, not -2"),
        ({"event": "checkpoint", "step": "2"}, "not '2'"),
        ({"event": "ready", "step": 1e300}, "not 1e+300"),
        ({"event": "steps", "first_step": True, "seconds": [1.0]}, "not True"),
        ({"event": "steps", "first_step": 1, "seconds": [math.nan]}, "seconds are a number from 0, not nan"),
        ({"event": "steps", "first_step": 1, "seconds": [1.0], "losses": [1.0, 2.0]}, "2 losses are of 1 steps"),
        ({"event": "steps", "first_step": 1, "seconds": [1.0], "losses": [None]}, "a loss is a finite number"),
        ({"event": "result", "result": {"status": "well"}}, "'well' is not a valid OutcomeStatus"),
        ({"event": "result", "result": {"status": "done", "metrics": {"/a": 1}}}, "'/a' cannot have this name"),
        ({"event": "result", "result": {"fellows": {"b": {"step": -1}}}}, "a step is a whole number from 0, not -1"),
        ({"event": "result", "result": {"save_s": "1 s"}}, "seconds are a number from 0, not '1 s'"),
        ({"event": "ended", "job": "b", "outcome": {"status": "done", "step": None, "metrics": {"": 1}}}, "''"),
        ({"event": "outcome", "status": "gone"}, "'gone' is not a valid OutcomeStatus"),
        ({"event": "outcome", "status": "done", "result": []}, "an object is wanted"),
        ({"event": ["metrics"]}, "an event is an object with its name"),
        ({}, "an event is an object with its name"),
        ([], "an event is an object with its name"),
        (None, "an event is an object with its name"),
    ],
    ids=str,
)
def test_what_is_no_event_is_refused_where_it_enters(content, complaint):
    refused = event_or_refusal(content)
    assert isinstance(refused, RefusedEvent)
    assert complaint in refused.message


def test_a_metric_of_nothing_is_no_number_and_no_fault():
    assert math.isnan(event_from_json({"event": "metrics", "step": 2, "metrics": {"auroc": math.nan}}).metrics["auroc"])


def test_what_a_process_says_of_its_failure_can_be_stored_and_is_short():
    message = RankFailed(kind=OutcomeStatus.CRASHED, message="\0\ud800" + "m" * 100_000).message
    assert len(message) <= 20_000
    message.encode()


def test_the_facts_that_0_1_stored_are_read_and_written_as_they_are():
    stored = {
        "num_parameters": 2266,
        "parameter_bytes": 9064,
        "largest_layer_bytes": 6784,
        "num_layers": 1,
        "has_batch_statistics": False,
        "has_dropout": False,
        "decoder": None,
    }
    found = from_json(Preflight, {**to_json(PREFLIGHT), "facts": stored})
    assert (found.facts.num_parameters, found.facts.former) == (2266, {"has_batch_statistics": False})
    assert to_json(found)["facts"] == stored
    assert to_json(PREFLIGHT)["facts"].keys() == stored.keys() - {"has_batch_statistics"}

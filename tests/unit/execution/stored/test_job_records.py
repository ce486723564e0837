"""The records of jobs, in the form in which earlier releases stored them."""

import json

import pytest

from ringmaster.features.untrusted.execute import RepeatedSegment, StateCommitment, Verification
from ringmaster.tasks.execution.execution_events import JobEnded
from ringmaster.tasks.pool.event_log import content_of, event_of
from ringmaster.tasks.storage.journal import (
    Evaluation,
    JobRecord,
    JobStatus,
    Variation,
    changed,
    details_of,
    job_record,
)

COMMITMENT = {"node": "v", "first_step": 0, "last_step": 2, "steps": [1], "digests": ["d"], "final": "f"}
LAYOUT = {"technique": "ddp", "config": {"micro_batch_size": 2}, "num_devices": 2}
PHASE = {"first_step": 0, "global_batch_size": 4, "precision": "fp32", "lr_factor": 1.0, "num_steps": 9}
STORED = {
    "metrics": {"loss": 0.5, "num_words": 3},
    "num_evaluated_rows": 7,
    "compared": [{"model": "soup", "metrics": {"loss": 1.0}}],
    "reached_target": False,
    "model_dir": "/run/models/a",
    "model_uri": "models:/night.a/1",
    "energy_j": {"3": 1.5},
    "leader": "b",
    "parted": True,
    "left_group": True,
    "joined": ["c"],
    "leads_after": "c",
    "layout": LAYOUT,
    "goal": 0,
    "rested": 4,
    "evaluated": {"step": 4, "metrics": {"loss": 0.7}, "num_evaluated_rows": None},
    "job": {"name": "a", "num_steps": 9},
    "like": "d",
    "cloned": {"job": "d", "step": None},
    "phases": [PHASE],
    "choice": "it keeps its batch size",
    "untrusted_segments": [{**COMMITMENT, "is_repeated": True}],
    "repeated": {"segment": {**COMMITMENT, "is_repeated": False}, "layout": LAYOUT, "repetitions": []},
    "trusted_only": True,
    "back_to": 0,
    "of_a_plugin": {"curve": [1.0]},
}
"""What earlier releases have stored of a job, with each of the keys."""


def read(details, **columns):
    return job_record("a", {"status": "done", "step": 9, "message": "", "details": details, **columns})


def test_each_field_is_read_and_stored_again_in_the_form_of_earlier_releases():
    record = read(STORED)
    assert (record.num_rows, record.ended_early, record.goal) == (7, False, 0)
    assert record.evaluated == Evaluation(step=4, metrics={"loss": 0.7})
    assert record.variation == Variation(job="d", step=None)
    assert record.phases[0].global_batch_size == 4 and record.changed_steps == 9
    repeated = StateCommitment(node="v", first_step=0, last_step=2, steps=(1,), digests=("d",), final="f")
    assert record.feature(Verification).repeated == RepeatedSegment(segment=repeated, layout=LAYOUT)
    assert json.loads(json.dumps(details_of(record))) == STORED


def test_what_a_record_has_not_is_not_stored():
    assert details_of(JobRecord(name="a")) == {}
    assert read(dict.fromkeys(STORED.keys() - {"metrics", "compared", "energy_j", "phases", "parted", "left_group"}))


def test_the_end_of_a_job_is_logged_with_its_step_among_the_details():
    content = {"job": "a", "status": "done", "message": "m", "details": {**STORED, "step": 9}}
    event = event_of("JobEnded", content)
    assert event == JobEnded(record=read(STORED, message="m"))
    assert json.loads(json.dumps(content_of(event))) == content
    failed = {"job": "a", "status": "failed", "message": "no", "details": {}}
    assert event_of("JobEnded", failed).record == JobRecord(name="a", status=JobStatus.FAILED, message="no")


def test_features_replace_those_of_their_kind():
    record = changed(read(STORED), {"goal": 3, "features": (Verification(back_to=1),)})
    assert (record.goal, record.model_uri, record.features) == (3, "models:/night.a/1", (Verification(back_to=1),))


@pytest.mark.parametrize("wrong", [{"status": "asleep"}, {"details": {"phases": 3}}, {"details": {"cloned": "b"}}])
def test_a_record_that_cannot_be_read_is_a_fault_of_its_job_alone(wrong):
    record = read(**{"details": STORED, "message": "well", **wrong})
    assert record.status == JobStatus.FAILED and record.step == 9
    assert record.message.startswith("its record cannot be read: ") and record.message.endswith(". well")

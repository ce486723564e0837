"""Files, stored jobs and digests of earlier states: what a job's optional features add stays as it was.

`frozen_jobs.json` has jobs that use all features: as in files, and as they were stored. With each job are its stored
form, as changes of `stored_job`, and the digests by which trained weights, profiles, inspections and measurements of
earlier states are found again.
"""

import json
from pathlib import Path

import pytest

from ringmaster.codec import digest, from_json, to_json
from ringmaster.tasks.batch import json_schema, parse_batch
from ringmaster.tasks.profiling.preflight_runs import preflight_key
from ringmaster.tasks.profiling.profile_store import speed_key
from ringmaster.techniques import Job
from ringmaster.techniques.estimates.measured_steps import _measurable
from ringmaster.techniques.job_features import Effect
from ringmaster.techniques.training.rank_job import weights_digest

FROZEN = json.loads(Path(__file__).with_name("frozen_jobs.json").read_text())
DATA = {
    "kind": "tokens",
    "seq_len": 24,
    "vocab_size": 300,
    "num_held_out": 9000,
    **dict.fromkeys(("num_labels", "image_size", "num_channels")),
}


def state(job):
    made = [digest([*job.searches(), *job.with_variants()[1:]])] if job.num_steps else []
    return {
        "job": {key: value for key, value in to_json(job).items() if FROZEN["stored_job"].get(key) != value},
        "all": digest(job),
        "weights": weights_digest(job, data_digest="d"),
        "speed": speed_key(job, DATA),
        "inspection": preflight_key(job, weights={}),
        "step": digest(_measurable(job).fields_with(Effect.STEP)),
        "model_and_loss": digest(job.fields_with(Effect.MODEL)),
        "parents": list(job.parents),
        "renamed": digest(job.renamed("new", "new-{}".format)),
        "made": made,
    }


@pytest.mark.parametrize("frozen", FROZEN["files"], ids=lambda frozen: ",".join(frozen["entry"]) or "plain")
def test_a_file_gives_the_job_that_it_gave(frozen):
    entry = {key: value for key, value in (FROZEN["file"] | frozen["entry"]).items() if value is not None}
    objective = "time-to-target" if "may_vary" in entry else "makespan"
    text = json.dumps({"jobs": [entry], "objective": objective})
    *_, job = parse_batch(text, folder=Path("/"), name="batch.yaml").jobs
    assert {"entry": frozen["entry"], **state(job)} == frozen
    assert from_json(Job, to_json(job)) == job


@pytest.mark.parametrize("frozen", FROZEN["stored"], ids=lambda frozen: ",".join(frozen["entry"]))
def test_a_job_that_was_stored_is_read_and_has_its_digests(frozen):
    entry = FROZEN["stored_job"] | frozen["entry"]
    job = from_json(Job, entry)
    assert {"entry": frozen["entry"], **state(job)} == frozen
    assert from_json(Job, to_json(job)) == job


def test_editors_get_the_same_keys():
    frozen, definitions = FROZEN["schema"], json_schema()["$defs"]
    keys = definitions["JobEntry"]["properties"]
    assert {key: keys[key] for key in frozen["keys"]} == frozen["keys"]
    assert {name: definitions[name] for name in frozen["sections"]} == frozen["sections"]

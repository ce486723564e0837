"""The deployments of prefect.yaml: importable flows, forms with titles and descriptions, a valid schedule."""

import json
import os
import subprocess
import sys
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
import yaml

from ringmaster.flows.pool.flow_worker import REQUESTS_QUEUE
from ringmaster.model_lineage import QUIET_ENVIRONMENT

pytestmark = pytest.mark.full  # importing every flow in a separate process takes seconds
ROOT = Path(__file__).parents[3]
DEPLOYMENTS = {d["name"]: d for d in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]}

# Prints what a worker imports and a server stores, in a process with a Prefect home of its own.
READ = """
import json, sys
from prefect.client.schemas.schedules import CronSchedule
from prefect.flows import load_flow_from_entrypoint
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools import validate

found = {}
for name, deployment in json.load(sys.stdin).items():
    flow = load_flow_from_entrypoint(deployment["entrypoint"])
    schema = parameter_schema(flow).model_dump_for_openapi()
    defaults = {key: value["default"] for key, value in schema["properties"].items() if "default" in value}
    given = {**defaults, **deployment.get("parameters", {})}
    errors = validate(given, schema, raise_on_error=False)
    schedules = [CronSchedule(cron=s["cron"], timezone=s["timezone"]) for s in deployment.get("schedules", [])]
    found[name] = {
        "flow": flow.name, "schema": schema, "errors": [str(error) for error in errors],
        "schedules": len(schedules), "serializer": str(flow.result_serializer), "persist": flow.persist_result,
        "faults of priorities": [
            len(validate({**given, "batch": "b", "what": {"priority": value}}, schema, raise_on_error=False))
            for value in (0, 2)
        ],
        "wrong batches": [
            [str(error) for error in validate({**given, "batch": wrong}, schema, raise_on_error=False)]
            for wrong in ({"example": "none.yaml"}, {"path": ""}, {"yaml": ""})
        ],
        "wrong wait": [str(e) for e in validate({**given, "answer_within_s": 0}, schema, raise_on_error=False)],
        "hidden": [key for key in flow.fn.__annotations__ if key not in (*schema["properties"], "return")],
        "with hidden": [str(e) for e in validate({**given, "seed": 1}, schema, raise_on_error=False)],
    }
former = load_flow_from_entrypoint("ringmaster.flows.start_batch.start_batch")
assert former is load_flow_from_entrypoint("ringmaster.flows.batch_form.train_batch"), "as releases up to 0.2 deploy it"
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    environment = {**os.environ, "PREFECT_HOME": str(tmp_path_factory.mktemp("prefect")), "DO_NOT_TRACK": "true"}
    command = [sys.executable, "-c", READ]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, input=json.dumps(DEPLOYMENTS), capture_output=True, text=True, timeout=550
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


WORK = {"train-batch", "sweep", "retrain-daily"}
ASKED = {"submit-jobs", "control-jobs", "set-quota"}
FOR_THE_POOL_ITSELF = {"z-internal-segment", "z-internal-profile-node"}


def test_all_flows_are_deployed_on_the_pool():
    assert set(DEPLOYMENTS) == WORK | ASKED | FOR_THE_POOL_ITSELF
    assert {d["work_pool"]["name"] for d in DEPLOYMENTS.values()} == {"ringmaster"}


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_workers_are_quiet_and_keep_results_as_json(name):
    environment = DEPLOYMENTS[name]["work_pool"]["job_variables"]["env"]
    assert QUIET_ENVIRONMENT.items() <= environment.items()
    assert environment["PREFECT_RESULTS_DEFAULT_SERIALIZER"] == "json"
    assert all(isinstance(value, str) for value in environment.values())


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_the_parameters_of_a_deployment_are_a_form_that_explains_itself(deployed, name):
    schema = deployed[name]["schema"]
    for section in (schema, *schema.get("definitions", {}).values()):
        for key, field in section["properties"].items():
            title = field.get("title") or schema["definitions"][field["$ref"].rpartition("/")[2]]["title"]
            assert title[0].isupper() or name in FOR_THE_POOL_ITSELF, key
            assert field["description"].endswith("."), key
    errors = deployed[name]["errors"]
    # Flows that query a batch, or start a part of one, have no batch as a default.
    assert errors == [] if name in {*WORK, "submit-jobs"} else all("is a required property" in e for e in errors)


def test_a_form_refuses_what_is_out_of_bounds(deployed):
    assert all(deployed["train-batch"]["wrong batches"])
    (told,) = deployed["train-batch"]["wrong wait"]
    assert "0 is less than the minimum of 1" in told
    assert deployed["control-jobs"]["faults of priorities"] == [1, 0]


def test_forms_leave_out_what_few_people_change_and_runs_may_be_given_it(deployed):
    assert {name: found["hidden"] for name, found in deployed.items() if found["hidden"]} == {
        "train-batch": ["name", "checkpoint_every_s", "seed"],
        "sweep": ["data", "num_parallel", "seed", "batch_keys", "caller"],
        "retrain-daily": ["seed", "caller"],
        "submit-jobs": ["checkpoint_every_s"],
    }
    assert all(deployed[name]["with hidden"] == [] for name in WORK)


def test_tags_divide_the_deployments_into_those_of_users_and_those_of_the_pool():
    tags = {name: deployment["tags"] for name, deployment in DEPLOYMENTS.items()}
    assert {name for name in tags if "user" in tags[name]} == WORK | ASKED
    assert {name for name in tags if "internal" in tags[name]} == FOR_THE_POOL_ITSELF
    assert {*sorted(tags)[-2:]} == FOR_THE_POOL_ITSELF, "Prefect's page lists deployments by name"


def test_requests_do_not_wait_behind_batches():
    queues = {name: deployment["work_pool"].get("work_queue_name") for name, deployment in DEPLOYMENTS.items()}
    assert {name for name, queue in queues.items() if queue == REQUESTS_QUEUE} == ASKED - {"submit-jobs"}
    assert {queues[name] for name in WORK} == {None}, "Prefect's default queue"


def test_the_parts_of_forms_have_names_that_a_person_reads(deployed):
    parts = deployed["train-batch"]["schema"]["definitions"]
    assert {part["title"] for part in parts.values()} == {"An example", "A batch file", "Pasted text"}
    examples = parts["ExampleBatch"]["properties"]["example"]["enum"]
    assert examples[0] == "tiny_batch.yaml"
    assert {"mixed_batch.yaml", "custom/batch.yaml"} <= set(examples)
    assert not {"retraining.yaml", "sweep.yaml"} & set(examples), "they are not batch files"
    parts = deployed["submit-jobs"]["schema"]["definitions"]
    assert {part["title"] for part in parts.values()} == {"A batch file", "Jobs written out"}
    parts = deployed["control-jobs"]["schema"]["definitions"]
    assert [part["title"] for part in parts.values()] == ["Clone a job", "Change settings", "Pause, resume or cancel"]
    assert "default" not in parts["SetAction"]["properties"]["steps"], "Prefect would fill in None, and refuse it"
    parts = deployed["sweep"]["schema"]["definitions"]
    assert {part["title"] for part in parts.values()} == {
        "A job of a batch file",
        "A job written out",
        "Devices",
        "Early stopping",
        "Parameter",
        "Comparison of trials",
        "Constraint",
        "Objective",
    }
    assert parts["DeviceChoice"]["properties"]["kind"]["enum"] == ["auto", "gpu", "cpu"]


def test_results_are_never_stored_as_pickles(deployed):
    assert all(found["serializer"] == "json" or found["persist"] is False for found in deployed.values())


def test_retraining_comes_every_night_and_never_twice_at_once(deployed):
    (schedule,) = DEPLOYMENTS["retrain-daily"]["schedules"]
    minute, hour, *days = schedule["cron"].split()
    assert (minute, hour, days) == ("0", "2", ["*", "*", "*"])
    assert ZoneInfo(schedule["timezone"])
    assert not schedule["active"], "until a file of one's own is named"
    assert deployed["retrain-daily"]["schedules"] == 1
    assert DEPLOYMENTS["retrain-daily"]["concurrency_limit"]["limit"] == 1


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_files_that_a_deployment_starts_with_are_there(name):
    given = DEPLOYMENTS[name].get("parameters", {})
    paths = [given["file"]] if "file" in given else []
    paths += [f"examples/{given['batch']['example']}"] if "batch" in given else []
    assert all((ROOT / path).is_file() for path in paths)

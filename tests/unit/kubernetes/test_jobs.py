"""The pods that Prefect's Kubernetes worker makes of the base job template: what it sends to Kubernetes' API."""

import asyncio
import json
import signal
import subprocess
import threading
import uuid

import jsonschema
import kubernetes_validate
import pytest

from ringmaster.codec import to_json
from ringmaster.tasks.pool.node_agent import DRAIN_S
from ringmaster.tasks.process_identity import READY_FILE, ProcessId
from tests import manifests
from tests.kubernetes_api import kubernetes_api

pytest.importorskip("prefect_kubernetes", reason="ringmaster-ml[kubernetes] is not installed")

from kubernetes_asyncio.config import kube_config
from prefect.client.schemas.objects import FlowRun
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_URL,
    PREFECT_LOGGING_TO_API_ENABLED,
    temporary_settings,
)
from prefect_kubernetes.worker import KubernetesWorker, KubernetesWorkerJobConfiguration

TEMPLATE = json.loads((manifests.ON_DEMAND / "base-job-template.json").read_text())
PASSWORD = "a-password-of-the-pool"


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    """The Jobs that arrive at Kubernetes' API, each with its path."""
    config = tmp_path / "config"
    # The library reads KUBECONFIG once, when it is imported.
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(config))
    for variable in manifests.containers()["prefect-worker", "prefect-worker"]["env"]:
        if variable["name"].startswith("PREFECT_INTEGRATIONS_"):
            monkeypatch.setenv(variable["name"], variable["value"])
    with kubernetes_api(config) as jobs:
        yield jobs


def started(jobs, **variables):
    """The path and the job that the worker sends for a flow run with these job variables."""
    run = FlowRun(id=uuid.uuid4(), name="quick-fox", flow_id=uuid.uuid4())

    async def start():
        configuration = await KubernetesWorkerJobConfiguration.from_template_and_values(TEMPLATE, variables)
        configuration.prepare_for_flow_run(run)
        await KubernetesWorker(work_pool_name="kubernetes").run(run, configuration)

    settings = {
        PREFECT_API_AUTH_STRING: f"ringmaster:{PASSWORD}",
        PREFECT_API_URL: "http://prefect:4200/api",  # nothing is asked of it
        PREFECT_LOGGING_TO_API_ENABLED: False,
    }
    with temporary_settings(settings):
        asyncio.run(start())
    ((path, job),) = jobs
    return path, job


def validate(job):
    pod = job["spec"]["template"]["spec"]
    # Prefect wants these two at the wrong place, where Kubernetes passes over them.
    assert (pod.pop("parallelism"), pod.pop("completions")) == (1, 1)
    for version in ("1.34", kubernetes_validate.latest_version()):
        kubernetes_validate.validate(job, version, strict=True)
    return pod


def test_a_flow_run_is_a_node(jobs):
    path, job = started(jobs)
    pod = validate(job)
    (container,) = pod["containers"]
    node = manifests.pods()["node"]["spec"]
    assert path == "/apis/batch/v1/namespaces/ringmaster/jobs"
    assert container["args"] == ["prefect", "flow-run", "execute"]
    assert container["resources"] == node["containers"][0]["resources"]
    assert container["envFrom"] == node["containers"][0]["envFrom"]
    assert container["volumeMounts"] == node["containers"][0]["volumeMounts"]
    for key in ("volumes", "tolerations", "securityContext", "serviceAccountName"):
        assert pod[key] == node[key]
    assert job["spec"]["template"]["metadata"]["labels"]["pool"] == "ringmaster"
    # A node that has left in order is not made again, and one that is leaving has no successor yet.
    assert (job["spec"]["backoffLimit"], job["spec"]["podReplacementPolicy"]) == (0, "Failed")
    assert pod["restartPolicy"] == "Never"


def test_the_password_does_not_stand_in_a_job(jobs):
    _, job = started(jobs)
    assert PASSWORD not in json.dumps(job)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    found = {each["name"]: each for each in container["env"]}["PREFECT_API_AUTH_STRING"]
    assert found["valueFrom"] == {"secretKeyRef": {"name": "ringmaster-pool", "key": "PREFECT_API_AUTH_STRING"}}


def test_job_variables_change_the_pod(jobs):
    _, job = started(
        jobs,
        gpus=2,
        cpu="8",
        memory="64Gi",
        command="ringmaster pool worker --drain 25",
        termination_grace_s=90,
        time_limit_s=3600,
        node_selector={"gpu": "h200"},
        tolerations=[{"key": "spot", "operator": "Exists"}],
        priority_class="batch",
        runtime_class="nvidia",
        env={"RINGMASTER_CHECKPOINTS": "s3://bucket/checkpoints"},
    )
    pod = validate(job)
    (container,) = pod["containers"]
    assert container["args"][-2:] == ["--drain", "25"]
    assert container["resources"]["limits"] == {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": 2}
    assert {"name": "RINGMASTER_CHECKPOINTS", "value": "s3://bucket/checkpoints"} in container["env"]
    assert (pod["terminationGracePeriodSeconds"], job["spec"]["activeDeadlineSeconds"]) == (90, 3600)
    assert pod["nodeSelector"] == {"gpu": "h200"}
    assert (pod["priorityClassName"], pod["runtimeClassName"]) == ("batch", "nvidia")


def test_a_node_waits_in_a_queue_of_kueue_where_one_is_named(jobs):
    _, job = started(jobs, queue="gpus", suspend=True, labels={"team": "vision"})
    validate(job)
    assert job["spec"]["suspend"] is True
    labels = job["metadata"]["labels"]
    assert (labels["kueue.x-k8s.io/queue-name"], labels["team"]) == ("gpus", "vision")


def test_without_a_queue_a_node_starts_at_once(jobs):
    _, job = started(jobs)
    assert "suspend" not in job["spec"]
    assert "kueue.x-k8s.io/queue-name" not in job["metadata"]["labels"]


def test_the_defaults_of_the_template_keep_its_own_schema():
    variables = TEMPLATE["variables"]
    jsonschema.Draft202012Validator.check_schema(variables)
    defaults = {name: said["default"] for name, said in variables["properties"].items() if "default" in said}
    jsonschema.validate(defaults, variables)
    assert defaults["termination_grace_s"] >= DRAIN_S + 30


def test_a_node_gets_its_signal_before_its_runner(tmp_path):
    """The hook ends the process that the file names, and waits for its end."""
    container = TEMPLATE["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]["containers"][0]
    ready = tmp_path / "ready"
    hook = [word.replace("/tmp/ready", str(ready)) for word in container["lifecycle"]["preStop"]["exec"]["command"]]
    assert subprocess.run(hook).returncode == 0  # the node does not serve yet
    with subprocess.Popen(["sleep", "1000"]) as node:
        reaper = threading.Thread(target=node.wait)
        reaper.start()
        ready.write_text(json.dumps(to_json(ProcessId.of(node.pid))))
        assert subprocess.run(hook).returncode == 0
        assert node.poll() == -signal.SIGTERM
        reaper.join()
    assert TEMPLATE["variables"]["properties"]["env"]["default"][READY_FILE] == "/tmp/ready"


def test_every_variable_of_the_template_is_used():
    text = json.dumps(TEMPLATE["job_configuration"])
    assert [name for name in TEMPLATE["variables"]["properties"] if f"{{{{ {name} }}}}" not in text] == []


def test_the_worker_may_do_what_it_does():
    (role,) = [each for each in manifests.resources(manifests.ON_DEMAND) if each["kind"] == "Role"]
    allowed = {(resource, verb) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]}
    assert {("jobs", "create"), ("jobs", "delete"), ("jobs", "get"), ("jobs", "list"), ("jobs", "watch")} <= allowed
    assert {("pods", "list"), ("pods", "watch"), ("pods/log", "get")} <= allowed
    assert not [each for each in allowed if each[0] == "secrets"]

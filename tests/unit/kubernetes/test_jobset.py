"""The nodes as a JobSet: the published schemas, the pod of the fixed nodes, and how a node ends."""

import copy
import os
import shutil
import signal
import subprocess

import kubernetes_validate
import pytest
import yaml

from tests import manifests

FOLDER = manifests.FOLDER / "jobset"
JOBSET = yaml.safe_load((FOLDER / "jobset.yaml").read_text())
(REPLICATED,) = JOBSET["spec"]["replicatedJobs"]
JOB = REPLICATED["template"]


@pytest.mark.parametrize(
    "change",
    [
        lambda jobset: None,
        lambda jobset: jobset["spec"].update(suspended=True),
        lambda jobset: jobset["spec"].update(suspend="yes"),
        lambda jobset: jobset["spec"]["network"].update(enableDnsHostnames=True),
        lambda jobset: jobset["spec"]["failurePolicy"].update(maxRestarts="ten"),
        lambda jobset: jobset["spec"]["replicatedJobs"][0].pop("name"),
    ],
)
def test_the_set_keeps_the_published_schema_and_a_wrong_one_does_not(change):
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet  # with thousands of others

    jobset = copy.deepcopy(JOBSET)
    change(jobset)
    try:
        # The models pass over unknown keys, so these are missing afterwards.
        is_kept = JobsetV1alpha2JobSet.from_dict(jobset).to_dict() == jobset
    except ValueError:
        is_kept = False
    assert is_kept == (jobset == JOBSET)


@pytest.mark.parametrize("version", ["1.34", kubernetes_validate.latest_version()])
def test_its_job_keeps_the_published_schema(version):
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": REPLICATED["name"]}, **JOB}
    kubernetes_validate.validate(job, version, strict=True)
    assert JOB["spec"]["parallelism"] == JOB["spec"]["completions"]


def test_its_pod_is_that_of_the_fixed_nodes():
    pod, fixed = copy.deepcopy(JOB["spec"]["template"]), copy.deepcopy(manifests.pods()["node"])
    assert pod["spec"].pop("restartPolicy") == "Never"
    (container,), (fixed_container,) = pod["spec"]["containers"], fixed["spec"]["containers"]
    args, fixed_args = container.pop("args"), fixed_container.pop("args")
    assert args[-len(fixed_args) :] == fixed_args
    assert pod == fixed


@pytest.mark.parametrize(
    ("program", "is_evicted"),
    [("trap 'exit 0' TERM; echo ready; while :; do sleep .05; done", True), ("echo ready", False)],
)
def test_a_node_that_has_left_in_order_is_made_again(program, is_evicted):
    """Its end is a failure of the pod, after the node's own: an index that is completed is never made again."""
    args = JOB["spec"]["template"]["spec"]["containers"][0]["args"]
    command = [*args[: args.index("ringmaster")], "sh", "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={"PATH": os.environ["PATH"]}) as pod:
        assert pod.stdout.readline() == b"ready\n"
        if is_evicted:
            pod.send_signal(signal.SIGTERM)
        assert pod.wait(timeout=60) == 1
        assert pod.stdout.read() == b""  # the node has ended before: nobody holds the pipe


def test_kustomize_replaces_the_fixed_nodes_by_the_set(tmp_path):
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed, which has kustomize")
    (tmp_path / "ringmaster").symlink_to(manifests.FOLDER.parents[1])
    (tmp_path / "pool").mkdir()
    kustomization = {
        "resources": ["../ringmaster/docs/kubernetes"],
        "components": ["../ringmaster/docs/kubernetes/jobset"],
    }
    (tmp_path / "pool" / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    built = subprocess.run(
        ["kubectl", "kustomize", tmp_path / "pool"], check=True, capture_output=True, text=True
    ).stdout
    found = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(built)}
    assert ("JobSet", "nodes") in found
    assert not {("StatefulSet", "node"), ("PodDisruptionBudget", "node")} & set(found)
    pod = found["JobSet", "nodes"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == "registry.example.org/ringmaster:0.3.0"

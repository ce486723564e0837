"""The processes of the manifests for Kubernetes, started here with their commands and environment, train a batch."""

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request

import psycopg
import pytest

from tests import manifests
from tests.cluster.machines import SOURCE
from tests.cluster.waiting import TIMEOUT_S, until
from tests.kubernetes_api import kubernetes_api
from tests.ports import free_port

SERVERS = {"prefect": 4200, "mlflow": 5000, "metrics": 9464}
DBPASSWORD = "a-password-of-the-database"
PROGRAMS = {
    "python": [sys.executable],
    "prefect": [sys.executable, "-m", "prefect"],
    "ringmaster": [sys.executable, "-m", "ringmaster.flows.entry"],
}


class Cluster:
    """The containers of docs/kubernetes as processes of this machine, on loopback and other ports.

    folder: what is mounted at /srv/ringmaster, and for the rest. secrets: the secrets, by name.
    """

    def __init__(self, folder, secrets):
        self.folder, self.secrets = folder, secrets
        self.ports = {}
        for name in SERVERS:
            self.ports[name] = free_port(but=list(self.ports.values()))
        self.processes = {}
        (folder / "mlflow-auth.ini").write_text(secrets["ringmaster-mlflow"]["mlflow-auth.ini"])

    def here(self, text):
        """A value of a manifest with the addresses and paths of this machine."""
        for name, port in SERVERS.items():
            text = text.replace(f"http://{name}:{port}", f"http://127.0.0.1:{self.ports[name]}")
            text = str(self.ports[name]) if text == str(port) else text
        text = re.sub(r"^(/srv/ringmaster|/etc/ringmaster|/tmp)(?=/)", str(self.folder), text)
        return text.replace("0.0.0.0", "127.0.0.1")

    def environment(self, container):
        """What the container has, and nothing of this test's own environment but paths."""
        said = manifests.environment(container, self.secrets)
        own = {"PATH": os.environ["PATH"], "HOME": str(self.folder), "PYTHONPATH": str(SOURCE)}
        return {**own, **{name: self.here(value) for name, value in said.items()}}

    def start(self, container, *arguments, environment=None, **options):
        """Starts a container, with other arguments and further variables where some are given."""
        words = arguments or [self.here(word) for word in container["args"]]
        number = next((number for number, word in enumerate(words) if word in PROGRAMS), 0)  # after `env -u NAME`
        command = [*words[:number], *PROGRAMS.get(words[number], words[number : number + 1]), *words[number + 1 :]]
        environment = {**self.environment(container), **(environment or {})}
        return subprocess.Popen(command, cwd=self.folder, env=environment, text=True, **options)

    def run(self, container, *arguments, **options):
        with self.start(container, *arguments, **options) as process:
            assert process.wait(timeout=TIMEOUT_S) == 0, arguments or container["args"]

    def start_pod(self, name):
        """Runs the containers of a pod in their order, and returns once its probe succeeds."""
        *before, last = [container for (pod, _), container in manifests.containers().items() if pod == name]
        for container in before:
            self.run(container)
        self.start_container(name, last)
        until(f"{name} is ready", lambda: self.is_ready(name, last))

    def start_container(self, name, container):
        with (self.folder / f"{name}.log").open("w") as log:
            self.processes[name] = self.start(container, stdout=log, stderr=log)

    def is_ready(self, name, container):
        assert self.processes[name].poll() is None, self.log(name)[-3000:]
        probe = container.get("readinessProbe")
        if probe is None:
            return True
        if "exec" in probe:
            return subprocess.run([self.here(word) for word in probe["exec"]["command"]]).returncode == 0
        get = probe["httpGet"]
        url = f"http://127.0.0.1:{self.ports[name]}{get['path']}"
        headers = {header["name"]: header["value"] for header in get["httpHeaders"]}
        try:
            with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=5) as answer:
                return answer.status == 200
        except urllib.error.HTTPError as error:
            assert error.code >= 500, f"{url} with {headers}: {error.read()}"
        except OSError:
            pass
        return False

    def log(self, name):
        return (self.folder / f"{name}.log").read_text()

    def end(self, name):
        """Ends a pod as Kubernetes does, within a node's grace period; returns the exit status."""
        process = self.processes.pop(name)
        process.terminate()
        return process.wait(timeout=manifests.pods()["node"]["spec"]["terminationGracePeriodSeconds"])


@pytest.fixture
def database(postgresql):
    """The address of a server with the user and the databases that postgresql.yaml makes."""
    sql = next(each for each in manifests.resources(manifests.FOLDER) if "databases.sql" in each.get("data", {}))
    statements = [line.rstrip(";") for line in sql["data"]["databases.sql"].splitlines()]
    names = ["ringmaster", *(statement.split()[-1] for statement in statements)]
    with psycopg.connect(postgresql.url("postgres"), autocommit=True) as connection:
        connection.execute(f"CREATE ROLE ringmaster SUPERUSER LOGIN PASSWORD '{DBPASSWORD}'")
        for statement in ["CREATE DATABASE ringmaster OWNER ringmaster", *statements]:
            connection.execute(statement)
    yield f"{postgresql.address}:{postgresql.port}"
    for name in names:
        postgresql.drop(name)
    with psycopg.connect(postgresql.url("postgres"), autocommit=True) as connection:
        connection.execute("DROP ROLE ringmaster")


@pytest.fixture
def cluster(database, tmp_path):
    made = tmp_path / "secrets"
    made.mkdir()
    cluster = Cluster(tmp_path, manifests.made_secrets(made, database, DBPASSWORD=DBPASSWORD))
    try:
        yield cluster
    finally:
        for name in reversed(list(cluster.processes)):
            cluster.end(name)


@pytest.mark.full
def test_the_pods_train_a_batch(cluster):
    for name in ("prefect", "mlflow", "metrics", "controller", "node"):
        cluster.start_pod(name)
    node = manifests.containers()["node", "node"]
    run = cluster.start(node, "ringmaster", "run", "examples/tiny_batch.yaml", "--json", stdout=subprocess.PIPE)
    output, _ = run.communicate(timeout=2 * TIMEOUT_S)
    assert run.returncode == 0
    result = json.loads(output.splitlines()[-1])
    assert result["status"] == "done"
    assert all(job["status"] == "done" for job in result["jobs"])
    assert cluster.end("node") == 0
    assert "has left the pool" in cluster.log("node")
    run, job = job_of_a_flow_run(cluster)
    # The name of a pod is that of its machine: here the node of the job has the one of the node that has left.
    (cluster.folder / "ready").unlink()
    (container,) = job["spec"]["template"]["spec"]["containers"]
    cluster.start_container("on-demand", container)
    until("the node of the job serves", (cluster.folder / "ready").exists)
    hook = container["lifecycle"]["preStop"]["exec"]["command"]
    assert subprocess.run([word.replace("/tmp/", f"{cluster.folder}/") for word in hook]).returncode == 0
    assert cluster.processes.pop("on-demand").wait(timeout=TIMEOUT_S) == 0
    assert "has left the pool" in cluster.log("on-demand")
    shown = cluster.start(
        manifests.containers()["node", "node"], "prefect", "flow-run", "inspect", run, stdout=subprocess.PIPE
    )
    assert "Completed" in shown.communicate()[0]


def job_of_a_flow_run(cluster):
    """The id of a flow run that serves a node, and the Job that Prefect's Kubernetes worker makes of it."""
    pods = manifests.containers()
    node, worker = pods["node", "node"], pods["prefect-worker", "prefect-worker"]
    template = cluster.folder / "base-job-template.json"
    template.write_text((manifests.ON_DEMAND / template.name).read_text())
    cluster.run(pods["prefect-worker", "work-pool"])
    cluster.run(pods["controller", "deployments"], *manifests.with_nodes_on_demand("deployments")["args"])
    cluster.run(node, "prefect", "deployment", "run", "serve-node/serve-node", "--job-variable", "gpus=4")
    with kubernetes_api(cluster.folder / "config") as jobs:
        further = {
            "KUBECONFIG": str(cluster.folder / "config"),
            "PREFECT_INTEGRATIONS_KUBERNETES_OBSERVER_ENABLED": "false",  # there are no Jobs to watch
            "PREFECT_WORKER_WEBSERVER_PORT": str(free_port()),
        }
        cluster.run(worker, *worker["args"], "--run-once", environment=further)
    ((_, job),) = jobs
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert not [each for each in container["env"] if "value" in each and "AUTH_STRING" in each["name"]]
    return job["metadata"]["labels"]["prefect.io/flow-run-id"], job

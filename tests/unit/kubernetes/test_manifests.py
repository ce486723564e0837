"""The manifests for Kubernetes keep the published schemas, and start what `ringmaster up` starts."""

import json
import re
import shutil
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from ringmaster.codec import from_json
from ringmaster.flows import cli
from ringmaster.flows.services.service_definitions import PoolOptions, compose, databases, engine_environment
from ringmaster.tasks.pool.engines import NodeDeployment, WorkPoolOptions
from ringmaster.tasks.pool.nodes import Timeouts
from tests import manifests
from tests.manifests import FOLDER, KUSTOMIZATIONS

ROOT = FOLDER.parents[1]
# The oldest and the newest release whose schemas come with the validator, of those that are maintained.
VERSIONS = ("1.34", kubernetes_validate.latest_version())
HOME = Path("/srv/ringmaster/.ringmaster")
OPTIONS = PoolOptions(
    home=HOME,
    databases=databases("postgresql://ringmaster:DBPASSWORD@postgresql:5432/ringmaster", home=HOME),
    host="0.0.0.0",
    password="PASSWORD",
)
ENGINE = WorkPoolOptions(work_pool="kubernetes", max_nodes=4)
ELASTIC = replace(OPTIONS, worker=False, engine=ENGINE)
SERVICES = {service.name: service for service in (*compose(ELASTIC), *compose(OPTIONS))}
OBJECTS = [each for folder in KUSTOMIZATIONS for each in manifests.resources(folder)]
PODS, CONTAINERS = manifests.pods(), manifests.containers()
OF_SERVICES = {
    "prefect": ("prefect", "prefect"),
    "mlflow": ("mlflow", "mlflow"),
    "metrics": ("metrics", "metrics"),
    "deployments": ("controller", "deployments"),
    "controller": ("controller", "controller"),
    "worker": ("node", "node"),
    "flows": ("flows", "flows"),
}


def name_of(found):
    return f"{found['kind']}-{found['metadata']['name']}"


@pytest.fixture(scope="module")
def secrets(tmp_path_factory):
    """The secrets that the script would make."""
    return manifests.made_secrets(tmp_path_factory.mktemp("secrets"))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("found", OBJECTS, ids=name_of)
def test_an_object_keeps_the_published_schema(found, version):
    kubernetes_validate.validate(found, version, strict=True)


def test_kustomize_puts_the_manifests_together_as_the_page_says(tmp_path):
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed, which has kustomize")
    page = (ROOT / "docs" / "engines" / "kubernetes.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "ringmaster").symlink_to(ROOT)
    (tmp_path / "my-pool").mkdir()
    (tmp_path / "my-pool" / "kustomization.yaml").write_text("".join(blocks))
    command = ["kubectl", "kustomize", tmp_path / "my-pool"]
    built = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {name_of(each): each for each in yaml.safe_load_all(built)}
    assert {name_of(each) for each in OBJECTS} <= set(found)
    for each in found.values():
        kubernetes_validate.validate(each, VERSIONS[-1], strict=True)
    images = set(re.findall(r"^ +(?:- )?image: (\S+?)(@sha256:[0-9a-f]{64})?$", built, re.MULTILINE))
    assert {(name, bool(digest)) for name, digest in images} == {
        ("REGISTRY/ringmaster:0.3.0", False),
        ("postgres:17-bookworm", True),
    }
    assert found["StatefulSet-node"]["spec"]["replicas"] == 2
    engine = {"name": "RINGMASTER_ENGINE", "value": "work-pool"}
    assert engine in found["Deployment-controller"]["spec"]["template"]["spec"]["containers"][0]["env"]


def test_the_controller_asks_for_nodes_of_the_work_pool():
    assert not ENGINE.faults(has_server=True)
    said = manifests.with_nodes_on_demand("controller")["env"]
    assert {each["name"]: each["value"] for each in said} == engine_environment(ENGINE, home=HOME)
    args = manifests.with_nodes_on_demand("deployments")["args"]
    assert args[:-2] == CONTAINERS["controller", "deployments"]["args"]
    nodes = from_json(NodeDeployment, json.loads(args[-1]))
    template = json.loads((manifests.ON_DEMAND / "base-job-template.json").read_text())
    assert nodes.work_pool in CONTAINERS["prefect-worker", "prefect-worker"]["args"]
    assert set(nodes.job_variables) <= set(template["variables"]["properties"])


def test_every_manifest_is_part_of_a_kustomization():
    for folder in KUSTOMIZATIONS:
        there = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}
        assert there == set(manifests.kustomization(folder)["resources"])


@pytest.mark.parametrize("service", OF_SERVICES)
def test_a_pod_starts_what_up_starts(service):
    ours, args = list(SERVICES[service].command), CONTAINERS[OF_SERVICES[service]]["args"]
    if "ringmaster.flows.entry" in ours:
        assert args == ["ringmaster", *ours[ours.index("ringmaster.flows.entry") + 1 :]]
    else:
        assert args[args.index("python") + 1 :] == ours[1:]


@pytest.mark.parametrize("service", OF_SERVICES)
def test_a_pod_is_told_what_up_tells_its_service(service, secrets):
    wanted = {name: value for name, value in SERVICES[service].environment.items() if value is not None}
    said = manifests.environment(CONTAINERS[OF_SERVICES[service]], secrets)
    assert set(wanted) <= set(said)
    own = r"PASSWORD|DATABASE|URI$|URL$|AUTH|SECRET|HOSTS|ORIGINS|LOG_FORMAT|BACKEND_STORE"
    same = [name for name in wanted if not re.search(own, name)]
    assert {name: said[name] for name in same} == {name: wanted[name] for name in same}
    parts = re.compile(r"(postgresql[+a-z]*)://ringmaster:\w+@postgresql:5432/(\w+)")
    for name in (name for name in wanted if "postgresql" in wanted[name]):
        assert parts.fullmatch(said[name]).groups() == parts.fullmatch(wanted[name]).groups()


@pytest.mark.parametrize("pod", PODS)
def test_what_a_pod_refers_to_is_made(pod, secrets):
    generated = [each for folder in KUSTOMIZATIONS for each in manifests.kustomization(folder)["configMapGenerator"]]
    maps = {each["name"] for each in generated}
    maps |= {each["metadata"]["name"] for each in OBJECTS if each["kind"] == "ConfigMap"}
    accounts = {each["metadata"]["name"] for each in OBJECTS if each["kind"] == "ServiceAccount"}
    claims = {each["metadata"]["name"] for each in OBJECTS if each["kind"] == "PersistentVolumeClaim"}
    spec = PODS[pod]["spec"]
    volumes = spec.get("volumes", [])
    assert spec["serviceAccountName"] in accounts
    assert {each["secret"]["secretName"] for each in volumes if "secret" in each} <= set(secrets)
    assert {each["configMap"]["name"] for each in volumes if "configMap" in each} <= maps
    assert {each["persistentVolumeClaim"]["claimName"] for each in volumes if "persistentVolumeClaim" in each} <= claims


def test_a_selector_finds_its_pods():
    labels = [pod["metadata"]["labels"] for pod in PODS.values()]
    selectors = [
        (each["spec"].get("selector") or each["spec"].get("podSelector"), name_of(each))
        for each in OBJECTS
        if each["kind"] in ("Service", "Deployment", "StatefulSet", "PodDisruptionBudget", "NetworkPolicy")
    ]
    for selector, name in selectors:
        wanted = selector.get("matchLabels", selector).items()
        assert any(wanted <= each.items() for each in labels), name
    assert all(each["pool"] == "ringmaster" for each in labels)


def test_a_probe_asks_by_a_name_that_the_server_answers():
    for (pod, _), container in CONTAINERS.items():
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            if (get := container.get(probe, {}).get("httpGet")) is None or pod == "prefect-worker":
                continue
            (header,) = get["httpHeaders"]
            said = {variable["name"]: variable.get("value", "") for variable in container["env"]}
            allowed = said.get("RINGMASTER_ALLOWED_HOSTS") or said["MLFLOW_SERVER_ALLOWED_HOSTS"]
            assert header["name"] == "Host"
            assert header["value"].partition(":")[0] in allowed.split(",")


def test_the_addresses_of_the_pool_are_services():
    services = [each for each in OBJECTS if each["kind"] == "Service" and "ports" in each["spec"]]
    ports = {each["metadata"]["name"]: each["spec"]["ports"][0]["port"] for each in services}
    said = manifests.settings()
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
        host, port = re.match(r"http://(\w+):(\d+)", said[name]).groups()
        assert ports[host] == int(port)


@pytest.mark.parametrize("pod", PODS)
def test_a_pod_keeps_the_restricted_profile(pod):
    spec = PODS[pod]["spec"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        said = container["securityContext"]
        assert (said["allowPrivilegeEscalation"], said["capabilities"]) == (False, {"drop": ["ALL"]})
        assert said["readOnlyRootFilesystem"]
    # Kubernetes would tell of the service `mlflow` by MLFLOW_PORT=tcp://..., which MLflow's server takes for its port.
    assert spec["enableServiceLinks"] is False
    # Jobs run code of their users, which gets no token of the cluster.
    assert spec["automountServiceAccountToken"] is (pod == "prefect-worker")


def test_no_secret_stands_in_a_manifest():
    text = "".join(path.read_text() for path in FOLDER.rglob("*") if path.suffix in (".yaml", ".env", ".json"))
    assert not [each for each in OBJECTS if each["kind"] == "Secret"]
    assert not re.findall(r"://[^\s/\"]*:[^\s/\"]+@", text)
    assert not {name for name in manifests.settings() if re.search("PASSWORD|AUTH|SECRET|DATABASE", name)}


def test_a_node_has_the_time_to_leave_in_order():
    pod = PODS["node"]["spec"]
    args = pod["containers"][0]["args"]
    assert float(args[args.index("--drain") + 1]) + 30 <= pod["terminationGracePeriodSeconds"]
    assert pod["terminationGracePeriodSeconds"] >= SERVICES["worker"].grace_s
    text = manifests.settings()["RINGMASTER_PATIENCE"]
    assert tuple(float(part) for part in text.split(",")) == (
        Timeouts().beat_every_s,
        Timeouts().lost_after_s,
        Timeouts().fence_after_s,
    )


def test_the_secrets_of_a_database_elsewhere(tmp_path):
    environment = {"PATH": "/usr/bin:/bin", "DBPASSWORD": "a/b"}
    done = subprocess.run([FOLDER / "make-secrets.sh", "db:5433"], env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "To fix" in done.stderr


class TestDockerfile:
    """The image cannot be built in a test: its parts are there."""

    TEXT = (FOLDER / "Dockerfile").read_text()

    def copied(self):
        lines = re.findall(r"^COPY (?!--from)(.*)$", self.TEXT, re.MULTILINE)
        return {source for line in lines for source in line.split()[:-1]}

    def test_what_it_copies_is_there_and_sent_to_the_builder(self):
        sent = set(re.findall(r"^!(.*)$", (FOLDER / "Dockerfile.dockerignore").read_text(), re.MULTILINE))
        assert self.copied() == sent
        assert all((ROOT / source).exists() for source in sent)

    def test_it_copies_all_that_the_package_links_to(self):
        links = [path for path in (ROOT / "src" / "ringmaster").iterdir() if path.is_symlink()]
        assert {path.resolve().name for path in links} <= self.copied()

    def test_it_runs_as_the_user_of_the_pods(self):
        assert self.TEXT.index("\nUSER 2000:2000\n") < self.TEXT.index("\nENTRYPOINT ")
        users = {pod["spec"]["securityContext"]["runAsUser"] for name, pod in PODS.items() if name != "postgresql"}
        assert users == {2000}

    def test_it_installs_an_extra_that_there_is(self):
        (extras,) = re.findall(r'^ARG EXTRAS="([\w,]+)"$', self.TEXT, re.MULTILINE)
        known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert set(extras.split(",")) <= set(known)

    def test_its_command_is_one_of_the_command_line(self):
        (command,) = re.findall(r"^CMD (.*)$", self.TEXT, re.MULTILINE)
        program, *words = json.loads(command)
        assert program in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
        assert CliRunner().invoke(cli.app, [*words, "--help"]).exit_code == 0

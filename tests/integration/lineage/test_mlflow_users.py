"""MLflow's server with passwords: its users get what they may read, and no page of another origin acts for them."""

import base64
import http.client
import json
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from safetensors.numpy import save

from ringmaster.flows.services.service_files import keep_password
from ringmaster.model_lineage.tensors import TensorStore
from ringmaster.model_lineage.tensors.references import FileReference
from tests.attacks import expect_closed_mlflow
from tests.integration.lineage.test_ledger_server import TIMEOUT_S, served

pytestmark = pytest.mark.full

OWNER, OTHER, BAD = "ringmaster", "eve", "bad.safetensors.stored"
PASSWORD = "correct horse battery"
RANDOM = np.random.default_rng(0)


@dataclass
class Server:
    """A server with its owner, and another user who may not read one of the two experiments."""

    url: str
    files: Path
    ids: dict[str, str] = field(default_factory=dict)
    runs: dict[str, str] = field(default_factory=dict)

    def send(self, method, path, body=None, *, user=OWNER):
        """The status and the content of an answer. A body that is not a bytes is sent as JSON."""
        parts = urlsplit(self.url)
        headers = {"Authorization": "Basic " + base64.b64encode(f"{user}:{PASSWORD}".encode()).decode()}
        if body is not None and not isinstance(body, bytes):
            headers["Content-Type"], body = "application/json", json.dumps(body).encode()
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=TIMEOUT_S)
        try:
            connection.request(method, path, body=body, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def ask(self, method, path, body=None, *, user=OWNER):
        """The JSON of an answer."""
        status, content = self.send(method, path, body, user=user)
        assert status == 200, content
        return json.loads(content)

    def artifact(self, user, name):
        """The path of an artifact of the run of a user."""
        return f"/api/2.0/mlflow-artifacts/artifacts/{self.place(user)}/{name}"

    def place(self, user):
        return f"{self.ids[user]}/{self.runs[user]}/artifacts"

    def make(self, user):
        made = self.ask("POST", "/api/2.0/mlflow/experiments/create", {"name": f"of {user}"}, user=user)
        self.ids[user] = made["experiment_id"]
        run = self.ask("POST", "/api/2.0/mlflow/runs/create", made, user=user)
        self.runs[user] = run["run"]["info"]["run_id"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    place = tmp_path_factory.mktemp("users")
    (place / "pool").mkdir()
    keep_password(place / "pool", username=OWNER, password=PASSWORD)
    settings = {
        "MLFLOW_AUTH_CONFIG_PATH": str(place / "pool" / "mlflow-auth.ini"),
        "MLFLOW_FLASK_SERVER_SECRET_KEY": "not so secret",
        "MLFLOW_SERVER_ALLOWED_HOSTS": "127.0.0.1,127.0.0.1:*",
    }
    TensorStore(place / "tensors").add_artifacts(place / "files")
    with served(
        place,
        destination=f"tensors://{place}/files",
        module="ringmaster.model_lineage.mlflow_server",
        options=("--app-name", "basic-auth"),
        settings=settings.items(),
    ) as url:
        server = Server(url, place / "files")
        server.ask("POST", "/api/2.0/mlflow/users/create", {"username": OTHER, "password": PASSWORD})
        server.make(OWNER)
        server.make(OTHER)
        grant = {"username": OTHER, "resource_type": "experiment", "resource_id": server.ids[OWNER]}
        server.ask("POST", "/api/3.0/mlflow/users/permissions/grant", {**grant, "permission": "DENY"})
        yield server


@pytest.fixture(scope="module")
def secret(server):
    """The weights that only the owner may read, and the content of the reference to them."""
    weights = save({"w": RANDOM.normal(size=(40, 50)).astype(np.float32)})
    assert server.send("PUT", server.artifact(OWNER, "secret/model.safetensors"), weights)[0] == 200
    assert server.send("GET", server.artifact(OWNER, "secret/model.safetensors")) == (200, weights)
    assert server.send("GET", server.artifact(OWNER, "secret/model.safetensors"), user=OTHER)[0] == 403
    return weights, (server.files / server.place(OWNER) / "secret" / "model.safetensors.stored").read_bytes()


UPLOADS = {
    "proxy": ("PUT", "/api/2.0/mlflow-artifacts/artifacts/{place}/{name}"),
    "page": ("PUT", "/ajax-api/2.0/mlflow-artifacts/artifacts/{place}/{name}"),
    "quoted": ("PUT", "/api/2.0/mlflow-artifacts/artifacts/{place}/%2e/{quoted}"),
    "run": ("POST", "/ajax-api/2.0/mlflow/upload-artifact?run_uuid={run}&path={name}"),
}


@pytest.mark.parametrize("way", UPLOADS)
@pytest.mark.parametrize(
    "name",
    ["a.safetensors.stored", "A.SAFETENSORS.STORED", "m.safetensors.stored/a.txt", ".tensors/models/a.json"],
)
@pytest.mark.parametrize("user", [OWNER, OTHER])
def test_nobody_uploads_a_reference_or_a_store(server, secret, way, name, user):
    method, path = UPLOADS[way]
    before = sorted(server.files.rglob("*"))
    path = path.format(
        place=server.place(user), run=server.runs[user], name=name, quoted=name.replace(".stored", "%2estored")
    )
    status, content = server.send(method, path, secret[1], user=user)
    assert (status, b"is kept for the tensor store" in content) == (400, True)
    assert sorted(server.files.rglob("*")) == before


def test_a_reference_that_lies_among_the_artifacts_gives_nobody_what_he_may_not_read(server, secret):
    """It may have come there past this server."""
    fields = json.loads(secret[1])
    for seal in ("", "0" * 64, "ü", None, 1):
        planted = server.files / server.place(OTHER) / "stolen.safetensors.stored"
        planted.parent.mkdir(parents=True, exist_ok=True)
        planted.write_text(json.dumps({**fields, "seal": seal}))
        for path in (
            server.artifact(OTHER, "stolen.safetensors"),
            f"/get-artifact?run_uuid={server.runs[OTHER]}&path=stolen.safetensors",
            server.artifact(OTHER, "stolen.safetensors.stored"),
        ):
            status, content = server.send("GET", path, user=OTHER)
            assert (status, b"stolen.safetensors" in content) == (400, True), content
            assert secret[0] not in content
    store = TensorStore(server.files / ".tensors")
    (fault,) = store.reference_faults()
    assert str(planted) in fault
    assert server.send("DELETE", server.artifact(OTHER, "stolen.safetensors"))[0] == 200
    assert store.reference_faults() == []


def test_equal_weights_are_everybodys_who_uploads_them(server, secret):
    path = server.artifact(OTHER, "own/model.safetensors")
    assert server.send("PUT", path, secret[0], user=OTHER)[0] == 200
    assert server.send("GET", path, user=OTHER) == (200, secret[0])
    run = f"/get-artifact?run_uuid={server.runs[OTHER]}&path=own/model.safetensors"
    assert server.send("GET", run, user=OTHER) == (200, secret[0])
    own = json.loads((server.files / server.place(OTHER) / "own" / "model.safetensors.stored").read_bytes())
    assert own == json.loads(secret[1]), "they are stored once"


# What may lie in place of a reference to the model {id}. Each is damaged.
DAMAGED = {
    "list": b"[1]",
    "null": b"null",
    "text": b'"{id}"',
    "number": b"1",
    "true": b"true",
    "nothing": b"",
    "no keys": b"{}",
    "one key": b'{"model": "{id}"}',
    "cut off": b'{"model": "{id}", "path": "model.safe',
    "two values": b"{} {}",
    "no UTF-8": b"\xff\xfe\x00",
    "another encoding": '{"model": "ü"}'.encode("utf-16"),
    "nested": b"[" * 60_000,
    "huge": b'{"model": "' + b"0" * (1 << 20) + b'"}',
    "model of no text": b'{"model": ["{id}"], "path": "model.safetensors", "num_bytes": 1}',
    "model out of the store": b'{"model": "../../{id}", "path": "model.safetensors", "num_bytes": 1}',
    "model with NUL": b'{"model": "\\u0000", "path": "model.safetensors", "num_bytes": 1}',
    "absolute model": b'{"model": "/etc/passwd", "path": "model.safetensors", "num_bytes": 1}',
    "path out of the model": b'{"model": "{id}", "path": "../model.safetensors", "num_bytes": 1}',
    "path that is not UTF-8": b'{"model": "{id}", "path": "\\ud800", "num_bytes": 1}',
    "path of no text": b'{"model": "{id}", "path": {}, "num_bytes": 1}',
    "negative size": b'{"model": "{id}", "path": "model.safetensors", "num_bytes": -1}',
    "size of no number": b'{"model": "{id}", "path": "model.safetensors", "num_bytes": "1"}',
    "fraction": b'{"model": "{id}", "path": "model.safetensors", "num_bytes": 1.5}',
    "infinity": b'{"model": "{id}", "path": "model.safetensors", "num_bytes": Infinity}',
    "truth": b'{"model": "{id}", "path": "model.safetensors", "num_bytes": true}',
    "enormous size": b'{"model": "{id}", "path": "model.safetensors", "num_bytes": ' + b"9" * 5000 + b"}",
    "size beyond a file's": b'{"model": "{id}", "path": "model.safetensors", "num_bytes": 9223372036854775808}',
}


@pytest.mark.parametrize("form", DAMAGED)
def test_a_damaged_reference_is_one_clear_error_and_stops_nothing(server, secret, form):
    content = DAMAGED[form].replace(b"{id}", json.loads(secret[1])["model"].encode())
    folder = server.files / server.place(OWNER) / "damaged"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / BAD).write_bytes(content)
    (folder / "good.txt").write_text("good")
    expect_an_error_alone(server, folder)


LINKS = {"model.safetensors.stored": True, "/etc/passwd": True, ".": True, "nowhere": False, BAD: False}
"""Targets of links, and whether they are there."""


@pytest.mark.parametrize("target", LINKS)
def test_a_link_is_no_reference(server, secret, target):
    folder = server.files / server.place(OWNER) / "linked"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors.stored").write_bytes(secret[1])
    (folder / BAD).unlink(missing_ok=True)
    (folder / BAD).symlink_to(target)
    expect_an_error_alone(server, folder, is_listed=LINKS[target])


def expect_an_error_alone(server, folder, *, is_listed=True):
    """Asserts that `bad.safetensors` in a folder cannot be read, and that the rest continues."""
    name = f"{folder.name}/bad.safetensors"
    for path in (server.artifact(OWNER, name), f"/get-artifact?run_uuid={server.runs[OWNER]}&path={name}"):
        status, content = server.send("GET", path)
        message = json.loads(content)["message"]
        assert status == 400
        assert f"{name}.stored is damaged: " in message and "To fix: " in message
    listing = f"/api/2.0/mlflow/artifacts/list?run_id={server.runs[OWNER]}&path={folder.name}"
    status, content = server.send("GET", listing)
    assert status == (200 if is_listed else 400)
    assert (name if is_listed else BAD) in content.decode()
    store = TensorStore(server.files / ".tensors")
    assert store.gc(drop=[]) == 0
    assert any(str(folder / BAD) in fault for fault in store.reference_faults())
    assert server.send("DELETE", server.artifact(OWNER, name))[0] == 200
    assert store.reference_faults() == []


def test_references_to_what_the_store_lacks_are_named(server, secret):
    folder = server.files / server.place(OWNER) / "lost"
    fields = json.loads(secret[1])
    for wrong in ({"model": "0" * 32}, {"path": "other.safetensors"}):
        FileReference(**{**fields, **wrong}).write(folder / "model.safetensors")
        status, content = server.send("GET", server.artifact(OWNER, "lost/model.safetensors"))
        assert (status, b"lost/model.safetensors" in content) == (400, True)
        assert TensorStore(server.files / ".tensors").gc(drop=[]) == 0
    assert server.send("DELETE", server.artifact(OWNER, "lost/model.safetensors"))[0] == 200


def test_a_folder_with_the_name_of_a_reference_is_none(server, secret):
    folder = server.files / server.place(OWNER) / "folders"
    (folder / BAD).mkdir(parents=True)
    assert server.send("GET", server.artifact(OWNER, "folders/bad.safetensors"))[0] == 404
    assert TensorStore(server.files / ".tensors").reference_faults() == []


def test_pages_of_other_origins_are_kept_out(server):
    expect_closed_mlflow(server.url, user=f"{OWNER}:{PASSWORD}")

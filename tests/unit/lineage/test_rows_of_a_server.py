"""Rows that are read in pages from an MLflow server by its REST API."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

import pytest

from ringmaster.model_lineage import Ledger
from ringmaster.model_lineage.ledger import rows
from ringmaster.model_lineage.ledger.rows import MlflowServer


def model(number, **tags):
    """A LoggedModel in the API's form: numbers that may be large are texts, and empty fields are left out."""
    info = {
        "model_id": f"m-{number}",
        "experiment_id": "7",
        "name": "writer",
        "artifact_uri": f"file:///models/{number}",
        "creation_timestamp_ms": number,
        "status": "LOGGED_MODEL_READY" if number else "LOGGED_MODEL_PENDING",
        "tags": [{"key": key.replace("_", "."), "value": value} for key, value in tags.items()],
    }
    points = [{"key": "loss", "value": 2.0 - step, "timestamp": 5, "step": step} for step in (1, 0)]
    return {"info": info, "data": {"params": [{"key": "lr", "value": "0.1"}], "metrics": points} if number else {}}


OURS = {"ringmaster_kind": "pretrained", "mlflow_note_content": "long", "ringmaster_child_m-9": "{}"}
EXPERIMENTS = [
    {"experiment_id": "7", "name": "ringmaster"},
    {"experiment_id": "8", "name": "ringmaster/night"},
    {"experiment_id": "9", "name": "ringmaster-profiles"},
]
PAGES = {
    None: {"models": [model(0, **OURS), model(1)], "next_page_token": "second"},
    "second": {"models": [model(2, **OURS)]},
}


def version(id, changed_ms):
    tags = [{"key": "ringmaster.model_id", "value": id}]
    return {"name": "writer", "version": "1", "last_updated_timestamp": changed_ms, "tags": tags}


@pytest.fixture
def versions():
    """The server's model versions, the last changed first. Each is a page."""
    return []


@pytest.fixture
def server(versions):
    """A fake MLflow server: (its URI, the list of its requests). It refuses the wrong password."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            if "model-versions" in self.path:
                asked.append(self.path)
                number = int(parse_qs(self.path).get("page_token", ["0"])[0])
                more = {"next_page_token": str(number + 1)} if number + 1 < len(versions) else {}
                self.answer({"model_versions": versions[number : number + 1], **more})
                return
            aliases = [{"alias": "champion", "version": "3"}]
            self.answer({"registered_models": [{"name": "writer", "aliases": aliases}, {"name": "x"}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if "experiments" in self.path:
                self.answer({"experiments": EXPERIMENTS})
                return
            asked.append(body)
            changed = [model(0, **OURS, some_tag="new")] if "model_id" in body["filter"] else None
            self.answer(PAGES[body.get("page_token")] if changed is None else {"models": changed})

        def answer(self, value):
            self.send_response(200 if self.headers.get("Authorization") in (None, "Basic bWU6cHc=") else 401)
            self.end_headers()
            self.wfile.write(json.dumps(value).encode())

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}", asked
        http.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def nobody(monkeypatch):
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def test_all_pages_are_read_and_what_is_not_ours_is_left_out(server, tmp_path):
    uri, asked = server
    found, aliases = rows.read_rows(Ledger(uri), cache=tmp_path)
    assert [row.model_id for row in found] == ["m-0", "m-2"]
    assert [row.is_ready for row in found] == [False, True]
    assert found[1].tags == {"ringmaster.kind": "pretrained"}
    assert (found[1].params, found[1].metrics) == ({"lr": "0.1"}, {"loss": 1.0})
    assert aliases == {"writer": {"champion": 3}}
    assert asked[1]["experiment_ids"] == ["7", "8"], "those of the ledger and of its batches"
    assert asked[1]["filter"] == "creation_timestamp >= 0" and asked[2]["page_token"] == "second"
    assert rows.read_rows(Ledger(uri), cache=tmp_path) == (found, aliases)  # the cached rows are the same


def test_of_what_is_known_only_what_has_changed_is_asked_for_again(server, versions, tmp_path):
    uri, asked = server
    day_ms = 86_400_000
    versions[:] = [version("m-2", day_ms)]
    rows.read_rows(Ledger(uri), cache=tmp_path)
    versions[:] = [version("m-0", 2 * day_ms), version("m-other", 2 * day_ms - 1), version("m-2", 1), version("m-0", 0)]
    asked.clear()
    found, _ = rows.read_rows(Ledger(uri), cache=tmp_path)
    assert [row.tags.get("some.tag") for row in found] == ["new", None]
    assert sum("model-versions" in said for said in asked) == 3, "no page beyond the first old one"
    assert asked[-1]["filter"] == "model_id IN ('m-0')"


def test_user_and_password_are_those_of_the_environment(server, monkeypatch):
    uri, _ = server
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "pw")
    assert [*MlflowServer(uri).listed("registered-models/search", key="registered_models")]
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "wrong")
    with pytest.raises(OSError, match="401"):
        [*MlflowServer(uri).listed("registered-models/search", key="registered_models")]


def test_other_stores_are_left_to_mlflows_client():
    with pytest.raises(ValueError, match="asked by MLflow's client"):
        next(MlflowServer("postgresql://me:pw@host/db").listed("x", key="x"))


def test_where_the_server_answers_otherwise_mlflows_client_is_asked(server, tmp_path, monkeypatch):
    monkeypatch.setattr(MlflowServer, "_ask", lambda *_, **__: {"something": "else"})
    monkeypatch.setattr(rows, "_versions", lambda ledger: iter(()))
    monkeypatch.setattr(rows, "_rows_where", lambda ledger, condition: iter(()))
    monkeypatch.setattr(rows, "_aliases", lambda ledger: {"asked": {"client": 1}})
    assert rows.read_rows(Ledger(server[0]), cache=tmp_path) == ([], {"asked": {"client": 1}})

"""The ledger with an MLflow server that stores the files itself, as on several machines."""

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from contextlib import contextmanager

import numpy as np
import pytest
from safetensors.numpy import save_file

from ringmaster.errors import LedgerError
from ringmaster.model_lineage import QUIET_ENVIRONMENT, DatasetInput, Ledger, MetricPoint
from ringmaster.model_lineage import snapshot as rows
from ringmaster.model_lineage.snapshot import Snapshot, node_of
from ringmaster.model_lineage.tensors import TensorStore
from tests.ports import free_port

TIMEOUT_S = 300

pytestmark = pytest.mark.full


@contextmanager
def served(place, *, destination, module="mlflow", options=(), settings=()):
    """The address of a server on its own sqlite store.

    destination: the URI of its files; options: further words; settings: pairs of further environment variables.
    """
    port = free_port()
    command = [sys.executable, "-m", module, *(["server"] if module == "mlflow" else []), "--workers", "1"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--backend-store-uri", f"sqlite:///{place}/mlflow.db", "--artifacts-destination", destination]
    command += options
    environment = {**os.environ, **QUIET_ENVIRONMENT, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", **dict(settings)}
    with (place / "log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=place, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            wait_for(process, f"http://127.0.0.1:{port}", place / "log")
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(timeout=TIMEOUT_S)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of a stock server."""
    place = tmp_path_factory.mktemp("server")
    with served(place, destination=f"{place}/files") as address:
        yield address


def wait_for(process, address, log):
    for _ in range(TIMEOUT_S * 4):
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except OSError:  # a busy server accepts connections and does not answer in time
            try:
                code = process.wait(timeout=0.25)
            except subprocess.TimeoutExpired:
                continue
            raise AssertionError(f"the server ended with {code}: {log.read_text()}") from None
    raise AssertionError(f"no answer from the server: {log.read_text()}")


@pytest.fixture
def quiet(monkeypatch):
    for name, value in QUIET_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def test_a_batch_is_recorded_and_its_model_comes_back(server, quiet, tmp_path, capfd):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    data = DatasetInput(name="stdlib", digest="d1", source="/usr/lib/python3")
    ledger = Ledger(server, artifact_root=tmp_path / "unused")

    batch = ledger.start_batch("tonight", params={"objective": "makespan"}, files={"batch.yaml": "name: tonight\n"})
    job = ledger.start_job(batch, "tune", params={"lr": 1})
    ledger.log_metrics(job, [MetricPoint("loss", 1 / (step + 1), step) for step in range(1500)])
    ledger.write_table(batch, "plan/segments.json", [{"job": "tune", "start_s": 0.0}])
    base = ledger.record_model("base", run_id=job, folder=tmp_path / "model", kind="imported")
    ledger.set_alias("base", "champion", 1)
    arguments = {"run_id": job, "folder": tmp_path / "model", "kind": "lora", "parents": ["models:/base@champion"]}
    record = ledger.record_model("tuned", datasets=[data], metrics={"loss": 0.5}, **arguments)
    assert ledger.record_model("tuned", datasets=[data], metrics={"loss": 0.5}, **arguments) == record
    ledger.record_profile("fingerprint", {"step_s": 0.5})
    for run_id in (job, batch):
        ledger.finish_run(run_id)
    assert capfd.readouterr().out == ""  # stdout belongs to the program that uses the ledger

    later = Ledger(server)
    assert later.read_text(batch, "batch.yaml") == "name: tonight\n"
    assert len(later.client.get_metric_history(job, "loss")) == 1501  # the model's own loss is among them
    assert Snapshot.of(later, cache=tmp_path).graph.parents(record.model_id) == (base.model_id,)
    assert later.find_profiles(["fingerprint"]) == {"fingerprint": {"step_s": 0.5}}
    copy = later.download_model("models:/tuned/1", tmp_path / "models")
    files = {file.name: file.read_bytes() for file in copy.iterdir()}
    assert b"base_model: base" in files.pop("README.md")  # the card that was written with the files
    assert files == {
        "config.json": b"{}",
        "model.safetensors": b"weights",
    }
    assert not (tmp_path / "unused").exists()
    with pytest.raises(LedgerError, match=r"no alias 'x'; it has \['champion'\]"):
        later.resolve_model("models:/base@x")


def test_a_model_that_has_changed_is_asked_for_again_however_old_it_is(server, quiet, tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "NEW_FOR_MS", -1)  # no row counts as new
    ledger, store = Ledger(server), TensorStore(tmp_path / "tensors")
    (tmp_path / "model").mkdir()
    save_file({"tower.w": np.full((8, 8), 4, np.float32)}, tmp_path / "model" / "model.safetensors")
    job = ledger.start_job(ledger.start_batch("changes", params={}), "job", params={})
    older, newer = (
        ledger.record_model(f"{name}.changed", run_id=job, folder=tmp_path / "model", kind="imported")
        for name in ("older", "newer")
    )
    kept = tmp_path / "cache"
    rows.read_rows(ledger, cache=kept)
    ledger.keep_tensors(older, tmp_path / "model", store=store, components={"tower": "tower"})
    best = ledger.add_version(newer, "best.changed")
    ledger.set_alias(best.registered_name, "challenger", best.version)
    found = rows.read_rows(ledger, cache=kept)
    assert found == rows.read_rows(ledger, cache=kept, is_fresh=True)
    snapshot = Snapshot(node_of(row, found[1]) for row in found[0])
    assert snapshot.find("best.changed@challenger").id == newer.model_id
    assert older.model_id in snapshot.reached_from([snapshot.find("tower").id])


def test_a_server_that_is_down_is_told_with_the_remedy(quiet, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, but not listening
        port = closed.getsockname()[1]
        with pytest.raises(LedgerError, match="see that the MLflow server is up"):
            Ledger(f"http://127.0.0.1:{port}").warm_up()

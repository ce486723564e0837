"""A worker that is started before its pool waits for the pool, and reports that."""

import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from ringmaster.flows import cli, settings
from ringmaster.flows.commands import pool as processes
from ringmaster.flows.settings import PoolAddress
from ringmaster.tasks.process_identity import write_secret

ADDRESS = PoolAddress(database="sqlite:///x", prefect_api="http://p/api", mlflow_uri="http://m")


@pytest.fixture
def served(monkeypatch, tmp_path):
    """The pools that a worker served. Serving is faked."""
    from ringmaster.flows.pool import node

    for name in ("RINGMASTER_DATABASE", "PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RINGMASTER_HOME", str(tmp_path))
    monkeypatch.setattr(settings, "prepare_environment", lambda _: None)
    monkeypatch.setattr(processes, "log_to_stderr", lambda _: None)  # the log of this process belongs to pytest
    monkeypatch.setenv(settings.OWN_NODE, "")
    found = []
    monkeypatch.setattr(node, "serve_until_stopped", lambda options, notice: found.append(options.pool) or True)
    return found


def test_a_worker_waits_for_its_pool_and_says_so(served, tmp_path, monkeypatch):
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            write_secret(tmp_path / "pool.json", json.dumps(asdict(ADDRESS)))

    monkeypatch.setattr(processes, "time", SimpleNamespace(sleep=sleep))
    done = CliRunner().invoke(cli.app, ("pool", "worker", "--devices", "cpu:1"))
    assert (done.exit_code, served, len(waits)) == (0, [ADDRESS], 3)
    said = done.output.replace("\n", "")
    assert said.count("waiting for a pool:") == 1
    assert str(tmp_path / "pool.json") in said


def test_the_controller_is_started_with_its_seed(served, monkeypatch, tmp_path):
    from ringmaster.flows.pool import controller

    begun = []
    monkeypatch.setattr(controller, "serve_pool", lambda pool, *, notice, seed: begun.append((pool.database, seed)))
    write_secret(settings.pool_file(tmp_path), json.dumps(asdict(ADDRESS)))
    done = CliRunner().invoke(cli.app, ["pool", "controller", "--seed", "3"])
    assert (done.exit_code, begun) == (0, [(ADDRESS.database, 3)])

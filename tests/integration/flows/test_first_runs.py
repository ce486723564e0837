"""Two first runs at once in one new home, as the tasks of a Slurm array are."""

import os
import subprocess
import sys

import pytest

CREATE = """
import os, sys
from contextlib import ExitStack
from pathlib import Path

from ringmaster.flows import settings

settings.prepare_environment(settings.home())
from ringmaster.flows.retraining.examine import file_url
from ringmaster.flows.services.serving import prefect_database
from ringmaster.flows.services.prefect_server import started_alone
from ringmaster.model_lineage import Ledger
from ringmaster.model_lineage.sqlite_files import exclusive_lock
from ringmaster.tasks.cluster import detect
from ringmaster.tasks.execution.leases import leases_of
from ringmaster.tasks.storage.database import Database
import mlflow  # so that both begin at once
import alembic.command
from prefect.server.api.server import create_app
from starlette.testclient import TestClient

app = create_app(final=True, ephemeral=True)

print("ready", flush=True)
sys.stdin.readline()
home = settings.home()
leases_of(home, detect())
Database(file_url(home / "promotions.db")).close()
Ledger(settings.tracking_uri(home), artifact_root=home / "mlartifacts").warm_up(batch="tonight")
with ExitStack() as lock:
    lock.enter_context(exclusive_lock(prefect_database().parent))
    with TestClient(started_alone(app, lock)):
        os._exit(0)  # it has started; Prefect cannot end in order before its services have begun
"""


@pytest.mark.full
def test_both_first_runs_of_a_home_create_it(tmp_path):
    environment = {**os.environ, "RINGMASTER_HOME": str(tmp_path / "array%2Fhome")}
    for name in ("PREFECT_HOME", "PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
        environment.pop(name, None)
    command = [sys.executable, "-c", CREATE]
    runs = [
        subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(2)
    ]
    for run in runs:
        assert run.stdout.readline() == b"ready\n"
    for run in runs:
        run.stdin.write(b"\n")
        run.stdin.flush()
    errors = [run.communicate()[1].decode() for run in runs]
    assert [run.returncode for run in runs] == [0, 0], errors
    home = tmp_path / "array%2Fhome"
    assert {"prefect/prefect.db", "mlflow.db", "promotions.db"} <= {
        str(file.relative_to(home)) for file in home.rglob("*.db")
    }

"""The private names and the tables of MLflow that `ringmaster.compat.mlflow` gives are what is relied on."""

import importlib.util
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from ringmaster.compat import mlflow as compat
from ringmaster.model_lineage.ledger.connection import create_database
from ringmaster.model_lineage.sqlite_files import sqlite_url


@pytest.fixture(scope="module")
def database(tmp_path_factory) -> Path:
    """MLflow's database with a model of experiment "ours/batch", and one of experiment "theirs"."""
    from mlflow import MlflowClient

    file = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    create_database(file)
    client = MlflowClient(sqlite_url(file))
    for name in ("ours/batch", "theirs"):
        experiment = client.create_experiment(name, artifact_location=f"file:///old/{name}")
        run = client.create_run(experiment).info.run_id
        model = client.create_logged_model(
            experiment,
            name=f"model of {name[:4]}",
            source_run_id=run,
            tags={"kind": "model", "child.1": "x", "mlflow.note.content": "a note"},
            params={"steps": "7"},
        )
        for step, value in ((2, 0.5), (1, 0.25)):
            client.log_metric(run, "loss", value, step=step, model_id=model.model_id)
        client.finalize_logged_model(model.model_id, "READY")
    client.create_registered_model("words")
    client.create_model_version("words", "file:///old/ours", tags={"decision": "kept"})
    client.set_registered_model_alias("words", "production", "1")
    return file


@pytest.fixture
def connection(database):
    with closing(sqlite3.connect(database)) as opened:
        yield opened
        opened.rollback()


def test_models_of_an_experiment_and_those_below_it_are_read(connection):
    (model,) = compat.models(connection, experiment="ours")
    assert (model["name"], model["is_ready"]) == ("model of ours", True)
    assert model["artifact_location"].startswith("file:///old/ours/batch/models/")
    of_ours = {"experiment": "ours"}
    id = model["model_id"]
    assert compat.model_tags(connection, **of_ours, but="child.%").fetchall() == [(id, "kind", "model")]
    assert compat.model_params(connection, **of_ours).fetchall() == [(id, "steps", "7")]
    assert compat.model_metrics(connection, **of_ours).fetchall() == [(id, "loss", 0.25), (id, "loss", 0.5)]


def test_what_is_registered_is_read(connection):
    assert compat.aliases(connection).fetchall() == [("words", "production", 1)]
    assert compat.version_tags(connection, key="decision").fetchall() == [("words", 1, "kept")]


def test_experiments_are_moved(connection):
    compat.move_experiments(connection, old="file:///old/ours", new="tensors:///new/ours")
    places = {name: location for location, name in compat.experiment_locations(connection)}
    assert (places["ours/batch"], places["theirs"]) == ("tensors:///new/ours/batch", "file:///old/theirs")


def test_a_database_without_tables_has_no_experiments():
    assert compat.experiment_locations(sqlite3.connect(":memory:")) == []


COLUMNS = [(table, column) for table, columns in compat.LOCATIONS.items() for column in columns]


@pytest.mark.parametrize(("table", "column"), [*COLUMNS, *compat.TAGS.items()])
def test_a_column_with_paths_is_in_its_table(connection, table, column):
    assert column in [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]


def test_no_other_column_has_the_places_of_files(connection):
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    used = {
        (table, row[1])
        for table in tables
        for row in connection.execute(f"PRAGMA table_info({table})").fetchall()
        if connection.execute(f"SELECT 1 FROM {table} WHERE instr({row[1]}, '/old/')").fetchone()
    }
    assert used <= set(COLUMNS)


def test_the_version_of_the_tables_is_the_name_of_a_migration(connection):
    package, _, folder = compat.MIGRATIONS.partition(":")
    (place,) = importlib.util.find_spec(package).submodule_search_locations
    ((version,),) = connection.execute("SELECT version_num FROM alembic_version")
    assert list(Path(place, folder).glob(f"{version}_*.py"))


def test_migrations_log_by_their_loggers(tmp_path):
    program = "import sys, mlflow; mlflow.MlflowClient(sys.argv[1]).search_experiments()"
    command = [sys.executable, "-c", program, sqlite_url(tmp_path / "new.db")]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()
    assert any(compat.DATABASE_LOGGER in line for line in lines)
    assert [line for line in lines if not any(name in line for name in compat.MIGRATION_LOGGERS)] == []
    for name in compat.MIGRATION_LOGGERS:  # each is the logger of a module
        assert importlib.util.find_spec(name) is not None


def test_a_repository_is_found_by_its_scheme_and_takes_the_place_of_mlflows():
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
    from mlflow.store.artifact.mlflow_artifacts_repo import MlflowArtifactsRepository

    try:
        for scheme in ("compat-test", "mlflow-artifacts"):
            compat.register_artifact_repository(scheme, lambda uri, tracking_uri, registry_uri: (uri, tracking_uri))
            assert get_artifact_repository(f"{scheme}:/2", tracking_uri="sqlite://") == (f"{scheme}:/2", "sqlite://")
    finally:
        compat.register_artifact_repository("mlflow-artifacts", MlflowArtifactsRepository)


ENVIRONMENT = {
    **os.environ, "MLFLOW_FLASK_SERVER_SECRET_KEY": "k" * 64, "MLFLOW_AUTH_ADMIN_PASSWORD": "a long password",
}  # fmt: skip
SERVER = """
import sys
from contextlib import suppress
from mlflow.cli import cli
from ringmaster.compat import mlflow as compat

def start(command, *, extra_env, **_):
    print("started", "MLFLOW" in " ".join(extra_env), *command)
    sys.exit()

compat.start_server_by(start)
for options in ([], ["--app-name", "basic-auth"]):
    with suppress(SystemExit):
        cli(["server", "--workers", "1", "--port", "1", "--backend-store-uri", sys.argv[1], *options])
"""


def test_the_servers_are_started_by_a_function_of_ones_own(database, tmp_path):
    command = [sys.executable, "-c", SERVER, sqlite_url(database)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=ENVIRONMENT)
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("started ")]
    assert len(lines) == 2, done.stderr
    for (has_variables, *started), served in zip(lines, (compat.OPEN, compat.AUTHENTICATING), strict=True):
        assert (has_variables, started[:3]) == ("True", [sys.executable, "-m", "uvicorn"])
        assert started.count(served) == 1


# MLflow reads its settings as it is imported, and each application is one of all processes that it is made in.
ANSWERS = """
import os
import mlflow.server  # most of what both applications import
from starlette.testclient import TestClient
from ringmaster.compat import mlflow as compat

for make in (compat.open_app, compat.authenticating_app):
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    client = TestClient(make(), base_url="http://localhost")
    paths = ("/health", "/api/2.0/mlflow/users/current")
    print(*(client.get(path).status_code for path in paths), flush=True)
    os._exit(0)
"""


def test_the_applications_answer(database, tmp_path):
    variables = {"_MLFLOW_SGI_NAME": "uvicorn", "MLFLOW_BACKEND_STORE_URI": sqlite_url(database)}
    command = [sys.executable, "-c", ANSWERS]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=ENVIRONMENT | variables)
    assert done.stdout.splitlines() == ["200 404", "200 401"], done.stderr


def test_importing_the_module_imports_no_mlflow():
    program = "import sys, ringmaster.compat.mlflow; sys.exit('mlflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0

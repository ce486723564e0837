"""The private names of Prefect that `ringmaster.compat.prefect` gives do what is relied on."""

import asyncio
import importlib.util
import os
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from prefect import Flow, flow, runtime
from prefect.settings import PREFECT_API_URL, Settings, temporary_settings
from prefect.workers.process import ProcessWorker

from ringmaster.compat import prefect as compat
from ringmaster.model_lineage.sqlite_files import migration_files


class OwnFlow(Flow):
    """A flow of a class of its own."""


def test_a_flow_is_copied_into_another_class_with_all_its_options():
    @flow(name="plain", retries=3, description="adds", flow_run_name="adding {x}")
    def plain(x: int) -> int:
        return x + 1

    copied = compat.copy_flow(plain, OwnFlow)
    assert type(copied) is OwnFlow
    assert vars(copied) == vars(plain)
    assert (copied.fn(1), copied.name, copied.retries, copied.flow_run_name) == (2, "plain", 3, "adding {x}")
    assert copied.with_options(retries=4).retries == 4


def test_the_variable_of_a_started_process_has_the_id_of_its_run(monkeypatch):
    monkeypatch.delenv(compat.STARTED_RUN, raising=False)
    assert runtime.flow_run.id is None
    monkeypatch.setenv(compat.STARTED_RUN, "run-1")
    assert runtime.flow_run.id == "run-1"


def test_the_settings_of_the_process_are_not_those_of_a_context():
    before = compat.process_settings().api.url
    with temporary_settings({PREFECT_API_URL: "http://elsewhere:4200/api"}):
        assert PREFECT_API_URL.value() == "http://elsewhere:4200/api"
        assert compat.process_settings().api.url == before != "http://elsewhere:4200/api"


def test_the_last_migration_of_the_sqlite_file_has_its_version_in_its_name():
    package, _, folder = compat.MIGRATIONS.partition(":")
    (place,) = importlib.util.find_spec(package).submodule_search_locations
    files = list(Path(place, folder).glob("*.py"))
    assert len(files) > 10
    last = max(files, key=lambda file: file.name)
    found = re.search(r'^revision\b[^=]*=\s*"(\w+)"', last.read_text(), re.MULTILINE)
    assert found is not None
    assert found[1] in last.name


@pytest.mark.full  # seconds of migrations, which each new server of a release without a template does as well
def test_a_database_is_created_with_its_tables_at_the_last_version_and_without_rows(tmp_path):
    file = tmp_path / "prefect.db"
    program = "import asyncio; from ringmaster.compat.prefect import create_database; asyncio.run(create_database())"
    environment = {**os.environ, "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{file}"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    with closing(sqlite3.connect(file)) as database:
        ((version,),) = database.execute("SELECT version_num FROM alembic_version").fetchall()
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        rows = {name: database.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in tables}
    assert version in max(migration_files(compat.MIGRATIONS), key=lambda migration: migration.name).name
    assert "flow_run" in rows and {name for name, count in rows.items() if count} == {"alembic_version"}


def test_the_application_serves_prefects_api():
    app = compat.server_app(ephemeral=True)
    assert asyncio.run(asked(app, "/api/health")) == 200
    assert app.router.lifespan_context is not None


async def asked(app, path):
    """Returns the status that an application answers with, before it has started."""
    statuses = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        statuses.extend([message["status"]] if message["type"] == "http.response.start" else [])

    scope = {
        "type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b"", "headers": [],
        "scheme": "http", "server": ("localhost", 80), "client": ("127.0.0.1", 1), "http_version": "1.1",
    }  # fmt: skip
    await app(scope, receive, send)
    return statuses[0]


def test_the_limit_of_a_worker_changes_while_it_works():
    worker = ProcessWorker(work_pool_name="nodes", limit=3)
    with pytest.raises(RuntimeError, match="async context manager"):
        compat.set_run_limit(worker, 2)

    async def limited():
        await worker.setup()
        compat.set_run_limit(worker, 2)
        free = worker.limiter.available_tokens
        await worker.teardown(None, None, None)
        return free

    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        assert asyncio.run(limited()) == 2


def test_a_workers_class_has_its_texts():
    texts = compat.worker_texts(description="Runs jobs.", display_name="Cluster")
    kind = type("TextWorker", (ProcessWorker,), {"type": "text", **texts})
    assert kind.get_description() == "Runs jobs."


def test_importing_the_module_imports_no_prefect():
    program = "import sys, ringmaster.compat.prefect; sys.exit('prefect' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.mark.parametrize(
    ("name", "text"),
    zip(
        compat.SETTINGS_FILES,
        ("PREFECT_API_URL={}", "[api]\nurl = '{}'", "[tool.prefect.api]\nurl = '{}'"),
        strict=True,
    ),
)
def test_prefect_takes_settings_from_each_of_these_files(tmp_path, monkeypatch, name, text):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    (tmp_path / name).write_text(text.format(f"http://{name}/api"))
    assert Settings().api.url == f"http://{name}/api"

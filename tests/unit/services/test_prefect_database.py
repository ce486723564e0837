"""Prefect's database in SQLite: created by one server at a time, and checked before a server starts."""

import sqlite3
import threading
from contextlib import ExitStack, asynccontextmanager, closing, suppress

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from ringmaster.errors import InputError
from ringmaster.flows.services.first_processes import check_prefect_database
from ringmaster.flows.services.prefect_server import started_alone
from ringmaster.model_lineage.sqlite_files import exclusive_lock


def test_servers_of_one_file_start_one_after_another(tmp_path):
    """Prefect creates tables and registers blocks as it starts, as if no other server did so at once."""
    both, have_met, have_started = threading.Barrier(2), [], threading.Barrier(2)

    @asynccontextmanager
    async def lifespan(_):
        with suppress(threading.BrokenBarrierError):
            both.wait(timeout=0.5)
            have_met.append(True)
        yield

    def serve():
        with ExitStack() as lock:
            lock.enter_context(exclusive_lock(tmp_path))
            with TestClient(started_alone(Starlette(lifespan=lifespan), lock)):
                have_started.wait(timeout=60)

    threads = [threading.Thread(target=serve) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not have_met
    assert not have_started.broken, "the lock is given back when one has started, not when it ends"


def test_a_server_that_cannot_start_says_why_on_one_line_and_lets_others_start(capsys):
    @asynccontextmanager
    async def lifespan(_):
        raise RuntimeError("UNIQUE constraint failed:\nblock_type.slug")
        yield

    released = []
    with ExitStack() as lock:
        lock.callback(released.append, True)
        with pytest.raises(RuntimeError), TestClient(started_alone(Starlette(lifespan=lifespan), lock)):
            pass
        assert released
    assert (
        capsys.readouterr().err == "Prefect's server cannot start or end: UNIQUE constraint failed: block_type.slug\n"
    )


@pytest.mark.parametrize(
    ("version", "said"),
    [("a3b9c7d2e5f1", None), ("ffffffffffff", "another release of prefect"), (None, "other tables")],
)
def test_a_database_of_another_release_is_refused(tmp_path, version, said):
    with closing(sqlite3.connect(tmp_path / "prefect.db")) as connection, connection:
        connection.execute("CREATE TABLE flow_run (id TEXT)")
        if version is not None:
            connection.execute("CREATE TABLE alembic_version (version_num TEXT)")
            connection.execute("INSERT INTO alembic_version VALUES (?)", (version,))
    if said is None:
        check_prefect_database(tmp_path / "prefect.db")
        return
    with pytest.raises(InputError, match=f"Prefect's database .*{said}.* To fix: "):
        check_prefect_database(tmp_path / "prefect.db")


def test_a_damaged_database_is_refused_and_none_is_created(tmp_path):
    check_prefect_database(tmp_path / "new" / "prefect.db")
    check_prefect_database(tmp_path / "prefect.db")
    assert [*tmp_path.iterdir()] == []
    (tmp_path / "prefect.db").write_text("text " * 200)
    with pytest.raises(InputError, match=r"not a SQLite database .* the pages of earlier runs .*: mkdir"):
        check_prefect_database(tmp_path / "prefect.db")

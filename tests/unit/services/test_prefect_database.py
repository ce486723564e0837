"""Prefect's database in SQLite: created by one process at a time, and checked before a server starts."""

import asyncio
import sqlite3
import threading
from contextlib import closing, suppress
from types import SimpleNamespace

import pytest

from ringmaster.errors import InputError
from ringmaster.flows.services import prefect_server
from ringmaster.flows.services.first_processes import check_prefect_database


def test_one_process_at_a_time_creates_the_tables(tmp_path, monkeypatch):
    """Alembic commits after each migration: a second process would run one that the first is about to run."""
    both, have_met = threading.Barrier(2), []

    class Database:
        async def create_db(self):
            with suppress(threading.BrokenBarrierError):
                both.wait(timeout=0.5)
                have_met.append(True)

        async def engine(self):
            async def dispose():
                pass

            return SimpleNamespace(dispose=dispose)

    monkeypatch.setattr(prefect_server, "provide_database_interface", Database)
    file = tmp_path / "prefect.db"
    threads = [threading.Thread(target=lambda: asyncio.run(prefect_server.create_database(file))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not have_met


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
    with pytest.raises(InputError, match=r"no SQLite database .* the pages of earlier runs in Prefect with it: mkdir"):
        check_prefect_database(tmp_path / "prefect.db")

"""MLflow's database is made in shared memory if that has room, and else beside its place."""

import sqlite3
from contextlib import closing

import pytest

from ringmaster.errors import LedgerError
from ringmaster.model_lineage.ledger import connection
from tests.readers import small_disk


@pytest.mark.parametrize("is_there", [True, False])
def test_shared_memory_without_room_is_not_used(tmp_path, monkeypatch, is_there):
    """A container gives 64 kB to /dev/shm."""
    shared = tmp_path / "shm"
    monkeypatch.setattr(connection, "_MEMORY", shared)
    file = tmp_path / "home" / "mlflow.db"
    if is_there:
        with small_disk(shared, size="64k"):
            connection.create_database(file)
    else:
        connection.create_database(file)
    with closing(sqlite3.connect(file)) as database:
        assert database.execute("SELECT count(*) FROM experiments").fetchone()
    assert [path.name for path in file.parent.iterdir()] == ["mlflow.db"]


def test_a_home_without_room_is_one_fault_without_a_statement(tmp_path, monkeypatch):
    monkeypatch.setattr(connection, "_MEMORY", tmp_path / "shm")
    with (
        small_disk(tmp_path / "home", size="64k") as home,
        pytest.raises(LedgerError, match=r"mlflow.db cannot be written: database or disk is full. To fix: free space"),
    ):
        connection.create_database(home / "mlflow.db")

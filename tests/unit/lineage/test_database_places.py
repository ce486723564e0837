"""MLflow's database is made in shared memory if that has room, and otherwise next to its final path."""

import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest

from ringmaster.errors import LedgerError
from ringmaster.model_lineage import Ledger, mlflow_calls
from ringmaster.model_lineage.ledger import connection
from ringmaster.model_lineage.records import MetricPoint
from tests.readers import small_disk


@pytest.mark.usefixtures("databases_made_anew")
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


@pytest.mark.parametrize("has_template", [True, False])
def test_a_home_without_room_is_one_fault_without_a_statement(tmp_path, monkeypatch, request, has_template):
    if has_template:
        connection.create_database(tmp_path / "mlflow.db")
    else:
        request.getfixturevalue("databases_made_anew")
    monkeypatch.setattr(connection, "_MEMORY", tmp_path / "shm")
    with (
        small_disk(tmp_path / "home", size="64k") as home,
        pytest.raises(LedgerError, match=r"mlflow.db cannot be written: .*To fix: free space"),
    ):
        connection.create_database(home / "mlflow.db")


def test_a_full_disk_is_the_cause_without_tracebacks(tmp_path, monkeypatch, caplog):
    with small_disk(tmp_path / "home", size="4m") as home:
        ledger = Ledger(f"sqlite:///{home / 'mlflow.db'}")
        run_id = ledger.start_batch("night", params={}, key="k")
        with (home / "filler").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            while True:
                file.write(bytes(4096))
        points = [MetricPoint(key="loss", value=1.0, step=step, timestamp_ms=1) for step in range(900)]
        monkeypatch.setattr(mlflow_calls, "RETRY_DELAYS_S", ())
        with pytest.raises(LedgerError, match=r"database or disk is full. To fix: .*free space") as caught:
            for step in range(100):
                ledger.log_metrics(run_id, [replace(point, step=1000 * step + point.step) for point in points])
        assert caught.value.may_pass
    assert not [record for record in caplog.records if record.exc_info]

"""Detection of another release of Ringmaster on a pool's database, before it can misread any row."""

import pytest
from sqlalchemy import update

from ringmaster.errors import ReleaseMismatch
from ringmaster.flows.batch.run_options import RunOptions
from ringmaster.flows.caller import Caller
from ringmaster.flows.pool.controller import _lead
from ringmaster.flows.pool.pooled_run import open_pooled_run
from ringmaster.flows.settings import PoolAddress
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.pool.failover import Leadership
from ringmaster.tasks.storage import schema
from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.tasks.storage.schema import ABOUT


def test_a_worker_may_come_before_any_executor_and_beside_one_of_its_release(database):
    database.read(schema.check_release)
    for _ in range(2):  # the next controller notes it again
        database.write(schema.note_release)
    database.read(schema.check_release)


def test_a_worker_of_another_release_is_refused_until_the_executor_is_of_that_one_too(database, monkeypatch):
    database.write(schema.note_release)
    here = schema.own_release()
    monkeypatch.setattr(schema, "own_release", lambda: "9.0")
    with pytest.raises(ReleaseMismatch, match=rf"controller is of Ringmaster {here}, and this machine has 9.0.*To fix"):
        database.read(schema.check_release)
    database.write(schema.note_release)
    database.read(schema.check_release)


def test_a_database_of_another_form_is_not_opened(tmp_path):
    url = file_url(tmp_path / "pool.db")
    for _ in range(2):  # created, then opened again
        database = Database(url, synced=False)
        database.close()
    database.write(lambda connection: connection.execute(update(ABOUT).values(value="99")))
    database.close()
    with pytest.raises(ReleaseMismatch, match=r"tables of form 99.*To fix"):
        Database(url, synced=False)


def test_a_batch_is_not_handed_over_to_a_pool_of_another_release(tmp_path, monkeypatch):
    database = Database(file_url(tmp_path / "pool.db"), synced=False)
    database.write(schema.note_release)
    monkeypatch.setattr(schema, "own_release", lambda: "9.0")
    monkeypatch.setenv("RINGMASTER_HOME", str(tmp_path))
    address = PoolAddress(database=database.url, prefect_api="http://p/api", mlflow_uri="http://m")
    batch = Batch(name="nightly", jobs=(), folder=tmp_path, text="")
    with (
        pytest.raises(ReleaseMismatch, match=r"this machine has 9\.0"),
        open_pooled_run(batch, address, RunOptions(), caller=Caller()),
    ):
        pass
    database.close()


def test_an_executor_does_not_stand_by_for_one_of_another_release(database, monkeypatch):
    leader = Leadership(database)
    assert leader.claim()
    database.write(schema.note_release)
    monkeypatch.setattr(schema, "own_release", lambda: "9.0")
    with pytest.raises(ReleaseMismatch, match=r"this machine has 9\.0"):
        _lead(Leadership(database), database, lambda _: None)

"""Fixtures for tests of a pool's controller. Some tests override the database with their own."""

import pytest

from ringmaster.tasks.storage.database import Database, file_url
from tests.unit.pool.bench import Clock, PoolBench


@pytest.fixture
def database(tmp_path):
    database = Database(file_url(tmp_path / "pool.db"), synced=False)
    yield database
    database.close()


@pytest.fixture
def pool(database):
    return PoolBench(database, Clock())

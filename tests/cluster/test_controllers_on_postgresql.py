"""The tests of a pool's runner, controller, leader election and metrics, repeated on PostgreSQL."""

import pytest

from ringmaster.tasks.storage.database import Database
from tests.unit.pool.conftest import pool  # noqa: F401 - a fixture, instead of the one with processes
from tests.unit.pool.controller import (
    test_controller,
    test_engine,
    test_failover,
    test_leadership,
    test_terms_of_batches,
)
from tests.unit.pool.controller.test_engine import made  # noqa: F401 - a fixture
from tests.unit.pool.metrics import test_monitor
from tests.unit.pool.metrics.test_monitor import clock, monitor  # noqa: F401 - fixtures

ON_FILES = ("test_a_kill_after_any_write_doubles_and_loses_nothing",)  # these create databases of their own
for module in (test_leadership, test_engine, test_controller, test_failover, test_terms_of_batches, test_monitor):
    globals().update({n: test for n, test in vars(module).items() if n.startswith("test_") and n not in ON_FILES})


@pytest.fixture
def database(postgresql_url):
    database = Database(postgresql_url, timeout_s=300)
    yield database
    database.close()

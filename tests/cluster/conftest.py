from pathlib import Path
from uuid import uuid4

import pytest

from tests.cluster.postgresql import PostgresServer

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """All that lies here takes minutes and starts servers: `make test-cluster` runs it, `make test` does not."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("cluster")


@pytest.fixture(scope="session")
def postgresql():
    """A PostgreSQL server: `.url(name)`, `.create(name)`, `.stop(how)`, `.start()`, `.restart(how)`."""
    server = PostgresServer()
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture
def postgresql_url(postgresql):
    """The address of an empty PostgreSQL database, this test's own."""
    name = f"test_{uuid4().hex[:12]}"
    yield postgresql.create(name)
    postgresql.drop(name)

import pytest

from techniques.engine.processes import ForkServer
from tests.integration.workbench import ARCHITECTURES, Workbench


@pytest.fixture(scope="session")
def bench(tmp_path_factory):
    """One warm fork server for all tests that train."""
    with ForkServer(preload=[f"transformers:{name}" for name in ARCHITECTURES]) as server:
        yield Workbench(server, tmp_path_factory.mktemp("bench"))

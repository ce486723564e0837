from contextlib import nullcontext

import pytest

from ringmaster.flows.retraining import examine
from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.techniques.processes.forkserver_client import ForkServer
from tests.integration.workbench import ARCHITECTURES, SharedGpuServer, Workbench

# Imports of techniques and data that many tests use, so that not each of their ranks needs to import them.
PRELOAD = ("ringmaster.techniques.sharding.pipe:StageLayers", "sklearn.datasets:load_digits")


@pytest.fixture(scope="session")
def bench(tmp_path_factory, pytestconfig):
    """One warm fork server for all tests that train."""
    num_gpus = pytestconfig.getoption("--gpus")
    kind = SharedGpuServer if num_gpus else ForkServer
    with kind(preload=[*PRELOAD, *(f"transformers:{name}" for name in ARCHITECTURES)]) as server:
        yield Workbench(server, tmp_path_factory.mktemp("bench"), num_gpus=num_gpus)


@pytest.fixture(autouse=True)
def evaluations_by_the_fork_server_of_all_tests(bench, monkeypatch):
    """Spares each command that evaluates the four seconds in which a fork server of its own imports torch."""
    monkeypatch.setattr(examine, "ForkServer", lambda: nullcontext(bench.server))


@pytest.fixture
def client(prefect_server):
    """A client of the Prefect server of a test module; this process uses the server's address meanwhile."""
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: prefect_server.api}), get_client(sync_client=True) as client:
        yield client


@pytest.fixture
def pool_database(tmp_path):
    """A new database of a pool."""
    connection = Database(file_url(tmp_path / "pool.db"), synced=False)
    yield connection
    connection.close()


@pytest.fixture
def empty_home(tmp_path):
    """A Ringmaster home without models."""
    from tests.integration.lineage.family import in_home

    with in_home(tmp_path / "empty home"):
        yield tmp_path / "empty home"


@pytest.fixture(scope="module")
def family_home(tmp_path_factory):
    """A Ringmaster home with a family of models; `tuned` and later models are in the tensor store too."""
    from tests.integration.lineage.family import in_home, record

    home = tmp_path_factory.mktemp("home")
    with in_home(home):
        record(home)
        yield home

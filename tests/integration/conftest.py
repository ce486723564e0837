import shutil

import pytest

from ringmaster.model_lineage.ledger import connection
from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.techniques.processes.forkserver_client import ForkServer
from tests.integration.workbench import ARCHITECTURES, SharedGpuServer, Workbench

MAKE_DATABASE = connection._write_database


@pytest.fixture(scope="session", autouse=True)
def databases_made_once(tmp_path_factory):
    """Copies one MLflow database for all tests: making it takes dozens of migrations and several seconds."""
    folder = tmp_path_factory.mktemp("database")

    def make(file):
        first = folder / "mlflow.db"
        if not first.exists():
            MAKE_DATABASE(first)
        shutil.copy(first, file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection, "_write_database", make)
        yield


@pytest.fixture
def databases_made_anew(monkeypatch):
    """Restores the function that makes an MLflow database by migrations, as outside of tests."""
    monkeypatch.setattr(connection, "_write_database", MAKE_DATABASE)


@pytest.fixture(scope="session")
def bench(tmp_path_factory, pytestconfig):
    """One warm fork server for all tests that train."""
    num_gpus = pytestconfig.getoption("--gpus")
    kind = SharedGpuServer if num_gpus else ForkServer
    with kind(preload=[f"transformers:{name}" for name in ARCHITECTURES]) as server:
        yield Workbench(server, tmp_path_factory.mktemp("bench"), num_gpus=num_gpus)


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


@pytest.fixture(scope="module")
def family_home(tmp_path_factory):
    """A Ringmaster home with a family of models; `tuned` and later models are in the tensor store too."""
    from tests.integration.lineage.family import in_home, record

    home = tmp_path_factory.mktemp("home")
    with in_home(home):
        record(home)
        yield home

"""A pool whose nodes Ray lends. `make test-ray` runs these tests, `make test` does not."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ringmaster.features.ray import ADDRESS, DEVICES
from ringmaster.techniques.processes.forkserver_client import ForkServer, ScratchFolder
from tests.cluster.machines import end
from tests.cluster.pool import Pool
from tests.cluster.servers import prefect_server
from tests.cluster.waiting import until
from tests.integration.workbench import Workbench
from tests.ray.machines import RayMachines

HERE = Path(__file__).parent
RECOVERIES = pytest.StashKey[list]()
TIMEOUTS = "1,30,18"  # "beat,lost,fence" in seconds; "5,60,40" in production
MACHINES = ("one", "two")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks all tests of this folder, and skips them where Ray is not installed."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("ray")


@pytest.fixture(scope="session")
def bench(tmp_path_factory):
    """Trains the undisturbed models that serve as references."""
    with ForkServer() as server:
        yield Workbench(server, tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="session")
def prefect(tmp_path_factory):
    """A Prefect server on SQLite."""
    folder = tmp_path_factory.mktemp("prefect")
    server = prefect_server(folder, "127.0.0.1", database=f"sqlite+aiosqlite:///{folder}/prefect.db")
    try:
        yield server.start()
    finally:
        server.stop()


class RayPool(Pool):
    """A pool with a controller; its nodes come from Ray. machines: the Ray cluster."""

    def __init__(self, folder, *, machines, prefect):
        super().__init__(
            folder,
            network=None,
            database_url=f"sqlite:///{folder}/pool.db",
            prefect=prefect,
            mlflow_uri=f"sqlite:///{folder}/mlflow.db",
            timeouts=TIMEOUTS,
        )
        self.machines = machines
        self.environment |= {
            "RINGMASTER_ENGINE": "ray",
            "RINGMASTER_MAX_NODES": str(len(MACHINES)),
            "RINGMASTER_NODE_IDLE_S": "600",
            ADDRESS: machines.address,
            DEVICES: "cpu:1",
        }

    def start_executor(self):
        """Starts the controller, without the mark of a machine, which it would pass on to the nodes."""
        command = [sys.executable, "-m", "ringmaster.flows.entry", "pool", "controller"]
        with (self.folder / "controller.log").open("ab") as log:
            self.executor = subprocess.Popen(
                command,
                cwd="/",
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self.executor

    def heal(self):
        """Starts what a test has killed: the head, machines, and the controller."""
        self.machines.heal(MACHINES)
        if self.executor is None or self.executor.poll() is not None:
            self.start_executor()
            until("a controller leads", lambda: self._controller_answers())

    def broker(self):
        """Returns the process of the controller that talks to Ray."""
        children = psutil.Process(self.executor.pid).children()
        return next(each for each in children if "providers.ray.broker" in " ".join(each.cmdline()))

    def log(self):
        """Returns the log of the controller."""
        return (self.folder / "controller.log").read_text(errors="replace")

    def _controller_answers(self):
        assert self.executor.poll() is None, self.tail("controller")
        return "leading the pool" in self.log()

    def close(self):
        """Ends the controller."""
        if self.executor is not None:
            end(self.executor)
        self.database.close()


@pytest.fixture(scope="session")
def session_pool(prefect, tmp_path_factory):
    """A pool on a Ray cluster of two machines with one CPU each; tests use `pool`."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'ringmaster-ml[ray]'")
    with ScratchFolder() as folder:  # Ray's sockets need a short path
        machines = RayMachines(folder.path)
        pool = RayPool(tmp_path_factory.mktemp("pool"), machines=machines, prefect=prefect)
        try:
            pool.prepare()
            yield pool
        finally:
            pool.close()
            machines.close()


@pytest.fixture
def pool(session_pool):
    """The pool, repaired before each test."""
    session_pool.heal()
    yield session_pool
    session_pool.abandon()


@pytest.fixture
def recovered(request):
    """Records the seconds from a fault to the recovery, for the end of the report."""

    def note(fault, seconds):
        request.config.stash.setdefault(RECOVERIES, []).append((fault, seconds))

    return note


def pytest_terminal_summary(terminalreporter, config):
    """Prints the recovery time of each fault."""
    found = config.stash.get(RECOVERIES, [])
    if found:
        terminalreporter.section("seconds to recovery")
        for fault, seconds in found:
            terminalreporter.line(f"{seconds:7.1f}  {fault}")

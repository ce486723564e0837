"""A pool started by `ringmaster up`, and the methods that kill its parts as machines, users and kernels do."""

import json
import os
import secrets
import signal
import time
from types import SimpleNamespace

import psutil

from ringmaster.compat.prefect import STARTED_RUN
from ringmaster.flows.services.pool_processes import ServiceStatus
from ringmaster.tasks.control.requests import RequestKind, Requests
from ringmaster.tasks.storage.journal import ENDED
from tests.cluster.pool import Pool
from tests.cluster.stubs import NODE
from tests.cluster.waiting import until
from tests.pool_home import Home

NODES = ("alpha", "beta")
SUPERVISED = ("prefect", "mlflow", "controller")
RECENT_S = 1.0  # a rank with a step within this time counts as alive


class WholePool(Pool):
    """Prefect, MLflow and the controller as `up` starts them, on PostgreSQL; two nodes, whose workers a test restarts.

    The workers are started first, as after a power cut: they wait for the pool.
    """

    def __init__(self, folder, *, network, postgresql, timeouts):
        self.postgresql = postgresql
        self._url = postgresql.create("chaos")
        server = SimpleNamespace(url=f"http://{network.address}")
        super().__init__(
            folder, network=network, database_url=self._url, prefect=server, mlflow_uri="", timeouts=timeouts
        )
        found_by_home = ("RINGMASTER_DATABASE", "PREFECT_API_URL", "MLFLOW_TRACKING_URI", "PREFECT_HOME")
        self.environment = {name: text for name, text in self.environment.items() if name not in found_by_home}
        self.servers = Home(self.home)
        mine = ("RINGMASTER_PATIENCE", "PYTHONPATH", "PREFECT_SERVER_ANALYTICS_ENABLED")
        self.servers.environment |= {name: self.environment[name] for name in mine} | {NODE: "head"}
        secret = folder / "password"
        secret.write_text(secrets.token_urlsafe(16))
        secret.chmod(0o600)
        self._options = ("--host", network.address, "--password-file", str(secret), "--database", self._url)
        cores = sorted(os.sched_getaffinity(0))
        for number, name in enumerate(NODES):
            self.add_node(name, core=cores[number % len(cores)])
        self.options["alpha"] = ("--flows",)

    def up(self):
        """Starts the pool, as a user or a booting machine would."""
        done = self.servers.up("--no-worker", *self._options)
        assert done.returncode == 0, done.stderr

    def submit_file(self, file, *, name):
        """Submits a batch by the command line; returns its flow run, or None where Prefect has not created one yet."""
        done = self.servers.ringmaster("submit", file, "--batch", name, "--checkpoint-every", "0.4", "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["flow_run"]

    def handed_over(self):
        """Returns all training requests that were submitted."""
        return Requests(self.database).of_kind(RequestKind.TRAIN)

    def state(self, name):
        """Returns the state of a service."""
        return self.servers.states().get(name)

    def close(self):
        """Stops all services and drops the databases."""
        self.postgresql.restart()
        self.servers.down()
        super().close()
        for name in ("chaos", "chaos_prefect", "chaos_mlflow"):
            self.postgresql.drop(name)

    def tail(self, name):
        """Returns the end of a log."""
        file = self.servers.files.log(name) if name in (*SUPERVISED, "supervisor") else self.folder / f"{name}.log"
        return file.read_text(errors="replace")[-4000:] if file.exists() else ""


class Kills:
    """Kills parts of a pool, restarts those that a machine's init system restarts, and reports recoveries.

    Each method kills one part, and returns a predicate that is true after its recovery.
    """

    def __init__(self, pool, draw):
        self.pool, self.draw = pool, draw

    def rank(self, *, number=signal.SIGKILL):
        steps = self.pool.trace.of(after_s=time.monotonic() - RECENT_S)
        if not steps:
            return lambda: True
        victim, struck_s = self.draw.choice(steps[-len(NODES) :]), time.monotonic()
        _kill(victim["pid"], number=number)
        return lambda: self._trains_again(victim["job"], struck_s, but=victim["pid"])

    def fork_server(self):
        name, struck_s = self.draw.choice(NODES), time.monotonic()
        # The worker's own: a flow that measures a batch on this node has another one, which trains nothing.
        found = [p for p in self.pool.nodes[name].processes() if "processes.forkserver" in _command(p)]
        found = [p for p in found if not _is_of_a_flow(p)]
        steps = self.pool.trace.of(node=self.pool.nodes[name].mark, after_s=struck_s - RECENT_S)
        if not found:
            return lambda: True
        _kill(min(found, key=lambda process: process.create_time()).pid)
        if not steps:
            return lambda: True
        return lambda: self._trains_again(steps[-1]["job"], struck_s, but=steps[-1]["pid"])

    def worker(self):
        name = self.draw.choice(NODES)
        self.pool.workers[name].kill()
        self.pool.workers[name].wait()
        before = self.pool.serving().get(name)
        self.pool.start_worker(name)  # as systemd does
        return lambda: self.pool.serving().get(name) not in (None, before)

    def stopped_rank(self):
        """Stops a rank, which is detected by its missing heartbeats."""
        return self.rank(number=signal.SIGSTOP)

    def node(self):
        """Simulates the power loss of a machine."""
        name = self.draw.choice(NODES)
        before, node = self.pool.serving().get(name), self.pool.nodes[name]
        node.unplug()
        node.lose()
        node.mend()
        self.pool.workers[name].wait()
        self.pool.start_worker(name)
        return lambda: self.pool.serving().get(name) not in (None, before)

    def flow(self):
        """Kills the process that profiles or follows a batch."""
        found = [p for node in self.pool.nodes.values() for p in node.processes() if _follows(p)]
        if found:
            _kill(self.draw.choice(found).pid)
        return lambda: True  # its recovery shows at the end: the batch is recorded

    def supervisor(self):
        self.pool.servers.files.supervisor().signal(signal.SIGKILL)
        until("the supervisor has ended", lambda: self.pool.servers.files.supervisor() is None)
        self.pool.up()
        return lambda: True

    def controller(self):
        return self._supervised("controller")

    def prefect(self):
        return self._supervised("prefect")

    def mlflow(self):
        return self._supervised("mlflow")

    def postgresql(self):
        self.pool.postgresql.stop("immediate")
        self.pool.postgresql.start()
        return lambda: True

    def _supervised(self, name):
        before = self.pool.state(name)
        if before.process is not None:
            before.process.signal(signal.SIGKILL)
        return lambda: (now := self.pool.state(name)).status == ServiceStatus.UP and now.pid != before.pid

    def _trains_again(self, job, struck_s, *, but):
        """Returns whether another process trains the job, or no training is needed: it was profiled, or it is done."""
        if any(step["pid"] != but for step in self.pool.trace.of(job=job, after_s=struck_s)):
            return True
        records = [self.pool.jobs(batch).get(job) for batch, _, _ in self.pool.batches()]
        return not any(record is not None and record.status not in ENDED for record in records)


def all_up(pool):
    """Returns whether every service is up."""
    states = pool.servers.states()
    return (
        all(states[name].status == ServiceStatus.UP for name in SUPERVISED)
        and states["deployments"].status == ServiceStatus.DONE
    )


def _kill(pid, *, number=signal.SIGKILL):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it had just ended


def _command(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _is_of_a_flow(process):
    """Returns whether a process that executes a flow run has started the process."""
    try:
        return any(_follows(parent) for parent in process.parents())
    except psutil.Error:  # it has ended meanwhile
        return True


def _follows(process):
    """Returns whether the process executes a flow run."""
    try:
        return STARTED_RUN in process.environ() and "prefect" in _command(process)
    except psutil.Error:
        return False

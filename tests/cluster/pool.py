"""A pool on one machine: servers, a controller, and nodes whose workers are real processes that a test may disturb."""

import os
import subprocess
import sys
import time
import uuid

import psutil
from sqlalchemy import select

from ringmaster.errors import ReleaseMismatch
from ringmaster.model_lineage import QUIET_ENVIRONMENT
from ringmaster.tasks.control.requests import RequestKind, Requests
from ringmaster.tasks.pool.nodes import VARIABLE, NodeRegistry, NodeStatus
from ringmaster.tasks.pool.submissions import Submission, Submissions
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.journal import JobStatus, Journal
from ringmaster.tasks.storage.message_store import MessageStore
from ringmaster.tasks.storage.schema import EXECUTOR, check_release
from tests.cluster.jobs import Trace, profiles_of
from tests.cluster.machines import SOURCE, end
from tests.cluster.stubs import NODE
from tests.cluster.waiting import TIMEOUT_S, until
from tests.pool_home import FOREIGN

ENTRY_POINT = "[ringmaster.techniques]\nwaits = tests.cluster.stubs:Waits\n"


class Pool:
    """The parts of a pool; nodes are added one by one.

    timeouts: "beat,lost,fence" in seconds, as in RINGMASTER_PATIENCE.
    """

    def __init__(self, folder, *, network, database_url, prefect, mlflow_uri, timeouts):
        self.folder, self.network, self.prefect, self.timeouts = folder, network, prefect, timeouts
        self.home = folder / "home"
        self.home.mkdir(exist_ok=True)
        self.database = Database(database_url)
        self.nodes, self.workers = {}, {}
        self.options = {}  # options of the workers, by node
        self._before = {}  # by node, the incarnation that was registered when its worker was started
        self.executor = None
        self.trace = Trace(folder / "trace.jsonl")
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)},
            **QUIET_ENVIRONMENT,
            "DO_NOT_TRACK": "true",
            "RINGMASTER_HOME": str(self.home),
            "RINGMASTER_DATABASE": database_url,
            "PREFECT_API_URL": f"{prefect.url}/api",
            "PREFECT_HOME": str(folder / "prefect-of-clients"),
            "MLFLOW_TRACKING_URI": mlflow_uri,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PYTHONPATH": os.pathsep.join([str(SOURCE / "src"), str(SOURCE), str(self._plugin())]),
            VARIABLE: timeouts,
        }

    def _plugin(self):
        """Returns a folder that registers the test's technique by an entry point, when it is on the import path."""
        folder = self.folder / "plugin" / "waiting_stub-0.dist-info"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: waiting-stub\nVersion: 0\n")
        (folder / "entry_points.txt").write_text(ENTRY_POINT)
        return folder.parent

    # -- processes ---------------------------------------------------------------------------------------------------

    def prepare(self):
        """Creates the deployments on the Prefect server."""
        done = subprocess.run(
            [sys.executable, "-m", "ringmaster.flows.deployments"],
            cwd="/",  # outside the source folder: modules in the working folder are imported first
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def start_executor(self, *options):
        """Starts a controller, which stands by while another one leads."""
        command = [sys.executable, "-m", "ringmaster.flows.entry", "pool", "controller", *options]
        with (self.folder / "controller.log").open("ab") as log:
            self.executor = subprocess.Popen(
                command,
                cwd="/",
                env={**self.environment, NODE: "controller"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self.executor

    def epoch(self):
        """Returns how many executors have been leader so far."""
        return self.database.read(lambda connection: connection.execute(select(EXECUTOR.c.epoch)).scalar()) or 0

    def add_node(self, name, *, core):
        """Adds a node without a worker."""
        self.nodes[name] = self.network.node(name, core=core)
        return self.nodes[name]

    def start_worker(self, name, *options):
        """Starts the worker of a node, as systemd would."""
        node = self.nodes[name]
        command = [
            sys.executable,
            "-m",
            "ringmaster.flows.entry",
            "pool",
            "worker",
            "--name",
            name,
            "--devices",
            "cpu:1",
        ]
        command += ["--address", node.address, *self.options.get(name, ()), *options]
        self._before[name] = self.serving().get(name)
        self.workers[name] = node.popen(command, environment=self.environment, log=self.folder / f"{name}.log")
        return self.workers[name]

    def serving(self):
        """Returns the incarnations of registered nodes that are not leaving, by name."""
        return {
            node.name: node.incarnation
            for node in NodeRegistry(self.database).all()
            if node.status == NodeStatus.SERVING
        }

    def heal(self):
        """Repairs the pool after a test: reconnects nodes, and restarts the controller and workers that have ended."""
        for node in self.nodes.values():
            node.mend()
        if self.executor is None or self.executor.poll() is not None:
            self.start_executor()
        until("the last leader is of this release", self._is_of_this_release, seconds=TIMEOUT_S)
        fresh = [name for name, worker in self.workers.items() if worker.poll() is not None]
        for name in [*fresh, *(name for name in self.nodes if name not in self.workers)]:
            self.start_worker(name)
        until("all nodes serve", self._all_serve, seconds=TIMEOUT_S)

    def abandon(self):
        """Cancels the batches that a failed test has left behind, so that they do not affect the next test."""
        requests = Requests(self.database)
        for submission in Submissions(self.database).unended():
            requests.ask(RequestKind.CANCEL, {"batch": submission.id, "jobs": []})
        until("nothing is left", lambda: not Submissions(self.database).unended(), seconds=TIMEOUT_S)

    def _is_of_this_release(self):
        try:
            self.database.read(check_release)
        except ReleaseMismatch:  # of a test that upgrades the pool; workers would refuse to serve
            return False
        return True

    def _all_serve(self):
        for name, worker in self.workers.items():
            assert worker.poll() is None, f"the worker of {name} has ended: {self.tail(name)}"
        assert self.executor.poll() is None, f"the controller has ended: {self.tail('controller')}"
        serving = self.serving()
        return all(serving.get(name) not in (None, self._before[name]) for name in self.nodes)

    def tail(self, name):
        """Returns the end of the log of a node or of the controller."""
        file = self.folder / f"{name}.log"
        return file.read_text(errors="replace")[-4000:] if file.exists() else ""

    def close(self):
        """Ends all processes, each by its own pid."""
        for name, worker in self.workers.items():
            self.nodes[name].lose()
            worker.wait()
        if self.executor is not None:
            end(self.executor)
        self.database.close()

    def fork_server(self, name):
        """Returns the fork server of a node."""
        (found,) = [p for p in self.nodes[name].processes() if "processes.forkserver" in _command(p) and _leads(p)]
        return found

    # -- batches -----------------------------------------------------------------------------------------------------

    def submit(self, jobs, *, profiles=None, name=None, checkpoint_every_s=0.4, **changes):
        """Submits a batch with given profiles; returns its id."""
        batch = f"{name or 'batch'}-{uuid.uuid4().hex[:8]}"
        submission = Submission(
            id=batch,
            name=name or "batch",
            jobs=tuple(jobs),
            profiles=profiles or {job.name: profiles_of(job) for job in jobs},
            folder=str(self.home / "batches" / batch),
            cache_dir=str(self.home / "cache"),
            checkpoint_every_s=checkpoint_every_s,
            started_s=time.time(),
            **changes,
        )
        Submissions(self.database).submit(submission)
        return batch

    def batches(self):
        """Returns id, name and status of every batch."""
        return Submissions(self.database).names()

    def flow_run(self, record):
        """Returns the flow run that shows a segment in Prefect, None before there is one."""
        body = {"flow_runs": {"name": {"like_": f"{record.job} {record.id} on"}}}
        found = self.prefect.call("POST", "/flow_runs/filter", body)
        return found[0] if found else None

    def jobs(self, batch):
        """Returns the journal's records of a batch's jobs, by name."""
        return Journal(self.database, batch=batch).jobs()

    def segments(self, batch=None):
        """Returns the segments of a batch, or of all batches (with qualified job names)."""
        return Journal(self.database, batch=batch).segments()

    def words(self, batch):
        """Returns the events of a batch's gangs, in order."""
        numbers = {segment.id for segment in self.segments(batch)}
        return [word for word in MessageStore(self.database).events(after=0) if word.segment in numbers]

    def said(self, batch, event):
        """Returns the events of one kind."""
        return [word for word in self.words(batch) if event == word.content.NAME]

    def wait(self, batch, *, seconds=TIMEOUT_S, status=JobStatus.DONE):
        """Waits until every job of a batch has `status`; fails where a job failed or was cancelled instead."""

        def ended():
            found = self.jobs(batch)
            bad = {
                n: r.message
                for n, r in found.items()
                if r.status in (JobStatus.FAILED, JobStatus.CANCELLED) and r.status != status
            }
            assert not bad, f"{bad}\n{self.tail('controller')}"
            return all(record.status == status for record in found.values())

        until(f"all jobs of {batch} are {status}", ended, seconds=seconds)

    def finish(self, batch):
        """Lets the jobs of a batch train without sleeps, and waits until all are done."""
        self.trace.hurry(*self.jobs(batch))
        self.wait(batch)

    def wait_for_checkpoint(self, batch, *, job=None, beyond=0, seconds=TIMEOUT_S):
        """Waits for a checkpoint event of a batch (or of its job) beyond a step; returns the event."""

        def poll():
            jobs = {segment.id: segment.job for segment in self.segments(batch)}
            for word in self.said(batch, "checkpoint"):
                if word.content.step > beyond and job in (None, jobs[word.segment]):
                    return word
            return None

        return until("a checkpoint", poll, seconds=seconds)

    def model_dir(self, batch, job):
        """Returns the folder of a job's finished model."""
        found = Submissions(self.database).find(batch)
        assert found is not None
        return found.run_folder() / "models" / job

    def trains(self, job, *, after_s=0.0, not_by=None, node=None, seconds=TIMEOUT_S):
        """Waits for a job's first step after `after_s`, by a process other than `not_by`."""

        def poll():
            steps = self.trace.of(job=job, node=node and self.nodes[node].mark, after_s=after_s)
            return next((step for step in steps if step["pid"] != not_by), None)

        return until(f"{job} is trained", poll, seconds=seconds)


def _command(process):
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def _leads(process):
    """Returns whether the process is the server itself, not a forked rank."""
    try:
        parent = process.parent()
    except psutil.NoSuchProcess:
        return False
    return parent is None or "processes.forkserver" not in _command(parent)

"""A pool whose nodes Slurm lends: a controller, Prefect's worker of type `slurm`, and jobs of a test cluster."""

import json
import os
import subprocess
import sys
import threading
import time

from ringmaster.codec import to_json
from ringmaster.features.slurm.slurm_engine import BATCH_SCRIPT
from ringmaster.flows.pool.controller import ALARMS_EVERY_S
from ringmaster.flows.settings import ENGINE, MAX_NODES, NODE_IDLE_S
from ringmaster.tasks.pool.engines import NodeDeployment
from tests.cluster.machines import SOURCE, end
from tests.cluster.pool import Pool
from tests.cluster.stubs import NODE
from tests.cluster.waiting import TIMEOUT_S, until
from tests.slurm.pools import collections_plugin

WORK_POOL = "ringmaster-slurm"
IDLE_S = 5
# As a site edits it: the steps of jobs are then traced with the name of their node.
SCRIPT = BATCH_SCRIPT.replace(
    "\n# What a site needs before", f'\nexport {NODE}="$SLURMD_NODENAME"\n# What a site needs before', 1
)
assert SCRIPT != BATCH_SCRIPT


class ElasticPool(Pool):
    """A pool with at most two nodes of one CPU slot each."""

    def __init__(self, folder, *, cluster, **options):
        super().__init__(folder, **options)
        self.cluster, self.worker = cluster, None
        self.environment |= {
            **cluster.environment,
            ENGINE: "slurm",
            MAX_NODES: "2",
            NODE_IDLE_S: str(IDLE_S),
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PYTHONPATH": os.pathsep.join([str(SOURCE), str(SOURCE / "src"), str(collections_plugin(folder))]),
        }

    def prepare(self, **variables):
        """Creates the deployments, with values for the template of the nodes' jobs."""
        nodes = NodeDeployment(
            work_pool=WORK_POOL,
            work_pool_type="slurm",
            devices="cpu:1",
            job_variables={"batch_script": SCRIPT, **variables},
        )
        done = subprocess.run(
            [sys.executable, "-m", "ringmaster.flows.deployments", "--nodes", json.dumps(to_json(nodes))],
            cwd="/",
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def start_slurm_worker(self):
        """Starts Prefect's worker."""
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", WORK_POOL, "--type", "slurm"]
        with (self.folder / "slurm-worker.log").open("ab") as log:
            self.worker = subprocess.Popen(
                [*command, "--name", "login"],
                cwd="/",
                env={**self.environment, NODE: "login"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def heal(self):
        """Starts what has ended, and waits until no node is left."""
        if self.executor is None or self.executor.poll() is not None:
            self.start_executor()
        if self.worker is None or self.worker.poll() is not None:
            self.start_slurm_worker()
        until("no node is left", lambda: not self.jobs_of_nodes() and not self.serving())

    def jobs_of_nodes(self):
        """Returns the jobs of nodes that wait or run, by node; waiting ones have no node."""
        return {job.node: job for job in self.cluster.slurm.jobs() if job.flow_run and not job.has_ended}

    def node_of(self, job, *, after_s=0.0):
        """Returns the node that trains a job, once it has."""
        return self.trains(job, after_s=after_s)["node"]

    def trains_again(self, job, *, after_s):
        """Waits for a step by another process than the last one before `after_s`; returns it."""
        before = [step for step in self.trace.of(job=job) if step["s"] <= after_s][-1]
        return self.trains(job, after_s=after_s, not_by=before["pid"])

    def outcomes(self, batch):
        """Returns the status of the outcome of each ended segment of a batch, in order."""
        return [segment.outcome.status for segment in self.segments(batch) if segment.outcome]

    def num_alarms(self):
        """Returns how many alarms the controllers have raised so far."""
        file = self.folder / "controller.log"
        return file.read_text(errors="replace").count("alarm: ") if file.exists() else 0

    def alarms_since_nodes_left(self):
        """Returns how many alarms there are, once those of nodes that have left by now would have been raised."""
        threading.Event().wait(2 * ALARMS_EVERY_S)  # nothing is written down where there is no alarm
        return self.num_alarms()

    def steps_lost(self, batch):
        """Returns how many steps of a batch were trained more than once."""
        lost = 0
        for job in self.jobs(batch):
            steps = len(self.trace.of(job=job))
            lost += max(steps - self.jobs(batch)[job].step, 0)
        return lost

    def close(self):
        if self.worker is not None:
            end(self.worker)
        for job in self.jobs_of_nodes().values():
            self.cluster.slurm.cancel(job.id)
        super().close()


def now_s():
    """Returns the time by the clock of traces."""
    return time.monotonic()

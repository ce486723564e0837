"""A measure of nodes that Slurm lends: sixteen jobs of a real Slurm cluster on this machine, whose pilots are stubs."""

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil

from benchmarks.execution.scale import stub_job, stub_profiles
from benchmarks.execution.stub_pilot import BATCH_SCRIPT
from ringmaster.flows.settings import MAX_NODES
from ringmaster.tasks.pool.nodes import Timeouts
from tests.cluster.postgresql import PostgresServer
from tests.cluster.servers import prefect_server
from tests.cluster.waiting import until
from tests.slurm.cluster import SlurmCluster
from tests.slurm.elastic import IDLE_S, ElasticPool

NUM_NODES, NUM_JOBS, JOB_S = 16, 80, 20.0
TIMEOUT_S = 600
NETWORK = SimpleNamespace(address="127.0.0.1", subnet="127.0.0.0/8")


@contextmanager
def slurm_pool(num_nodes: int) -> Iterator[ElasticPool]:
    """Yields a pool with the timeouts of production, on a Slurm cluster of its own, without deployments."""
    asked = Timeouts()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ringmaster-bench-")))
        postgresql = PostgresServer(address=NETWORK.address, networks=(NETWORK.subnet,))
        stack.callback(postgresql.close)
        postgresql.start()
        prefect = prefect_server(folder, NETWORK.address, database=postgresql.create("prefect"))
        stack.callback(prefect.stop)
        prefect.start()
        cluster = SlurmCluster(num_nodes=num_nodes)
        stack.callback(cluster.close)
        cluster.start()
        pool = ElasticPool(
            folder,
            cluster=cluster,
            network=NETWORK,
            database_url=postgresql.create("pool"),
            prefect=prefect,
            mlflow_uri=f"sqlite:///{folder}/mlflow.db",
            timeouts=f"{asked.beat_every_s},{asked.lost_after_s},{asked.fence_after_s}",
        )
        stack.callback(pool.close)
        pool.environment[MAX_NODES] = str(num_nodes)
        yield pool


def sixteen_nodes(*, num_nodes: int = NUM_NODES, num_jobs: int = NUM_JOBS, job_s: float = JOB_S) -> dict:
    """Measures how long nodes take to come and to be given back, and the processor that this costs."""
    with slurm_pool(num_nodes) as pool:
        pool.prepare(batch_script=BATCH_SCRIPT.format(python=sys.executable))
        pool.heal()
        jobs = [stub_job(f"j{number:02d}", seconds=job_s) for number in range(num_jobs)]
        until("the controller leads", pool.epoch, seconds=TIMEOUT_S)
        watched = {"controller": pool.executor.pid, "worker": pool.worker.pid}
        before_s = {name: processor_s(pid) for name, pid in watched.items()}
        began_s = time.monotonic()
        batch = pool.submit(jobs, profiles={job.name: stub_profiles(job)[:1] for job in jobs})
        until("the first node serves", pool.serving, seconds=TIMEOUT_S)
        first_s = time.monotonic() - began_s
        until("all nodes serve", lambda: len(pool.serving()) == num_nodes, seconds=TIMEOUT_S)
        all_s = time.monotonic() - began_s
        pool.wait(batch, seconds=TIMEOUT_S)
        done_s = time.monotonic() - began_s
        until("all nodes are given back", lambda: not pool.jobs_of_nodes(), seconds=TIMEOUT_S)
        back_s = time.monotonic() - began_s
        spent_s = {name: processor_s(pid) - before_s[name] for name, pid in watched.items()}
        lent = [job for job in pool.cluster.slurm.jobs() if job.flow_run]
        bad = {job.id: job.state for job in lent if job.node and "COMPLETED" not in job.states}
        assert not bad, bad
        trained = {device.partition(":")[0] for segment in pool.segments(batch) for device in segment.spec.devices}
        assert trained == set(pool.cluster.nodes), "every node has trained"
        return {
            "nodes": num_nodes,
            "jobs": num_jobs,
            "job_s": job_s,
            "first_node_s": first_s,
            "all_nodes_s": all_s,
            "done_s": done_s,
            "given_back_s": back_s - done_s - IDLE_S,
            "controller_processor_s": spent_s["controller"],
            "worker_processor_s": spent_s["worker"],
            "controller_share": spent_s["controller"] / back_s,
            "worker_share": spent_s["worker"] / back_s,
            "alarms": pool.num_alarms(),
        }


def processor_s(pid: int) -> float:
    """Returns the processor seconds of a process so far, with those of its children that it has waited for."""
    return sum(psutil.Process(pid).cpu_times()[:4])

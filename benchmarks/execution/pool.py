"""Measures of execution on a pool: a lost node, two hundred short segments on eight nodes, and a thousand jobs."""

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from benchmarks.execution.alone import peak_bytes
from ringmaster.flows.settings import PoolAddress
from ringmaster.tasks.background_worker import background_thread
from ringmaster.tasks.planning import Plan, Problem, Segment
from ringmaster.tasks.pool.nodes import Timeouts
from ringmaster.techniques import registry
from tests.cluster.jobs import profiles_of, torch_job, waiting_job
from tests.cluster.machines import Network
from tests.cluster.pool import Pool
from tests.cluster.postgresql import PostgresServer
from tests.cluster.servers import prefect_server
from tests.cluster.stubs import Waits
from tests.cluster.waiting import until

NUM_NODES, NUM_JOBS, NUM_SEGMENTS, SEGMENT_S = 8, 60, 200, 10.0
STEPS_OF_SEGMENT = 10
MANY_JOBS = 1000
TIMEOUT_S = 240
# Variables that Prefect in this process must find in the environment, before it is imported.
ENVIRONMENT = ("PREFECT_API_URL", "PREFECT_HOME", "RINGMASTER_HOME", "PREFECT_SERVER_ANALYTICS_ENABLED")


@contextmanager
def pool_of(num_nodes: int, *, with_executor: bool) -> Iterator[Pool]:
    """Yields a pool with the timeouts of production, all of whose nodes serve."""
    asked = Timeouts()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ringmaster-bench-")))
        network = Network()
        stack.callback(network.close)
        postgresql = PostgresServer(address=network.address, networks=(network.subnet,))
        stack.callback(postgresql.close)
        postgresql.start()
        prefect = prefect_server(folder, network.address, database=postgresql.create("prefect"))
        stack.callback(prefect.stop)
        prefect.start()
        pool = Pool(
            folder,
            network=network,
            database_url=postgresql.create("pool"),
            prefect=prefect,
            mlflow_uri=f"sqlite:///{folder}/mlflow.db",
            timeouts=f"{asked.beat_every_s},{asked.lost_after_s},{asked.fence_after_s}",
        )
        stack.callback(pool.close)
        pool.prepare()
        cores = sorted(os.sched_getaffinity(0))
        for number in range(num_nodes):
            pool.add_node(f"node{number}", core=cores[number % len(cores)])
            pool.start_worker(f"node{number}")
        if with_executor:
            pool.start_executor()
        until("all nodes serve", lambda: len(pool.serving()) == num_nodes, seconds=TIMEOUT_S)
        yield pool


def lost_node() -> dict:
    """Measures the seconds from the loss of a node to its detection, and from there to its job's step elsewhere."""
    with pool_of(2, with_executor=True) as pool:
        job = torch_job("widowed", trace=pool.trace.file, num_steps=100_000)
        batch = pool.submit([job])
        pool.wait_for_checkpoint(batch, seconds=TIMEOUT_S)
        mark = pool.trace.of(job="widowed")[-1]["node"]
        (name,) = [name for name, node in pool.nodes.items() if node.mark == mark]
        lost_s = time.monotonic()
        pool.nodes[name].unplug()
        pool.nodes[name].lose()
        until("the node is given up", lambda: name not in pool.serving(), seconds=TIMEOUT_S)
        found_s = time.monotonic()
        (other,) = set(pool.nodes) - {name}
        again = pool.trains("widowed", after_s=lost_s, node=other, seconds=TIMEOUT_S)
        wires = "network namespaces" if pool.network.has_wires else "plain processes"
        return {"found_s": found_s - lost_s, "elsewhere_s": again["s"] - found_s, "nodes": wires}


def in_turns(problem: Problem) -> Plan:
    """Returns a plan with every job in parts of ten seconds, each on another node than the one before."""
    ids = [node.id for node in problem.nodes]
    parts = {job.id: max(1, round(job.options[0].runtime_s / SEGMENT_S)) for job in problem.jobs}
    rows = [(p, job.id) for p in range(max(parts.values())) for job in problem.jobs if p < parts[job.id]]
    segments = []
    for number, (_, job) in enumerate(rows):
        start_s = number // len(ids) * SEGMENT_S
        work = 1 / parts[job]
        node = ((ids[number % len(ids)], (0,)),)
        segments.append(Segment(job, 0, start_s, start_s + SEGMENT_S, work, 0.0, node))
    return Plan(problem.name, tuple(segments))


def short_segments(*, num_nodes: int = NUM_NODES, num_jobs: int = NUM_JOBS, num_segments: int = NUM_SEGMENTS) -> dict:
    """Measures seconds from lease to start, and the share of device time idle beyond the plan, with a real executor."""
    with pool_of(num_nodes, with_executor=False) as pool:
        extra = num_segments - num_jobs * (num_segments // num_jobs)
        jobs = [
            waiting_job(f"j{i:02d}", num_steps=STEPS_OF_SEGMENT * (num_segments // num_jobs + (i < extra)), step_s=1.0)
            for i in range(num_jobs)
        ]
        with _executor(pool):
            profiles = {job.name: profiles_of(job, techniques=("waits",)) for job in jobs}
            batch = pool.submit(jobs, profiles=profiles)
            pool.wait(batch, seconds=10 * num_segments * SEGMENT_S / num_nodes)
        segments = pool.segments(batch)
        starts_s = [word.content.startup_s for word in pool.said(batch, "ready")]
        makespan_s = max(s.ended_s for s in segments) - min(s.started_s for s in segments)
        planned_s = -(-num_segments // num_nodes) * SEGMENT_S
        return {
            "segments": len(segments),
            "jobs": num_jobs,
            "nodes": num_nodes,
            "median_start_s": statistics.median(starts_s),
            "p95_start_s": sorted(starts_s)[int(0.95 * len(starts_s))],
            "worst_start_s": max(starts_s),
            "makespan_s": makespan_s,
            "planned_s": planned_s,
            "idle": 1 - planned_s / makespan_s,
        }


def thousand_jobs(*, num_jobs: int = MANY_JOBS) -> dict:
    """Measures the peak memory of the pool's executor for a batch of many jobs, until some of them are done."""
    with pool_of(2, with_executor=True) as pool:
        jobs = [waiting_job(f"j{i:04d}", num_steps=2, step_s=0.1) for i in range(num_jobs)]
        batch = pool.submit(jobs, profiles={job.name: profiles_of(job, techniques=("waits",)) for job in jobs})
        until("jobs are done", lambda: len(pool.segments(batch)) >= 20, seconds=2 * TIMEOUT_S)
        assert pool.executor.poll() is None
        return {"num_jobs": num_jobs, "peak_mib": peak_bytes(pool.executor.pid) / 2**20}


@contextmanager
def _executor(pool: Pool) -> Iterator[None]:
    """Runs the pool's executor in this process, with `in_turns` as its planner."""
    os.environ.update({key: pool.environment[key] for key in ENVIRONMENT})
    registry.register(Waits)
    from ringmaster.flows.pool import controller as pool_controller

    class InTurns(pool_controller.PoolController):
        def make_plan(self, problem: Problem) -> Plan:
            return in_turns(problem)

    pool_controller.PoolController = InTurns
    address = PoolAddress(
        database=pool.environment["RINGMASTER_DATABASE"],
        prefect_api=pool.environment["PREFECT_API_URL"],
        mlflow_uri=pool.environment["MLFLOW_TRACKING_URI"],
    )
    with ExitStack() as stack:
        database = pool_controller.Database(address.database)
        stack.callback(database.close)
        leadership = pool_controller.Leadership(database)
        assert leadership.claim()
        stack.enter_context(background_thread(partial(pool_controller._beat, leadership), name="beat"))
        stopping = threading.Event()
        executor = stack.enter_context(pool_controller._taken_over(database, stopping, seed=0))
        thread = threading.Thread(target=executor.serve, name="executor")
        thread.start()
        stack.callback(thread.join)
        stack.callback(executor.stop_starting)
        stack.callback(stopping.set)
        yield

"""A measure of a pool's controller at scale: a thousand jobs on 128 simulated nodes.

Prefect's server is away: the thread that shows segments there waits for it, and costs nothing.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.execution.simulated_nodes import EVALUATE_S, EXPORT_S, SAVE_S, STARTUP_S, STEP_S
from ringmaster.tasks.planning import Plan
from ringmaster.tasks.pool.nodes import Timeouts
from ringmaster.tasks.storage.journal import JobStatus, Journal
from ringmaster.techniques import DataSpec, Job, ModelSpec, Profile
from tests.cluster.machines import Network, end
from tests.cluster.pool import Pool
from tests.cluster.postgresql import PostgresServer
from tests.cluster.waiting import until
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
NUM_JOBS, NUM_NODES, DEVICES_PER_NODE = 1000, 128, 4
SHORTEST_S, LONGEST_S = 60.0, 240.0  # of a job on one device
EFFICIENCY = {1: 1.0, 2: 0.9, 4: 0.75}  # of gangs of that many devices
STEPS_S = 1.0  # of a step on one device
CHECKPOINT_EVERY_S = 30.0
TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Size:
    """The size of a run, by environment variables BENCH_JOBS, BENCH_NODES: a small run finds mistakes sooner."""

    num_jobs: int
    num_nodes: int

    @classmethod
    def of_environment(cls) -> "Size":
        """Returns the full size, unless the environment names another one."""
        return cls(
            num_jobs=int(os.environ.get("BENCH_JOBS", NUM_JOBS)),
            num_nodes=int(os.environ.get("BENCH_NODES", NUM_NODES)),
        )


def stub_job(name: str, *, seconds: float) -> Job:
    """Returns a job that takes `seconds` on one device."""
    num_steps = max(1, round(seconds / STEPS_S))
    steps_s = {str(n): STEPS_S / (n * efficiency) for n, efficiency in EFFICIENCY.items()}
    model = ModelSpec(factory="a:b", kwargs={STEP_S: steps_s})
    return Job(name=name, model=model, data=DataSpec(factory="a:c"), num_steps=num_steps)


def stub_profiles(job: Job) -> tuple[Profile, ...]:
    """Returns the true profiles of a stub job: one for each gang size."""
    return tuple(
        Profile(
            technique="single" if num_devices == "1" else "ddp",
            config={},
            num_devices=int(num_devices),
            num_ranks=int(num_devices),
            step_s=step_s,
            peak_bytes=1 << 30,
            startup_s=STARTUP_S,
            save_s=SAVE_S,
            stall_s=0.0,
            evaluate_s=EVALUATE_S,
            export_s=EXPORT_S,
        )
        for num_devices, step_s in job.model.kwargs[STEP_S].items()
    )


@dataclass(frozen=True)
class NoServer:
    """A server that is away."""

    url: str


@contextmanager
def simulated_pool(size: Size, figures: Path) -> Iterator[Pool]:
    """Yields a pool on PostgreSQL, with a real controller and simulated nodes."""
    asked = Timeouts()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ringmaster-bench-")))
        network = Network()
        stack.callback(network.close)
        postgresql = PostgresServer(address=network.address, networks=(network.subnet,))
        stack.callback(postgresql.close)
        postgresql.start()
        pool = Pool(
            folder,
            network=network,
            database_url=postgresql.create("pool"),
            prefect=NoServer(f"http://{network.address}:{free_port(network.address)}"),
            mlflow_uri=f"sqlite:///{folder}/mlflow.db",
            timeouts=f"{asked.beat_every_s},{asked.lost_after_s},{asked.fence_after_s}",
        )
        stack.callback(pool.close)
        nodes = ["benchmarks.execution.simulated_nodes", pool.environment["RINGMASTER_DATABASE"]]
        stack.callback(end, _start(pool, "nodes", *nodes, str(size.num_nodes), str(DEVICES_PER_NODE)))
        until("all nodes serve", lambda: len(pool.serving()) == size.num_nodes, seconds=TIMEOUT_S)
        pool.executor = _start(pool, "controller", "benchmarks.execution.measured_controller", str(figures))
        until("the controller leads", lambda: pool.epoch() and figures.exists(), seconds=TIMEOUT_S)
        yield pool


def _start(pool: Pool, name: str, *arguments: str) -> subprocess.Popen:
    environment = {**pool.environment, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    with (pool.folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def thousand_on_many_nodes() -> dict:
    """Measures what the controller costs while it runs many jobs on many nodes, and the idle time beyond its plan."""
    size = Size.of_environment()
    draw = random.Random(0)
    jobs = [stub_job(f"j{i:04d}", seconds=draw.uniform(SHORTEST_S, LONGEST_S)) for i in range(size.num_jobs)]
    with tempfile.TemporaryDirectory(prefix="ringmaster-bench-") as folder:
        figures = Path(folder, "figures.json")
        with simulated_pool(size, figures) as pool:
            before, began_s = json.loads(figures.read_text()), time.monotonic()
            profiles = {job.name: stub_profiles(job) for job in jobs}
            batch = pool.submit(jobs, profiles=profiles, checkpoint_every_s=CHECKPOINT_EVERY_S)
            _wait(pool, batch)
            after, wall_s = json.loads(figures.read_text()), time.monotonic() - began_s
            found = _costs(before, after, wall_s=wall_s)
            if kept := os.environ.get("BENCH_LOG"):
                Path(kept).write_text((pool.folder / "controller.log").read_text())
            return {
                "jobs": size.num_jobs,
                "nodes": size.num_nodes,
                "devices": size.num_nodes * DEVICES_PER_NODE,
                **found,
                **_idle(pool, batch, num_devices=size.num_nodes * DEVICES_PER_NODE),
            }


def _wait(pool: Pool, batch: str) -> None:
    """Waits until all jobs are done; looks seldom, as the database serves the controller too."""
    journal = Journal(pool.database, batch=batch)

    def ended() -> bool:
        assert pool.executor.poll() is None, f"the controller has ended: {pool.tail('controller')}"
        statuses = [record.status for record in journal.jobs().values()]
        assert not {JobStatus.FAILED, JobStatus.CANCELLED} & {*statuses}, pool.tail("controller")
        return all(status == JobStatus.DONE for status in statuses)

    until("all jobs are done", ended, seconds=6 * TIMEOUT_S, every_s=2.0)


def _costs(before: dict, after: dict, *, wall_s: float) -> dict:
    """Compares the counters. The threads that plan end with their plans; all others last."""
    spent_s = after["processor_s"] - before["processor_s"]
    others_s = sum(s - before["threads_s"].get(name, 0.0) for name, s in after["threads_s"].items())
    return {
        "wall_s": wall_s,
        "processor_s": spent_s,
        "share": spent_s / wall_s,
        "planning_share": (spent_s - others_s) / wall_s,
        "peak_mib": after["peak_bytes"] / 2**20,
        "plans_made": after["num_plans"],
        "statements_per_s": (after["num_statements"] - before["num_statements"]) / wall_s,
        "ticks": after["num_ticks"],
        "longest_tick_s": after["longest_tick_s"],
        "longest_wait_for_tick_s": after["late_s"],
        "threads_s": {name: s for name, s in after["threads_s"].items() if s > 0.5},
    }


def _idle(pool: Pool, batch: str, *, num_devices: int) -> dict:
    """Compares the segments that ran with the first plan that has all jobs."""
    segments = pool.segments(batch)
    plans = [Plan.from_json(each["plan"]) for each in Journal(pool.database, batch="").plans()]
    first_s, last_s = min(s.started_s for s in segments), max(s.ended_s for s in segments)
    makespan_s, planned_s = last_s - first_s, plans[0].makespan_s
    busy_s = sum((s.ended_s - s.started_s) * s.spec.num_devices for s in segments)
    in_plan_s = sum((s.end_s - s.start_s) * sum(len(ids) for _, ids in s.devices) for s in plans[0].segments)
    return {
        "segments": len(segments),
        "plans_followed": len(plans),
        "makespan_s": makespan_s,
        "planned_s": planned_s,
        "bound_s": plans[0].lower_bound_s,
        "idle_beyond_plan": 1 - planned_s / makespan_s,
        "leased_share": busy_s / (num_devices * makespan_s),
        "planned_share": in_plan_s / (num_devices * planned_s),
    }

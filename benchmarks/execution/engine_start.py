"""Measures of nodes that Slurm and Ray lend: from a pilot to its first step, and from one segment to the next.

The imports of a pilot are measured separately, each time in processes of their own: a pilot imports torch in another
process than Prefect, and may find files in memory that the one before has read.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from benchmarks.execution.slurm_nodes import slurm_pool
from ringmaster.flows.settings import MAX_NODES, NODE_IDLE_S
from ringmaster.tasks.pool.engines import ALLOCATION
from ringmaster.techniques.processes.forkserver_client import PRELOAD, ScratchFolder
from tests.cluster.jobs import torch_job
from tests.cluster.pool import Pool
from tests.cluster.servers import prefect_server
from tests.cluster.waiting import until

NUM_NODES_LENT = 3  # one after another
NUM_SEGMENTS = 20  # one after another on one node
STEP_S, NUM_STEPS = 0.1, 10
TIMEOUT_S = 600
NEVER_S = 1e6
PRELOADED = "; ".join(f"import {name.partition(':')[0]}" for name in PRELOAD)
IMPORTS = {"prefect": "import prefect.engine, ringmaster.flows.pool.node", "torch": PRELOADED}


@contextmanager
def ray_pool() -> Iterator[Pool]:
    """Yields a pool on a Ray cluster of two machines of one CPU each."""
    from tests.ray.conftest import MACHINES, RayPool
    from tests.ray.machines import RayMachines

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ringmaster-bench-")))
        prefect = prefect_server(folder, "127.0.0.1", database=f"sqlite+aiosqlite:///{folder}/prefect.db")
        stack.callback(prefect.stop)
        prefect.start()
        machines = RayMachines(stack.enter_context(ScratchFolder()).path)  # Ray's sockets need a short path
        stack.callback(machines.close)
        pool = RayPool(folder, machines=machines, prefect=prefect)
        stack.callback(pool.close)
        pool.prepare()
        machines.heal(MACHINES)
        yield pool


def on_slurm() -> dict:
    """Measures nodes of Slurm."""
    with slurm_pool(1) as pool:
        pool.prepare()
        return _measure(pool, start=pool.heal)


def on_ray() -> dict:
    """Measures nodes of Ray."""
    with ray_pool() as pool:
        return _measure(pool, start=pool.heal)


def _measure(pool: Pool, *, start: Callable[[], None]) -> dict:
    """Measures a pool without nodes. start: starts its controller."""
    pool.environment |= {MAX_NODES: "1", NODE_IDLE_S: "2"}
    start()
    until("the controller leads", pool.epoch, seconds=TIMEOUT_S)
    first_steps_s, imports_s = [], []
    for number in range(NUM_NODES_LENT):
        first_steps_s.append(_first_step_s(pool, number))
        until("the node is given back", lambda: not pool.serving() and not _pilots(pool), seconds=TIMEOUT_S)
        imports_s.append({name: _run_s(program) for name, program in IMPORTS.items()})
    gaps_s = _gaps_s(pool)
    return {
        "nodes": len(first_steps_s),
        "first_step_s": statistics.median(first_steps_s),
        "first_steps_s": [round(each, 2) for each in first_steps_s],
        "imports_s": {name: statistics.median(each[name] for each in imports_s) for name in IMPORTS},
        "segments": len(gaps_s) + 1,
        "gap_s": statistics.median(gaps_s),
        "worst_gap_s": max(gaps_s),
    }


def _first_step_s(pool: Pool, number: int) -> float:
    """Submits a job while no node is there; returns the seconds from the start of its pilot to its first step."""
    job = torch_job(f"alone{number}", trace=pool.trace.file, num_steps=NUM_STEPS, step_s=STEP_S)
    batch = pool.submit([job])
    step = pool.trains(job.name, seconds=TIMEOUT_S)
    began_s = min(process.create_time() for process in _pilots(pool))
    pool.wait(batch, seconds=TIMEOUT_S)
    return step["s"] + time.time() - time.monotonic() - began_s


def _gaps_s(pool: Pool) -> list[float]:
    """Trains jobs in turn on one node; returns the seconds from the end of each to the next one's first step."""
    jobs = [
        torch_job(f"j{i:02d}", trace=pool.trace.file, num_steps=NUM_STEPS, step_s=STEP_S) for i in range(NUM_SEGMENTS)
    ]
    batch = pool.submit(jobs, checkpoint_every_s=NEVER_S)
    pool.wait(batch, seconds=TIMEOUT_S)
    segments = sorted(pool.segments(batch), key=lambda segment: segment.started_s)
    to_wall_s = time.time() - time.monotonic()
    first_steps_s = {job.name: pool.trace.of(job=job.name)[0]["s"] + to_wall_s for job in jobs}
    ends_s = [segment.ended_s for segment in segments]
    return [first_steps_s[after.job] - end_s for end_s, after in zip(ends_s, segments[1:], strict=False)]


def _pilots(pool: Pool) -> list[psutil.Process]:
    """Returns the processes of a pool's lent nodes."""
    return [each for each in psutil.process_iter() if _is_pilot(each, home=str(pool.home))]


def _is_pilot(process: psutil.Process, *, home: str) -> bool:
    try:
        environment = process.environ()
    except psutil.Error:
        return False
    return ALLOCATION in environment and environment.get("RINGMASTER_HOME") == home


def _run_s(program: str) -> float:
    """Returns the seconds that a Python process takes."""
    began_s = time.monotonic()
    subprocess.run([sys.executable, "-P", "-c", program], check=True, env=os.environ, capture_output=True)
    return time.monotonic() - began_s

"""Measures of execution without a pool: a killed rank, a thousand jobs, and wrong profiles."""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from ringmaster.model_lineage import QUIET_ENVIRONMENT
from ringmaster.tasks.execution.replan_policy import ReplanPolicy
from ringmaster.tasks.planning import Option, PlanningJob, PlanningNode, Problem, solve
from ringmaster.techniques import registry
from tests.cluster.jobs import Trace
from tests.cluster.stubs import NODE
from tests.cluster.waiting import until
from tests.fake_engine import FakeEngine
from tests.unit.execution.clocked import clocked_bench
from tests.unit.execution.fakes import job, profile

ROOT = Path(__file__).resolve().parents[2]
DEATHS, DRAWS, JOBS = 10, 20, 1000
TIMEOUT_S = 240
TOLD_AFTER_S = 0.3  # a rank reports a checkpoint together with the steps after it
RUN = "import sys, ringmaster; ringmaster.train_batch(sys.argv[1], checkpoint_every_s=0.5)"


def deaths(*, number: int = DEATHS) -> dict:
    """Measures the seconds from the death of a rank of `ringmaster run` to the job's next training step."""
    waits_s: list[float] = []
    with tempfile.TemporaryDirectory(prefix="ringmaster-bench-") as folder:
        trace = Trace(Path(folder, "trace.jsonl"))
        slow = {"factory": "tests.cluster.stubs:slow"}
        jobs = [
            {
                "name": "slow",
                "model": {**slow, "kwargs": {"job": "slow", "trace": str(trace.file), "step_s": 0.1}},
                "data": {"factory": "tests.cluster.stubs:points"},
                "loss": "tests.cluster.stubs:cross_entropy",
                "techniques": ["single"],
                "num_devices": [1],
                "global_batch_size": 8,
                "num_steps": 100_000,
            }
        ]
        with _run(Path(folder), jobs) as process:
            for _ in range(number):
                pid = until("a checkpoint of a new rank", lambda: _saver(trace, Path(folder)), seconds=TIMEOUT_S)
                before_s = time.monotonic()
                os.kill(pid, signal.SIGKILL)
                fresh = until(
                    "training again",
                    lambda before_s=before_s, pid=pid: [s for s in trace.of(after_s=before_s) if s["pid"] != pid],
                    seconds=TIMEOUT_S,
                )
                waits_s.append(fresh[0]["s"] - before_s)
            process.terminate()
    return {"number": number, "median_s": statistics.median(waits_s), "worst_s": max(waits_s)}


def _saver(trace: Trace, folder: Path) -> int | None:
    """Returns the process that trains now, once it has saved and reported a checkpoint."""
    latest = list(folder.glob("home/batches/*/*/checkpoints/*/latest"))
    steps = trace.read().lines
    if not latest or not steps:
        return None
    newest = steps[-1]["pid"]
    first_s = min(s["s"] for s in steps if s["pid"] == newest)
    saved_s = time.monotonic() - (time.time() - latest[0].stat().st_mtime)
    return newest if first_s < saved_s < steps[-1]["s"] - TOLD_AFTER_S else None


def thousand_jobs(*, num_jobs: int = JOBS) -> dict:
    """Measures the peak memory of a batch's parent process with many jobs, until 20 jobs are done."""
    with tempfile.TemporaryDirectory(prefix="ringmaster-bench-") as folder:
        trace = Path(folder, "trace.jsonl")
        model = {"factory": "tests.cluster.stubs:slow", "kwargs": {"job": "any", "trace": str(trace)}}
        template = {
            "model": model,
            "data": {"factory": "tests.cluster.stubs:points"},
            "loss": "tests.cluster.stubs:cross_entropy",
            "global_batch_size": 8,
            "num_steps": 20,
        }
        jobs = [{"name": f"j{i:04d}", "seed": i, **template} for i in range(num_jobs)]
        with _run(Path(folder), jobs) as process:
            models = Path(folder, "home/batches")
            until("jobs are done", lambda: len(list(models.glob("*/*/models/*"))) >= 20, seconds=2 * TIMEOUT_S)
            most_bytes = peak_bytes(process.pid)
            process.terminate()
    return {"num_jobs": num_jobs, "peak_mib": most_bytes / 2**20}


def peak_bytes(pid: int) -> int:
    """Returns the peak resident memory of a process."""
    (line,) = [row for row in Path(f"/proc/{pid}/status").read_text().splitlines() if row.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


class _run:
    """A batch that a child process trains on this machine; the process and all its children are ended on exit."""

    def __init__(self, folder: Path, jobs: list[dict]) -> None:
        self._folder, self._jobs = folder, jobs

    def __enter__(self) -> subprocess.Popen:
        batch = self._folder / "batch.json"
        batch.write_text(json.dumps({"name": "bench", "jobs": self._jobs}))
        environment = {
            **os.environ,
            **QUIET_ENVIRONMENT,
            "DO_NOT_TRACK": "true",
            "RINGMASTER_HOME": str(self._folder / "home"),
            "PYTHONPATH": str(ROOT),
            NODE: "bench",
        }
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", RUN, str(batch)], env=environment, cwd=ROOT, stdout=log, stderr=log
            )
        return self._process

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        family = [psutil.Process(self._process.pid), *psutil.Process(self._process.pid).children(recursive=True)]
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
        finally:
            for process in family:
                if process.is_running():
                    process.kill()
            self._process.wait()


def wrong_profiles(*, draws: int = DRAWS, say: object = print) -> dict:
    """Runs the real executor on gangs with a simulated clock: its makespan over that of the plan with the true speeds.

    12 jobs run on 8 devices; each speed has a normal error of 25 %, unknown until it is measured.
    """
    ratios = []
    for seed in range(draws):
        with tempfile.TemporaryDirectory(prefix="ringmaster-bench-") as folder:
            ratios.append(_one_draw(Path(folder), seed))
        say(f"wrong profiles, draw {seed}: {ratios[-1]:.4f}")
    return {"draws": draws, "mean": statistics.mean(ratios), "worst": max(ratios), "ratios": ratios}


def _one_draw(folder: Path, seed: int, *, num_steps: int = 1000) -> float:
    draw = random.Random(seed)
    profiles = {f"j{i}": tuple(_ladder(draw)) for i in range(12)}
    factors = {name: max(0.1, draw.gauss(1.0, 0.25)) for name in profiles}
    true_s = {
        (name, registry.dotted_path(p.technique), p.num_devices): p.step_s * factors[name]
        for name, options in profiles.items()
        for p in options
    }
    gangs = FakeEngine(true_s)
    jobs = [job(name, num_steps=num_steps) for name in profiles]
    policy = ReplanPolicy(every=0.1, worth_s=0.0)
    bench = clocked_bench(folder, jobs, gangs, make_plan=solve, policy=policy, profiles=profiles, num_devices=8)
    assert bench.run()
    rows = tuple(
        PlanningJob(
            name, tuple(Option(p.technique, p.num_devices, num_steps * p.step_s * factors[name]) for p in options)
        )
        for name, options in profiles.items()
    )
    ideal_s = solve(Problem("right", (PlanningNode("here", 8),), rows, switch_cost_s=0.1)).makespan_s
    return gangs.now_s / ideal_s


def _ladder(draw: random.Random):
    step_s, scales = draw.uniform(1.0, 12.0), draw.uniform(0.5, 0.95)
    for num_devices in (1, 2, 4, 8):
        yield profile("single" if num_devices == 1 else "ddp", num_devices, step_s / num_devices**scales)

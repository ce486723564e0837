"""Benchmarks of adapters that train together on one base: against sequential and parallel runs, and other trainers.

    python -m benchmarks.adapters [PART ...] [--rounds 3] [--tiny]

Parts: `engine` (CPU seconds of a step), `memory` (of a process), `processes` (whole processes, compared with peft and
Hugging Face's Trainer), `sweep` (a whole sweep of sixteen trials) and `prediction` (predicted step times, by
`benchmarks.groups`); the default is all of them. Contenders take turns, and ratios are formed within a round. Writes
benchmarks/results/adapters.json, which keeps the figures of other parts, and the section of docs/benchmarks.md between
the markers `<!-- adapters -->`. `--tiny` tests all parts in two minutes, and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from datetime import date
from itertools import chain
from pathlib import Path

from benchmarks.page import write_section

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "adapters.json"
ENDLESS = 100_000  # steps, for jobs that are tried and not trained completely


def main() -> None:
    """Measures the requested parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--rounds", type=int, default=3, help="of each contender")
    parser.add_argument("--more", action="store_true", help="rounds of `sweep` are added to those written before")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}. To fix: choose from {', '.join(PARTS)}")
    os.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "1"}  # before torch is imported
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for part in options.parts or PARTS:
        measured = PARTS[part](options, known.get(part, {}).get("found"))
        known[part] = {"date": date.today().isoformat(), "load": round(os.getloadavg()[0], 1), "found": measured}
        print(json.dumps(measured), flush=True)
        if not options.tiny:
            record(known)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def engine(options: argparse.Namespace, _: object) -> list[dict]:
    from benchmarks.adapters.jobs import TINY, Size
    from benchmarks.adapters.runtime import measure_engine

    sizes, counts, steps = ([TINY], [2, 8], 2) if options.tiny else ([Size(), Size(hidden=256)], [8, 16, 32], 5)
    return [_said(row) for row in measure_engine(sizes, counts, rounds=options.rounds, steps=steps)]


def memory(options: argparse.Namespace, _: object) -> list[dict]:
    from benchmarks.adapters.jobs import TINY, Size
    from benchmarks.adapters.runtime import measure_memory

    sizes = [TINY] if options.tiny else [Size(hidden=256), Size(hidden=1024)]
    rows = measure_memory(sizes, [1, 2] if options.tiny else [1, 16, 32], steps=2)
    # A step of sixteen adapters takes minutes at this size.
    large = (
        [] if options.tiny else measure_memory([Size(hidden=2048, layers=16)], [1, 16], steps=2, recomputes=["none"])
    )
    return [_said(row) for row in chain(rows, large)]


def processes(options: argparse.Namespace, _: object) -> dict:
    from benchmarks.adapters.baselines import measure_processes
    from benchmarks.adapters.jobs import TINY, Size

    size, num, steps = (TINY, 4, 4) if options.tiny else (Size(), 16, 100)
    rounds = 1 if options.tiny else options.rounds
    with tempfile.TemporaryDirectory() as folder:
        return measure_processes(Path(folder), size, num=num, steps=steps, rounds=rounds, ranks=(4, 8), say=say)


def sweep(options: argparse.Namespace, before: list[dict] | None) -> list[dict]:
    from benchmarks.adapters.jobs import TINY, Size
    from benchmarks.adapters.sweep import measure_sweeps

    size, steps = (TINY, 20) if options.tiny else (Size(), 150)
    rounds, known = 1 if options.tiny else options.rounds, (before or []) if options.more else []
    first = 1 + max((row["round"] for row in known), default=-1)
    with tempfile.TemporaryDirectory() as folder:
        found = measure_sweeps(Path(folder), size, steps=steps, rounds=rounds, say=say, few=options.tiny)
    return known + [{**row, "round": first + row["round"]} for row in found]


def prediction(options: argparse.Namespace, _: object) -> list[dict]:
    from benchmarks.adapters.jobs import TINY, Size, jobs_on, save_base
    from benchmarks.groups import compare
    from ringmaster.tasks.cluster import detect
    from ringmaster.tasks.profiling.preflight_runs import GangEnvironment
    from ringmaster.techniques.processes.forkserver_client import ForkServer

    size, num, ranks, sizes = (TINY, 4, (4,), [2, 3]) if options.tiny else (Size(), 24, (4, 8), [2, 4, 8, 12, 16, 24])
    cluster = detect({"cpu": len(os.sched_getaffinity(0))})
    with ForkServer() as server, tempfile.TemporaryDirectory() as folder:
        jobs = jobs_on(save_base(Path(folder), size), size, num=num, steps=ENDLESS, ranks=ranks)
        environment = GangEnvironment(server=server, devices=cluster.devices, cache_dir=Path(folder))
        return compare(jobs, environment=environment, sizes=sizes, cluster=cluster)


PARTS: dict[str, Callable[[argparse.Namespace, object], object]] = {
    "engine": engine,
    "memory": memory,
    "processes": processes,
    "sweep": sweep,
    "prediction": prediction,
}


def _said(row: dict) -> dict:
    say(str({key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()}))
    return row


def record(known: dict) -> None:
    """Writes the figures, and the section of the page between the markers."""
    from benchmarks.adapters.tables import page

    RESULTS.write_text(json.dumps(known, indent=1) + "\n")
    text = page(known, machine=f"{os.cpu_count()} cores, {platform.machine()}")
    write_section("adapters", text)


if __name__ == "__main__":
    main()

"""The figures and the picture of README.md, from what the benchmarks have recorded and from a run of the demo.

    python -m benchmarks.readme           # trains examples/mixed_batch.yaml twice: minutes
    python -m benchmarks.readme --table   # only writes the claims again, from benchmarks/results

The demo runs in a new home and then again in the same home; the README shows the second run, which has the speeds of
the first. Writes benchmarks/results/demo.json, docs/images/demo.svg, and the blocks of README.md between the markers of
`demo` and of `claims`.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.tasks.timeline.drawing import render_svg
from ringmaster.tasks.timeline.reader import TimelineReader
from ringmaster.tasks.timeline.run_timeline import RunTimeline

ROOT = Path(__file__).parents[1]
README, RESULTS = ROOT / "README.md", ROOT / "benchmarks" / "results"
BATCH, PICTURE = ROOT / "examples" / "mixed_batch.yaml", ROOT / "docs" / "images" / "demo.svg"
SATURN = "Saturn's MILP, 60 s"  # as the benchmark of planning names it
HEAD = "| what you do | by other means | with Ringmaster | measured by |\n|---|---|---|---|\n"


def main() -> None:
    """Writes the README's blocks and picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="do not train the demo")
    if not parser.parse_args().table:
        demo, run_timeline = run_demo()
        (RESULTS / "demo.json").write_text(json.dumps(demo, indent=1) + "\n")
        PICTURE.write_text(render_svg(run_timeline) + "\n")
    for name, text in blocks().items():
        marked = rf"(?s)(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        README.write_text(re.sub(marked, lambda m, text=text: m[1] + text + m[2], README.read_text()))


def blocks() -> dict[str, str]:
    """Returns the README's blocks by name, from the recorded results."""
    return {"demo": demo_text(_recorded("demo")), "claims": claims()}


def run_demo() -> tuple[dict[str, Any], RunTimeline]:
    """Trains the demo in a new home, and again in it; returns the figures and the timeline of the second run."""
    with tempfile.TemporaryDirectory(prefix="readme-") as folder:
        home, seconds = Path(folder), []
        for _ in range(2):
            load, started_s = os.getloadavg()[0], time.monotonic()
            done = subprocess.run(
                [sys.executable, "-m", "ringmaster.flows.entry", "run", BATCH, "--json"],
                env=os.environ | {"RINGMASTER_HOME": folder},
                stdout=subprocess.PIPE,
                check=True,
            )
            seconds.append(time.monotonic() - started_s)
        result = json.loads(done.stdout)
        newest = max((home / "batches" / result["batch"]).iterdir(), key=lambda run: run.stat().st_mtime)
        with closing(Database(file_url(newest / "journal.db"))) as database:
            run_timeline = TimelineReader(database, name=result["batch"]).read()
    keys = ("makespan_s", "current_practice_s", "is_measured")
    figures = {key: result[key] for key in keys} | {"gap": result["plan"]["gap"], "jobs": len(result["jobs"])}
    figures |= {"planned_s": result["plan"]["makespan_s"], "first_s": seconds[0], "second_s": seconds[1]}
    figures |= {"date": date.today().isoformat(), "cores": os.cpu_count(), "load_1min": round(load, 1)}
    return figures, replace(run_timeline, name=f"{figures['jobs']} models on {figures['cores']} devices")


def demo_text(demo: Mapping[str, Any]) -> str:
    """Returns the sentences below the picture."""
    runtimes = "measured" if demo["is_measured"] else "predicted"
    return (
        f"*`make demo` on {demo['cores']} CPU cores, {demo['date']}: {demo['makespan_s']:.0f} s. Planned: "
        f"{demo['planned_s']:.0f} s, within {100 * demo['gap']:.1f} % of the best plan\n"
        f"for the {runtimes} runtimes; one job after another on all devices: {demo['current_practice_s']:.0f} s.*\n"
    )


def claims() -> str:
    """Returns the table of what is better, from the results of the benchmarks that it names."""
    sweep, planning, adapters, tasks = (_recorded(name) for name in ("sweep", "planning", "adapters", "tasks"))
    seconds = {who: _median(sweep["rows"], who) for who in ("Ringmaster", "peft, one after another")}
    problem = next(row for row in planning["compared"] if row["family"] == "scale-30x32")
    plans = next(row for row in planning["rows"] if row["name"] == "preemptive, up to 30 x 32")
    whole = {who: statistics.median(times) for who, times in adapters["processes"]["found"]["seconds"].items()}
    preferences = next(row for row in tasks["rows"] if row["name"] == "preferences")
    rows = [
        (
            f"train a [sweep](examples/recipes/sweep.yaml) of {sweep['trials']} adapters",
            f"peft, one after another to the end: {seconds['peft, one after another']:.0f} s",
            f"{seconds['Ringmaster']:.0f} s: side by side, and ASHA stops weak ones",
            "`make bench-sweep`",
        ),
        (
            "plan 30 jobs on 32 GPUs (simulated total times)",
            f"one job after another {float(problem['current practice']):.1f}, "
            f"MILP of Saturn (VLDB 2024) {float(problem[SATURN]):.1f}",
            f"1.0, within {plans['gap_mean']:.1f} % of the optimum, planned in {plans['seconds_mean']:.1f} s",
            "`make bench-planning`",
        ),
        (
            f"train {adapters['processes']['found']['adapters']} adapters of one base",
            f"peft and Trainer, one process per core: {whole['peft + Trainer, a process a core']:.0f} s",
            f"{whole['a group a core']:.0f} s: in the same steps, with the same weights",
            "`make bench-adapters`",
        ),
        (
            "train a small Llama on preferences",
            f"TRL's DPOTrainer: {1000 * preferences['theirs_s']:.0f} ms a step",
            f"{1000 * preferences['ours_s']:.0f} ms, the same losses",
            "`python -m benchmarks.tasks`",
        ),
    ]
    return HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _median(rows: list[Mapping[str, Any]], who: str) -> float:
    return statistics.median(row["seconds"] for row in rows if row["who"] == who)


def _recorded(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return result


if __name__ == "__main__":
    main()

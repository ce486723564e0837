"""Benchmarks of execution: killed ranks, lost nodes, wrong profiles, predictions, short segments, many jobs and nodes,
and nodes that Slurm and Ray lend.

    python -m benchmarks.execution [MEASURE ...]

The latest figures of each measure are stored in benchmarks/results/execution.json, and form the table between the
markers in docs/benchmarks.md. Nodes are network namespaces as root, else plain processes.
"""

import argparse
import json
import os
from collections.abc import Callable
from datetime import date
from pathlib import Path

from benchmarks.execution import alone, calibration, engine_start, pool, scale, slurm_nodes
from benchmarks.page import write_section

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "execution.json"
MEASURES: dict[str, Callable[[], dict]] = {
    "deaths": alone.deaths,
    "lost-node": pool.lost_node,
    "wrong-profiles": alone.wrong_profiles,
    "calibration": calibration.calibration,
    "short-segments": pool.short_segments,
    "thousand-jobs": alone.thousand_jobs,
    "thousand-jobs-on-a-pool": pool.thousand_jobs,
    "many-nodes": scale.thousand_on_many_nodes,
    "slurm-nodes": slurm_nodes.sixteen_nodes,
    "slurm-start": engine_start.on_slurm,
    "ray-start": engine_start.on_ray,
}


def main() -> None:
    """Runs the requested measures, one after another, and records each as it ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measures", nargs="*", help="all, unless some are named")
    for name in parser.parse_args().measures or MEASURES:
        found = MEASURES[name]()
        print(f"{name}: {json.dumps(found)}", flush=True)
        record(name, found)


def record(name: str, found: dict) -> None:
    """Stores a measure's figures, and rewrites the table."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    machine = {"date": date.today().isoformat(), "cores": os.cpu_count(), "load_1min": round(os.getloadavg()[0], 1)}
    known[name] = {**found, **machine}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(known, indent=1) + "\n")
    write_section("execution", table(known))


def table(known: dict[str, dict]) -> list[str]:
    """Returns all figures as lines of markdown."""
    rows = [row for name in MEASURES if name in known for row in ROWS[name](known[name])]
    return ["| | measured | goal | when, cores, load |", "| --- | ---: | --- | --- |", *rows]


def _row(what: str, measured: str, goal: str, found: dict) -> str:
    return f"| {what} | {measured} | {goal} | {found['date']}, {found['cores']}, {found['load_1min']} |"


def _deaths(found: dict) -> list[str]:
    what = f"a rank dies, to its job's next step, local runner ({found['number']} deaths)"
    return [_row(what, f"{found['median_s']:.2f} s, worst {found['worst_s']:.2f} s", "<= 2 s", found)]


def _lost_node(found: dict) -> list[str]:
    return [
        _row(f"a node is lost ({found['nodes']}), until that is found", f"{found['found_s']:.1f} s", "<= 75 s", found),
        _row("from there, to its job's next step elsewhere", f"{found['elsewhere_s']:.1f} s", "<= 30 s", found),
    ]


def _wrong_profiles(found: dict) -> list[str]:
    what = f"profiles wrong by 25 %, over the plan with the true speeds ({found['draws']} draws)"
    return [_row(what, f"{found['mean']:.3f}, worst {found['worst']:.3f}", "<= 1.03", found)]


def _calibration(found: dict) -> list[str]:
    which = f"{found['runs']} runs of a batch of {found['median_makespan_s']:.0f} s, some while busy loops run"
    low, high = found["machine_loads"]
    predicted, planned, quiet = (found[f"error_{name}"] for name in ("predicted", "planned", "quiet"))
    errors = f"{predicted:.0%} (plan {planned:.0%}, without load {quiet:.0%})"
    rows = [
        _row(f"{which}: makespans in their 90 % interval", f"{found['inside']} of {found['runs']}", ">= 17", found),
        _row("the same: median width of the interval", f"±{found['median_width']:.0%}", "<= 30 %", found),
        _row(
            f"the same: error of the prediction, median, at loads of {low:.1f} to {high:.1f}", errors, "<= 25 %", found
        ),
    ]
    kinds = (("jobs", "ends of jobs"), ("early", "makespans, after a tenth of the run"), ("early_jobs", "and jobs"))
    for kind, name in kinds:
        if f"num_{kind}" in found:  # not in figures of earlier releases
            said = f"{found[f'inside_{kind}']} of {found[f'num_{kind}']}, off by {found[f'error_{kind}']:.0%} (median)"
            goal = "" if kind == "jobs" else "off by <= 10 %"
            rows.append(_row(f"the same: {name} in their interval", said, goal, found))
    return rows


def _short_segments(found: dict) -> list[str]:
    which = f"{found['segments']} segments of ten seconds, {found['jobs']} jobs, {found['nodes']} nodes"
    starts = f"{found['median_start_s']:.2f} s, 95 % within {found['p95_start_s']:.2f} s"
    idle = f"{found['idle']:.1%} ({found['makespan_s']:.0f} s for {found['planned_s']:.0f} s)"
    return [
        _row(f"{which}: from lease to start, median", starts, "<= 0.5 s", found),
        _row("the same: device time idle beyond the plan", idle, "< 5 %", found),
    ]


def _thousand_jobs(found: dict) -> list[str]:
    return [_peak(f"memory of `ringmaster run` for {found['num_jobs']:,} jobs, at most", found)]


def _thousand_on_a_pool(found: dict) -> list[str]:
    return [_peak(f"memory of the pool's executor for {found['num_jobs']:,} jobs, at most", found)]


def _many_nodes(found: dict) -> list[str]:
    what = f"{found['jobs']:,} jobs on {found['nodes']} simulated nodes of {found['devices'] // found['nodes']} devices"
    planned = f"{found['idle_beyond_plan']:.1%} ({found['makespan_s']:.0f} s for {found['planned_s']:.0f} s)"
    did = f"{found['plans_made']} plans, {found['statements_per_s']:.0f} statements/s"
    return [
        _row(f"{what}: processor of the controller", f"{found['share']:.0%} of a core ({did})", "< 20 %", found),
        _row("the same: of that, planning", f"{found['planning_share']:.0%} of a core", "", found),
        _row("the same: device time idle beyond the plan", planned, "< 5 %", found),
        _row("the same: the longest tick", f"{found['longest_tick_s']:.1f} s", "", found),
        _peak("the same: memory of the controller, at most", found),
    ]


def _slurm_nodes(found: dict) -> list[str]:
    what = f"{found['jobs']} jobs of {found['job_s']:.0f} s on {found['nodes']} slurmd with stub pilots"
    until = f"{found['first_node_s']:.1f} s, {found['all_nodes_s']:.1f} s"
    back = f"{found['given_back_s']:.1f} s (in all {found['done_s']:.0f} s)"
    spent = f"{found['controller_processor_s']:.0f} s, {found['worker_processor_s']:.0f} s"
    shares = f"{found['controller_share']:.0%}, {found['worker_share']:.0%} of a core"
    return [
        _row(f"{what}: until the first node serves, until all do", until, "", found),
        _row(
            "the same: from the last job's end until all are given back, less the idle time",
            back,
            "",
            found,
        ),
        _row("the same: processor of the controller, of Prefect's worker", f"{spent} ({shares})", "", found),
    ]


def _start_on(engine: str) -> Callable[[dict], list[str]]:
    def rows(found: dict) -> list[str]:
        imports = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in found["imports_s"].items())
        step = f"{found['first_step_s']:.1f} s; imports alone: {imports}"
        gaps = f"{found['gap_s']:.2f} s, worst {found['worst_gap_s']:.2f} s"
        return [
            _row(f"a node of {engine}: from its pilot to a job's first step, median", step, "<= imports + 5 s", found),
            _row("the same: from a segment's end to the next one's first step, median", gaps, "<= 0.5 s", found),
        ]

    return rows


def _peak(what: str, found: dict) -> str:
    return _row(what, f"{found['peak_mib']:.0f} MiB", "< 1,024 MiB", found)


ROWS: dict[str, Callable[[dict], list[str]]] = {
    "deaths": _deaths,
    "lost-node": _lost_node,
    "wrong-profiles": _wrong_profiles,
    "calibration": _calibration,
    "short-segments": _short_segments,
    "thousand-jobs": _thousand_jobs,
    "thousand-jobs-on-a-pool": _thousand_on_a_pool,
    "many-nodes": _many_nodes,
    "slurm-nodes": _slurm_nodes,
    "slurm-start": _start_on("Slurm"),
    "ray-start": _start_on("Ray"),
}


if __name__ == "__main__":
    main()

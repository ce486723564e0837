"""Benchmarks of lineage: seconds of queries on a lineage of 10,000 models; time and space of the tensor store.

    python -m benchmarks.lineage [--models 10000] [--only questions|store|adapters] [--megabytes 400]

Queries are whole commands (`ringmaster lineage show ...`), each in a process of its own, on an MLflow database that is
filled by rows. The store's ratios are those of a small Llama that is trained and then adapted in each way. Its rates
are those of a larger model of the same numbers in another order. Writes benchmarks/results/lineage.json and the
sections of docs/benchmarks.md between the markers `<!-- lineage -->`, `<!-- tensors -->` and `<!-- stored-adapters
-->`; the parts that --only excludes stay unchanged.
"""

import argparse
import json
import os
import random
import resource
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

from benchmarks.lineage.measuring import ROUNDS, machine, stamp
from benchmarks.page import write_section

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "lineage.json"
GOAL_S = 2.0
KINDS = ("fine-tuned", "lora", "distilled", "quantized", "pruned")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=10_000)
    parser.add_argument("--megabytes", type=int, default=400, help="of the model that rates are measured with")
    parser.add_argument("--only", choices=("questions", "store", "adapters"))
    arguments = parser.parse_args()
    scratch = ROOT / ".ringmaster"  # on a disk, as a home is
    scratch.mkdir(exist_ok=True)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    measured = [arguments.only] if arguments.only else ["questions", "store", "adapters"]
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        if "questions" in measured:
            results["questions"] = questions(Path(folder) / "home", arguments.models)
            write_section("lineage", question_lines(results["questions"], arguments.models))
        if "adapters" in measured:
            from benchmarks.lineage.adapters import adapter_lines, measure_adapters

            results["adapters"] = measure_adapters(Path(folder) / "adapters")
            write_section("stored-adapters", adapter_lines(results["adapters"]))
        if "store" in measured:
            from benchmarks.lineage.tensors import measure_family, measure_rates, measure_ratios, store_lines

            results["ratios"] = measure_ratios(Path(folder) / "ratios")
            results["family"] = measure_family(Path(folder) / "family")
            results["rates"] = measure_rates(Path(folder) / "rates", megabytes=arguments.megabytes)
            write_section("tensors", store_lines(results["ratios"], results["family"], results["rates"]))
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    stamped = {part: {"date": date.today().isoformat(), "machine": machine()} for part in measured}
    results["measured"] = {**results.get("measured", {}), **stamped}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def questions(home, num_models):
    """Returns rows of (query, wall seconds, CPU seconds), medians of ROUNDS."""
    ledger = home / "mlflow.db"
    fill(ledger, num_models)
    deep, base, first = f"team-{num_models % 97}", "base-0", "m-0000001"
    asked = {
        "show a model, its ancestors and descendants": ["show", deep],
        "show a base, all of whose descendants are thousands": ["show", base],
        "impact of a base": ["impact", base, "--json"],
        "impact of a data set": ["impact", "data-7", "--json"],
        "diff of what is recorded": ["diff", deep, base, "--no-tensors"],
        "bisect by a recorded metric": ["bisect", f"m-{num_models - 1:07d}", "--test", "loss<0.5", "--json"],
        "export everything as JSON": ["export"],
        "export everything as GraphML": ["export", "--format", "graphml"],
        "a name that is not there": ["show", f"{first}-not"],
    }
    rows = []
    for name, words in asked.items():
        wall, processor = zip(*(timed(words, home) for _ in range(ROUNDS)), strict=True)
        rows.append({"question": name, "wall_s": statistics.median(wall), "cpu_s": statistics.median(processor)})
        print(rows[-1], flush=True)
    return rows


def timed(words, home):
    """Returns (wall seconds, CPU seconds) of one command in a process of its own."""
    environment = {**os.environ, "RINGMASTER_HOME": str(home), "MLFLOW_TRACKING_URI": ""}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "ringmaster.flows.entry", "lineage", *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    wall_s, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode in (0, 2), done.stderr
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def fill(file, num_models):
    """Fills an MLflow database with `num_models` models: 20 bases, and models that mostly adapt recent ones."""
    from ringmaster.model_lineage import Ledger

    Ledger(f"sqlite:///{file}", artifact_root=file.parent / "mlartifacts").warm_up()
    draw = random.Random(0)
    tables = {name: [] for name in ("models", "tags", "params", "metrics", "versions", "aliases")}
    names, now_ms = {}, time.time_ns() // 1_000_000
    with sqlite3.connect(file) as connection:
        (experiment,) = connection.execute("SELECT experiment_id FROM experiments WHERE name = 'ringmaster'").fetchone()
        for i in range(num_models):
            model(i, experiment, draw, names, now_ms - (num_models - i) * 864_000, tables)
        connection.execute("PRAGMA foreign_keys = OFF")
        insert(connection, "logged_models", tables["models"])
        insert(connection, "logged_model_tags", tables["tags"])
        insert(connection, "logged_model_params", tables["params"])
        insert(connection, "logged_model_metrics", tables["metrics"])
        insert(connection, "registered_models", [{"name": name, "creation_time": now_ms} for name in names])
        insert(connection, "model_versions", tables["versions"])
        insert(connection, "registered_model_aliases", tables["aliases"])


def model(i, experiment, draw, names, created_ms, tables):
    """Adds the rows of model `i`, as recording it would."""
    id, is_base = f"m-{i:07d}", i < 20
    parents = [] if is_base else sorted({max(0, i - draw.randint(1, 400)) for _ in range(draw.choice([1, 1, 1, 2]))})
    name = f"base-{i}" if is_base else f"team-{i % 97}"
    kind = "pretrained" if is_base else "merged" if len(parents) > 1 else draw.choice(KINDS)
    version = names[name] = names.get(name, 0) + 1
    data = [
        {"name": f"data-{i % 50}", "digest": f"{i % 50:032x}", "source": "/data", "context": "training", "num_rows": 9}
    ]
    origin = {"job": name, "seed": 1, "plan": "plan-1/plan.json", "batch_run_id": f"{i:032x}", "num_steps": 1000}
    tags = {
        "ringmaster.kind": kind,
        "ringmaster.name": name,
        "ringmaster.parents": json.dumps([f"m-{parent:07d}" for parent in parents]),
        "ringmaster.datasets": json.dumps(data),
        "ringmaster.origin": json.dumps(origin),
        "ringmaster.tensors": f"{i:032x}",
        "mlflow.modelVersions": json.dumps([{"name": name, "version": str(version)}]),
        "mlflow.note.content": "A page of a model. " * 40,
    }
    of = {"model_id": id, "experiment_id": experiment}
    at = {"creation_timestamp_ms": created_ms, "last_updated_timestamp_ms": created_ms, "lifecycle_stage": "active"}
    run = f"{i:032x}"
    tables["models"].append(
        {**of, **at, "name": name, "artifact_location": f"file:///nowhere/{id}", "status": 2, "source_run_id": run}
    )
    tables["tags"] += [{**of, "tag_key": key, "tag_value": value} for key, value in tags.items()]
    tables["params"] += [{**of, "param_key": f"p{k}", "param_value": str(draw.random())} for k in range(10)]
    measured = {**of, "run_id": run, "metric_timestamp_ms": created_ms, "metric_step": 0}
    tables["metrics"] += [{**measured, "metric_name": key, "metric_value": 1.0} for key in ("loss", "accuracy")]
    tables["versions"].append({"name": name, "version": version, "creation_time": created_ms, "run_id": run})
    if draw.random() < 0.01:
        alias = f"champion-{version}" if version > 1 else "champion"
        tables["aliases"].append({"name": name, "alias": alias, "version": version})


def insert(connection, table, rows):
    """Inserts rows, given as mappings with equal keys, in one statement."""
    keys = list(rows[0]) if rows else []
    marks = ", ".join("?" * len(keys))
    if rows:
        columns = ", ".join(keys)
        connection.executemany(f"INSERT INTO {table} ({columns}) VALUES ({marks})", [tuple(r.values()) for r in rows])


def question_lines(rows, num_models):
    """Returns the table of the queries."""
    return [
        f"{stamp()} {num_models:,} models in MLflow's sqlite; whole commands, medians of {ROUNDS}.",
        "",
        "| question | seconds | of the processor | goal |",
        "| --- | ---: | ---: | --- |",
        *(f"| {r['question']} | {r['wall_s']:.2f} | {r['cpu_s']:.2f} | <= {GOAL_S:.0f} |" for r in rows),
    ]


if __name__ == "__main__":
    main()

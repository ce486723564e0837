"""Predicted seconds of a step, and outside the steps, compared with measured ones: real models, no trial before.

    python -m benchmarks.predictions [--only NAME ...] [--options 2] [--record FILE] [--replay FILE]

For each job, all candidates are predicted by a preflight in a new home. Some of each technique and gang size are then
trained for some steps on two CPU slots of this machine: the one that is predicted to be the quickest, and others drawn
at random. Other programs are taken out: of a step's seconds, those count for which the rank did not wait for a core,
and of all steps the least ratio of these to the processor time. `--record` stores what was measured, job by job;
`--replay` reads it, and only repeats the predictions, so that two versions of the predictions are compared on the same
measurements. Writes benchmarks/results/predicted_steps.json and the section of docs/benchmarks.md between the markers
`<!-- predicted-steps -->`; not after `--only`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pkgutil
import platform
import random
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.page import write_section
from ringmaster.codec import to_json
from ringmaster.tasks.batch.batch import parse_batch
from ringmaster.tasks.cluster import detect
from ringmaster.tasks.profiling.preflight_runs import GangEnvironment, preflight_jobs, slots_of
from ringmaster.techniques import Adapter, Job, registry
from ringmaster.techniques.estimates.device_rates import in_children
from ringmaster.techniques.preflight_result import Candidate
from ringmaster.techniques.processes.forkserver_client import ForkServer
from ringmaster.techniques.processes.order import TRIAL, GangOrder
from ringmaster.techniques.processes.ranks import join
from ringmaster.techniques.technique import GangShape
from ringmaster.techniques.training.trainer import WARM_UP_STEPS, Trainer

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "predicted_steps.json"
MIN_STEPS, MAX_STEPS, ENOUGH_S = 3, 12, 0.8  # steps that are measured, and seconds of them
SAME = 0.05  # the logarithm of a ratio of seconds that decides nothing
BESIDE = ("save_s", "evaluate_s", "export_s")
MINILM = {
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "vocab_size": 30522,
}
LLAMA = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "vocab_size": 20000,
}
VIT = {"patch_size": 8, "hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 12, "num_attention_heads": 3}
RESNET = {"embedding_size": 32, "hidden_sizes": [32, 64, 128, 256], "depths": [2, 2, 2, 2], "layer_type": "basic"}

Row = dict[str, Any]
"""{"job", "candidate", "measured": the fields of a profile, null where it could not train}."""


def jobs(data: Path) -> list[Job]:
    """Returns the jobs, on the data of examples/recipes in `data`, as a batch file would have them."""

    def job(name: str, architecture: str, config: dict[str, Any], spec: Any, **changes: Any) -> dict[str, Any]:
        model = {"architecture": architecture, "config": config}
        return {"name": name, "model": model, "data": spec, "num_steps": 100, "global_batch_size": 16, **changes}

    def text(name: str) -> dict[str, Any]:
        return {"path": str(data / name), "tokenizer": str(data / "tokenizer"), "seq_len": 128}

    texts, pairs, chats = text("docstrings.csv"), text("pairs.jsonl"), text("conversations.jsonl")
    preferences, images = text("preferences.jsonl"), {"path": str(data / "digits"), "kwargs": {"image_size": 64}}
    prose = {"source": "python-stdlib", "seq_len": 256, "vocab_size": 2048}
    bert, llama = "BertForSequenceClassification", "LlamaForCausalLM"
    frozen = {"freeze": ["*", "!classifier.*"]}
    every = [
        job("bert", bert, MINILM, texts),
        job("bert-lora", bert, MINILM, texts, global_batch_size=32),
        job("bert-bf16", bert, MINILM, texts, precision="bf16", global_batch_size=32),
        job("embeddings", "BertModel", MINILM, pairs, loss="contrastive", global_batch_size=32),
        job("llama", llama, LLAMA, prose, global_batch_size=8),
        job("chat", llama, LLAMA, chats),
        job("chat-lora", llama, LLAMA, chats),
        job("dpo-lora", llama, LLAMA, preferences, loss="dpo", global_batch_size=8),
        job("vit", "ViTForImageClassification", VIT, images),
        job("vit-head", "ViTForImageClassification", VIT, images, global_batch_size=32, **frozen),
        job("resnet", "ResNetForImageClassification", RESNET, images, global_batch_size=32),
    ]
    batch = parse_batch(json.dumps({"name": "predictions", "jobs": every}), folder=data, name="predictions")
    # A batch file refuses adapters of random weights, which train as quickly as those of others.
    return [replace(job, adapter=Adapter(rank=8)) if job.name.endswith("-lora") else job for job in batch.jobs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="the names of some jobs")
    parser.add_argument("--options", type=int, default=2, help="options measured of a technique and gang size")
    parser.add_argument("--record", type=Path, help="write what is measured to this file")
    parser.add_argument(
        "--data", type=Path, help="a folder with the recipes' data, which is made where it is not there"
    )
    parser.add_argument("--replay", type=Path, help="take what was measured from this file")
    given = parser.parse_args()
    kept = [json.loads(line) for line in given.replay.open()] if given.replay else None
    rows = compare(given.only, num_options=given.options, kept=kept, record=given.record, data=given.data)
    print(report(rows))
    if given.only is None:
        write(rows)


def compare(
    only: Sequence[str] | None, *, num_options: int, kept: list[Row] | None, record: Path | None, data: Path | None
) -> list[Row]:
    """Predicts all options of the jobs; measures some, or takes those that are `kept`."""
    torch.set_num_threads(1)  # a child that is forked from several threads waits for the others
    cluster, rows = detect({"cpu": 2}), []
    with TemporaryDirectory() as folder:
        data = data or Path(folder)
        recipe_data(data)
        every = [job for job in jobs(data) if not only or job.name in only]
        preload = tuple({f"transformers:{job.model.architecture}" for job in every})
        for name in preload:
            pkgutil.resolve_name(name)  # once, and not in each rank
        with ForkServer(preload=preload) as server:
            environment = GangEnvironment(server=server, devices=cluster.devices, cache_dir=Path(folder) / "cache")
            for job in every:
                started_s = time.monotonic()
                found, faults = preflight_jobs([job], environment=environment, cluster=cluster, notice=lambda _: None)
                inspected_s = time.monotonic() - started_s
                if faults:
                    print(f"{job.name}: {faults}", file=sys.stderr)
                    continue
                preflight = found[job.name]
                mine = [row for row in kept or () if row["job"] == job.name]
                chosen = drawn(preflight.candidates, num_options) if kept is None else preflight.candidates
                for candidate in chosen:
                    row: Row = {"job": job.name, "candidate": to_json(candidate), "inspected_s": inspected_s}
                    if kept is not None:
                        known = [old for old in mine if option(old["candidate"]) == option(row["candidate"])]
                        if not known:
                            continue
                        row["measured"] = known[0]["measured"]
                    else:
                        row["measured"] = measured(job, preflight.data, candidate, environment)
                    rows.append(row)
                    print(line(row), flush=True)
                    if record is not None:
                        with record.open("a") as file:
                            file.write(json.dumps(row) + "\n")
    return rows


def measured(job: Job, data: Mapping[str, Any], candidate: Candidate, environment: GangEnvironment) -> Row | None:
    """Trains some steps under an option; returns the seconds of one, and outside the steps, without other load."""
    with TemporaryDirectory() as folder:
        order = GangOrder(
            purpose=TRIAL,
            job=job,
            technique=registry.dotted_path(candidate.technique),
            config=candidate.config,
            slots=slots_of(environment.devices[: candidate.num_devices]),
            folder=folder,
            cache_dir=str(environment.cache_dir),
            data=data,
        )
        number = candidate.num_ranks
        try:
            found = in_children([partial(of_rank, order, rank, number) for rank in range(number)])
        except RuntimeError:
            return None
    num_threads = candidate.num_devices // number
    cpu_s = [max(each) / num_threads for each in zip(*(one["cpu_s"] for one in found), strict=True)]
    wall_s = [min(each) for each in zip(*(one["wall_s"] for one in found), strict=True)]
    ratio = max(min(wall / cpu for wall, cpu in zip(wall_s, cpu_s, strict=True)), 1.0)
    row = {"step_s": statistics.fmean(cpu_s) * ratio, "cpu_s": statistics.fmean(cpu_s), "ratio": ratio}
    return row | {key: max(one[key] for one in found) for key in found[0] if key not in ("cpu_s", "wall_s")}


def waited_s() -> float:
    """Returns the seconds for which this process's threads were ready and waited for a core."""
    files = Path("/proc/self/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[1]) for file in files) / 1e9


def of_rank(order: GangOrder, rank: int, num_ranks: int) -> Row:
    """Trains as one rank of a gang; returns the seconds of each step, and outside them."""
    technique = registry.load(order.technique)
    shape = GangShape(kind="cpu", num_devices=len(order.slots), memory_bytes=0)
    busy_s = time.process_time
    ranks = join(order, rank, num_ranks=num_ranks, axes=technique.mesh_shape(shape, order.config))
    trainer = Trainer(order, technique, ranks, beat=lambda: None)
    trainer.next_step = WARM_UP_STEPS  # whose samples are padded as far as those of any step
    trainer.step()
    wall_s, cpu_s = [], []
    while len(wall_s) < MIN_STEPS or not ranks.agree(sum(cpu_s) > ENOUGH_S or len(wall_s) >= MAX_STEPS):
        started_s, busy_from_s, waited_from_s = time.perf_counter(), busy_s(), waited_s()
        trainer.step()
        wall_s.append(time.perf_counter() - started_s - (waited_s() - waited_from_s))
        cpu_s.append(busy_s() - busy_from_s)
    seconds: dict[str, float] = {}
    if len(order.slots) > 1:  # outside the steps, techniques cost alike
        return {"wall_s": wall_s, "cpu_s": cpu_s}
    folder, begun_s = Path(order.folder), busy_s()
    trainer.save(folder / "checkpoints")
    seconds["save_s"] = busy_s() - begun_s
    begun_s = busy_s()
    trainer.export(folder / "model", folder / "checkpoints")
    seconds["export_s"] = busy_s() - begun_s
    begun_s = busy_s()
    trainer.evaluate(max_batches=1)
    seconds["evaluate_s"] = (busy_s() - begun_s) * trainer.num_evaluated_batches()
    return {"wall_s": wall_s, "cpu_s": cpu_s, **seconds}


def recipe_data(folder: Path) -> None:
    """Writes the data of examples/recipes into a folder, where it is not there yet."""
    if (folder / "tokenizer").exists():
        return
    sys.path.insert(0, str(ROOT / "examples" / "recipes"))
    import make_data

    make_data.DATA = folder
    make_data.main()


def drawn(candidates: Iterable[Candidate], number: int) -> list[Candidate]:
    """Returns the quickest-looking candidate of each technique and gang size, and others at random; up to `number`."""
    groups: dict[tuple[str, int], list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault((candidate.technique, candidate.num_devices), []).append(candidate)
    draw, found = random.Random(1), []
    for group in groups.values():
        ordered = sorted(group, key=lambda candidate: candidate.step_s or 0.0)
        found += [ordered[0], *draw.sample(ordered[1:], min(number - 1, len(ordered) - 1))]
    return found


def option(candidate: Row) -> tuple[Any, ...]:
    """Returns what names an option; stages that were cut by measured times may differ from run to run."""
    config = {key: value for key, value in candidate["config"].items() if key != "stage_layers"}
    return candidate["technique"], candidate["num_devices"], json.dumps(config, sort_keys=True)


def line(row: Row) -> str:
    candidate, measured = row["candidate"], row["measured"]
    name = f"{row['job']}: {candidate['technique']} x{candidate['num_devices']} {candidate['config']}"
    if measured is None or candidate.get("step_s") is None:
        return f"{name}: {'failed' if measured is None else 'not predicted'}"
    pairs = [f"{key} {candidate[key]:.3f}/{measured.get(key, 0.0):.3f}" for key in BESIDE if candidate.get(key)]
    step = f"{candidate['step_s']:.4f}/{measured['step_s']:.4f} = {candidate['step_s'] / measured['step_s']:.2f}"
    return f"{name}: step {step}; {', '.join(pairs)}"


def errors(rows: Iterable[Row], key: str = "step_s") -> list[float]:
    """Returns the logarithms of predicted over measured seconds."""
    return [
        math.log(row["candidate"][key] / row["measured"][key])
        for row in rows
        if row["measured"] and row["candidate"].get(key) and row["measured"].get(key)
    ]


def summary(logs: Sequence[float]) -> str:
    """Returns the number of errors, their median and 90 % size, and the median ratio, as cells of a table."""
    if not logs:
        return "0 | | | "
    sizes = sorted(math.exp(abs(each)) - 1 for each in logs)
    high = sizes[min(math.ceil(0.9 * len(sizes)), len(sizes)) - 1]
    return f"{len(logs)} | {statistics.median(sizes):.0%} | {high:.0%} | {math.exp(statistics.median(logs)):.2f}"


def report(rows: Sequence[Row]) -> str:
    """Returns tables of the errors by technique, by job, and of the seconds outside the steps."""
    techniques: dict[str, list[Row]] = {}
    of_job: dict[str, list[Row]] = {}
    for row in rows:
        name = f"`{row['candidate']['technique']}` x{row['candidate']['num_devices']}"
        techniques.setdefault(name, []).append(row)
        of_job.setdefault(row["job"], []).append(row)
    head = "options | median error | 90 % within | predicted / measured, median |"
    lines = [f"| technique | {head}", "|---|---|---|---|---|"]
    lines += [f"| {name} | {summary(errors(group))} |" for name, group in sorted(techniques.items())]
    lines += [
        f"| **all** | {summary(errors(rows))} |",
        "",
        f"| job | {head} inspection, s |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {summary(errors(group))} | {group[0]['inspected_s']:.1f} |" for name, group in of_job.items()
    ]
    lines += ["", f"| outside the steps | {head}", "|---|---|---|---|---|"]
    lines += [f"| {key} | {summary(errors(rows, key))} |" for key in BESIDE]
    orders = {name: order_of(group) for name, group in of_job.items()}
    known = {name: order for name, order in orders.items() if order is not None}
    if known:
        wrong = ", ".join(name for name, is_right in known.items() if not is_right) or "none"
        lines += ["", f"Two threads or two ranks: right in {sum(known.values())} of {len(known)} jobs; wrong: {wrong}."]
    return "\n".join(lines) + "\n"


def order_of(rows: Iterable[Row]) -> bool | None:
    """Returns whether `single` or `ddp` on two devices, each as it looks quickest, was predicted to be the quicker one.

    Options that take equally long to a twentieth have no order. None where one of them was not measured.
    """
    quickest: dict[str, Row] = {}
    for row in rows:
        name, number = row["candidate"]["technique"], row["candidate"]["num_devices"]
        if number == 2 and name in ("single", "ddp") and row["measured"] and row["candidate"].get("step_s"):
            known = quickest.setdefault(name, row)
            quickest[name] = min(known, row, key=lambda each: each["candidate"]["step_s"])
    if len(quickest) < 2:
        return None
    single, ranks = quickest["single"], quickest["ddp"]
    measured = math.log(single["measured"]["step_s"] / ranks["measured"]["step_s"])
    predicted = math.log(single["candidate"]["step_s"] / ranks["candidate"]["step_s"])
    return abs(measured) < SAME or measured * predicted > 0


def write(rows: Sequence[Row]) -> None:
    """Writes the rows as JSON, and the tables into the docs."""
    machine = f"{os.cpu_count()} cores, {platform.machine()}, shared"
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"date": date.today().isoformat(), "machine": machine, "rows": list(rows)}) + "\n")
    text = f"{date.today().isoformat()}, {machine}.\n\n{report(rows)}"
    write_section("predicted-steps", text)


if __name__ == "__main__":
    main()

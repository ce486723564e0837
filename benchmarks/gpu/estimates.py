"""Predicted seconds of a step and predicted memory on one GPU, compared with measured ones; no trial before.

    python benchmarks/gpu/estimates.py [--options 4] [--only NAME ...] [--tiny]

A preflight predicts all options of each job. Some are then trained for some steps: the quickest-looking and the one
that needs the least memory of each technique, and others drawn at random. Measured are the median seconds of a step,
and the peak of the allocator and of all that it had reserved. `--tiny` tests the script itself, also on a CPU. Writes
benchmarks/results/gpu_estimates.json, and the section of docs/benchmarks.md between `<!-- gpu-estimates -->`.
"""

import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path

import torch
from steps import LLAMA_1B, TINY, synchronize

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "gpu_estimates.json", ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- gpu-estimates -->", "<!-- /gpu-estimates -->"
LLAMA = {**LLAMA_1B, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
LLAMA |= {"num_key_value_heads": 12, "max_position_embeddings": 1024}
GPT2 = {"n_positions": 1024, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
WARM_UP_STEPS, MIN_STEPS, MAX_STEPS, ENOUGH_S = 3, 5, 20, 1.5


class Images:
    """Random images of random classes: speed does not depend on their values."""

    def __init__(self, size, classes):
        self.size, self.classes = size, classes

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        label = torch.randint(self.classes, (), generator=draw)
        return {"pixel_values": torch.randn((3, self.size, self.size), generator=draw), "labels": label}


def images(size, classes):
    """Returns a job's data: training and held-out samples."""
    return Images(size, classes), Images(size, classes)


def jobs(*, is_tiny):
    """Returns the jobs: language models, an adapter and image models, of about 100 to 200 million parameters."""
    from ringmaster.techniques import Adapter, DataSpec, Job, ModelSpec

    def job(name, architecture, config, data, rows, **changes):
        spec = DataSpec(factory=data[0], kwargs=data[1])
        model = ModelSpec(architecture=architecture, config=config)
        return Job(
            name=name, model=model, data=spec, global_batch_size=rows, num_steps=1000, clip_grad_norm=1.0, **changes
        )

    llama, gpt2, size = (TINY, {**GPT2, "n_embd": 64, "n_layer": 2, "n_head": 2}, 32) if is_tiny else (LLAMA, GPT2, 224)
    length = llama["max_position_embeddings"]
    text = ("steps:tokens", {"seq_len": length, "vocab_size": llama["vocab_size"]})
    gpt2_text = ("steps:tokens", {"seq_len": min(length, 1024), "vocab_size": 50257})
    pictures, head = ("estimates:images", {"size": size, "classes": 1000}), {"image_size": size, "num_labels": 1000}
    vit = head | ({"num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 2} if is_tiny else {})
    resnet = {"num_labels": 1000} | ({"depths": [1, 1], "hidden_sizes": [16, 32]} if is_tiny else {})
    llama_class, rows = "LlamaForCausalLM", 4 if is_tiny else 16
    return [
        job("llama-fp32", llama_class, llama, text, rows),
        job("llama-bf16", llama_class, llama, text, rows, precision="bf16"),
        job("llama-bf16-params", llama_class, llama, text, rows, precision="bf16-params"),
        job("llama-lora", llama_class, llama, text, rows, precision="bf16-params", adapter=Adapter(rank=16)),
        job("gpt2-bf16", "GPT2LMHeadModel", gpt2, gpt2_text, rows, precision="bf16"),
        job("vit-bf16", "ViTForImageClassification", vit, pictures, 4 * rows, precision="bf16"),
        job("resnet-50", "ResNetForImageClassification", resnet, pictures, 4 * rows),
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--options", type=int, default=4, help="options measured of a technique")
    parser.add_argument("--only", nargs="*", help="names of some jobs")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    rows = compare(arguments)
    print("\n".join(table(rows)))


def compare(arguments):
    """Returns the predicted and the measured values of each option that was measured."""
    sys.path.append(str(ROOT))
    # Preflight and ranks import the factories.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    from ringmaster.tasks.cluster import detect, gpus
    from ringmaster.tasks.profiling.preflight_runs import GangEnvironment, preflight_order, run_preflight
    from ringmaster.techniques.estimates.device_rates import in_children
    from ringmaster.techniques.processes.forkserver_client import ForkServer

    torch.set_num_threads(1)  # a child that is forked from several threads waits for the others
    cluster, rows = detect({"gpu": 1} if gpus() else {"cpu": 1}), []
    with tempfile.TemporaryDirectory() as folder, ForkServer(preload=()) as server:
        environment = GangEnvironment(server=server, devices=cluster.devices, cache_dir=Path(folder) / "cache")
        for job in jobs(is_tiny=arguments.tiny):
            if arguments.only and job.name not in arguments.only:
                continue
            started_s = time.monotonic()
            order = preflight_order([job], environment=environment, cluster=cluster)
            order = replace(order, forecast_all=True)
            found, faults = run_preflight(order, server=server, notice=lambda _: None, failed=lambda *_: None)
            preflight_s = time.monotonic() - started_s
            if faults:
                print(f"{job.name}: {faults[job.name]}", file=sys.stderr)
                continue
            if any(candidate.step_s is None for candidate in found[job.name].candidates):
                print((environment.cache_dir / "preflight.log").read_text()[-3000:], file=sys.stderr)
            for candidate in drawn(found[job.name].candidates, arguments.options):
                try:
                    (measured,) = in_children([partial(measure, job, found[job.name].data, candidate, environment)])
                except RuntimeError as error:
                    print(f"{job.name}: {candidate.technique} {candidate.config}: {error}", file=sys.stderr)
                    continue
                predicted = {"step_s": candidate.step_s, "device_bytes": candidate.memory.device_bytes}
                predicted["source"] = candidate.memory.source
                option = {"technique": candidate.technique, "config": dict(candidate.config)}
                rows.append({"job": job.name, **option, "predicted": predicted, "measured": measured})
                rows[-1]["preflight_s"] = preflight_s
                print("\n".join(lines(rows[-1:])), file=sys.stderr, flush=True)
                if not arguments.tiny:
                    record(rows)
    return rows


def drawn(candidates, number):
    """Returns the quickest-looking and the smallest candidate of each technique, and others at random."""
    draw, chosen, groups = random.Random(1), [], {}
    for candidate in candidates:
        groups.setdefault(candidate.technique, []).append(candidate)
    for group in groups.values():
        ends = [min(group, key=lambda c: c.step_s or 0.0), min(group, key=lambda c: c.memory.device_bytes)]
        mine = [c for i, c in enumerate(ends) if c not in ends[:i]]
        rest = [candidate for candidate in group if candidate not in mine]
        chosen += mine + draw.sample(rest, max(min(number - len(mine), len(rest)), 0))
    return chosen


def measure(job, data, candidate, environment):
    """Trains some steps; returns the median seconds of one, and the bytes that were allocated and reserved at most."""
    from ringmaster.tasks.profiling.preflight_runs import slots_of
    from ringmaster.techniques import registry
    from ringmaster.techniques.processes.order import TRIAL, GangOrder
    from ringmaster.techniques.processes.ranks import join
    from ringmaster.techniques.training.trainer import Trainer

    sys.path.insert(0, str(Path(__file__).parent))
    with tempfile.TemporaryDirectory() as folder:
        order = GangOrder(
            purpose=TRIAL,
            job=job,
            technique=registry.dotted_path(candidate.technique),
            config=candidate.config,
            slots=slots_of(environment.devices),
            folder=folder,
            cache_dir=str(environment.cache_dir),
            data=data,
        )
        technique = registry.load(order.technique)
        ranks = join(order, 0, num_ranks=1, axes={})
        trainer = Trainer(order, technique, ranks, beat=lambda: None)
        seconds = []
        while len(seconds) < WARM_UP_STEPS + MIN_STEPS or (
            len(seconds) < MAX_STEPS and sum(seconds[WARM_UP_STEPS:]) < ENOUGH_S
        ):
            synchronize()
            started_s = time.perf_counter()
            trainer.step()
            synchronize()
            seconds.append(time.perf_counter() - started_s)
        is_gpu = ranks.device.type == "cuda"
        name = torch.cuda.get_device_name() if is_gpu else "CPU"
        reserved_bytes = torch.cuda.max_memory_reserved() if is_gpu else 0
        step_s = statistics.median(seconds[WARM_UP_STEPS:])
        return {"step_s": step_s, "device_bytes": ranks.peak_bytes(), "reserved_bytes": reserved_bytes, "device": name}


def lines(rows):
    """Yields the rows of the table."""
    for row in rows:
        predicted, measured = row["predicted"], row["measured"]
        config = ", ".join(f"{key} {value}" for key, value in row["config"].items())
        step_s = predicted["step_s"] or math.nan
        yield (
            f"| {row['job']} | `{row['technique']}` {config} | {1e3 * step_s:.0f} | {1e3 * measured['step_s']:.0f} | "
            f"{step_s / measured['step_s']:.2f} | {predicted['device_bytes'] / 2**30:.2f} | "
            f"{measured['device_bytes'] / 2**30:.2f} | {predicted['device_bytes'] / measured['device_bytes']:.2f} | "
            f"{measured['reserved_bytes'] / 2**30:.2f} |"
        )


def table(rows):
    """Yields the section of the page."""
    steps = [
        abs(math.log(r["predicted"]["step_s"] / r["measured"]["step_s"])) for r in rows if r["predicted"]["step_s"]
    ]
    sizes = [abs(math.log(r["predicted"]["device_bytes"] / r["measured"]["device_bytes"])) for r in rows]
    median = math.exp(statistics.median(steps)) - 1 if steps else math.nan
    device, preflights_s = rows[0]["measured"]["device"], [row["preflight_s"] for row in rows]
    yield f"One {device}, {date.today()}: {len(rows)} options of {len({r['job'] for r in rows})} jobs. Median error of"
    yield f"a step {median:.0%}, of the memory"
    yield f"{math.exp(statistics.median(sizes)) - 1:.1%} (largest {math.exp(max(sizes)) - 1:.0%}); a preflight took"
    yield f"{preflights_s[0]:.0f} s for the first job, and {statistics.median(preflights_s):.0f} s in the median."
    yield ""
    yield "| job | option | predicted, ms | measured | ratio | predicted, GiB | allocated | ratio | reserved |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    yield from lines(rows)


def record(rows):
    """Writes the figures, and the section of the page between the markers."""
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps({"date": str(date.today()), "rows": rows}, indent=1) + "\n")
    before, rest = PAGE.read_text().split(BEGIN, 1)
    PAGE.write_text(before + "\n".join([BEGIN, *table(rows), END]) + rest.split(END, 1)[1])


if __name__ == "__main__":
    main()

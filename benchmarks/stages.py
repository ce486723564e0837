"""What it gains to balance a pipeline's stages by measured times of layers, against balancing them by parameters.

    python -m benchmarks.stages [--rounds 7]

Both cuts of each model are tried on two CPU slots in turn, under `1f1b` with the same micro-batches; what is compared
are seconds a step within a round. Writes benchmarks/results/stages.json and the part of docs/benchmarks.md between the
markers `<!-- stages -->`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
from dataclasses import replace
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tasks.cluster import detect
from tasks.profiling.stage import survey_jobs
from tasks.profiling.trials import Site, Trial, run_wave
from techniques import DataSpec, Job, ModelSpec, Profile
from techniques.engine.processes import ForkServer
from techniques.surveys import Candidate, Survey

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "stages.json", ROOT / "docs" / "benchmarks.md"
MICRO_BATCH, NUM_MICRO_BATCHES = 2, 8
LLAMA = {
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
MODELS = {
    "Llama, a head of 8,192 words": ModelSpec(architecture="LlamaForCausalLM", config=LLAMA),
    "GPT-2, tied ends": ModelSpec(architecture="GPT2LMHeadModel", config={"n_embd": 128, "n_layer": 8, "n_head": 4}),
    "Mixtral, 2 of 8 experts a token": ModelSpec(architecture="MixtralForCausalLM", config=LLAMA | EXPERTS),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    num_rounds = parser.parse_args().rounds
    rows = measure(num_rounds)
    write(rows, num_rounds=num_rounds)


def measure(num_rounds: int) -> list[dict[str, Any]]:
    """A row for each model: its cuts, and seconds a step under them by round."""
    cluster, rows = detect({"cpu": 2}), []
    preload = tuple(f"transformers:{model.architecture}" for model in MODELS.values())
    with TemporaryDirectory() as folder, ForkServer(preload=preload) as server:
        site = Site(server=server, devices=cluster.devices, cache_dir=Path(folder))
        for name, model in MODELS.items():
            job = Job(
                name="job",
                model=model,
                data=DataSpec(source="python-stdlib", seq_len=128, vocab_size=8192),
                techniques=("pipeline",),
                num_devices=(2,),
                global_batch_size=MICRO_BATCH * NUM_MICRO_BATCHES,
                num_steps=10,
            )
            surveys, faults = survey_jobs([job], site=site, cluster=cluster, notice=lambda _: None)
            assert not faults, faults
            by_time = _candidate(surveys[job.name])
            by_parameters = replace(by_time, config={k: v for k, v in by_time.config.items() if k != "stage_layers"})
            seconds = [
                (_step_s(site, job, surveys[job.name], by_parameters), _step_s(site, job, surveys[job.name], by_time))
                for _ in range(num_rounds)
            ]
            rows.append({"model": name, "by_time": by_time.config["stage_layers"], "seconds": seconds})
            print(json.dumps(rows[-1]))
    return rows


def _candidate(survey: Survey) -> Candidate:
    wanted = {"schedule": "1f1b", "recompute": "none", "micro_batch": MICRO_BATCH}
    return next(c for c in survey.candidates if wanted.items() <= c.config.items())


def _step_s(site: Site, job: Job, survey: Survey, candidate: Candidate) -> float:
    trial = Trial(fingerprint="it", job=job, data=survey.data, candidate=candidate)
    result = run_wave(site, [trial])["it"]
    assert isinstance(result, Profile), result
    return result.step_s


def write(rows: list[dict[str, Any]], *, num_rounds: int) -> None:
    """The result as JSON, and as a table in the docs."""
    machine = f"{os.cpu_count()} cores, {platform.machine()}, shared"
    result = {"date": date.today().isoformat(), "machine": machine, "rows": rows}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    lines = [_line(row) for row in rows]
    text = f"""{result["date"]}, {machine}; 8 layers on two slots of one core, `1f1b`,
{NUM_MICRO_BATCHES} micro-batches of {MICRO_BATCH} x 128 tokens; medians of {num_rounds} rounds, of ratios the range.

| model | layers a stage, by time | by parameters, ms a step | by time, ms a step | times as fast |
|---|---|---|---|---|
{chr(10).join(lines)}
"""
    page = PAGE.read_text()
    PAGE.write_text(re.sub(r"(?s)(<!-- stages -->\n).*?(<!-- /stages -->)", lambda m: m[1] + text + m[2], page))


def _line(row: dict[str, Any]) -> str:
    ratios = [before_s / after_s for before_s, after_s in row["seconds"]]
    before_s, after_s = (statistics.median(column) for column in zip(*row["seconds"], strict=True))
    cut = " + ".join(map(str, row["by_time"]))
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return f"| {row['model']} | {cut} | {before_s * 1e3:.0f} | {after_s * 1e3:.0f} | {spread} |"


if __name__ == "__main__":
    main()

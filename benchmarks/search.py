"""The quality of a search that measures a quarter of the options, compared with measuring every option.

    python -m benchmarks.search [--rounds 3] [--record FILE] [--replay FILE]

Every option of some small jobs on two CPU slots of this machine is measured, in several rounds of all of them in turn.
Then the search of a long job is replayed against the medians. `--record` stores the measurements; `--replay` reads
them. Writes benchmarks/results/search.json and the section of docs/benchmarks.md between the markers `<!-- search -->`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.page import write_section
from ringmaster.codec import digest, from_json, to_json
from ringmaster.tasks.cluster import detect
from ringmaster.tasks.profiling.preflight_runs import GangEnvironment, preflight_jobs
from ringmaster.tasks.profiling.search import ConfigSearch, ProfilingFailure, Result, quickest_looking_first, worthwhile
from ringmaster.tasks.profiling.trials import ProfilingTrial, run_wave
from ringmaster.techniques import DataSpec, Job, ModelSpec, Profile
from ringmaster.techniques.preflight_result import Candidate
from ringmaster.techniques.processes.forkserver_client import ForkServer
from ringmaster.techniques.profiles import ProfileKey

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "search.json"
LLAMA = ModelSpec(
    architecture="LlamaForCausalLM",
    config={
        "hidden_size": 128,
        "intermediate_size": 344,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
)
GPT2 = ModelSpec(architecture="GPT2LMHeadModel", config={"n_embd": 192, "n_layer": 4, "n_head": 4})
SHORT = Job(
    name="Llama, 64 tokens",
    model=LLAMA,
    data=DataSpec(source="python-stdlib", seq_len=64, vocab_size=512),
    num_devices=(2,),
    global_batch_size=16,
    num_steps=10,
)
LONG = replace(
    SHORT,
    name="Llama, 512 tokens",
    data=replace(SHORT.data, seq_len=512, vocab_size=1024),
    global_batch_size=4,
)
TIED = replace(
    SHORT, name="GPT-2, 4,096 words", model=GPT2, data=replace(SHORT.data, vocab_size=4096), global_batch_size=8
)
JOBS = (SHORT, LONG, TIED)

KEY = ProfileKey(fingerprint="it", speed_class="", device_kind="")  # of a trial that is not stored

Row = dict[str, Any]
"""{"job", "candidate", "seconds": one value a round, null where the candidate could not train}."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--record", type=Path, help="write what is measured to this file")
    parser.add_argument("--replay", type=Path, help="take what was measured from this file")
    given = parser.parse_args()
    rows = [json.loads(line) for line in given.replay.open()] if given.replay else measure(given.rounds)
    if given.record:
        given.record.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    write(rows)


def measure(num_rounds: int) -> list[Row]:
    """Measures every candidate of each job; returns a row for each."""
    cluster, rows = detect({"cpu": 2}), []
    preload = tuple({f"transformers:{job.model.architecture}" for job in JOBS})
    with TemporaryDirectory() as folder, ForkServer(preload=preload) as server:
        environment = GangEnvironment(server=server, devices=cluster.devices, cache_dir=Path(folder))
        for job in JOBS:
            named = replace(job, name="job")
            preflights, faults = preflight_jobs(
                [named], environment=environment, cluster=cluster, notice=lambda _: None
            )
            assert not faults, faults
            preflight = preflights["job"]
            mine = [{"job": job.name, "candidate": to_json(c), "seconds": []} for c in preflight.candidates]
            for _ in range(num_rounds):
                for row, candidate in zip(mine, preflight.candidates, strict=True):
                    trial = ProfilingTrial(key=KEY, job=named, data=preflight.data, candidate=candidate)
                    result = run_wave(environment, [trial])[KEY.fingerprint]
                    row["seconds"].append(result.step_s if isinstance(result, Profile) else None)
            for row in mine:
                c = row["candidate"]
                print(job.name, c["technique"], c["config"], c["step_s"], row["seconds"], flush=True)
            rows += mine
    return rows


def step_s(row: Row) -> float | None:
    """Returns the median of its rounds, or None where one of them failed."""
    seconds = row["seconds"]
    return None if None in seconds else statistics.median(seconds)


def replay(rows: Sequence[Row]) -> tuple[float, float, int]:
    """Returns, from one job's rows, seconds of the best option and of the search's option, and the number of trials."""
    candidates = [from_json(Candidate, row["candidate"]) for row in rows]
    table = {digest(c): step_s(row) for c, row in zip(candidates, rows, strict=True)}
    groups: dict[tuple[str, int], list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault((candidate.technique, candidate.num_devices), []).append(candidate)
    searches = []
    for group in groups.values():
        ordered = quickest_looking_first(group)
        searches.append(ConfigSearch(key="it", job="it", candidates=ordered, fingerprints=[digest(c) for c in ordered]))
    known: dict[str, Result] = {}
    while wanted := [w for s in worthwhile(searches) if (w := s.next_trial()) is not None]:
        for fingerprint, candidate in wanted:
            known[fingerprint] = _result(candidate, table[fingerprint])
        for search in searches:
            search.take(known)
    best_s = min(seconds for seconds in table.values() if seconds is not None)
    found_s = min(result.step_s for result in known.values() if isinstance(result, Profile))
    return best_s, found_s, len(known)


def _result(candidate: Candidate, seconds: float | None) -> Result:
    if seconds is None:
        return ProfilingFailure(kind="failed", message="it failed when the table was made")
    return Profile(
        technique=candidate.technique,
        config=candidate.config,
        num_devices=candidate.num_devices,
        num_ranks=candidate.num_ranks,
        step_s=seconds,
        peak_bytes=1,
    )


def write(rows: Sequence[Row]) -> None:
    """Writes the measurements as JSON, and the search's results as a table in the docs."""
    machine = f"{os.cpu_count()} cores, {platform.machine()}, shared"
    of_job: dict[str, list[Row]] = {}
    for row in rows:
        of_job.setdefault(row["job"], []).append(row)
    lines = [_line(name, mine) for name, mine in of_job.items()]
    num_rounds = len(rows[0]["seconds"])
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"date": date.today().isoformat(), "machine": machine, "rows": list(rows)}) + "\n")
    text = f"""{date.today().isoformat()}, {machine}; {num_rounds} round(s), medians.

| job | options | tried | best, ms a step | found, ms | behind | predictions, off by |
|---|---|---|---|---|---|---|
{chr(10).join(lines)}
"""
    print(text)
    write_section("search", text)


def _line(name: str, rows: Sequence[Row]) -> str:
    best_s, found_s, num_trials = replay(rows)
    logs = [math.log(seconds / row["candidate"]["step_s"]) for row in rows if (seconds := step_s(row)) is not None]
    spread = math.exp(statistics.pstdev(logs)) - 1
    behind = f"{found_s / best_s - 1:.1%}"
    return (
        f"| {name} | {len(rows)} | {num_trials} | {best_s * 1e3:.1f} | {found_s * 1e3:.1f} | {behind} | {spread:.0%} |"
    )


if __name__ == "__main__":
    main()

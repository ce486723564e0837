"""How good is a search that measures a quarter of what there is? Every option of a small Llama on the CPU slots of this
machine is measured once; then the search is replayed against that table.

    python benchmarks/search.py [--record FILE]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory

from tasks.cluster import detect
from tasks.profiling.search import Failure, Result, Search, quickest_looking_first, worthwhile
from tasks.profiling.stage import survey_jobs
from tasks.profiling.trials import Site, Trial, run_wave
from techniques import DataSpec, Job, ModelSpec, Profile
from techniques.engine.processes import ForkServer
from techniques.surveys import Candidate
from techniques.values import digest, from_json, to_json

JOB = Job(
    name="llama",
    model=ModelSpec(
        architecture="LlamaForCausalLM",
        config={
            "hidden_size": 128,
            "intermediate_size": 344,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
    ),
    data=DataSpec(source="python-stdlib", seq_len=64, vocab_size=512),
    techniques=("ddp", "tensor", "context", "pipeline"),
    num_devices=(2,),
    global_batch_size=16,
    num_steps=10,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", type=Path, help="write the table of measured options to this file")
    arguments = parser.parse_args()
    rows = measure_all()
    if arguments.record:
        arguments.record.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    for num_devices, (best_s, found_s, num_trials, num_options) in replay(rows).items():
        print(
            f"{num_devices} slots: the search tried {num_trials} of {num_options} options and found "
            f"{found_s * 1e3:.1f} ms a step; the best takes {best_s * 1e3:.1f} ms: {found_s / best_s - 1:+.1%}"
        )


def measure_all() -> list[dict]:
    """A row for each candidate: {"candidate", "step_s"}; step_s is None where it could not train."""
    cluster = detect({"cpu": 2})
    rows = []
    with TemporaryDirectory() as folder, ForkServer(preload=["transformers:LlamaForCausalLM"]) as server:
        site = Site(server=server, devices=cluster.devices, cache_dir=Path(folder))
        surveys, faults = survey_jobs([JOB], site=site, cluster=cluster, notice=print)
        assert not faults, faults
        survey = surveys[JOB.name]
        for candidate in survey.candidates:
            trial = Trial(fingerprint="it", job=JOB, data=survey.data, candidate=candidate)
            result = run_wave(site, [trial])["it"]
            step_s = result.step_s if isinstance(result, Profile) else None
            rows.append({"candidate": to_json(candidate), "step_s": step_s})
            print(candidate.technique, candidate.num_devices, dict(candidate.config), candidate.step_s, step_s)
    return rows


def replay(rows: list[dict]) -> dict[int, tuple[float, float, int, int]]:
    """By number of devices: seconds of the best option, and of the one that was found; trials, and options."""
    candidates = [from_json(Candidate, row["candidate"]) for row in rows]
    table = {digest(c): row["step_s"] for c, row in zip(candidates, rows, strict=True)}
    groups: dict[tuple[str, int], list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault((candidate.technique, candidate.num_devices), []).append(candidate)
    searches = []
    for group in groups.values():
        ordered = quickest_looking_first(group)
        searches.append(
            Search(key="it", job="it", candidates=ordered, fingerprints=[digest(c) for c in ordered], is_thorough=True)
        )
    known: dict[str, Result] = {}
    tried: list[Candidate] = []
    while wanted := [w for s in worthwhile(searches) if (w := s.next_trial(known)) is not None]:
        for fingerprint, candidate in wanted:
            known[fingerprint] = _result(candidate, table[fingerprint])
            tried.append(candidate)
        for search in searches:
            search.next_trial(known)
    found = {}
    for num_devices in sorted({c.num_devices for c in candidates}):
        measured = [s for c in candidates if c.num_devices == num_devices and (s := table[digest(c)]) is not None]
        seen = [s for c in tried if c.num_devices == num_devices and (s := table[digest(c)]) is not None]
        num_options = sum(c.num_devices == num_devices for c in candidates)
        found[num_devices] = (min(measured), min(seen), sum(c.num_devices == num_devices for c in tried), num_options)
    return found


def _result(candidate: Candidate, step_s: float | None) -> Result:
    if step_s is None:
        return Failure(kind="failed", message="it failed when the table was made")
    return Profile(
        technique=candidate.technique,
        config=candidate.config,
        num_devices=candidate.num_devices,
        num_ranks=candidate.num_ranks,
        step_s=step_s,
        peak_bytes=1,
    )


if __name__ == "__main__":
    main()

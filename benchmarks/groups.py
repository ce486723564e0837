"""Predicted profiles of groups that share a base, compared with a trial of each size.

    python -m benchmarks.groups [--jobs 16] [--sizes 2 4 8 12 16] [--tokens 64] [--hidden 128] [--devices 2]

The jobs are profiled as by `ringmaster profile`: alone, and in up to three sizes of groups. Then a new trial of
each size runs, on all devices at once, and is compared with the prediction, also for sizes that profiling did not
measure.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringmaster.tasks.cluster import Cluster, detect
from ringmaster.tasks.profiling.group_layouts import ONE_DEVICE, Group, classes
from ringmaster.tasks.profiling.group_search import GroupSearch, group_searches
from ringmaster.tasks.profiling.preflight_runs import GangEnvironment
from ringmaster.tasks.profiling.profile_store import ProfileStore, speed_key
from ringmaster.tasks.profiling.stage import ProfilingPolicy, profile_jobs
from ringmaster.tasks.profiling.trials import run_wave
from ringmaster.techniques import Adapter, DataSpec, EvaluationSpec, Job, ModelSpec, OptimizerSpec, Profile
from ringmaster.techniques.processes.forkserver_client import ForkServer


def main() -> None:
    """Prints a line for each size, and JSON at the end."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=16)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4, 8, 12, 16])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8])
    parser.add_argument("--devices", type=int, default=2)
    options = parser.parse_args()
    jobs = [job_of(i, options) for i in range(options.jobs)]
    cluster = detect({"cpu": options.devices})
    with ForkServer(preload=["transformers:LlamaForCausalLM"]) as server, tempfile.TemporaryDirectory() as folder:
        environment = GangEnvironment(server=server, devices=cluster.devices, cache_dir=Path(folder))
        print(json.dumps(compare(jobs, environment=environment, sizes=options.sizes, cluster=cluster)))


def compare(
    jobs: Sequence[Job], *, environment: GangEnvironment, sizes: Sequence[int], cluster: Cluster
) -> list[dict[str, float]]:
    """Returns for each size the seconds of a step, of the start and of the end, and bytes; predicted and measured."""
    kept: dict[str, Any] = {}
    known = ProfileStore(find=lambda names: {name: kept[name] for name in names if name in kept}, keep=kept.__setitem__)
    profiled = profile_jobs(
        jobs,
        environment=environment,
        cluster=cluster,
        profile_store=known,
        notice=tell,
        policy=ProfilingPolicy.THOROUGH,
    )
    preflights = profiled.preflights
    keys = {
        job.name: speed_key(job, preflights[job.name].data, facts=preflights[job.name].facts) for job in profiled.jobs
    }
    (members,) = classes(profiled.jobs, preflights, profiled.profiles, keys=keys)
    (search,) = group_searches({ONE_DEVICE: [members]}, cluster=cluster, num_nodes=1)
    search.take(known.results(list(search.tried)))
    tried = {len(group) for name, group in search.tried.items() if name in search.results}
    return [row_of(search, members[:size], environment=environment, is_fitted=size in tried) for size in sizes]


def row_of(search: GroupSearch, group: Group, *, environment: GangEnvironment, is_fitted: bool) -> dict[str, float]:
    """Returns the row of one size; is_fitted: whether the prediction is based on a measurement of this size."""
    predicted = search.laws.profile(group, is_measured=False)
    trial = search.trial(group)
    measured = run_wave(environment, [trial])[trial.fingerprint]
    assert isinstance(measured, Profile), measured
    row = {
        "size": len(group),
        "is_fitted": is_fitted,
        "alone_s": sum(solo.profile.step_s for solo in group),
        "predicted_s": predicted.gang_step_s,
        "measured_s": measured.step_s,
        "off": predicted.gang_step_s / measured.step_s - 1,
        "startup_off_s": predicted.startup_s - measured.startup_s,
        "peak_off": predicted.peak_bytes / measured.peak_bytes - 1,
        "predicted_end_s": sum(solo.end_s for solo in group),
        "measured_end_s": measured.save_s + measured.evaluate_s + measured.export_s,
    }
    tell(json.dumps({key: round(value, 4) for key, value in row.items()}))
    return row


def tell(line: str) -> None:
    """Prints a line to stderr."""
    print(line, file=sys.stderr)


def job_of(i: int, options: argparse.Namespace) -> Job:
    """Returns a small adapter job of a small model, long enough for trials to pay."""
    hidden = options.hidden
    config = {"hidden_size": hidden, "intermediate_size": 8 * hidden // 3 // 8 * 8, "num_hidden_layers": 4}
    config |= {"num_attention_heads": max(hidden // 64, 1), "vocab_size": 2048}
    return Job(
        name=f"adapter-{i:02}",
        model=ModelSpec(architecture="LlamaForCausalLM", config=config),
        adapter=Adapter(rank=options.ranks[i % len(options.ranks)]),
        data=DataSpec(source="python-stdlib", seq_len=options.tokens),
        optimizer=OptimizerSpec(lr=1e-4 * (i + 1)),
        global_batch_size=1,
        num_steps=100_000,
        evaluation=EvaluationSpec(max_batches=4),
    )


if __name__ == "__main__":
    main()

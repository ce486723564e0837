"""The same sweep by Ray Tune with ASHA: `train` of peft_sweep.py, as many trials at a time as there are cores.

python benchmarks/sweep/ray_sweep.py SWEEP.json
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"RAY_AIR_NEW_OUTPUT": "0", "RAY_DEDUP_LOGS": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler


def trial(config: dict[str, Any]) -> None:
    """Trains one configuration on one core, and reports its loss at every rung."""
    import torch
    from peft_sweep import Sweep, train

    torch.set_num_threads(1)
    sweep = Sweep(**config["sweep"])

    def report(step: int, loss: float) -> None:
        tune.report({"loss": loss, "step": step, "name": config["name"]})

    train(sweep, config["name"], config["values"], report=report)


def main() -> None:
    """Runs the sweep."""
    folder = Path(__file__).parent
    sweep = json.loads(Path(sys.argv[1]).read_text())
    first, factor = sweep["evaluated_at"][0], sweep["evaluated_at"][1] // sweep["evaluated_at"][0]
    cores = len(os.sched_getaffinity(0))
    environment = {"env_vars": {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}}
    ray.init(
        num_cpus=cores, include_dashboard=False, runtime_env=environment, logging_level=logging.WARNING,
        log_to_driver=False,
    )  # fmt: skip
    names = [f"trial-{number:02}" for number in range(len(sweep["configurations"]))]
    space = tune.grid_search(
        [
            {"sweep": sweep, "name": name, "values": values}
            for name, values in zip(names, sweep["configurations"], strict=True)
        ]
    )
    tuner = tune.Tuner(
        tune.with_resources(lambda config: trial(config["trial"]), {"cpu": 1}),
        param_space={"trial": space},
        tune_config=tune.TuneConfig(
            metric="loss",
            mode="min",
            scheduler=ASHAScheduler(
                time_attr="step", max_t=sweep["num_steps"], grace_period=first, reduction_factor=factor
            ),
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(storage_path=sweep["folder"], name="ray", verbose=0),
    )
    found = tuner.fit()
    assert not found.errors, found.errors
    done = [result.metrics for result in found if result.metrics["step"] >= sweep["num_steps"]]
    best = min(done, key=lambda metrics: metrics["loss"])
    model = str(Path(sweep["folder"]) / best["name"])
    print(json.dumps({"best": best["name"], "loss": best["loss"], "model": model}))


if __name__ == "__main__":
    main()

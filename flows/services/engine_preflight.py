"""Checks, before a pool starts, of the engine that is to lend its nodes: Slurm's answers, or those of a Ray cluster."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ringmaster.flows.services.engine_options import EngineOptions
from ringmaster.tasks.execution.engine import RAY, SLURM


def engine_faults(engine: EngineOptions, *, home: Path) -> Sequence[str]:
    """Returns what is wrong with what the engine would be asked; asks it, which takes seconds. home: of the pool."""
    if engine.faults(has_server=True):  # these come first: an engine cannot be asked with options that make no sense
        return []
    if engine.name == SLURM:
        return _slurm_faults(engine, home=home)
    if engine.name == RAY and engine.address:
        from ringmaster.tasks.pool.providers.ray import ray_engine as ray_preflight

        return ray_preflight.faults(engine.environment(), log=home / "ray.log")
    return []


def _slurm_faults(engine: EngineOptions, *, home: Path) -> Sequence[str]:
    from ringmaster.flows.pool.slurm.configuration import SlurmJobConfiguration
    from ringmaster.tasks.pool.providers.slurm.commands import Slurm
    from ringmaster.tasks.pool.providers.slurm.slurm_engine import JobRequest, faults

    given = {**_defaults(engine.work_pool_template), **engine.job_variables()}

    def options(request: JobRequest) -> Sequence[str]:
        asked = {"partition": request.partition, "time": request.time, "gres": request.gres}
        job = SlurmJobConfiguration(**{**given, **{name: value or None for name, value in asked.items()}})
        return job.arguments(flow_run="preflight", log_dir=home / "slurm")

    wanted = {name: given.get(name) or "" for name in ("partition", "time", "gres")}
    kind, _, number = engine.devices.partition(":")
    request = JobRequest(
        **wanted,
        num_gpus=(int(number) if number.isdigit() else 1) if kind == "gpu" else 0,
        has_whole_node=bool(given.get("exclusive", True)),
        script=str(given.get("batch_script", "")),
    )
    return faults(Slurm(), request, options=options)


def _defaults(template: Path | None) -> Mapping[str, Any]:
    """Returns the defaults of a base job template that were set."""
    if template is None:
        return {}
    properties = json.loads(template.read_text()).get("variables", {}).get("properties", {})
    return {name: each["default"] for name, each in properties.items() if each.get("default") is not None}

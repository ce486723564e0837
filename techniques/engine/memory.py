"""How much memory an option will need, before anything runs: the peak of its rank's rehearsed step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from techniques import registry
from techniques.engine.models import ModelFacts
from techniques.engine.rehearsal import Rehearsed, Scene
from techniques.engine.rehearsals import Fault, rehearse_all
from techniques.job import Job
from techniques.surveys import ARITHMETIC, REHEARSED, Forecast
from techniques.technique import Config, GangShape, Technique, training_state_bytes

# What ranks of these axes hold differs; of others they are alike.
UNEQUAL_AXES = ("pp", "cp")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A job with what a survey found out about it.

    data: the JSON form of the prepared data. techniques: dotted paths by name. at_once: rehearsals side by side.
    """

    job: Job
    data: Mapping[str, Any]
    facts: ModelFacts
    techniques: Mapping[str, str]
    cache_dir: str
    at_once: int = 1


Choice = tuple[Technique, Config, GangShape]


def forecast_memory(workload: Workload, choices: Sequence[Choice]) -> list[Forecast]:
    """Bytes per device and of host memory that each choice will need, with how they were found.

    Where a technique or model cannot be rehearsed: the technique's own arithmetic for the state, and the activations
    of one device alone, of which this one has the share that it computes.
    """
    scenes = [list(_scenes(workload, choice)) for choice in choices]
    whole = [s for mine, choice in zip(scenes, choices, strict=True) for s in mine if not _few_do(workload, choice)]
    few = [s for mine, choice in zip(scenes, choices, strict=True) for s in mine if _few_do(workload, choice)]
    results: dict[int, Rehearsed | Fault] = {}
    for group, num_layers in ((whole, 0), (few, workload.facts.num_layers)):
        found = rehearse_all(group, num_layers=num_layers, at_once=workload.at_once)
        results |= {id(scene): result for scene, result in zip(group, found, strict=True)}
    return [
        _forecast(workload, choice, [results[id(scene)] for scene in mine])
        for choice, mine in zip(choices, scenes, strict=True)
    ]


def single_scene(workload: Workload, *, num_rows: int, recompute: str = "none") -> Scene:
    """The job on one device, `num_rows` at once: what its model computes and keeps."""
    shape = GangShape(kind="cpu", num_devices=1, memory_bytes=0)
    config = {"micro_batch": num_rows, "recompute": recompute}
    job = replace(workload.job, global_batch_size=num_rows)
    path = registry.BUILTIN["single"]
    return Scene(job=job, data=workload.data, technique=path, config=config, shape=shape, cache_dir=workload.cache_dir)


def data_parallel(axes: Mapping[str, int]) -> int:
    """Into how many slices ranks on these axes divide the global batch."""
    return math.prod(size for axis, size in axes.items() if axis.startswith("dp"))


def _forecast(workload: Workload, choice: Choice, results: Sequence[Rehearsed | Fault]) -> Forecast:
    technique, config, shape = choice
    host_bytes = technique.host_memory(workload.job, shape, config, workload.facts)
    peaks = [max(result.peaks.values()) for result in results if isinstance(result, Rehearsed)]
    if len(peaks) == len(results):
        # Rehearsed on the CPU, where device and host memory are one.
        device_bytes = max(peaks) - (host_bytes if shape.kind == "gpu" else 0)
        least = technique.estimate_memory(workload.job, shape, config, workload.facts) if host_bytes else 0
        return Forecast(device_bytes=max(device_bytes, least), host_bytes=host_bytes, source=REHEARSED)
    message = next(result.message for result in results if isinstance(result, Fault))
    return Forecast(
        device_bytes=_by_arithmetic(workload, choice), host_bytes=host_bytes, source=ARITHMETIC, message=message
    )


def _by_arithmetic(workload: Workload, choice: Choice) -> int:
    technique, config, shape = choice
    job, facts = workload.job, workload.facts
    state = technique.estimate_memory(job, shape, config, facts)
    axes = technique.mesh_shape(shape, config)
    share = data_parallel(axes) / technique.num_ranks(shape)
    scene = single_scene(workload, num_rows=int(config["micro_batch"]), recompute=config.get("recompute", "none"))
    (alone,) = rehearse_all([scene], num_layers=facts.num_layers if facts.decoder else 0)
    if isinstance(alone, Fault):
        return state
    return state + int(share * max(max(alone.peaks.values()) - training_state_bytes(job, facts), 0))


def _scenes(workload: Workload, choice: Choice) -> Iterable[Scene]:
    """Those of the ranks that may need most. Of many micro-batches two are enough; in a pipeline, as many as fill it
    twice, unless its schedule keeps them all.
    """
    technique, config, shape = choice
    axes, num_ranks = technique.mesh_shape(shape, config), technique.num_ranks(shape)
    job = workload.job
    if config.get("schedule") != "gpipe":
        num_slices = data_parallel(axes)
        rows = min(job.global_batch_size // num_slices, 2 * axes.get("pp", 1) * int(config["micro_batch"]))
        job = replace(job, global_batch_size=rows * num_slices)
    ranks = {0, num_ranks - 1} if set(axes) & set(UNEQUAL_AXES) else {0}
    for rank in sorted(ranks):
        yield Scene(
            job=job,
            data=workload.data,
            technique=workload.techniques[technique.name],
            config=config,
            shape=shape,
            cache_dir=workload.cache_dir,
            rank=rank,
        )


def _few_do(workload: Workload, choice: Choice) -> bool:
    """Whether a few layers tell what many need."""
    technique, config, _ = choice
    divides = technique.divides_layers and config.get("pp", 2) > 1
    return workload.facts.decoder is not None and not divides

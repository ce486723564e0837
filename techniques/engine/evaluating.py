"""Evaluates a model that was trained before, on the held-out data of a job, in a worker process of its own."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringmaster.techniques import registry
from ringmaster.techniques.adapters.peft_format import base_of, is_adapter, resolved
from ringmaster.techniques.engine.channel import Channel
from ringmaster.techniques.engine.order import GangOrder, Slot
from ringmaster.techniques.job import Adapter, Job
from ringmaster.techniques.technique import Config, GangShape, Technique
from ringmaster.techniques.values import from_json, to_json

if TYPE_CHECKING:
    from ringmaster.techniques.engine.data import PreparedData
    from ringmaster.techniques.engine.ranks import Ranks
    from ringmaster.techniques.engine.trainer import Trainer

TECHNIQUE, EVALUATE = "single", "evaluate"


@dataclass(frozen=True, kw_only=True)
class EvaluationOrder:
    """Measure the metrics of `job` with the weights in `model_dir`, on one device.

    model_dir: what a job exported, or `save_pretrained` wrote. data: the JSON form of the `PreparedData` whose
        held-out samples are read: exactly those, also where the files have changed since.
    cache_dir: prepared data. import_paths: folders appended to the import path, where users' factories are.
    """

    job: Job
    model_dir: str
    data: Mapping[str, Any]
    slot: Slot
    cache_dir: str
    import_paths: tuple[str, ...] = ()


def main(channel: Channel, argument: dict[str, Any]) -> int:
    """Sends one event: "metrics", or "fault" with a message. The target of a worker process."""
    order = from_json(EvaluationOrder, argument)
    sys.path.extend(path for path in order.import_paths if path not in sys.path)
    try:
        metrics = evaluate_model(order)
    except Exception as error:  # noqa: BLE001 - a user's model or data may raise anything: told, and the caller goes on
        traceback.print_exc()
        channel.send({"event": "fault", "message": f"{type(error).__name__}: {error}"})
        return 1
    channel.send({"event": "metrics", "metrics": metrics})
    return 0


def evaluate_model(order: EvaluationOrder) -> dict[str, float]:
    """The metrics, by the very loop that evaluates a job at its end, so that the two can be compared.

    Raises ValueError where the weights do not fit the job's model, or were learnt with another tokenizer.
    """
    from ringmaster.techniques.engine.ranks import Ranks, take_device

    device = take_device((order.slot,), 0, num_ranks=1)
    return evaluator(order, ranks=Ranks(rank=0, num_ranks=1, device=device, mesh=None), beat=lambda: None).evaluate()


def evaluator(order: EvaluationOrder, *, ranks: Ranks, beat: Callable[[], None]) -> Trainer:
    """What evaluates by itself on the device of `ranks`, which are one process. Raises what `evaluate_model` raises."""
    from ringmaster.techniques.engine.data import PreparedData
    from ringmaster.techniques.engine.trainer import Trainer

    order = of_folder(order)
    prepared = from_json(PreparedData, order.data)
    technique = registry.load(registry.dotted_path(TECHNIQUE))
    gang = GangOrder(
        purpose=EVALUATE,
        job=order.job,
        technique=registry.dotted_path(TECHNIQUE),
        config=config_of(technique, order, prepared),
        slots=(order.slot,),
        folder="",
        cache_dir=order.cache_dir,
        data=to_json(prepared),
        weights_from=order.model_dir or None,
    )
    return Trainer(gang, technique, ranks, beat=beat)


def of_folder(order: EvaluationOrder) -> EvaluationOrder:
    """The same with the folder of all weights but an adapter's, which is the job's if the folder holds one."""
    folder = Path(order.model_dir).absolute()
    if not is_adapter(folder):
        return replace(order, job=replace(order.job, adapter=None), model_dir=str(folder))
    base, adapter = base_of(folder), resolved(Adapter(from_pretrained=str(folder)))
    return replace(order, job=replace(order.job, adapter=adapter), model_dir=str(base or ""))


def config_of(technique: Technique, order: EvaluationOrder, prepared: PreparedData) -> Config:
    """The first config whose training would fit the device, as an evaluation needs less; else the smallest."""
    from ringmaster.techniques.engine.models import model_facts

    facts = model_facts(order.job.model, data=prepared, adapter=order.job.adapter)
    shape = GangShape(kind=order.slot.kind, num_devices=1, memory_bytes=order.slot.memory_bytes)
    configs = list(technique.configs(order.job, shape, facts))
    needs = [technique.estimate_memory(order.job, shape, config, facts) for config in configs]
    fitting = [config for config, least_bytes in zip(configs, needs, strict=True) if least_bytes <= shape.memory_bytes]
    return fitting[0] if fitting else configs[needs.index(min(needs))]

"""Evaluation of a trained model on the held-out data of a job, by the loop that evaluates a job at its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringmaster.codec import from_json, to_json
from ringmaster.techniques import registry
from ringmaster.techniques.job import CONTINUE, Adapter, Job
from ringmaster.techniques.models.peft_format import base_of, is_adapter, quantized_base, resolved
from ringmaster.techniques.processes.order import GangOrder, Slot
from ringmaster.techniques.technique import Config, GangShape, Technique

if TYPE_CHECKING:
    from ringmaster.techniques.data import PreparedData
    from ringmaster.techniques.processes.ranks import Ranks
    from ringmaster.techniques.training.trainer import Trainer

TECHNIQUE, EVALUATE = "single", "evaluate"


@dataclass(frozen=True, kw_only=True)
class EvaluationOrder:
    """Measure the metrics of `job` with the weights in `model_dir`, on one device.

    model_dir: a folder that a job exported or `save_pretrained` wrote.
    data: the JSON form of the `PreparedData` whose held-out samples are read. Exactly those samples are read, even if
        the source files have changed since.
    slot: the device.
    cache_dir: the folder of prepared data.
    import_paths: folders appended to the import path, with users' factories.
    """

    job: Job
    model_dir: str
    data: Mapping[str, Any]
    slot: Slot
    cache_dir: str
    import_paths: tuple[str, ...] = ()


def evaluator(order: EvaluationOrder, *, ranks: Ranks, beat: Callable[[], None]) -> Trainer:
    """Returns a trainer whose `evaluate` computes a model's metrics as a job's evaluation at its end does.

    ranks: a single process.

    Raises ValueError if the weights do not fit the job's model, or were trained with another tokenizer.
    """
    from ringmaster.techniques.data import PreparedData
    from ringmaster.techniques.training.trainer import Trainer

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
    """The order with the folder's contents resolved.

    If `model_dir` holds an adapter, the adapter becomes the job's, and `model_dir` becomes its base's folder (empty if
    the base has none). Else the job's adapter is removed.
    """
    folder = Path(order.model_dir).absolute()
    if not is_adapter(folder):
        return replace(order, job=replace(order.job, adapter=None, quantize_base=None), model_dir=str(folder))
    base, adapter, trained = base_of(folder), resolved(Adapter(from_pretrained=str(folder))), order.job.adapter
    if trained is not None and (trained.continues_base or trained.from_pretrained is not None):
        adapter = replace(adapter, base_adapter=CONTINUE)  # so what it began with is another adapter, not the base
    job = replace(order.job, adapter=adapter, quantize_base=quantized_base(folder))
    return replace(order, job=job, model_dir=str(base or ""))


def config_of(technique: Technique, order: EvaluationOrder, prepared: PreparedData) -> Config:
    """The first config whose training would fit the device's memory, as an evaluation needs less; else the smallest."""
    from ringmaster.techniques.models.facts import model_facts

    in_4_bits = order.job.quantize_base is not None
    facts = model_facts(order.job.model, data=prepared, adapter=order.job.adapter, in_4_bits=in_4_bits)
    shape = GangShape(kind=order.slot.kind, num_devices=1, memory_bytes=order.slot.memory_bytes)
    configs = list(technique.configs(order.job, shape, facts))
    needs = [technique.estimate_memory(order.job, shape, config, facts) for config in configs]
    fitting = [config for config, least_bytes in zip(configs, needs, strict=True) if least_bytes <= shape.memory_bytes]
    return fitting[0] if fitting else configs[needs.index(min(needs))]

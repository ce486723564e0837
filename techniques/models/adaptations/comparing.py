"""Comparison of a model with its parents: bytes on disk, seconds of a batch, and the metrics of its job."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors import safe_open

from ringmaster.codec import to_json
from ringmaster.techniques.data import prepare
from ringmaster.techniques.interface.job import Job, ModelSpec
from ringmaster.techniques.models.adaptations.folders import model_of_folder, weight_bytes
from ringmaster.techniques.runtime.checkpoints.tensor_files import DTYPES
from ringmaster.techniques.runtime.processes.order import GangOrder
from ringmaster.techniques.runtime.processes.ranks import Ranks
from ringmaster.techniques.runtime.processes.reporter import Reporter
from ringmaster.techniques.scoring.evaluating import EvaluationOrder, evaluator
from ringmaster.techniques.training.trainer import Trainer

COMPARING_PATIENCE_S = 600.0
TIMED_BATCHES = 8  # the fastest one counts, as other load on the machine can only add time


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of one model on the held-out data of a job, by one process on one device.

    model: the job's name, or a parent's name as the job spells it.
    weight_bytes: size of its safetensors files.
    sparsity: the share of zeros among its floating-point matrices.
    batch_s: the shortest time to evaluate one global batch, in seconds.
    """

    model: str
    weight_bytes: int
    sparsity: float
    batch_s: float
    metrics: Mapping[str, float]


def compare(order: GangOrder, ranks: Ranks, reporter: Reporter, *, folder: Path) -> tuple[Measured, ...]:
    """Measures the model that was exported to `folder`, then those parents whose folders the order contains.

    Only rank 0 measures, on its device, one model after another.
    """
    job, parents = order.job, order.parents
    models: list[tuple[str, Path, ModelSpec | None]] = [(job.name, folder, job.model)]
    models += [(name, Path(parents[name]), None) for name in job.parents if name in parents]
    alone = replace(ranks, rank=0, num_ranks=1, mesh=None)
    found = []
    for name, place, model in models:
        reporter.phase(f"measuring {name}", patience_s=COMPARING_PATIENCE_S)
        found.append(_measure(order, alone, reporter, name=name, folder=place, model=model or _model(job, name, place)))
    return tuple(found)


def _model(job: Job, name: str, folder: Path) -> ModelSpec:
    """Returns a parent's model: a teacher's own; for parents that are rewritten or trained further, the job's."""
    said = job.adaptation
    if said is not None and name == said.teacher:
        model = said.teacher_model or model_of_folder(folder)
        assert model is not None, "a teacher was trained with"
        return model
    return job.model


def _measure(
    order: GangOrder, ranks: Ranks, reporter: Reporter, *, name: str, folder: Path, model: ModelSpec
) -> Measured:
    data = order.data or to_json(prepare(order.job.data, cache_dir=Path(order.cache_dir)))
    evaluation = EvaluationOrder(
        job=replace(order.job, model=model, base=None, adapter=None, adaptation=None),
        model_dir=str(folder),
        data=data,
        slot=order.slots[0],
        cache_dir=order.cache_dir,
        import_paths=order.import_paths,
    )
    trainer = evaluator(evaluation, ranks=ranks, beat=reporter.beat)
    metrics = trainer.evaluate()
    return Measured(
        model=name,
        weight_bytes=weight_bytes(folder),
        sparsity=share_of_zeros(folder),
        batch_s=min(_batch_s(trainer) for _ in range(TIMED_BATCHES)),
        metrics=metrics,
    )


def _batch_s(trainer: Trainer) -> float:
    started_s = time.perf_counter()
    trainer.evaluate(max_batches=1)
    return time.perf_counter() - started_s


def share_of_zeros(folder: Path) -> float:
    """Returns the share of zeros among the floating-point tensors of two or more dimensions."""
    num_zeros = num_weights = 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - a file is no mapping
                part = file.get_slice(name)
                if len(part.get_shape()) > 1 and DTYPES[part.get_dtype()].is_floating_point:
                    tensor = file.get_tensor(name)
                    num_weights += tensor.numel()
                    num_zeros += tensor.numel() - int(tensor.count_nonzero())
    return num_zeros / num_weights if num_weights else 0.0

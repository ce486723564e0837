"""Evaluation of several adapters of one base in one process, in shared batches, each on its own held-out data."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringmaster.techniques.interface import registry
from ringmaster.techniques.interface.values import from_json, to_json
from ringmaster.techniques.runtime.processes.channel import Channel
from ringmaster.techniques.runtime.processes.events import ModelEvaluated, event_to_json
from ringmaster.techniques.runtime.scoring.evaluating import TECHNIQUE, EvaluationOrder, config_of, of_folder
from ringmaster.techniques.runtime.scoring.likeness import base_key, tokenizer_digest

if TYPE_CHECKING:
    import torch

    from ringmaster.techniques.runtime.scoring.common_base import Question

SHAPES = ("kind", "vocab_size", "seq_len", "end_of_text_id", "num_labels", "image_size", "num_channels")
"""The fields of prepared data that a model's config depends on."""


@dataclass(frozen=True, kw_only=True)
class TogetherOrder:
    """Evaluation orders by name. All have the same `likeness`."""

    orders: Mapping[str, EvaluationOrder]


def likeness(order: EvaluationOrder) -> str | None:
    """A key that is equal for orders that can be evaluated together; None for an order that must run alone."""
    job = order.job
    if job.precision != "fp32" or job.loss is not None or job.compile:
        return None
    if (key := base_key(Path(order.model_dir))) is None:
        return None
    shape = [order.data.get(name) for name in SHAPES]
    words = tokenizer_digest(str(Path(order.data.get("folder", "")) / "tokenizer"))
    return json.dumps([key, to_json(job.model), shape, words, to_json(order.slot)], sort_keys=True)


def main(channel: Channel, argument: dict[str, Any]) -> int:
    """The target of a worker process that evaluates several adapters together.

    Sends a "metrics" event for each name. An error ends all evaluations; the caller then runs each alone.
    """
    orders = from_json(TogetherOrder, argument).orders
    for order in orders.values():
        sys.path.extend(path for path in order.import_paths if path not in sys.path)
    from ringmaster.techniques.runtime.processes.ranks import take_device

    device = take_device((next(iter(orders.values())).slot,), 0, num_ranks=1)
    try:
        metrics = evaluate_together(orders, device=device)
    except Exception:  # noqa: BLE001 - user data, or a full device: reported when each is evaluated alone
        traceback.print_exc()
        return 1
    for name, found in metrics.items():
        channel.send(event_to_json(ModelEvaluated(model=name, metrics=found)))
    return 0


def evaluate_together(orders: Mapping[str, EvaluationOrder], *, device: torch.device) -> dict[str, dict[str, float]]:
    """The metrics of each order, by name. On a CPU in fp32 they equal those of `evaluate_model` bit by bit.

    orders: orders of the same `likeness`.
    Raises NotTogether if they cannot be evaluated over one base, and ValueError as `evaluate_model` does.
    """
    from ringmaster.techniques.runtime.data import PreparedData
    from ringmaster.techniques.runtime.models import build_model
    from ringmaster.techniques.runtime.scoring.common_base import CommonBase, Question
    from ringmaster.techniques.runtime.training.losses import loss_of
    from ringmaster.techniques.runtime.training.metrics import Metrics

    first = of_folder(next(iter(orders.values())))
    prepared = from_json(PreparedData, first.data)
    weights = Path(first.model_dir) if first.model_dir else None
    model = build_model(first.job.model, data=prepared, seed=first.job.seed, weights_from=weights).to(device)
    loss = loss_of(None, model, first.job.model)
    base = CommonBase(model, loss=loss)
    for name, order in orders.items():
        base.add(name, Path(order.model_dir))
    metrics = {
        name: Metrics(order.job.evaluation.metrics, loss=loss, data=from_json(PreparedData, order.data))
        for name, order in orders.items()
    }
    batches = {name: _batches(order, device) for name, order in orders.items()}

    def questions() -> Iterator[Question]:
        while batches:
            for name, rows in list(batches.items()):
                if (batch := next(rows, None)) is None:
                    del batches[name]
                else:
                    yield Question(model=name, inputs=loss.forward_inputs(batch), about=batch)

    for question, output in base.answers(questions()):
        metrics[question.model].add(output, question.about)
    return {name: found.result() for name, found in metrics.items()}


def _batches(order: EvaluationOrder, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yields the micro-batches that a separate evaluation of the order reads."""
    from ringmaster.techniques.runtime.data import PreparedData, fetch, open_data

    order = of_folder(order)
    prepared = from_json(PreparedData, order.data)
    _, held_out = open_data(order.job.data, cache_dir=Path(order.cache_dir), prepared=prepared)
    technique = registry.load(registry.dotted_path(TECHNIQUE))
    micro_batch: int = config_of(technique, order, prepared)["micro_batch"]
    size = order.job.global_batch_size
    num_rows = min(len(held_out), order.job.evaluation.max_batches * size)
    for first in range(0, num_rows, size):
        end = min(first + size, num_rows)
        for start in range(first, end, micro_batch):
            batch = fetch(held_out, list(range(start, min(start + micro_batch, end))))
            yield {key: tensor.to(device) for key, tensor in batch.items()}

"""What trained models say of single rows: losses, hits, predictions and probabilities, in a worker process of its own.

The rows are the held-out ones of a job, in the order in which an evaluation reads them, or literal cases. The sums over
all held-out rows are what `evaluate_model` says. Each model's arrays go to a file of numpy's; events only name it.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from techniques.dotted import resolve
from techniques.engine.channel import Channel
from techniques.engine.order import Slot
from techniques.job import DataSpec, Job, ModelSpec
from techniques.values import from_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from techniques.engine.data import PreparedData

MODEL_JSON = "model.json"
MAX_ROWS = 64  # of one forward pass
MAX_LOGITS = 1 << 26  # likewise, so that a large vocabulary does not take all memory

Chunk = tuple[list[int], "dict[str, Tensor]"]
"""Some rows by number, and the batch that they make."""


@dataclass(frozen=True, kw_only=True)
class ScoringOrder:
    """Score `models` (folders by name) on the same rows, on one device; the results are written into `folder`.

    job: whose loss and precision are used, and as many of whose held-out rows as its evaluation reads (max_rows: as
        many instead). What the models are is read from their folders.
    data: the JSON form of the `PreparedData` whose held-out rows are read; without it (and without cases) the job's
        data is prepared, and read with the tokenizer of the first model where the job names none.
    cases: instead of data, a file of literal cases: JSON with "texts" (and "labels", one each), or an .npz of columns.
    encode: "package.module:function" that makes a list of texts into columns of tensors; else each model's tokenizer.
    slicers: dotted functions, by name, each from a row (a dict of tensors) to the name of its slice.
    keep_inputs: whether the file also has the rows themselves.
    """

    job: Job
    models: Mapping[str, str]
    slot: Slot
    cache_dir: str
    folder: str
    data: Mapping[str, Any] | None = None
    cases: str | None = None
    encode: str | None = None
    slicers: Mapping[str, str] = field(default_factory=dict)
    keep_inputs: bool = False
    max_rows: int | None = None
    import_paths: tuple[str, ...] = ()


def main(channel: Channel, argument: dict[str, Any]) -> int:
    """Sends an event for each model: "scores" with a file, or "fault" with a message. The target of a worker."""
    order = from_json(ScoringOrder, argument)
    sys.path.extend(path for path in order.import_paths if path not in sys.path)
    from techniques.engine.ranks import take_device

    device = take_device((order.slot,), 0, num_ranks=1)
    for number, (name, model_dir) in enumerate(order.models.items()):
        try:
            arrays, kind = score_model(order, Path(model_dir), device=device)
        except Exception as error:  # noqa: BLE001 - a user's model or data may raise anything: told, and the next one
            traceback.print_exc()
            channel.send({"event": "fault", "model": name, "message": f"{type(error).__name__}: {error}"})
            continue
        file = Path(order.folder) / f"{number}.npz"
        np.savez(file, allow_pickle=False, **arrays)
        channel.send({"event": "scores", "model": name, "kind": kind, "file": str(file)})
    return 0


def model_spec(folder: Path) -> ModelSpec:
    """What the model in a folder is, as `export_model` or `save_pretrained` wrote it. Raises ValueError on another."""
    if (folder / MODEL_JSON).is_file():
        said = json.loads((folder / MODEL_JSON).read_text())
        return ModelSpec(factory=said["factory"], kwargs=said["kwargs"])
    if (folder / "config.json").is_file():
        return ModelSpec(from_pretrained=str(folder.absolute()))
    raise ValueError(f"{folder} holds no model. To fix: give a folder that a job exported or `save_pretrained` wrote")


def score_model(
    order: ScoringOrder, model_dir: Path, *, device: torch.device
) -> tuple[dict[str, np.ndarray[Any, Any]], str]:
    """The arrays of one model, a row each, and its kind: "causal", "classifier" or "other".

    loss_sums, loss_counts, hits, labelled; num_tokens of rows of tokens; log_probabilities of whole rows (causal);
    predictions and probabilities [rows, labels] (classifiers); column.NAME of whole numbers; slice.NAME; input.NAME.
    """
    import torch

    from techniques.engine.half import compute_in_half
    from techniques.engine.losses import loss_of
    from techniques.engine.models import build_model

    spec = model_spec(model_dir)
    if spec.factory is None:
        spec = replace(spec, attention=order.job.model.attention)
    prepared = _prepared(order)
    model = build_model(spec, data=prepared, seed=order.job.seed, weights_from=model_dir.absolute()).eval().to(device)
    loss = loss_of(order.job.loss, model, spec)
    if order.job.precision == "bf16-params":
        compute_in_half(model)
    scorer = _Scorer(order, model, loss)
    config = getattr(model, "config", None)
    rows: dict[str, dict[int, Any]] = {}
    with torch.no_grad():
        for numbers, batch in _chunks(order, prepared, model_dir, config=config, shifted=loss.shifted):
            on_device = {key: tensor.to(device) for key, tensor in batch.items()}
            for key, values in {**scorer.score(on_device), **_of_inputs(order, batch)}.items():
                rows.setdefault(key, {}).update(zip(numbers, values, strict=True))
    num_rows = max((len(values) for values in rows.values()), default=0)
    arrays = {key: _stacked([of[i] for i in range(num_rows)]) for key, of in rows.items()}
    kind = "causal" if loss.shifted else "classifier" if "predictions" in arrays else "other"
    return arrays, kind


class _Scorer:
    """A model and its loss, asked one batch at a time."""

    def __init__(self, order: ScoringOrder, model: Any, loss: Any) -> None:
        self._order, self._model, self._loss = order, model, loss

    def score(self, batch: dict[str, Tensor]) -> dict[str, list[Any]]:
        """Arrays of one value (or vector) a row, by name; for literal cases without labels no losses."""
        from techniques.engine.losses import hits_by_row, logits_of, losses_by_row

        output = self._forward(batch)
        found: dict[str, Any] = {}
        has_labels = self._order.cases is None or "labels" in batch
        losses = losses_by_row(self._loss, output, batch) if has_labels else None
        if losses is not None:
            found["loss_sums"], found["loss_counts"] = losses
        elif has_labels:
            found |= self._losses_one_by_one(batch)
        if (hits := hits_by_row(self._loss, output, batch)) is not None:
            found["hits"], found["labelled"] = hits
        logits = logits_of(output)
        if self._loss.shifted:
            found["log_probabilities"] = _log_probabilities(output, batch)
        elif logits is not None and logits.ndim == 2 and logits.shape[-1] > 1:
            found["probabilities"] = logits.float().softmax(-1)
            found["predictions"] = logits.argmax(-1)
        return {key: list(tensor.double().cpu().numpy()) for key, tensor in found.items()}

    def _forward(self, batch: dict[str, Tensor]) -> Any:
        import torch

        kind = next(iter(batch.values())).device.type
        with torch.autocast(kind, dtype=torch.bfloat16, enabled=self._order.job.precision == "bf16"):
            return self._model(**self._loss.forward_inputs(batch))

    def _losses_one_by_one(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """A loss that knows only whole batches, of batches of one row."""
        import torch

        pairs = []
        for i in range(len(next(iter(batch.values())))):
            row = {key: tensor[i : i + 1] for key, tensor in batch.items()}
            pairs.append([float(value) for value in self._loss(self._forward(row), row)])
        sums, counts = torch.tensor(pairs, dtype=torch.float64).T
        return {"loss_sums": sums, "loss_counts": counts}


def _log_probabilities(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Of each row of tokens, all but its first one, given those before: [rows], natural logarithms."""
    from techniques.engine.losses import Loss, losses_by_row, next_token_loss

    told = losses_by_row(Loss(compute=next_token_loss, inputs=None, shifted=True), output, batch)
    assert told is not None
    return -told[0]


def _prepared(order: ScoringOrder) -> PreparedData:
    from techniques.engine.data import PreparedData, prepare

    if order.data is not None:
        return from_json(PreparedData, order.data)
    if order.cases is None:
        return prepare(_data_spec(order), cache_dir=Path(order.cache_dir))
    return PreparedData(name="cases", digest="", num_samples=0, num_held_out=0, kind="other", source="cases")


def _data_spec(order: ScoringOrder) -> DataSpec:
    """The job's data; text as the first model reads it."""
    first, spec = Path(next(iter(order.models.values()))).absolute(), order.job.data
    if spec.tokenizer is None and spec.factory is None and (first / "tokenizer.json").is_file():
        return spec if order.data is not None else replace(spec, tokenizer=str(first))
    return spec


def _chunks(
    order: ScoringOrder, prepared: PreparedData, model_dir: Path, *, config: Any, shifted: bool
) -> Iterator[Chunk]:
    """All rows, some at a time."""
    if order.cases is not None:
        yield from _cases(order, model_dir, config=config, shifted=shifted)
        return
    from techniques.engine.data import fetch, open_data

    _, held_out = open_data(_data_spec(order), cache_dir=Path(order.cache_dir), prepared=prepared)
    limit = order.max_rows or order.job.evaluation.max_batches * order.job.global_batch_size
    num_rows = min(len(held_out), limit)
    if num_rows == 0:
        raise ValueError("there are no held-out rows. To fix: raise the data's held_out")
    size = _chunk_size(prepared.seq_len or 1, config)
    for first in range(0, num_rows, size):
        numbers = list(range(first, min(first + size, num_rows)))
        yield numbers, fetch(held_out, numbers)


def _cases(order: ScoringOrder, model_dir: Path, *, config: Any, shifted: bool) -> Iterator[Chunk]:
    """Literal cases; texts of equal length together, so that nothing need be padded."""
    import torch

    assert order.cases is not None
    file = Path(order.cases)
    if file.suffix == ".npz":
        with np.load(file, allow_pickle=False) as columns:
            yield from _columns({name: torch.from_numpy(columns[name]) for name in columns.files}, config)
        return
    said = json.loads(file.read_text(encoding="utf-8"))
    texts, labels = said["texts"], said.get("labels")
    if order.encode is not None:
        columns = {**resolve(order.encode)(texts), **({} if labels is None else {"labels": torch.tensor(labels)})}
        yield from _columns(columns, config)
        return
    encoded = _tokenized(texts, model_dir, config=config, shifted=shifted)
    by_length = sorted(range(len(texts)), key=lambda i: len(encoded[i]))
    alone = not shifted and getattr(config, "pad_token_id", None) is None  # such classifiers take one row at a time
    while by_length:
        length = len(encoded[by_length[0]])
        size = 1 if alone else _chunk_size(length, config)
        numbers = [i for i in by_length[:size] if len(encoded[i]) == length]
        by_length = by_length[len(numbers) :]
        batch = {"input_ids": torch.tensor([encoded[i] for i in numbers])}
        if shifted:
            batch["labels"] = batch["input_ids"]
        elif labels is not None:
            batch["labels"] = torch.tensor([labels[i] for i in numbers])
        yield numbers, batch


def _columns(columns: Mapping[str, Tensor], config: Any) -> Iterator[Chunk]:
    num_rows = len(next(iter(columns.values())))
    tokens = columns.get("input_ids")
    size = _chunk_size(1 if tokens is None else tokens.shape[-1], config)
    for first in range(0, num_rows, size):
        numbers = list(range(first, min(first + size, num_rows)))
        batch = {name: column[first : first + size] for name, column in columns.items()}
        yield numbers, {key: c.float() if c.dtype.is_floating_point else c.long() for key, c in batch.items()}


def _tokenized(texts: list[str], model_dir: Path, *, config: Any, shifted: bool) -> list[list[int]]:
    """Token ids of each text. A language model reads them behind the token that stands between documents."""
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{model_dir} has no tokenizer to read texts with. To fix: name a function by `encode` that makes them "
            "into tensors"
        ) from error
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=not shifted, verbose=False)["input_ids"]
    if shifted:
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        ids = [[*([] if start is None else [start]), *row] for row in ids]
    longest, limit = max(map(len, ids)), getattr(config, "max_position_embeddings", None)
    if limit is not None and longest > limit:
        raise ValueError(f"a case has {longest} tokens, and the model reads {limit}. To fix: shorten it")
    if min(map(len, ids)) < (2 if shifted else 1):
        raise ValueError("a case has too few tokens to say anything of it. To fix: leave empty texts out")
    return ids


def _chunk_size(num_tokens: int, config: Any) -> int:
    per_row = max(num_tokens, 1) * (getattr(config, "vocab_size", None) or 1)
    return max(1, min(MAX_ROWS, MAX_LOGITS // per_row))


def _of_inputs(order: ScoringOrder, batch: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """What is known of the rows without the model."""
    num_rows = len(next(iter(batch.values())))
    found: dict[str, list[Any]] = {}
    if "attention_mask" in batch:
        found["num_tokens"] = batch["attention_mask"].sum(-1).tolist()
    elif "input_ids" in batch:
        found["num_tokens"] = [batch["input_ids"].shape[-1]] * num_rows
    for key, tensor in batch.items():
        if tensor.ndim == 1 and not tensor.is_floating_point():
            found[f"column.{key}"] = tensor.tolist()
        if order.keep_inputs:
            found[f"input.{key}"] = list(tensor.cpu().numpy())
    for name, dotted in order.slicers.items():
        slicer = resolve(dotted)
        rows = [{key: tensor[i] for key, tensor in batch.items()} for i in range(num_rows)]
        found[f"slice.{name}"] = [str(slicer(row)) for row in rows]
    return found


def _stacked(values: list[Any]) -> np.ndarray[Any, Any]:
    """Rows as one array; rows of different lengths (of tokens) filled up with -1 behind."""
    if isinstance(values[0], np.ndarray) and len({value.shape for value in values}) > 1:
        width = max(len(value) for value in values)
        return np.stack([np.pad(value, (0, width - len(value)), constant_values=-1) for value in values])
    return np.asarray(values)

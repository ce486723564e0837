"""Small batches for probes: samples cropped to few tokens, made up from shapes, or with uneven numbers of labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ringmaster.techniques.data_source import PreparedData, SampleTensor
from ringmaster.techniques.metric import IGNORED

LONGEST = 32  # tokens


def cropped(batch: Mapping[str, Tensor], *, seq_len: int | None) -> dict[str, Tensor]:
    """Crops tensors of `seq_len` tokens a sample to the first `LONGEST` tokens; other tensors stay unchanged.

    Tokens become labels in sequences whose labels were all cropped, as where a long prompt has none.
    """
    if seq_len is None or seq_len <= LONGEST:
        return dict(batch)
    short = {name: _cropped(value, seq_len) for name, value in batch.items()}
    tokens, labels = short.get("input_ids"), short.get("labels")
    if tokens is not None and labels is not None and labels.shape == tokens.shape:
        lost = (labels == IGNORED).all(-1, keepdim=True) & (batch["labels"] != IGNORED).any(-1, keepdim=True)
        short["labels"] = torch.where(lost, tokens, labels)
    return short


def _cropped(value: Tensor, seq_len: int) -> Tensor:
    # Contiguous, as in a batch of the trainer: models of transformers flatten labels by `view`.
    if value.dim() > 1 and value.shape[1] == seq_len:
        return value[:, :LONGEST].contiguous()
    is_pair = value.dim() == 3 and value.shape[2] == seq_len  # of sequences
    return value[:, :, :LONGEST].contiguous() if is_pair else value


def made_up(data: PreparedData, number: int) -> dict[str, Tensor] | None:
    """Random samples of the shapes that `data` describes, for data that is not available; None if it lacks shapes."""
    draw = torch.Generator().manual_seed(0)
    if data.tensors:
        return {tensor.name: _made_up_tensor(tensor, data, number, draw) for tensor in data.tensors}
    if data.kind == "tokens" and data.vocab_size and data.seq_len:
        tokens = torch.randint(data.vocab_size, (number, min(data.seq_len, LONGEST)), generator=draw)
        return {"input_ids": tokens, "labels": tokens}
    if data.kind == "images" and data.image_size and data.num_channels:
        shape = (number, data.num_channels, data.image_size, data.image_size)
        labels = torch.randint(data.num_labels or 2, (number,), generator=draw)
        return {"pixel_values": torch.randn(shape, generator=draw), "labels": labels}
    return None


def _made_up_tensor(tensor: SampleTensor, data: PreparedData, number: int, draw: torch.Generator) -> torch.Tensor:
    shape, dtype = (number, *tensor.shape), getattr(torch, tensor.dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=draw, dtype=dtype)
    if tensor.name == "input_ids":
        return torch.randint(data.vocab_size or 2, shape, generator=draw)
    if tensor.name == "labels":
        return torch.randint(data.num_labels or data.vocab_size or 2, shape, generator=draw)
    return torch.ones(shape, dtype=dtype)  # such as a mask


def ragged(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The batch with fewer labels in each sample than in the one before.

    Equal numbers of labels would hide a loss that averages per sample.
    """
    labels = batch.get("labels")
    if labels is None or labels.dim() < 2 or labels.is_floating_point() or labels.shape[-1] < len(labels) + 1:
        return dict(batch)
    labels = labels.clone()
    fewer = max(1, labels.shape[-1] // (len(labels) + 1))
    for row in range(len(labels)):
        labels[row, ..., labels.shape[-1] - row * fewer :] = IGNORED
    return {**batch, "labels": labels}


def rows_of(batch: Mapping[str, Tensor], rows: Sequence[int]) -> dict[str, Tensor]:
    """The samples of a batch at the indices `rows`."""
    chosen = torch.as_tensor(rows)
    return {name: value[chosen] for name, value in batch.items()}

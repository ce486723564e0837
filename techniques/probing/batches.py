"""Small batches for probes: samples cropped to few tokens, made up from shapes, or with uneven numbers of labels."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ringmaster.techniques.data_source import PreparedData, SampleTensor
from ringmaster.techniques.metric import IGNORED

LONGEST = 32  # tokens
BEFORE = 4  # of them, before the first position that has a label, or at which the sequences of a pair differ


def cropped(batch: Mapping[str, Tensor], *, seq_len: int | None) -> dict[str, Tensor]:
    """Crops tensors of `seq_len` tokens a sample to `LONGEST` tokens; other tensors stay unchanged.

    The tokens are those where a sample's labels begin, and where the sequences of a pair begin to differ: of a common
    prompt alone the gradients of a preference cancel, and what is left is rounding.
    """
    if seq_len is None or seq_len <= LONGEST:
        return dict(batch)
    first = torch.zeros(len(next(iter(batch.values()))), dtype=torch.long)
    tokens, labels = batch.get("input_ids"), batch.get("labels")
    if labels is not None and labels.dim() > 1 and labels.shape[-1] == seq_len and not labels.is_floating_point():
        first = _first(labels != IGNORED)
    if tokens is not None and tokens.dim() == 3:
        first = first.maximum(_first(tokens[:, 1:] != tokens[:, :1]))
    window = (first - BEFORE).clamp(0, seq_len - LONGEST).unsqueeze(1) + torch.arange(LONGEST)
    return {name: _cropped(value, seq_len, window) for name, value in batch.items()}


def _first(is_there: Tensor) -> Tensor:
    """The first position of each sample at which one of its sequences has something: [rows]; 0 where none has."""
    return is_there.reshape(len(is_there), -1, is_there.shape[-1]).any(1).int().argmax(-1)


def _cropped(value: Tensor, seq_len: int, window: Tensor) -> Tensor:
    rows = torch.arange(len(value)).unsqueeze(1)
    if value.dim() > 1 and value.shape[1] == seq_len:
        return value[rows, window]
    is_pair = value.dim() == 3 and value.shape[2] == seq_len  # of sequences
    return value.transpose(1, 2)[rows, window].transpose(1, 2).contiguous() if is_pair else value


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
    """The batch with fewer labels in each sample than in the one before, and sequences of pairs that are not the same.

    Equal numbers of labels would hide a loss that averages per sample. The gradients of equal sequences cancel.
    """
    batch = dict(batch)
    tokens, labels = batch.get("input_ids"), batch.get("labels")
    if tokens is not None and tokens.dim() == 3:
        is_same = (tokens[:, 1] == tokens[:, 0]).all(-1)
        batch["input_ids"] = tokens.clone()
        batch["input_ids"][is_same, 1] = tokens[is_same, 1].roll(1, dims=-1)
    if labels is None or labels.dim() < 2 or labels.is_floating_point() or labels.shape[-1] < len(labels) + 1:
        return batch
    counted = labels != IGNORED
    num_labels = counted.sum(-1, keepdim=True)  # [rows, ..., 1]
    place = torch.arange(len(labels)).reshape(-1, *[1] * (labels.dim() - 1))
    kept = (num_labels - place * (num_labels // (len(labels) + 1)).clamp(min=1)).clamp(min=2)
    batch["labels"] = labels.masked_fill(counted.cumsum(-1) > kept, IGNORED)
    return batch


def rows_of(batch: Mapping[str, Tensor], rows: Sequence[int]) -> dict[str, Tensor]:
    """The samples of a batch at the indices `rows`."""
    chosen = torch.as_tensor(rows)
    return {name: value[chosen] for name, value in batch.items()}

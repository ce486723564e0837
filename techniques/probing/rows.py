"""What a model reads of a row of tokens, measured on a few rows: all positions, no padding, nothing that is to come."""

from collections.abc import Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ringmaster.techniques.metric import IGNORED
from ringmaster.techniques.models.architectures import PIXELS
from ringmaster.techniques.models.facts import has_experts
from ringmaster.techniques.models.layers import layer_names
from ringmaster.techniques.probing.faults import explained
from ringmaster.techniques.training.bound_loss import BoundLoss, logits_of

MAX_WHOLE = 1024
"""The most tokens of a row that all layers compute. Of a longer row only the embeddings, which have the positions."""
NUM_PADDED = 8
# Relative to the largest logit, in fp32. Rounding stays below a hundredth of this; a row that is read at another token
# has other logits.
LARGEST_DIFFERENCE = 1e-3


class _EmbeddingsDone(Exception):
    """Ends a forward in front of the first layer."""


@torch.no_grad()
def check_longest(
    model: PreTrainedModel, loss: BoundLoss, samples: Mapping[str, Tensor], *, seq_len: int | None
) -> None:
    """Raises StepError where the model cannot read a row of `seq_len` tokens, such as for lack of positions.

    samples: with their whole width, of which one row is filled up with its own tokens.
    """
    row = {name: value[:1] for name, value in samples.items()}
    if loss.function is not None and loss.function.num_written_tokens:  # of other samples than it is computed on
        return
    if seq_len is None or "input_ids" not in row or row["input_ids"].shape[-1] != seq_len:
        return
    mask = row.get("attention_mask")
    if mask is not None:
        row["input_ids"] = _filled(row["input_ids"], mask == 1)
        row["attention_mask"] = torch.ones_like(mask)
    labels = row.pop("labels", None)
    body: Any = model.base_model if hasattr(model, "base_model") else model
    if model.config.is_encoder_decoder:
        targets = None if labels is None or labels.is_floating_point() or labels.dim() < 2 else labels
        row["decoder_input_ids"] = row["input_ids"] if targets is None else _filled(targets, targets != IGNORED)
    remedy = "lower data.seq_len to what the model has positions for"
    with explained(f"model: its forward fails on a row of {seq_len} tokens", remedy), _up_to_layers(model, seq_len):
        body(**loss.forward_inputs(row))


def _filled(values: Tensor, is_there: Tensor) -> Tensor:
    """Values in the place of which those that are there are repeated."""
    real = values[is_there]
    count = values.numel()
    return values if not len(real) else real.repeat(-(-count // len(real)))[:count].reshape(values.shape)


@contextmanager
def _up_to_layers(model: PreTrainedModel, num_tokens: int) -> Any:
    """Inside the context, forwards of long rows end without an error before the first layer."""
    names = layer_names(model) if num_tokens > MAX_WHOLE else ()

    def end(*_: Any) -> None:
        raise _EmbeddingsDone

    hooks = [model.get_submodule(name).register_forward_pre_hook(end) for name in names[:1]]
    try:
        yield
    except _EmbeddingsDone:
        pass
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def why_not_causal(model: PreTrainedModel, loss: BoundLoss, batch: Mapping[str, Tensor]) -> str:
    """Returns why a model knows the tokens that it learns to predict, with a remedy; empty if it does not.

    batch: rows of tokens, of which the second half is exchanged. Models with experts, for which tokens may compete, are
        not asked, and neither are those of images, whose tokens cannot be exchanged.
    """
    tokens = batch["input_ids"]
    if tokens.dim() != 2 or tokens.shape[1] < 2 or has_experts(model) or PIXELS in batch:
        return ""
    kept = tokens.shape[1] // 2
    others = (tokens[:, kept:] + 1) % model.config.get_text_config().vocab_size
    changed = {**batch, "input_ids": torch.cat([tokens[:, :kept], others], dim=1)}
    one, other = (logits[:, :kept] for logits in _logits(model, loss, (batch, changed)))
    if _difference(one, other) <= LARGEST_DIFFERENCE:
        return ""
    is_encoder = getattr(model.config, "is_decoder", None) is False
    remedy = "set model.config.is_decoder to true" if is_encoder else "train a causal language model"
    return (
        f"model: {type(model).__name__} reads the tokens that it learns to predict: its output changes with those that "
        f"follow. To fix: {remedy}"
    )


@torch.no_grad()
def why_reads_padding(
    model: PreTrainedModel,
    loss: BoundLoss,
    samples: Mapping[str, Tensor],
    *,
    read: set[str],
    end_of_text_id: int | None,
) -> str:
    """Returns why a classifier's output for a row is that of its padding, with a remedy; empty if it is not.

    Classifiers of decoders find the last token of a row by the config's padding token, some others by the token that
    ends a text, and XLNet takes the last one of the batch.

    samples: with their whole width. read: the set to which names of the config's fields are added as they are read.
    end_of_text_id: of the tokenizer; where it is the padding too, it is left out as transformers leaves it out.
    """
    mask, labels = samples.get("attention_mask"), samples.get("labels")
    if mask is None or labels is None or "input_ids" not in samples or mask.dim() != 2:
        return ""
    width, lengths = mask.shape[1], mask.sum(1)
    at = int(lengths.argmin())
    length = int(lengths[at])
    if not 0 < length < width or not bool(mask[at, :length].all()):
        return ""
    rows = {name: value[at : at + 1] for name, value in samples.items()}
    ends = {"alone": (0, length), "padded": (0, min(length + NUM_PADDED, width))}
    known = set(read)
    read.clear()
    alone, padded = _logits(model, loss, [_cut(rows, width, *end) for end in ends.values()])
    fields = {"pad_token_id", "eos_token_id"} & read
    read |= known
    last = samples["input_ids"].gather(1, (lengths - 1).clamp(min=0).unsqueeze(1))
    padding_ends = {model.config.pad_token_id} - {end_of_text_id}
    if fields == {"pad_token_id"} and padding_ends & {*last.flatten().tolist()}:
        return (
            f"model: {type(model).__name__} takes the token {model.config.pad_token_id} for padding, and some rows end "
            "with it. To fix: give a tokenizer with a padding token of its own"
        )
    if alone.dim() != 2 or _difference(alone, padded) <= LARGEST_DIFFERENCE:
        return ""
    name, padding = type(model).__name__, int(samples["input_ids"][at, length])
    if "pad_token_id" in fields and padding != model.config.pad_token_id:
        return (
            f"model: {name} finds the last token of a row by its padding token, {model.config.pad_token_id}, and rows "
            f"are padded with {padding}. To fix: set model.config.pad_token_id to {padding}, or leave it out"
        )
    if "eos_token_id" in fields:
        return (
            f"model: {name} finds the end of a row by the token that ends a text, {model.config.eos_token_id}, and "
            f"rows are padded with {padding}. To fix: give a tokenizer whose padding token is another one"
        )
    (on_the_left,) = _logits(model, loss, [_rolled(_cut(rows, width, *ends["padded"]), ends["padded"][1] - length)])
    if _difference(alone, on_the_left) > LARGEST_DIFFERENCE:
        return ""  # padding has an influence on its layers, as of convolutions, wherever it is
    return (
        f"model: {name} takes the last token of a batch for that of each row, and rows are padded behind it. To fix: "
        "give rows of equal length, or train another class"
    )


def _cut(rows: Mapping[str, Tensor], width: int, first: int, end: int) -> dict[str, Tensor]:
    return {n: v[..., first:end] if v.dim() > 1 and v.shape[-1] == width else v for n, v in rows.items()}


def _rolled(rows: Mapping[str, Tensor], number: int) -> dict[str, Tensor]:
    width = rows["input_ids"].shape[-1]
    return {n: v.roll(number, -1) if v.dim() > 1 and v.shape[-1] == width else v for n, v in rows.items()}


def _logits(model: PreTrainedModel, loss: BoundLoss, batches: Any) -> list[Tensor]:
    """The logits of each batch without dropout; the model is left in training mode."""
    model.eval()
    try:
        result = []
        for batch in batches:
            with explained("model: its forward fails", "correct the samples, or model.config"):
                logits = logits_of(model(**loss.forward_inputs(batch)))
            result.append(torch.zeros(1) if logits is None else logits)
        return result
    finally:
        model.train()


def _difference(one: Tensor, other: Tensor) -> float:
    if one.shape != other.shape:
        return 0.0
    largest = float(one.abs().max())
    return float((one - other).abs().max()) / largest if largest else 0.0

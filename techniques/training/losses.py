"""Losses as (sum, count), so that the mean over a global batch does not depend on how the batch was divided."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ringmaster.techniques.interface import loss as kinds
from ringmaster.techniques.interface.decoders import CAUSAL
from ringmaster.techniques.interface.dotted_names import resolve
from ringmaster.techniques.interface.job import ModelSpec
from ringmaster.techniques.interface.metric import IGNORED
from ringmaster.techniques.losses.registry import is_named
from ringmaster.techniques.training.loss import Batch, Loss, SumAndCount, labels_of, logits_of, next_tokens
from ringmaster.techniques.training.named_losses import named_loss

__all__ = [
    "Batch",
    "Loss",
    "SumAndCount",
    "classification_loss",
    "logits_of",
    "loss_of",
    "losses_by_row",
    "next_token_loss",
    "next_tokens",
]

# Suffixes of transformers classes whose loss is a cross entropy of each labelled row (or token).
CLASSIFIERS = (
    "ForImageClassification",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForAudioClassification",
    "ForMaskedLM",
)

# Encoder-decoders that predict each label from those before it, and compute the decoder's inputs from the labels.
SEQUENCE_TO_SEQUENCE = ("ForConditionalGeneration", "MTModel")


def loss_of(
    job_loss: str | None, model: nn.Module, spec: ModelSpec, *, options: Mapping[str, Any] | None = None
) -> Loss:
    """Returns the loss of a job: `job_loss` (a name with its `options`, or a dotted name), or the model's own.

    Causal language models: cross entropy of the next token, over the labels that are not -100. Classifiers: cross
    entropy over labelled rows (or tokens); squared error with one label; binary cross entropy with float labels.
    Encoder-decoders: cross entropy of the labelled tokens. Any other model that returns a `loss`: that loss times the
    number of rows, which is exact under division of a batch only if the loss is a mean over rows.

    `model` is the result of `build_model`, before any technique wraps it. Raises ValueError where a named loss is
    unknown, has a wrong option or is not for such a model.
    """
    arguments = _arguments(model)
    without_labels = None if arguments is None else arguments - {"labels"}
    name = type(model).__name__
    config = getattr(model, "config", None)
    # The routers of mixture-of-experts models add losses of their own.
    is_known = config is not None and not getattr(config, "output_router_logits", False)
    has_encoder = is_known and getattr(config, "is_encoder_decoder", False)
    is_plain = is_known and not has_encoder
    is_causal, is_classifier = is_plain and name.endswith(CAUSAL), is_plain and name.endswith(CLASSIFIERS)
    is_seq2seq = has_encoder and name.endswith(SEQUENCE_TO_SEQUENCE)
    if job_loss is not None and is_named(job_loss):
        flags = {kinds.CAUSAL: is_causal, kinds.CLASSIFIER: is_classifier, kinds.SEQUENCE_TO_SEQUENCE: is_seq2seq}
        kind = next((kind for kind, is_one in flags.items() if is_one), kinds.OTHER)
        inputs = without_labels if is_causal or is_classifier else arguments
        return named_loss(job_loss, options or {}, kind=kind, model=name, inputs=inputs)
    if job_loss is not None:
        inputs = without_labels if is_causal or is_classifier else arguments
        return Loss(compute=partial(_users, resolve(job_loss), job_loss), inputs=inputs, shifted=is_causal)
    if is_causal:
        return Loss(compute=next_token_loss, inputs=without_labels, shifted=True)
    if is_classifier:
        return Loss(compute=classification_loss, inputs=without_labels, is_of_classes=True)
    if is_seq2seq:
        return Loss(compute=classification_loss, inputs=arguments, is_of_classes=True)
    return Loss(compute=partial(_models_own, spec.factory or name), inputs=arguments, is_models=True)


def next_token_loss(output: Any, batch: Batch) -> SumAndCount:
    """Computes cross entropy of logits [rows, tokens, vocabulary] at each position with the label at the next."""
    return _cross_entropy(_logits(output), next_tokens(batch))


def classification_loss(output: Any, batch: Batch) -> SumAndCount:
    """Computes the loss of logits [rows, labels] or [rows, tokens, labels], which is selected as in `transformers`."""
    logits, labels = _logits(output), labels_of(batch)
    if logits.shape[-1] == 1:
        return functional.mse_loss(logits.float().flatten(), labels.float().flatten(), reduction="sum"), labels.numel()
    if labels.is_floating_point():
        each = functional.binary_cross_entropy_with_logits(logits.float(), labels.float(), reduction="none")
        return each.mean(-1).sum(), each[..., 0].numel()
    return _cross_entropy(logits, labels)


def losses_by_row(loss: Loss, output: Any, batch: Batch) -> tuple[Tensor, Tensor] | None:
    """Returns each row's contribution to (sum, count), [rows] and [rows]; None where rows cannot be separated.

    A user's loss, or one that a model computes itself, may mix rows: call it with one row at a time.
    """
    if loss.function is not None:
        return loss.by_row(output, batch)
    if loss.compute is next_token_loss:
        return _cross_entropy_by_row(_logits(output), next_tokens(batch))
    if loss.compute is not classification_loss:
        return None
    logits, labels = _logits(output), labels_of(batch)
    if logits.shape[-1] == 1:
        squared = (logits.float().reshape(len(logits), -1) - labels.float().reshape(len(logits), -1)).square()
        return squared.sum(1), torch.full_like(squared[:, 0], squared.shape[1])
    if labels.is_floating_point():
        each = functional.binary_cross_entropy_with_logits(logits.float(), labels.float(), reduction="none").mean(-1)
        each = each.reshape(len(logits), -1)
        return each.sum(1), torch.full_like(each[:, 0], each.shape[1])
    return _cross_entropy_by_row(logits, labels)


def _cross_entropy(logits: Tensor, labels: Tensor) -> SumAndCount:
    # In fp32, as a bf16 softmax over a large vocabulary, which autocast would use, loses precision in its sum.
    flat = logits.flatten(0, -2).float()
    total = functional.cross_entropy(flat, labels.flatten().long(), ignore_index=IGNORED, reduction="sum")
    return total, (labels != IGNORED).sum()


def _cross_entropy_by_row(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    flat = logits.flatten(0, -2).float()
    each = functional.cross_entropy(flat, labels.flatten().long(), ignore_index=IGNORED, reduction="none")
    counted = (labels != IGNORED).reshape(len(labels), -1)
    return each.reshape(len(labels), -1).sum(1), counted.sum(1)


def _models_own(name: str, output: Any, batch: Batch) -> SumAndCount:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"{name} returns no loss for samples of {', '.join(sorted(batch))}. "
            f"To fix: set the job's loss to package.module:function, which returns (sum, count)"
        )
    rows = len(next(iter(batch.values())))
    return loss.float() * rows, rows


def _users(function: Callable[[Any, Batch], Any], name: str, output: Any, batch: Batch) -> SumAndCount:
    found = function(output, batch)
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[0], Tensor) or found[0].ndim:
        raise ValueError(
            f"loss {name} returned {type(found).__name__}. To fix: return (sum, count), the sum a scalar tensor over "
            f"what is averaged and the count a number or tensor"
        )
    return found[0], found[1]


def _arguments(model: nn.Module) -> frozenset[str] | None:
    """Returns the names of `forward`'s arguments, or None where a user's model takes any.

    Hugging Face's **kwargs are for kernels.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    if takes_any and not hasattr(model, "config"):
        return None
    return frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


def _logits(output: Any) -> Tensor:
    logits = logits_of(output)
    if logits is None:
        raise ValueError(f"the model returns {type(output).__name__} without logits. To fix: name a loss of the job")
    return logits

"""Faults of a job's samples and labels for its model, found before a training step."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ringmaster.errors import StepError
from ringmaster.techniques.data.inference import encodes_text
from ringmaster.techniques.data.row_files import has_tokenizer
from ringmaster.techniques.data.tokenizer_folders import have_other_tokens
from ringmaster.techniques.data_source import PreparedData, data_source_of
from ringmaster.techniques.job import Job
from ringmaster.techniques.loss import BUILTIN_LOSSES, loss_class
from ringmaster.techniques.metric import IGNORED
from ringmaster.techniques.training.bound_loss import REFERENCE, BoundLoss, logits_of
from ringmaster.text import message_of

MASKED = "ForMaskedLM"


@contextmanager
def explained(what: str, remedy: str) -> Iterator[None]:
    """Converts any error within the context to StepError, with `what` and `remedy` unless the error has a remedy."""
    try:
        yield
    except StepError:
        raise
    except BaseException as error:  # a user's function may end its process: other jobs are inspected there
        text = message_of(error)
        if isinstance(error, ValueError) and "To fix:" in text:
            raise StepError([text]) from error
        kind = "" if isinstance(error, ValueError) and text else type(error).__name__
        raise StepError([f"{': '.join(filter(None, (what, kind, text)))}. To fix: {remedy}"]) from error


def faults_of_samples(job: Job, model: nn.Module, loss: BoundLoss, batch: Mapping[str, Tensor]) -> Iterator[str]:
    """Yields faults: tensors that the model does not take, and tokens that it has no embedding for."""
    if loss.inputs is not None and (job.loss is None or loss.function is not None):
        read = () if loss.function is None else loss.function.reads
        ignored = sorted(batch.keys() - loss.inputs - {"labels", REFERENCE, *read})
        losses = ((name, loss_class(name)) for name in BUILTIN_LOSSES if ignored)
        if readers := [name for name, other in losses if other is not None and {*ignored} & {*other.reads}]:
            yield (
                f"loss: samples have {', '.join(ignored)}, which this loss does not read. To fix: set loss to "
                f"{' or '.join(readers)}, or leave this out of the samples"
            )
        elif ignored and batch.keys() & loss.inputs:
            yield (
                f"data: samples have {', '.join(ignored)}, which the model's forward does not take; it takes "
                f"{', '.join(sorted(loss.inputs))}. To fix: name the tensors so, or leave them out of the samples"
            )
    if job.adapter is not None and job.base is None and job.model.has_fresh_head:
        saved = (*job.adapter.modules_to_save, *(("",) if job.adapter.from_pretrained else ()))
        body = getattr(model, "base_model_prefix", "")
        heads = [name for name, part in model.named_children() if name != body and any(True for _ in part.parameters())]
        if heads and not saved:
            yield (
                f"adapter: the head ({', '.join(heads)}) is fresh, and would stay as it was drawn. To fix: set "
                f"adapter.modules_to_save to [{', '.join(heads)}]"
            )
    pairs = batch.get("input_ids")
    if pairs is not None and pairs.dim() == 3 and job.loss is None:
        usual = data_source_of(job.data).usual_loss
        remedy = f"set loss to one of pairs, such as {usual or 'those in docs/losses.md'}"
        yield f"loss: samples are pairs, of which the model has no loss of its own. To fix: {remedy}"
        return
    labels = batch.get("labels")
    is_masked = type(model).__name__.endswith(MASKED) and pairs is not None and labels is not None
    if is_masked and torch.equal(batch["labels"], batch["input_ids"]):
        yield (
            f"data: labels are the tokens that {type(model).__name__} reads, none of which is masked, so that it would "
            "learn to copy them. To fix: mask tokens in a data.factory, with labels of -100 for all others; or train a "
            "causal language model"
        )
    vocab_size = getattr(getattr(model, "config", None), "vocab_size", None)
    tokens = batch.get("input_ids")
    if isinstance(vocab_size, int) and tokens is not None and not tokens.is_floating_point() and tokens.numel():
        least, most = int(tokens.min()), int(tokens.max())
        if least < 0 or most >= vocab_size:
            yield (
                f"data: input_ids are {least} to {most}, and the model has tokens 0 to {vocab_size - 1}. To fix: use "
                "the model's own tokenizer; if it is, resize the model's embeddings, or set model.config.vocab_size"
            )


def why_tokens_are_foreign(job: Job, data: PreparedData) -> str | None:
    """Returns why a pretrained model does not know the tokens of its data, or None.

    Its folder holds another tokenizer than the data's. Or it holds none, and one was trained on the data: then a model
    of exactly as many tokens is taken to be made for it.
    """
    if job.model.from_pretrained is None or not encodes_text(job.data):
        return None
    if have_other_tokens(Path(job.model.from_pretrained), data.tokenizer_dir):
        return (
            f"data: {job.model.from_pretrained} was trained with another tokenizer than the one of {data.name}. "
            "To fix: set data.tokenizer to the model's, or leave it out"
        )
    if job.data.tokenizer is not None:
        return None
    if data.folder and data.tokenizer_dir is None:  # the data has token ids or no text at all
        return None
    folder = Path(job.model.from_pretrained)
    if not (folder / "config.json").is_file() or has_tokenizer(folder):
        return None
    known = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("vocab_size")
    if known in (None, data.vocab_size, job.data.vocab_size):
        return None
    return (
        f"data: {folder} holds no tokenizer, and the model does not know the tokens of a new one. To fix: set "
        f"data.tokenizer to the model's; or, for a new one, data.vocab_size to {known}"
    )


def faults_of_labels(
    job: Job, output: Any, loss: BoundLoss, batch: Mapping[str, Tensor], *, others: Callable[[], Tensor]
) -> Iterator[str]:
    """Yields faults: labels of another shape than the predictions, or of classes that the model does not have.

    others: reads the labels of further samples, [samples].
    """
    labels, logits = batch.get("labels"), logits_of(output)
    if not loss.is_of_classes or labels is None or logits is None or logits.shape[-1] == 1:
        return
    num_classes = logits.shape[-1]
    if labels.is_floating_point():
        if labels.shape != logits.shape:
            yield (
                f"data: labels are {_shape(labels)} a sample, and the model predicts {_shape(logits)}. To fix: give a "
                "number for each class (several labels), an integer (one label), or set model.config.num_labels"
            )
    elif labels.shape != logits.shape[:-1]:
        yield _shape_fault(job, labels, logits)
        return
    every = labels if labels.dim() > 1 else others()
    real = every[every != IGNORED]
    if real.numel() and not 0 <= int(real.min()) <= int(real.max()) < num_classes:
        yield (
            f"data: labels are {int(real.min())} to {int(real.max())}, and the model predicts classes 0 to "
            f"{num_classes - 1}. To fix: number them from 0, and set model.config.num_labels to how many there are"
        )


def _shape_fault(job: Job, labels: Tensor, logits: Tensor) -> str:
    if job.data.factory is None and job.data.kind is None and labels.shape[1:] and not logits.shape[2:]:
        return (
            "data: text has no labels, and the model predicts one class a sample. To fix: set data.kind to "
            "text-classification and data.label_column to the column with the classes, or train a language model"
        )
    wanted = _shape(logits[..., 0])
    return f"data: labels are {_shape(labels)} a sample, and the model predicts {wanted}. To fix: make them equal"


def _shape(tensor: Tensor) -> str:
    """The shape of one sample, as words for a message."""
    shape = list(tensor.shape[1:])
    return f"of shape {shape}" if shape else "one number"


def shapes_of(batch: Mapping[str, Tensor]) -> str:
    """The names and shapes of the samples' tensors, as words for a message."""
    return ", ".join(f"{name} {list(torch.as_tensor(value).shape[1:])}" for name, value in sorted(batch.items()))

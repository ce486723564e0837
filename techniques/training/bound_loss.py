"""The loss of a job with its model: as (sum, count), so that the mean does not depend on how a batch was divided.

`BoundLoss` is what training and scoring call. It is the default loss of the model's kind (`next_token_loss`,
`classification_loss`), the model's own loss, a function of the user, or a `LossFunction` that the job names
(`techniques.loss`), bound to the kind of the model by `BoundLossFunction`. Defaults are summed over a batch at once, as
transformers does it; `CrossEntropy` gives each row's share of them, in other bits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ringmaster import features
from ringmaster.registry import resolve
from ringmaster.techniques.job_specs import ModelSpec
from ringmaster.techniques.loss import (
    CAUSAL,
    CLASSIFIER,
    OTHER,
    SEQUENCE_TO_SEQUENCE,
    LossFunction,
    LossInputs,
    loss_function,
)
from ringmaster.techniques.losses.supervised import CrossEntropy
from ringmaster.techniques.metric import IGNORED
from ringmaster.techniques.model_facts import MODEL_LOSSES, default_loss, is_causal_name
from ringmaster.techniques.models.layers import DROPOUTS

SampleTensors = Mapping[str, Tensor]
"""What a forward pass or a loss reads: the tensors of samples by name, such as `input_ids` and `labels`."""
SumAndCount = tuple[Tensor, Tensor | int]
REFERENCE = "reference_log_probabilities"
"""The entry of a batch with what its loss compares, under initial weights or a teacher's; [rows, 2] for pairs."""

# Suffixes of transformers classes whose loss is a cross entropy of each labelled row (or token).
CLASSIFIER_SUFFIXES = (
    "ForImageClassification",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForAudioClassification",
    "ForMaskedLM",
)

# Encoder-decoders that predict each label from those before it, and compute the decoder's inputs from the labels.
SEQUENCE_TO_SEQUENCE_SUFFIXES = ("ForConditionalGeneration", "MTModel")


@dataclass(frozen=True, kw_only=True)
class BoundLoss:
    """A loss, and the inputs that the model needs for it.

    compute: f(model_output, batch) -> (sum, count): the sum over the averaged elements, and their number. None where a
        subclass computes the loss.
    inputs: the names in a batch that are passed to `forward`; None for all.
    shifted: whether the output at a position predicts the label at the next one (language models).
    is_models: whether the model computes the loss, and `compute` only reads it from the output.
    is_of_classes: whether it compares each label with the prediction in the same place, or that of a row.
    base: the folder or name on the hub of the pretrained model, if any.
    function: the loss that the job names; None for any other.
    arrange: makes the model's inputs of entries of a batch, where a feature knows that it takes them in another form.
    """

    compute: Callable[[Any, SampleTensors], SumAndCount] | None
    inputs: frozenset[str] | None
    shifted: bool = False
    is_models: bool = False
    is_of_classes: bool = False
    base: str | None = None
    function: LossFunction | None = None
    arrange: Callable[[SampleTensors], dict[str, Tensor]] = dict

    def __call__(self, output: Any, batch: SampleTensors) -> SumAndCount:
        """Returns (sum, count) of a batch; the sum is a differentiable fp32 scalar."""
        assert self.compute is not None
        return self.compute(output, batch)

    @property
    def total_names(self) -> tuple[str, ...]:
        """The numbers of a global batch that `given` takes; mostly there are none."""
        return () if self.function is None else self.function.total_names

    def num_counted(self, batch: SampleTensors) -> Tensor | int:
        """Returns the count of a batch if its labels determine it; otherwise the number of its rows."""
        if self.compute is next_token_loss:
            return (next_tokens(batch) != IGNORED).sum()
        if self.compute is classification_loss and not labels_of(batch).is_floating_point():
            return (labels_of(batch) != IGNORED).sum()
        return len(next(iter(batch.values())))

    def predictions(self, output: Any, batch: SampleTensors) -> tuple[Tensor | None, Tensor | None]:
        """Returns the logits, and the label that each position predicts: [rows, ..., classes] and [rows, ...]."""
        labels = batch.get("labels")
        # A user's loss of a language model may read labels of rows instead of tokens.
        if self.shifted and ("shift_labels" in batch or (labels is not None and labels.dim() > 1)):
            labels = next_tokens(batch)
        return logits_of(output), labels

    def written(self, output: Any, batch: SampleTensors) -> list[list[int]] | None:
        """Returns the tokens that the model writes to each row, where its output alone determines them; else None."""
        return None

    def is_known(self, batch: SampleTensors) -> bool:
        """Whether the loss of these rows can be computed: not where it compares with weights that are not there."""
        return True

    @property
    def separates_rows(self) -> bool:
        """Whether `by_row` gives each row's contribution, so that a part of the rows has the values that all have."""
        return self.compute in (next_token_loss, classification_loss)

    def by_row(self, output: Any, batch: SampleTensors) -> tuple[Tensor, Tensor] | None:
        """Returns each row's contribution to (sum, count), [rows] and [rows]; None where rows cannot be separated.

        A user's loss, or one that a model computes itself, may mix rows: call it with one row at a time.
        """
        if self.compute is next_token_loss:
            return CrossEntropy().by_row(_logits(output), next_tokens(batch))
        if self.compute is not classification_loss:
            return None
        logits, labels = _logits(output), labels_of(batch)
        if logits.shape[-1] == 1:
            squared = (logits.float().reshape(len(logits), -1) - labels.float().reshape(len(logits), -1)).square()
            return squared.sum(1), torch.full_like(squared[:, 0], squared.shape[1])
        if labels.is_floating_point():
            each = functional.binary_cross_entropy_with_logits(logits.float(), labels.float(), reduction="none")
            each = each.mean(-1).reshape(len(logits), -1)
            return each.sum(1), torch.full_like(each[:, 0], each.shape[1])
        return CrossEntropy().by_row(logits, labels)

    def rewards(self, output: Any, batch: SampleTensors) -> Tensor | None:
        """Returns the rewards of the chosen and the rejected sequence of each pair, [rows, 2].

        Returns None for losses that have none, and where they are not known.
        """
        return None

    def totals(self, batch: SampleTensors) -> Mapping[str, float]:
        """Returns this batch's summand of each of `total_names`."""
        return {}

    def first_pass(self, batch: SampleTensors, before: SampleTensors) -> SampleTensors | None:
        """Returns the rows of a first forward, as `LossFunction.first_pass` does; mostly there are none."""
        return None if self.function is None else self.function.first_pass(batch, before)

    def first_totals(self, output: Any, batch: SampleTensors) -> Mapping[str, float]:
        """Returns what the rows of a first forward add to totals."""
        return {}

    def given(self, totals: Mapping[str, float]) -> BoundLoss:
        """Returns the loss of rows of a global batch with these totals."""
        return self

    def sequences(self, samples: Sequence[int]) -> Sequence[int]:
        """Returns the number of each row that the model gets, of samples with these numbers."""
        return samples

    def forward_inputs(self, batch: SampleTensors) -> dict[str, Tensor]:
        """Returns the entries of `batch` for `forward`; labels only where the model itself computes the loss."""
        return self.arrange(self._entries(batch))

    def _entries(self, batch: SampleTensors) -> dict[str, Tensor]:
        given = {name: value for name, value in batch.items() if self.inputs is None or name in self.inputs}
        if not given:
            raise ValueError(
                f"the model's forward takes {', '.join(sorted(self.inputs or ()))}, and the samples have "
                f"{', '.join(sorted(batch))}. To fix: name the samples' tensors as forward names its arguments"
            )
        return given


def next_tokens(batch: SampleTensors) -> Tensor:
    """Returns the label that each position predicts, [rows, tokens].

    The labels are shifted, which avoids a copy of the far larger logits. A batch of divided sequences contains its own
    `shift_labels`, as the token after its last one is on another rank.
    """
    if "shift_labels" in batch:
        return batch["shift_labels"]
    return functional.pad(labels_of(batch)[:, 1:], (0, 1), value=IGNORED)


def logits_of(output: Any) -> Tensor | None:
    """Returns the logits of a model's output (tensor, mapping or object), or None where it has none."""
    if isinstance(output, Tensor):
        return output
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) else None


def labels_of(batch: SampleTensors) -> Tensor:
    """Returns the labels of a batch. Raises ValueError, with a remedy, where it has none."""
    if "labels" not in batch:
        raise ValueError(
            f"the samples have no labels, only {', '.join(sorted(batch))}. To fix: add them, or name a loss of the "
            f"job (and metrics) that need none"
        )
    return batch["labels"]


@dataclass(frozen=True, kw_only=True)
class BoundLossFunction(BoundLoss):
    """A `LossFunction`, bound to the kind of model that the job trains.

    known: totals of the global batch that the rows belong to; None where the rows are the global batch.
    model: the model as it was built.
    """

    function: LossFunction
    kind: str
    model: nn.Module | None = None
    known: Mapping[str, float] | None = None

    def __call__(self, output: Any, batch: SampleTensors) -> SumAndCount:
        """Returns (sum, count) of a batch, which is a part of the global batch or, without `known`, all of it."""
        inputs = self._inputs(output, batch, totals=self.totals(batch) if self.known is None else self.known)
        sums, counts = self.function.row_sums(inputs)
        return sums.sum(), counts.sum()

    @property
    def separates_rows(self) -> bool:
        """Whether a row's loss depends on neither the other rows nor on numbers of the global batch."""
        return not self.function.mixes_rows and not self.function.total_names

    def by_row(self, output: Any, batch: SampleTensors) -> tuple[Tensor, Tensor] | None:
        """Returns the loss of each row as if it were alone, ([rows], [rows]); None where a row has no loss alone."""
        if self.function.mixes_rows:
            return None
        labels = self._labels(batch)
        totals = {} if labels is None else self.function.totals(labels)
        return self.function.row_sums(self._inputs(output, batch, totals=totals))

    def forward_inputs(self, batch: SampleTensors) -> dict[str, Tensor]:
        """Returns the entries of `batch` for `forward`; of pairs and groups all sequences of each in turn."""
        added = (REFERENCE, *self.function.reads)
        given = self._entries({name: value for name, value in batch.items() if name not in added})
        sequences = self.function.num_sequences
        if sequences is None:
            return self.arrange(given)
        for name, value in given.items():
            if value.dim() < 2 or value.shape[1] != sequences:
                remedy = self.function.sequences_remedy(value.shape[1] if value.dim() > 2 else 1)
                raise ValueError(
                    f"loss {self.function.name}: {name} of a sample is {list(value.shape[1:])}, and not of {sequences} "
                    f"sequences. To fix: {remedy}"
                )
        return self.arrange({name: value.flatten(0, 1) for name, value in given.items()})

    def predictions(self, output: Any, batch: SampleTensors) -> tuple[Tensor | None, Tensor | None]:
        """Returns logits and labels; of pairs [rows, 2, tokens, vocabulary] and [rows, 2, tokens]; of groups alike."""
        sequences = self.function.num_sequences
        if sequences is None:
            return super().predictions(output, batch)
        logits = logits_of(output)
        return None if logits is None else logits.reshape(-1, sequences, *logits.shape[1:]), self._labels(batch)

    def written(self, output: Any, batch: SampleTensors) -> list[list[int]] | None:
        """Returns what the loss reads of the output."""
        return self.function.written(self._inputs(output, batch, totals={}))

    def is_known(self, batch: SampleTensors) -> bool:
        """Whether the batch has the log-probabilities that the loss compares with, if it compares."""
        return not self.function.compares or REFERENCE in batch

    def rewards(self, output: Any, batch: SampleTensors) -> Tensor | None:
        """Returns the rewards of each pair, [rows, 2]; None without rewards, or where they are not known."""
        if not self.is_known(batch):
            return None
        return self.function.rewards_of(self._inputs(output, batch, totals={}))

    def totals(self, batch: SampleTensors) -> Mapping[str, float]:
        """Returns this batch's summands."""
        if not self.function.total_names:
            return {}
        labels = self._labels(batch)
        if labels is None:
            raise ValueError(f"loss {self.function.name}: the samples have no labels. To fix: add them")
        return {name: float(each.sum()) for name, each in self.function.totals(labels).items()}

    def first_totals(self, output: Any, batch: SampleTensors) -> Mapping[str, float]:
        """Returns the sums of what the rows add; in fp64, in which sums of fp32 do not depend on their order."""
        summands = self.function.first_totals(self._inputs(output, batch, totals={}))
        return {name: float(each.double().sum()) for name, each in summands.items()}

    def given(self, totals: Mapping[str, float]) -> BoundLoss:
        """Returns the loss of rows of a global batch with these totals."""
        return replace(self, known=totals) if self.function.total_names else self

    def sequences(self, samples: Sequence[int]) -> Sequence[int]:
        """Returns a number for each sequence of each sample."""
        number = self.function.num_sequences
        return samples if number is None else [number * sample + i for sample in samples for i in range(number)]

    def num_counted(self, batch: SampleTensors) -> Tensor | int:
        """Returns the number of labels, of losses of each of them; the number of rows of others."""
        labels = self._labels(batch) if self.function.per_token else None
        return super().num_counted(batch) if labels is None else (labels != IGNORED).sum()

    def _labels(self, batch: SampleTensors) -> Tensor | None:
        labels = batch.get("labels")
        if labels is None or self.kind != CAUSAL:
            return labels
        if self.function.num_sequences is None:
            return next_tokens(batch)
        return functional.pad(labels[..., 1:], (0, 1), value=IGNORED)

    def _inputs(self, output: Any, batch: SampleTensors, *, totals: Mapping[str, float | Tensor]) -> LossInputs:
        logits, labels = self.predictions(output, batch)
        reference = batch.get(REFERENCE)
        return LossInputs(
            output=output,
            batch=batch,
            logits=logits,
            labels=labels,
            totals=totals,
            reference=reference,
            base=self.base,
            model=self.model,
        )


def with_made_up_reference(loss: BoundLoss, batch: SampleTensors) -> dict[str, Tensor]:
    """Returns a batch with zeros for what a reference gives, for a step that only tries or times the loss."""
    if loss.function is None or loss.is_known(batch):
        return dict(batch)
    labels = batch["labels"]
    return {**batch, REFERENCE: torch.zeros(loss.function.reference_shape(labels.shape), device=labels.device)}


def disable_dropout(model: nn.Module, loss: BoundLoss) -> None:
    """Switches the dropout of `model` off where the loss wants none: that of modules, and rates that modules store."""
    if loss.function is None or loss.function.drops_out:
        return
    for module in model.modules():
        if isinstance(module, DROPOUTS):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and any(part in name for part in ("dropout", "drop_prob", "layerdrop")):
                setattr(module, name, 0.0)


def bind_loss(
    job_loss: str | None, model: nn.Module, spec: ModelSpec, *, options: Mapping[str, Any] | None = None
) -> BoundLoss:
    """Returns the loss of a job: `job_loss` (a name with its `options`, or a dotted name), or the model's own.

    Causal language models: cross entropy of the next token, over the labels that are not -100. Classifiers: cross
    entropy over labelled rows (or tokens); squared error with one label; binary cross entropy with float labels.
    Encoder-decoders: cross entropy of the labelled tokens. Models that a feature knows: their `default_loss`. Any other
    model that returns a `loss`: that loss times the number of rows, which is exact under division of a batch only if
    the loss is a mean over rows.

    `model` is the result of `build_model`, before any technique wraps it. Raises ValueError where a named loss is
    unknown, has a wrong option or is not for such a model.
    """
    if isinstance(own := getattr(model, "own_loss", None), BoundLoss):
        return own
    forms = (form for make in features.listed("trainer", "MODEL_INPUTS") if (form := make(model)) is not None)
    return replace(_bind_loss(job_loss, model, spec, options=options), arrange=next(forms, dict))


def _bind_loss(
    job_loss: str | None, model: nn.Module, spec: ModelSpec, *, options: Mapping[str, Any] | None
) -> BoundLoss:
    arguments = _arguments(model)
    without_labels = None if arguments is None else arguments - {"labels"}
    name = type(model).__name__
    config = getattr(model, "config", None)
    # The routers of mixture-of-experts models add losses of their own.
    is_known = config is not None and not getattr(config, "output_router_logits", False)
    has_encoder = is_known and getattr(config, "is_encoder_decoder", False)
    is_plain = is_known and not has_encoder
    is_causal = is_plain and is_causal_name(name)
    is_classifier = is_plain and name.endswith(CLASSIFIER_SUFFIXES)
    is_seq2seq = has_encoder and name.endswith(SEQUENCE_TO_SEQUENCE_SUFFIXES)
    job_loss = job_loss or (default_loss(name) if is_plain else None)
    inputs = without_labels if is_causal or is_classifier or job_loss in MODEL_LOSSES.values() else arguments
    base = spec.from_pretrained
    if (function := loss_function(job_loss, options or {})) is not None:
        flags = {CAUSAL: is_causal, CLASSIFIER: is_classifier, SEQUENCE_TO_SEQUENCE: is_seq2seq}
        kind = next((kind for kind, is_one in flags.items() if is_one), OTHER)
        if kind not in function.kinds:
            raise ValueError(
                f"loss {job_loss} is for {' and '.join(function.kinds)} models, and {name} is not one. "
                "To fix: give another loss or model"
            )
        return BoundLossFunction(
            compute=None,
            inputs=inputs,
            shifted=is_causal and function.num_sequences is None,
            is_of_classes=is_classifier and function.per_token,
            base=base,
            function=function,
            kind=kind,
            model=model,
        )
    if job_loss is not None:
        compute = partial(_call_loss_function, resolve(job_loss), job_loss)
        return BoundLoss(compute=compute, inputs=inputs, shifted=is_causal, base=base)
    if is_causal:
        return BoundLoss(compute=next_token_loss, inputs=inputs, shifted=True, base=base)
    if is_classifier or is_seq2seq:
        return BoundLoss(compute=classification_loss, inputs=inputs, is_of_classes=True, base=base)
    return BoundLoss(compute=partial(_read_model_loss, spec.factory or name), inputs=inputs, is_models=True, base=base)


def next_token_loss(output: Any, batch: SampleTensors) -> SumAndCount:
    """Computes cross entropy of logits [rows, tokens, vocabulary] at each position with the label at the next."""
    return _cross_entropy(_logits(output), next_tokens(batch))


def classification_loss(output: Any, batch: SampleTensors) -> SumAndCount:
    """Computes the loss of logits [rows, labels] or [rows, tokens, labels], which is selected as in `transformers`."""
    logits, labels = _logits(output), labels_of(batch)
    if logits.shape[-1] == 1:
        return functional.mse_loss(logits.float().flatten(), labels.float().flatten(), reduction="sum"), labels.numel()
    if labels.is_floating_point():
        each = functional.binary_cross_entropy_with_logits(logits.float(), labels.float(), reduction="none")
        return each.mean(-1).sum(), each[..., 0].numel()
    return _cross_entropy(logits, labels)


def _cross_entropy(logits: Tensor, labels: Tensor) -> SumAndCount:
    # In fp32, as a bf16 softmax over a large vocabulary, which autocast would use, loses precision in its sum.
    flat = logits.flatten(0, -2).float()
    total = functional.cross_entropy(flat, labels.flatten().long(), ignore_index=IGNORED, reduction="sum")
    return total, (labels != IGNORED).sum()


def _read_model_loss(name: str, output: Any, batch: SampleTensors) -> SumAndCount:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"{name} returns no loss for samples of {', '.join(sorted(batch))}. "
            f"To fix: set the job's loss to package.module:function, which returns (sum, count)"
        )
    rows = len(next(iter(batch.values())))
    return loss.float() * rows, rows


def _call_loss_function(
    function: Callable[[Any, SampleTensors], Any], name: str, output: Any, batch: SampleTensors
) -> SumAndCount:
    returned = function(output, batch)
    if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[0], Tensor) or returned[0].ndim:
        raise ValueError(
            f"loss {name} returned {type(returned).__name__}. To fix: return (sum, count), the sum a scalar tensor "
            f"over what is averaged and the count a number or tensor"
        )
    return returned[0], returned[1]


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

"""The `LossFunction` interface: a loss that jobs select by its name, with options. No file imports torch on import.

A loss is a sum over what it averages and the number of these, so that the mean over a global batch does not depend on
how ranks and micro-batches divide the batch. Each row gives its own summand, or declares that rows are mixed.
"""

from __future__ import annotations

import dataclasses
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from ringmaster import features
from ringmaster.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

    from ringmaster.techniques.job_specs import DataSpec
    from ringmaster.techniques.training.generation import SequenceWriter, WriterContext


CAUSAL, CLASSIFIER, SEQUENCE_TO_SEQUENCE, OTHER = "causal", "classifier", "sequence-to-sequence", "other"
MODEL_KINDS = (CAUSAL, CLASSIFIER, SEQUENCE_TO_SEQUENCE, OTHER)
"""What a model predicts: the next token, a class of each row or token, the decoder's labels, or anything else."""

JOB = "job:"
"""What options begin with that name a job of the batch, whose model the loss reads."""
DOTTED_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True, eq=False, kw_only=True)
class LossInputs:
    """What a loss reads of one batch.

    output: the return value of the model's `forward`.
    batch: the rows, tensors [rows, ...] by name.
    logits: [rows, ..., classes], of pairs [rows, 2, tokens, classes]; None if the model returns none.
    labels: the label that each position predicts, [rows, ...] (for language models the next token); None without any.
    totals: the totals of `LossFunction.total_names` over the global batch; tensors [rows] where rows are scored alone.
    reference: what `compared` returns under the initial weights, or the log-probabilities of a pair's labelled tokens,
        [rows, 2]; of a teacher, what `compared` returns for its logits; None unless the loss has `needs_reference`.
    base: the folder or name on the hub of the pretrained model, if any.
    model: the model as it was built, for what its config determines; not to be called.
    """

    output: Any
    batch: Mapping[str, Tensor]
    logits: Tensor | None
    labels: Tensor | None
    totals: Mapping[str, float | Tensor]
    reference: Tensor | None
    base: str | None = None
    model: Any = None


class LossFunction(ABC):
    """A loss, a frozen dataclass in one file whose fields are its options, each made by `option`.

    name: the name in batch files. An entry point has the same name.
    kinds: the `MODEL_KINDS` that it is for.
    in_pairs: whether a sample holds several sequences, mostly a pair: its tensors are [`num_sequences`, ...], and the
        model gets as many times the rows.
    needs_reference: whether it compares the model with its initial weights, or with a teacher.
    needs_teacher: whether that is a teacher, which a feature of the job names (`JobFeature.teacher`).
    drops_out: whether the model's dropout stays on in training.
    mixes_rows: whether a row's summand depends on the other rows of the global batch, which then is not divided.
    per_token: whether each position's summand depends on its own logits and label alone.
    reads: the entries of a batch that the loss reads, and that are not inputs of the model.
    total_names: numbers of the global batch that must be known before its first forward, such as of tokens.
    """

    name: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]] = MODEL_KINDS
    in_pairs: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = False
    needs_teacher: ClassVar[bool] = False
    drops_out: ClassVar[bool] = True
    mixes_rows: ClassVar[bool] = False
    per_token: ClassVar[bool] = False
    reads: ClassVar[tuple[str, ...]] = ()
    total_names: ClassVar[tuple[str, ...]] = ()

    @property
    def num_written_tokens(self) -> int:
        """The most tokens that the model writes to a sample in each step, on which the loss is computed.

        0 for losses of the samples as they are. Others have a `sequence_writer`.
        """
        return 0

    @property
    def functions(self) -> tuple[str, ...]:
        """The dotted names of the functions that it calls, whose code is not Ringmaster's."""
        return ()

    @property
    def default_metrics(self) -> tuple[str, ...]:
        """The metrics of a job that names none; () for those of its model."""
        return ()

    @property
    def compares(self) -> bool:
        """Whether, under its options, it compares the model with its initial weights, or with a teacher."""
        return self.needs_reference

    @property
    def num_sequences(self) -> int | None:
        """The number of sequences of a sample, whose tensors are [sequences, ...]; None where they are [...]."""
        return 2 if self.in_pairs else None

    @property
    def min_rows(self) -> int:
        """The fewest rows of a global batch with which it is what it is meant to be."""
        return 1

    @abstractmethod
    def row_sums(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """Returns each row's sum, in fp32, and its number of averaged elements: [rows] and [rows].

        Raises ValueError, with a remedy, where the outputs or the labels do not suit the loss.
        """

    def conflicts(self) -> Iterator[OptionFault]:
        """Yields the faults of options that do not go together."""
        yield from ()

    @classmethod
    def options_of_data(cls, spec: DataSpec) -> Mapping[str, Any]:
        """Returns the options that the data determines unless a job gives them; None for the default of one.

        Raises ValueError where the data cannot be read.
        """
        return {}

    def sequences_remedy(self, number: int) -> str:
        """Returns what to do with samples of another number of sequences than `num_sequences`."""
        return f"give samples whose tensors are [{self.num_sequences}, tokens] (docs/losses.md)"

    def totals(self, labels: Tensor) -> Mapping[str, Tensor]:
        """Returns each row's summand of each of `total_names`, [rows]. labels: as in `LossInputs`."""
        return {}

    def first_pass(self, batch: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        """Returns the rows of a forward without gradients, before all others of a step, that totals are made of.

        batch: some rows of the global batch. before: for each of them, the one before it there; the last for the first.

        Returns None where labels determine all totals.
        """
        return None

    def first_totals(self, inputs: LossInputs) -> Mapping[str, Tensor]:
        """Returns what each row of the first pass adds to totals, [rows]."""
        return {}

    def compared(self, logits: Tensor, labels: Tensor) -> Tensor | None:
        """Returns what the loss compares with a reference; None for log-probabilities of whole sequences.

        logits: [rows, sequences, tokens, vocabulary]. labels: the token that each position predicts, [rows, sequences,
        tokens].
        """
        return None

    def reference_shape(self, labels: tuple[int, ...]) -> tuple[int, ...]:
        """Returns a shape of `LossInputs.reference`, for labels of a shape, in which a made-up one is as good."""
        return labels[:-1]

    def sequence_writer(self, context: WriterContext) -> SequenceWriter | None:
        """Returns what writes the sequences on which it is computed; None for losses of the samples as they are.

        Raises ValueError where the model cannot write them.
        """
        return None

    def probe_batch(
        self, samples: Mapping[str, Tensor], context: WriterContext, *, seed: int, seq_len: int
    ) -> dict[str, Tensor]:
        """Returns the batch of a few short sequences that the model writes to a few samples, for a tiny step.

        seq_len: the most tokens of a sample.
        Raises StepError where the model, the data or a function of the user does not suit the loss.
        """
        raise NotImplementedError(f"{self.name} has no sequences that a model writes")

    def written(self, inputs: LossInputs) -> list[list[int]] | None:
        """Returns the tokens that a model writes to each row, where its output alone determines them; else None."""
        return None

    def rewards_of(self, inputs: LossInputs) -> Tensor | None:
        """Returns the reward of the sequences of each row that are compared, the right one first: [rows, sequences].

        Returns None for losses without rewards.
        """
        return None


@dataclass(frozen=True, kw_only=True)
class OptionFault:
    """A wrong option: its name, what is wrong, and what to do."""

    option: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.option} {self.problem}. To fix: {self.remedy}"


@dataclass(frozen=True, kw_only=True)
class Values:
    """The allowed values of an option: strings of `among`, or numbers (or a list of them) between limits.

    required: whether the option has no default.
    """

    among: tuple[str, ...] = ()
    above: float = -math.inf
    least: float = -math.inf
    below: float = math.inf
    most: float = math.inf
    is_list: bool = False
    required: bool = False

    def allow(self, value: Any) -> bool:
        """Returns whether `value` is allowed."""
        if self.among:
            return value in self.among
        if self.is_list:
            return isinstance(value, (list, tuple)) and bool(value) and all(map(self._allows_number, value))
        return self._allows_number(value)

    def __str__(self) -> str:
        if self.among:
            return f"one of {', '.join(self.among)}"
        limits = [
            f"{word} {limit:g}"
            for word, limit in (
                ("above", self.above),
                ("at least", self.least),
                ("below", self.below),
                ("at most", self.most),
            )
            if math.isfinite(limit)
        ]
        return " ".join(["a list of numbers" if self.is_list else "a number", " and ".join(limits)]).strip()

    def _allows_number(self, value: Any) -> bool:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        return is_number and self.above < value and self.least <= value < self.below and value <= self.most


@dataclass(frozen=True, kw_only=True)
class YesOrNo(Values):
    """True and false."""

    def allow(self, value: Any) -> bool:
        """Returns whether `value` is a boolean."""
        return isinstance(value, bool)

    def __str__(self) -> str:
        return "true or false"


@dataclass(frozen=True, kw_only=True)
class WholeNumbers(Values):
    """Whole numbers from `least` on."""

    def allow(self, value: Any) -> bool:
        """Returns whether `value` is such a number."""
        return isinstance(value, int) and self._allows_number(value)

    def __str__(self) -> str:
        return f"a whole number, at least {self.least:g}"


@dataclass(frozen=True, kw_only=True)
class DottedNames(Values):
    """A list of functions by their dotted names, or of jobs."""

    def allow(self, value: Any) -> bool:
        """Returns whether `value` is a list of dotted names, or names of jobs."""
        is_list = isinstance(value, (list, tuple)) and bool(value)
        return is_list and all(
            isinstance(each, str) and (DOTTED_NAME.fullmatch(each) or job_named(each)) for each in value
        )

    def __str__(self) -> str:
        return 'a list of functions such as ["my_module:my_function"]'


@dataclass(frozen=True, kw_only=True)
class ModelName(Values):
    """The name of a model."""

    def allow(self, value: Any) -> bool:
        """Returns whether `value` is a text."""
        return isinstance(value, str) and bool(value)

    def __str__(self) -> str:
        return f"{JOB}NAME for a job of the batch, a folder, or a model of the hub"


def job_named(value: object) -> str | None:
    """Returns the name of the job that an option names; None where it names something else."""
    return value.removeprefix(JOB) if isinstance(value, str) and value.startswith(JOB) else None


def option(default: Any, values: Values) -> Any:
    """Returns the dataclass field of an option."""
    return field(default=default, metadata={"values": values})


def options_of(loss: type[LossFunction]) -> dict[str, Values]:
    """Returns the options of a loss by name."""
    return {each.name: each.metadata["values"] for each in dataclasses.fields(loss)}  # type: ignore[arg-type]


def option_faults(loss: type[LossFunction], options: Mapping[str, Any]) -> Iterator[OptionFault]:
    """Yields the faults of a loss's options: missing and unknown ones, wrong values, and then those of several."""
    faults = list(_faults_of_each(loss, options))
    yield from faults or _made(loss, options).conflicts()


def _made(loss: type[LossFunction], options: Mapping[str, Any]) -> LossFunction:
    return loss(**{key: tuple(value) if isinstance(value, list) else value for key, value in options.items()})


def _faults_of_each(loss: type[LossFunction], options: Mapping[str, Any]) -> Iterator[OptionFault]:
    known = options_of(loss)
    for name, values in known.items():
        if values.required and name not in options:
            yield OptionFault(option=name, problem="is missing", remedy=f"give {values}")
    for name, value in options.items():
        if name not in known:
            listed = f"it has {', '.join(known)}" if known else "it has none"
            yield OptionFault(option=name, problem=f"is not an option of {loss.name}", remedy=f"{listed}; or remove it")
        elif not known[name].allow(value):
            remedy = f"give {known[name]}{'' if known[name].required else ', or leave it out'}"
            yield OptionFault(option=name, problem=f"must be {known[name]}, not {value!r:.100}", remedy=remedy)


# The losses that a job may name. That of a job which names none is in `training.bound_loss`.
BUILTIN_LOSSES: dict[str, str] = {
    "cross-entropy": "ringmaster.techniques.losses.supervised:CrossEntropy",
    "mse": "ringmaster.techniques.losses.supervised:MeanSquaredError",
    "weighted-outputs": "ringmaster.techniques.losses.supervised:WeightedOutputs",
    **features.dotted_names("LOSSES"),
}
LOSSES = Registry(kind="loss", entry_point_group="ringmaster.losses", builtin=BUILTIN_LOSSES)


def loss_names() -> tuple[str, ...]:
    """Returns the names of all losses, built-in ones first."""
    return tuple(LOSSES.paths())


def is_named(loss: str | None) -> bool:
    """Returns whether a job's loss is the name of one, and not a dotted name or None."""
    return loss is not None and ":" not in loss


def loss_class(loss: str | None) -> type[LossFunction] | None:
    """Returns the class of a job's loss where the job names one; None for its model's own loss and dotted names.

    Raises ValueError where no loss, or a faulty one, has the name.
    """
    if loss is None or not is_named(loss):
        return None
    result: type[LossFunction] = LOSSES.load(loss, LossFunction)
    return result


def loss_function(loss: str | None, options: Mapping[str, Any]) -> LossFunction | None:
    """Returns a job's loss with its options where the job names one; None as `loss_class`.

    Raises ValueError on an unknown loss, an unknown option or a wrong value.
    """
    named = loss_class(loss)
    if named is None:
        return None
    if faults := list(option_faults(named, options)):
        raise ValueError("; ".join(f"loss: {fault}" for fault in faults))
    return _made(named, options)


def compares(loss: str | None, options: Mapping[str, Any]) -> bool:
    """Returns whether a job's loss compares the model with its initial weights."""
    function = loss_function(loss, options)
    return function is not None and function.compares and not function.needs_teacher


def loss_code_path(loss: str | None) -> str | None:
    """Returns the dotted name whose source code computes a job's loss; None where it is one of Ringmaster's."""
    if loss is None or loss in BUILTIN_LOSSES:
        return None
    return LOSSES.path(loss) if is_named(loss) else loss


def functions_of(loss: str | None, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the dotted names of the functions that a job's loss calls; () for most losses."""
    function = loss_function(loss, options)
    return () if function is None else function.functions


def writes(loss: str | None, options: Mapping[str, Any]) -> bool:
    """Returns whether a job's loss is computed on what the model writes in each step."""
    function = loss_function(loss, options)
    return function is not None and function.num_written_tokens > 0

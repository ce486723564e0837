"""Scores of rows from a model's outputs: of a single model, or of several adapters over one base in memory.

One forward pass over a common base serves many questions (`multi_adapter.multi_adapter_base`): of different adapters,
of different rows, and for a causal language model of different lengths. On a CPU in fp32 each output equals the
adapter's separate output bit by bit. For this reason a question whose products have fewer than eight rows runs alone,
because such products use another kernel. Models whose products depend on the other rows of the batch are refused
(`NoCommonBase`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.modeling_outputs import CausalLMOutput

from ringmaster.errors import NoCommonBase
from ringmaster.techniques.job_specs import Adapter, EvaluationSpec, ModelSpec
from ringmaster.techniques.loss import writes
from ringmaster.techniques.metric import Metric, ModelMetric, Outputs, metrics_named, scored_metrics
from ringmaster.techniques.models.adapters import attach, first_state, own_leaves, sites
from ringmaster.techniques.models.build import build_base, build_model
from ringmaster.techniques.models.facts import has_experts, model_facts
from ringmaster.techniques.models.model_folders import LOSS, REFERENCE, read_json
from ringmaster.techniques.models.peft_format import is_adapter, read_adapter, reference_of
from ringmaster.techniques.models.quantization import is_quantized
from ringmaster.techniques.multi_adapter.adapter_batches import AdapterBatch
from ringmaster.techniques.multi_adapter.adapter_runs import AdapterModules, adapter_modules_of
from ringmaster.techniques.multi_adapter.multi_adapter_base import MultiAdapterBase
from ringmaster.techniques.scoring import scored_rows
from ringmaster.techniques.sharding.tensor_plan import cut
from ringmaster.techniques.tensor_parallel import why_not_divisible
from ringmaster.techniques.training.bound_loss import (
    BoundLoss,
    bind_loss,
    classification_loss,
    logits_of,
    next_token_loss,
)
from ringmaster.techniques.training.generation import WriterContext, answer_writer_of
from ringmaster.techniques.training.gradients import compute_in_half
from ringmaster.techniques.training.metric_totals import outputs_of, sums_of
from ringmaster.techniques.training.reference_model import ReferenceModel

MIN_ROWS = 8  # a product of fewer rows runs on another kernel alone than in a batch


@dataclass(frozen=True, eq=False, kw_only=True)
class ScoringQuery:
    """The input of one model.

    model: the model's name.
    inputs: the arguments of `forward`.
    about: any value of the caller, returned with the output.
    """

    model: str
    inputs: dict[str, Tensor]
    about: Any = None

    @property
    def num_rows(self) -> int:
        """The number of samples."""
        return len(next(iter(self.inputs.values())))

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all samples; 0 if the inputs are not tokens."""
        tokens = self.inputs.get("input_ids")
        return 0 if tokens is None else tokens.numel()


class CommonBase:
    """A base and the adapters on it.

    model: the base without an adapter; it is changed in place.
    loss: the loss that will be computed from the outputs.
    Raises NoCommonBase if the model cannot serve several adapters at once.
    """

    def __init__(self, model: nn.Module, *, loss: BoundLoss) -> None:
        if loss.compute not in (next_token_loss, classification_loss):
            raise NoCommonBase(f"the loss of {type(model).__name__} needs more than logits")
        config: Any = getattr(model, "config", None)
        if has_experts(model):
            raise NoCommonBase(f"{type(model).__name__} routes rows to experts, whose products depend on all rows")
        self._device = next(model.parameters()).device
        self._num_logits = (getattr(config, "vocab_size", None) or 1) if loss.shifted else 0
        self._stem = MultiAdapterBase(model.eval())
        self._causal, self._packs = loss.shifted, self._stem.packs
        self._adapter_modules: dict[str, AdapterModules] = {}

    def add(self, name: str, folder: Path) -> None:
        """Adds the adapter in `folder` under a name. A folder without an adapter represents the base itself.

        Raises ValueError if the adapter does not fit the base.
        """
        if not is_adapter(folder):
            self._adapter_modules[name] = AdapterModules()
            return
        adapter, model = read_adapter(folder), self._stem.model
        at = sites(model, adapter)
        state = {key: value.to(self._device) for key, value in first_state(model, adapter, at, seed=0).items()}
        own = own_leaves(model, adapter)
        self._stem.open(at, own)
        self._adapter_modules[name] = adapter_modules_of(adapter, at, own, state)

    @torch.no_grad()
    def answers(self, questions: Iterable[ScoringQuery]) -> Iterator[tuple[ScoringQuery, CausalLMOutput]]:
        """Yields each question with its logits, in order; reads ahead by no more than one forward pass.

        Raises NoCommonBase if the base packs samples and a question has padded rows.
        """
        waiting: list[ScoringQuery] = []
        for question in questions:
            if waiting and not self._fits(waiting, question):
                yield from self._answered(waiting)
                waiting = []
            waiting.append(question)
        if waiting:
            yield from self._answered(waiting)

    def _answered(self, questions: list[ScoringQuery]) -> Iterator[tuple[ScoringQuery, CausalLMOutput]]:
        parts = [
            AdapterBatch(adapter_modules=self._adapter_modules[question.model], inputs=self._inputs(question))
            for question in questions
        ]
        yield from zip(questions, self._stem.forward(parts), strict=True)

    def _fits(self, waiting: list[ScoringQuery], question: ScoringQuery) -> bool:
        """Whether one more question fits into the same forward pass without changing any output."""
        grouped = [*waiting, question]
        if min(self._product_rows(waiting[-1]), self._product_rows(question)) < MIN_ROWS:
            return False
        if not self._packs and _is_padded(waiting[-1]) != _is_padded(question):
            return False
        num_tokens = sum(each.num_tokens for each in grouped)
        if num_tokens:
            return (
                num_tokens <= scored_rows.max_tokens(self._device)
                and num_tokens * self._num_logits <= scored_rows.MAX_LOGITS
            )
        return sum(each.num_rows for each in grouped) <= scored_rows.MAX_ROWS

    def _product_rows(self, question: ScoringQuery) -> int:
        """The number of rows of the smallest product: a classifier's head has one row per sample."""
        return question.num_tokens if self._causal else question.num_rows

    def _inputs(self, question: ScoringQuery) -> dict[str, Tensor]:
        if not self._packs:
            return question.inputs
        if not question.inputs.keys() <= {"input_ids", "attention_mask"} or _is_padded(question):
            raise NoCommonBase("rows that are padded, or more than tokens, cannot be packed")
        return {"input_ids": question.inputs["input_ids"]}


def _is_padded(question: ScoringQuery) -> bool:
    mask = question.inputs.get("attention_mask")
    return mask is not None and not bool(mask.all())


CAUSAL, CLASSIFIER, OTHER = "causal", "classifier", "other"

Array = np.ndarray[Any, Any]
Count = Callable[[int], None]
"""A callback that is called with the number of rows scored since its last call."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RowScores:
    """The scores of one model on some rows.

    kind: "causal", "classifier" or "other".
    arrays: arrays with one entry per row, by name: the sums of metrics, such as loss_sums, loss_counts, hits and
        labelled; num_tokens (rows of tokens); log_probabilities of whole rows (causal); predictions, and probabilities
        [rows, labels] (classifiers); column.NAME (integer columns); slice.NAME; input.NAME. Further columns are
        document.NAME: the values of a metric on rows of its own.
    """

    kind: str
    arrays: Mapping[str, Array]


class ScoreCollector:
    """A collection of values of rows, which may be added in any order."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[int, Any]] = {}

    def add(self, numbers: Sequence[int], values: Mapping[str, Sequence[Any]]) -> None:
        """Adds values, by name, of the rows with these numbers."""
        for key, of in values.items():
            self._rows.setdefault(key, {}).update(zip(numbers, of, strict=True))

    def missing(self, metrics: Sequence[str]) -> list[str]:
        """Returns those of some metrics that lack sums, other than those with rows of their own."""
        metrics_of_rows = (metric for metric in metrics_named(metrics) if not isinstance(metric, ModelMetric))
        return [metric.name for metric in metrics_of_rows if not self._rows.keys() >= set(metric.sums)]

    def scores(self, *, shifted: bool) -> RowScores:
        """The scores from all values, in the order of the rows. shifted: whether the model is a language model."""
        num_rows = max((len(values) for values in self._rows.values()), default=0)
        arrays = {key: _stacked([of[i] for i in range(num_rows)]) for key, of in self._rows.items()}
        return RowScores(kind=CAUSAL if shifted else CLASSIFIER if "predictions" in arrays else OTHER, arrays=arrays)


def build_scored_model(model_dir: Path, rows: scored_rows.ScoredRows) -> tuple[nn.Module, ModelSpec]:
    """The model in a folder (if it holds an adapter, its base) on the CPU, and its spec. Raises ValueError."""
    spec = scored_rows.model_spec(model_dir)
    if spec.factory is None:
        spec = replace(spec, attention=rows.job.model.attention)
    if is_adapter(model_dir):
        return build_base(spec, data=rows.prepared, seed=rows.job.seed, folder=model_dir), spec
    return build_model(spec, data=rows.prepared, seed=rows.job.seed, weights_from=model_dir.absolute()), spec


@torch.no_grad()
def score_alone(
    model_dir: Path, rows: scored_rows.ScoredRows, *, device: torch.device, count: Count, mesh: DeviceMesh | None = None
) -> RowScores:
    """The scores of one model, computed on its own.

    count: called with the number of rows of each batch. mesh: the devices over which the model is divided, of which
    all compute the same scores; None for `device` alone. Raises ValueError where the model cannot be divided so.
    """
    model, spec = build_scored_model(model_dir, rows)
    if is_adapter(model_dir):
        attach(model, Adapter(from_pretrained=str(model_dir)), seed=rows.job.seed)
    model = _laid_out(model, spec, rows, device=device, mesh=mesh)
    job = rows.job_of(model_dir)
    are_no_prompts = rows.cases is not None and writes(job.loss, job.loss_options)
    loss = bind_loss(None if are_no_prompts else job.loss, model, spec, options=job.loss_options)
    if rows.job.precision == "bf16-params":
        compute_in_half(model)
    writing = WriterContext(
        model=model,
        tokenizer_dir=rows.prepared.tokenizer_dir,
        device=device,
        autocast=lambda: torch.autocast(device.type, dtype=torch.bfloat16, enabled=rows.job.precision == "bf16"),
        is_trained=False,
    )
    writer = None if loss.function is None else loss.function.sequence_writer(writing)
    answers = answer_writer_of(rows.job.evaluation if rows.cases is None else EvaluationSpec(), writing)
    reference = compared = None
    is_compared = loss.function is not None and loss.function.compares
    has_teacher = loss.function is not None and loss.function.needs_teacher
    is_base = is_adapter(model_dir) and not has_teacher  # the model itself gives what its initial weights do
    if is_compared and not is_base:
        is_named = not has_teacher or read_json(model_dir / LOSS).get(REFERENCE)  # an adapter's base is no teacher
        name = reference_of(model_dir, rows.reader) if is_named else None
        compared = None if name is None else _compared_model(name, rows, device=device, mesh=mesh)
    if is_compared and (compared is not None or is_base):
        reference = ReferenceModel(model=compared, loss=loss, autocast=writing.autocast)
    collected, config = ScoreCollector(), getattr(model, "config", None)
    metrics = scored_metrics(rows.job.evaluation.metrics)
    for numbers, batch in rows.chunks(model_dir, config=config, shifted=loss.shifted, device=device):
        known = rows.known(batch)
        if writer is not None:
            batch = writer.held_out_batch(model, batch, seed=rows.job.seed, rows=numbers)
        if reference is not None:
            forward = partial(_forward, model, loss, rows=rows)
            batch = reference.before_forward(batch, trained=model, inner=model, forward=forward)
        output, losses = _forward(model, loss, batch, rows=rows), None
        batch = batch if reference is None else reference.before_loss(batch)
        if rows.are_labelled(batch) and loss.function is None:
            losses = loss.by_row(output, batch) or _losses_one_by_one(model, loss, batch, rows)
        elif rows.are_labelled(batch) and loss.is_known(batch):
            losses = loss.by_row(output, batch)
        outputs = outputs_of(
            loss,
            output,
            batch,
            losses=losses,
            data=rows.prepared,
            written=None if answers is None else answers.written(model, batch),
        )
        collected.add(numbers, {**scores_of_batch(loss, outputs, metrics=metrics), **known})
        if is_compared and reference is None and (lost := collected.missing(rows.job.evaluation.metrics)):
            named = "a teacher, which is" if has_teacher else "the weights that it began with, which are"
            remedy = "" if has_teacher else ", or name a registered model whose parent is there"
            raise ValueError(
                f"{', '.join(lost)}: the loss {job.loss} compares a model with {named} not known. To fix: write their "
                f"folder or hub name as {REFERENCE!r} into {model_dir / LOSS}{remedy}"
            )
        count(len(numbers))
    scores = collected.scores(shifted=loss.shifted)
    if rows.cases is None or rows.num_rows == 0:  # literal cases are scored with rows
        scores = replace(scores, arrays={**scores.arrays, **dict(_document_scores(model, metrics, rows, model_dir))})
    return scores


def _laid_out(
    model: nn.Module, spec: ModelSpec, rows: scored_rows.ScoredRows, *, device: torch.device, mesh: DeviceMesh | None
) -> nn.Module:
    """Returns a model on its devices. Raises ValueError where it cannot be divided over those of `mesh`."""
    model = model.eval()
    if mesh is not None:
        if is_quantized(model):
            raise ValueError(f"the model cannot be evaluated on {mesh.size()} devices: its weights are quantized")
        facts = model_facts(spec, data=rows.prepared)
        if reason := why_not_divisible(facts.decoder, mesh.size()):
            raise ValueError(f"the model cannot be evaluated on {mesh.size()} devices: tensor parallelism {reason}")
        cut(model, mesh, sequence_parallel=False, loss_parallel=False)
    return model.to(device)


def _compared_model(
    name: str, rows: scored_rows.ScoredRows, *, device: torch.device, mesh: DeviceMesh | None
) -> nn.Module:
    """Returns the weights that a whole model began with, or its teacher, from a folder or the hub."""
    folder = Path(name).absolute() if Path(name).is_dir() else None
    spec = ModelSpec(from_pretrained=name) if folder is None else scored_rows.model_spec(folder)
    model = build_model(spec, data=rows.prepared, seed=rows.job.seed, weights_from=folder)
    model = _laid_out(model, spec, rows, device=device, mesh=mesh)
    if rows.job.precision == "bf16-params":
        compute_in_half(model)
    return model


def _document_scores(
    model: nn.Module, metrics: Sequence[Metric], rows: scored_rows.ScoredRows, model_dir: Path
) -> Iterator[tuple[str, Array]]:
    """Yields the values of metrics that have rows of their own, read with the model's own tokenizer."""
    for metric in metrics:
        if isinstance(metric, ModelMetric):
            numbers = range(metric.num_rows())[: rows.limit]
            tokenizer_dir = Path(scored_rows.tokenizer_of(model_dir.absolute()))
            size = rows.job.global_batch_size
            yield (
                f"document.{metric.name}",
                metric.measure(model, numbers, tokenizer_dir=tokenizer_dir, batch_size=size),
            )


def scores_of_batch(loss: BoundLoss, outputs: Outputs, *, metrics: Sequence[Metric]) -> dict[str, list[Any]]:
    """The scores of a batch's rows, a value (or vector) per row, by name.

    metrics: those that do not suit the model or the labels are left out.
    """
    result = sums_of(metrics, outputs)
    batch, losses, logits = outputs.batch, outputs.losses, logits_of(outputs.output)
    if loss.shifted:
        # The next-token loss is the negative log-probability already.
        if losses is not None and loss.compute is next_token_loss:
            result["log_probabilities"] = -result["loss_sums"]
        elif logits is not None and "labels" in batch and logits.shape[:-1] == batch["labels"].shape:
            result["log_probabilities"] = _log_probabilities(outputs.output, batch)
    elif logits is not None and logits.ndim == 2 and logits.shape[-1] > 1:
        result["probabilities"] = logits.float().softmax(-1)
        result["predictions"] = logits.argmax(-1)
    return {key: list(tensor.double().cpu().numpy()) for key, tensor in result.items()}


def _forward(model: nn.Module, loss: BoundLoss, batch: Mapping[str, Tensor], *, rows: scored_rows.ScoredRows) -> Any:
    kind = next(iter(batch.values())).device.type
    with torch.autocast(kind, dtype=torch.bfloat16, enabled=rows.job.precision == "bf16"):
        return model(**loss.forward_inputs(batch))


def _losses_one_by_one(
    model: nn.Module, loss: BoundLoss, batch: Mapping[str, Tensor], rows: scored_rows.ScoredRows
) -> tuple[Tensor, Tensor]:
    """The losses by row of a loss that supports only whole batches, from batches of one row."""
    pairs = []
    for i in range(len(next(iter(batch.values())))):
        row = {key: tensor[i : i + 1] for key, tensor in batch.items()}
        pairs.append([float(value) for value in loss(_forward(model, loss, row, rows=rows), row)])
    sums, counts = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    return sums, counts


def _log_probabilities(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """The natural log-probability of each row's tokens after the first, given the tokens before them: [rows]."""
    losses = BoundLoss(compute=next_token_loss, inputs=None, shifted=True).by_row(output, batch)
    assert losses is not None
    return -losses[0]


def _stacked(values: list[Any]) -> Array:
    """Rows as one array; rows of different lengths (of tokens) are padded with -1 at the end."""
    if isinstance(values[0], np.ndarray) and len({value.shape for value in values}) > 1:
        width = max(len(value) for value in values)
        return np.stack([np.pad(value, (0, width - len(value)), constant_values=-1) for value in values])
    return np.asarray(values)

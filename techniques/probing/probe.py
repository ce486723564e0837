"""Probes of jobs: one tiny training step on the CPU that examines the model and finds faults early."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from ringmaster.codec import digest
from ringmaster.compat.transformers import attention_of, set_attention
from ringmaster.errors import ModelTooLarge, StepError
from ringmaster.files import kept_value, read_value, sha256_of
from ringmaster.registry import resolve, source_digest
from ringmaster.techniques.data import Dataset, PreparedData, fetch, open_data
from ringmaster.techniques.data.arrow_files import POSITIONS
from ringmaster.techniques.data_source import installed_source
from ringmaster.techniques.job import DISTILLED, Job
from ringmaster.techniques.job_features import Effect
from ringmaster.techniques.job_specs import VIRTUAL_TOKENS, ModelSpec
from ringmaster.techniques.loss import CLASSIFIER, functions_of, loss_class, loss_code_path
from ringmaster.techniques.metric import (
    GatheredMetric,
    Metric,
    ModelMetric,
    installed_metric,
    metrics_named,
    scored_metrics,
)
from ringmaster.techniques.models.architectures import instantiate, misspelt, undeclared_fields
from ringmaster.techniques.models.build import build_model, model_config, seeded
from ringmaster.techniques.models.peft_format import resolved
from ringmaster.techniques.probing.faults import (
    explained,
    faults_of_labels,
    faults_of_samples,
    shapes_of,
    why_tokens_are_foreign,
)
from ringmaster.techniques.probing.rows import check_longest, why_not_causal, why_reads_padding
from ringmaster.techniques.probing.tiny import cropped, made_up, ragged, rows_of, tiny_config
from ringmaster.techniques.training.bound_loss import (
    REFERENCE,
    BoundLoss,
    bind_loss,
    disable_dropout,
    logits_of,
    with_made_up_reference,
)
from ringmaster.techniques.training.dropout import Draws, DrawSites, drawing, find_sites, name_modules, use
from ringmaster.techniques.training.generation import WriterContext, answer_writer_of
from ringmaster.techniques.training.metric_totals import MetricTotals, outputs_of, sums_of
from ringmaster.techniques.training.reference_model import ReferenceModel

MAX_NEW_TOKENS = 8
PACKING_REMEDY = "To fix: set data.packing to false"
MAX_TOKENS = 12  # of each of two samples


def why_never_packed(job: Job) -> str:
    """Returns why no model of this job keeps packed samples apart, with a remedy; empty if one may."""
    if not job.data.packing:
        return ""
    attention = str(job.model.config.get("attn_implementation", job.model.attention))
    if "flash" in attention:  # transformers looks for packed samples in batches of one row only
        return (
            f"data: packing: attention {attention} does not keep samples apart. "
            f"{PACKING_REMEDY}, or take attention: sdpa"
        )
    if job.adapter is not None and (kind := resolved(job.adapter).kind) in VIRTUAL_TOKENS:
        return f"data: packing: a {kind} lies before a row, and not before each of its samples. {PACKING_REMEDY}"
    loss = loss_class(job.loss)
    if job.loss is not None and (loss is None or not loss.per_token):
        text = "a loss of one's own" if loss is None else f"the loss {loss.name}"
        return f"data: packing: {text} reads whole sequences, and several lie in one row. {PACKING_REMEDY}"
    if job.adaptation is not None and job.adaptation.kind == DISTILLED:
        return f"data: packing: whether the teacher keeps samples apart is not measured. {PACKING_REMEDY}"
    return ""


def why_without_positions(job: Job, model: nn.Module, loss: BoundLoss) -> str:
    """Returns why a model cannot separate packed samples, with a remedy, where it takes no positions; else empty."""
    if not job.data.packing or loss.inputs is None or POSITIONS in loss.inputs:
        return ""
    return (
        f"data: packing: {type(model).__name__} takes no {POSITIONS}, by which samples of one row are kept apart. "
        f"{PACKING_REMEDY}"
    )


@torch.no_grad()
def why_not_apart(model: nn.Module, batch: Mapping[str, Tensor]) -> str:
    """Returns why a model mixes samples of one row, with a remedy; empty if it does not.

    The logits of two samples in one row are compared with those of each alone, without dropout.

    model: it is left in training mode. batch: two samples or more, whose tokens are used.
    """
    model.eval()
    try:
        tokens = batch["input_ids"][:2, :MAX_TOKENS]
        alone = [_logits(model, each.unsqueeze(0), 1) for each in tokens]
        in_batch = _logits(model, tokens.reshape(1, -1), 2).chunk(2, dim=1)
    finally:
        model.train()
    difference = max(float((x - y).abs().max()) for x, y in zip(in_batch, alone, strict=True))
    largest = max(float(x.abs().max()) for x in alone)
    if difference <= torch.finfo(torch.float32).eps ** 0.5 * largest:
        return ""
    return (
        f"data: packing: {type(model).__name__} does not keep samples in one row apart (its outputs differ by "
        f"{difference / largest:.1e} of the largest from those of a sample alone). {PACKING_REMEDY}"
    )


def _logits(model: nn.Module, tokens: Tensor, num_samples: int) -> Tensor:
    positions = torch.arange(tokens.shape[1] // num_samples).repeat(num_samples).unsqueeze(0)
    logits = logits_of(model(input_ids=tokens, position_ids=positions))
    if logits is None:
        raise ValueError(f"data: packing: {type(model).__name__} returns no logits. {PACKING_REMEDY}")
    return logits


NUM_SAMPLES = 4
NUM_DRAWN = 3  # samples of rows of which an installed metric is computed
WHOLE = ((0, 1, 2, 3),)
DIVISIONS = (((0, 1), (2, 3)), ((3,), (0, 2), (1,)))
# Relative to the largest gradient, in fp32. Rounding stays below a tenth of this. The smallest difference measured for
# losses and layers that mix samples (routers of mixture-of-experts models) is ten times this.
LARGEST_DIFFERENCE = 3e-5


def why_undivided(model: nn.Module, loss: BoundLoss, batch: Mapping[str, Tensor], sites: DrawSites) -> str:
    """The reason why a batch of this model and loss must not be divided; empty if it may be.

    model: in training mode, on the device of `batch`, with named modules (`name_modules`). Its buffers are restored.
    batch: four samples.
    sites: the model's random draws, as `find_sites` found them.
    Raises what the model or the loss raises for the whole batch.
    """
    if sites.reason:
        return sites.reason
    buffers = [buffer.clone() for buffer in model.buffers()]
    if (
        is_of_differences := loss.function is not None
        and loss.function.in_pairs
        and loss.function.kinds == (CLASSIFIER,)
    ):
        model.double()  # a fresh head has nearly equal outputs, of whose difference's gradient fp32 leaves rounding
    reason = _why_divisions_differ(model, loss, batch, sites, buffers)
    if is_of_differences:
        model.float()
    _restore(model, buffers)
    return reason


def _why_divisions_differ(
    model: nn.Module, loss: BoundLoss, batch: Mapping[str, Tensor], sites: DrawSites, buffers: Sequence[Tensor]
) -> str:
    whole = _gradients(model, loss, batch, WHOLE, sites)
    for division in DIVISIONS:
        _restore(model, buffers)
        try:
            divided = _gradients(model, loss, batch, division, sites)
        except (ArithmeticError, IndexError, LookupError, RuntimeError, TypeError, ValueError) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            return f"a part of a batch cannot be trained alone ({lines[0]})"
        difference = _difference(whole, divided)
        if not difference <= LARGEST_DIFFERENCE:
            return (
                f"dividing a batch changes its gradients (by {difference:.1e} of the largest, measured on four "
                "samples): the loss or a layer depends on several samples together"
            )
    return ""


def with_reference_near(model: nn.Module, loss: BoundLoss, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a batch whose reference is like the model itself, as after the first steps of a training.

    A made-up one may be so far away that a comparison has no gradient but rounding.
    """
    if loss.function is None or not loss.function.compares:
        return dict(batch)
    completed = ReferenceModel(model=model, loss=loss, autocast=nullcontext).before_loss(dict(batch))
    noise = torch.rand(completed[REFERENCE].shape, generator=torch.Generator().manual_seed(0))
    return {**completed, REFERENCE: completed[REFERENCE] + 0.1 * noise.to(completed[REFERENCE].device)}


def _gradients(
    model: nn.Module, loss: BoundLoss, batch: Mapping[str, Tensor], parts: Sequence[Sequence[int]], sites: DrawSites
) -> list[Tensor]:
    """The gradients of the mean loss over all parts. Each part has its own forward and backward."""
    model.zero_grad(set_to_none=True)
    loss = loss.given(loss.totals(batch))
    count = 0.0
    with drawing():
        for part in parts:
            use(Draws(seed=0, samples=loss.sequences(part), shared=sites.shared))
            rows = rows_of(batch, part)
            part_sum, part_count = loss(model(**loss.forward_inputs(rows)), rows)
            part_sum.backward()  # type: ignore[no-untyped-call]
            count += float(part_count)
    gradients = [p.grad / count for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return gradients


def _difference(whole: Sequence[Tensor], divided: Sequence[Tensor]) -> float:
    """The largest difference of any element, relative to the largest gradient's absolute value."""
    if len(whole) != len(divided):
        return float("inf")
    largest = max((float(gradient.abs().max()) for gradient in whole), default=0.0)
    difference = max((float((a - b).abs().max()) for a, b in zip(whole, divided, strict=True)), default=0.0)
    return difference / largest if largest else difference


def _restore(model: nn.Module, buffers: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)


MAX_PARAMETERS = 500_000_000  # and buffers, of the small model


def probed_model(spec: ModelSpec, data: PreparedData, *, read: set[str]) -> nn.Module:
    """The model with two thin layers, on the CPU, in fp32 and in training mode; a factory's model at its full size.

    If the class refuses thin layers, two layers of the real size are built.

    read: a set to which the names of the config's fields that the model reads are added, now and later.
    Raises ValueError if neither can be built, and `ModelTooLarge` if even the small model would be too large.
    """
    if spec.factory is not None:
        return build_model(spec, data=data, seed=0)
    config = model_config(spec, data)
    with seeded(0):
        try:
            return _made(tiny_config(config), read)
        except ModelTooLarge:
            raise
        except ValueError:
            return _made(tiny_config(config, thin=False), read)


def _made(config: Any, read: set[str]) -> nn.Module:
    _check_size(config)
    _record(config, read)
    if attention_of(config) in _ON_GPUS:
        set_attention(config, "sdpa")
    return instantiate(config).float().train()


_ON_GPUS = ("flash_attention_2", "flex_attention")


def _record(config: Any, read: set[str]) -> None:
    """Adds the name of every attribute that is read from a config to `read`."""
    of_class = type(config)

    class RecordedModel(of_class):  # type: ignore[misc, valid-type]
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    RecordedModel.__name__ = of_class.__name__
    object.__setattr__(config, "__class__", RecordedModel)


def _check_size(config: Any) -> None:
    with torch.device("meta"):
        model = instantiate(config)
    sizes = {name: tensor.numel() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    if sum(sizes.values()) > MAX_PARAMETERS:
        largest = max(sizes, key=lambda name: sizes[name])
        raise ModelTooLarge(
            f"model: two thin layers of it have {sum(sizes.values()):,} numbers, {sizes[largest]:,} of them in "
            f"{largest}; a tiny step takes at most {MAX_PARAMETERS:,}. To fix: lower the sizes in model.config"
        )


FORMAT = 6  # to be incremented whenever a probe of the same job would have another result
REMEDY = "make the samples' shapes and the model's config agree"
MORE_LABELS = 64  # samples, evenly spaced, whose labels are checked


@dataclass(frozen=True, kw_only=True)
class TinyStepResult:
    """The result of a tiny step of a job.

    sites: the model's random draws.
    undivided: the reason why a batch must not be divided; empty if it may be.
    """

    sites: DrawSites
    undivided: str = ""


def probe(job: Job, *, data: PreparedData, cache_dir: Path, is_there: bool = True) -> TinyStepResult:
    """Takes a tiny step of `job`; the result is cached for all processes of a machine and all equivalent jobs.

    data: the job's prepared data.
    is_there: whether the data can be read; else samples of its shapes are made up.
    Raises StepError if the model, the data, the loss or a metric does not work.
    """

    with explained("a function of the job cannot be imported", "correct its module, or install what that imports"):
        source_states(job)
    if reason := why_never_packed(job) or why_tokens_are_foreign(job, data):
        raise StepError([reason])

    def examined() -> TinyStepResult:
        step = _TinyStep(job, data, cache_dir, is_there=is_there)
        sites = step.check()
        return TinyStepResult(sites=sites, undivided=step.why_undivided(sites))

    if not is_there:
        return kept_value(TinyStepResult, _file("described", job, data, cache_dir), examined)
    shown = kept_value(TinyStepResult, _file("step", job, data, cache_dir), examined)
    kept_value(DrawSites, _file("draws", job, data, cache_dir), lambda: shown.sites)  # for the ranks' `draws_of`
    return shown


def draws_of(job: Job, *, data: PreparedData, cache_dir: Path) -> DrawSites:
    """The model's random draws, the part of a probe that a rank needs. Cached likewise."""
    return kept_value(DrawSites, _file("draws", job, data, cache_dir), lambda: _TinyStep(job, data, cache_dir).sites())


def known_draws(job: Job, *, data: PreparedData, cache_dir: Path) -> DrawSites | None:
    """The cached result of `draws_of` on this machine; None if there is none."""
    return read_value(DrawSites, _file("draws", job, data, cache_dir))


class _TinyStep:
    """A job's small model, its loss, and a few samples. Its methods raise StepError with all faults that they find."""

    def __init__(self, job: Job, data: PreparedData, cache_dir: Path, *, is_there: bool = True) -> None:
        self._job, self._read, self._data = job, set[str](), data
        self._undeclared = [] if job.model.factory else undeclared_fields(job.model)
        try:
            with explained("model: it cannot be built", "correct model"):
                self._model = probed_model(job.model, data, read=self._read)
        except StepError as fault:
            suspects = [misspelt(job.model, self._undeclared)] if self._undeclared else []
            raise StepError([*fault.faults, *suspects]) from fault
        with explained("data: samples cannot be read", "give samples that are dicts of tensors, all of equal shapes"):
            invented = None if is_there else made_up(data, MORE_LABELS)
            self._training: Dataset = (
                open_data(job.data, cache_dir=cache_dir, prepared=data)[0]
                if invented is None
                else _MadeUpSamples(invented)
            )
            samples = self._samples(range(NUM_SAMPLES))
        with explained("loss: it does not suit the model", "correct loss"):
            self._loss = bind_loss(job.loss, self._model, job.model, options=job.loss_options)
        disable_dropout(self._model, self._loss)
        self._whole = samples
        self._writing = WriterContext(
            model=self._model, tokenizer_dir=data.tokenizer_dir, device=torch.device("cpu"), autocast=nullcontext
        )
        if self._loss.function is not None and self._loss.function.num_written_tokens:
            seq_len = data.seq_len or 0
            samples = self._loss.function.probe_batch(samples, self._writing, seed=job.seed, seq_len=seq_len)
        else:
            samples = cropped(samples, seq_len=data.seq_len)
        self._batch = with_made_up_reference(self._loss, samples)
        name_modules(self._model)

    def check(self) -> DrawSites:
        """Checks samples, labels, config, loss and metrics; returns the model's random draws."""
        if fault := why_without_positions(self._job, self._model, self._loss):
            raise StepError([fault])
        faults = list(faults_of_samples(self._job, self._model, self._loss, self._batch))
        if not faults and self._job.data.packing:
            with explained("data: packing: the model takes no packed samples", "set data.packing to false"):
                faults = [fault for fault in [why_not_apart(self._model, self._batch)] if fault]
        if faults:
            raise StepError(faults)
        self._check_rows()
        sites = self.sites()
        output = self._forward(self._batch)
        faults = list(
            faults_of_labels(self._job, output, self._loss, self._batch, others=lambda: self._more()["labels"])
        )
        if unread := [name for name in self._undeclared if name not in self._read]:
            faults.append(misspelt(self._job.model, unread))
        if faults:
            raise StepError(faults)
        with explained(f"loss: it cannot be computed of samples with {shapes_of(self._batch)}", "correct loss or data"):
            self._loss(output, self._batch)
        with explained("evaluation: its metrics cannot be computed", "correct the metric, or name others"):
            scored_metrics(self._job.evaluation.metrics)  # their sums must have names of their own
            named, written = metrics_named(self._job.evaluation.metrics), self._written()
        for metric in named:
            with explained(f"evaluation: the metric {metric.name} cannot be computed", "correct it, or name others"):
                totals = MetricTotals([metric.name], loss=self._loss, data=self._data)
                totals.add(output, self._batch, written=written)
                if installed_metric(metric.name) and not isinstance(metric, ModelMetric):
                    self._add_fewer(metric, totals, written)
                totals.measure_model(self._model, self._data, NUM_SAMPLES, batch_size=NUM_SAMPLES)
                totals.result()
        with explained("loss: it has no gradient", "compute it of what the model returns"), seeded(0):
            self._loss(self._model(**self._loss.forward_inputs(self._batch)), self._batch)[0].backward()  # type: ignore[no-untyped-call]
        self._model.zero_grad(set_to_none=True)
        return sites

    def _check_rows(self) -> None:
        """Raises StepError where the model does not read a row as long as they may be, or reads what it must not."""
        if not isinstance(self._model, PreTrainedModel):
            return
        with seeded(0):
            check_longest(self._model, self._loss, self._whole, seq_len=self._data.seq_len)
        if self._loss.shifted:
            faults = [why_not_causal(self._model, self._loss, self._batch)]
        else:
            some = self._more() if self._data.kind == "tokens" else {}
            end = self._data.end_of_text_id
            faults = [why_reads_padding(self._model, self._loss, some, read=self._read, end_of_text_id=end)]
        if faults := [fault for fault in faults if fault]:
            raise StepError(faults)

    def _add_fewer(self, metric: Metric, totals: MetricTotals, written: Sequence[Sequence[int]] | None) -> None:
        """Adds fewer rows than before, with the losses of each row, and draws samples of them, as scoring does."""
        batch = rows_of(self._batch, range(NUM_SAMPLES - 1))
        output, written = self._forward(batch), written and written[: NUM_SAMPLES - 1]
        losses = torch.ones(NUM_SAMPLES - 1), torch.ones(NUM_SAMPLES - 1)
        sums = sums_of([metric], outputs_of(self._loss, output, batch, losses=losses, data=self._data, written=written))
        rows: Mapping[str, Any] = {name: values.detach().double().numpy() for name, values in sums.items()}
        rows = metric.relate(rows) if isinstance(metric, GatheredMetric) else rows
        with np.errstate(divide="ignore", invalid="ignore"):
            drawn = metric.value_of_rows(rows, np.ones((NUM_DRAWN, NUM_SAMPLES - 1))) if rows else np.zeros(NUM_DRAWN)
        if (shape := np.shape(drawn)) != (NUM_DRAWN,):
            raise ValueError(
                f"of {NUM_DRAWN} samples of rows its value has the shape {[*shape]}, and not [{NUM_DRAWN}]"
            )
        totals.add(output, batch, written=written)

    def _written(self) -> list[list[int]] | None:
        """What the small model writes to the samples, a few tokens each; None where no metric reads it."""
        most = min(self._job.evaluation.max_new_tokens, MAX_NEW_TOKENS)
        answers = answer_writer_of(replace(self._job.evaluation, max_new_tokens=most), self._writing)
        return None if answers is None else answers.written(self._model, self._batch)

    def _samples(self, rows: Sequence[int]) -> dict[str, Tensor]:
        return fetch(self._training, [row % len(self._training) for row in rows])

    def _more(self) -> dict[str, Tensor]:
        return self._samples([i * len(self._training) // MORE_LABELS for i in range(MORE_LABELS)])

    def sites(self) -> DrawSites:
        with seeded(0):
            return find_sites(lambda num: self._forward(rows_of(self._batch, range(num))))

    def why_undivided(self, sites: DrawSites) -> str:
        with seeded(0):
            return why_undivided(self._model, self._loss, self._uneven(), sites)

    def _forward(self, batch: Mapping[str, Tensor]) -> Any:
        with explained(f"model: its forward fails on samples with {shapes_of(batch)}", REMEDY), torch.no_grad():
            return self._model(**self._loss.forward_inputs(batch))

    def _uneven(self) -> dict[str, Tensor]:
        """Samples with uneven numbers of labels, unless a user's loss does not support ignored labels."""
        uneven = ragged(self._batch)
        try:
            self._loss(self._forward(uneven), uneven)
        except (IndexError, RuntimeError, ValueError):
            uneven = dict(self._batch)
        return with_reference_near(self._model, self._loss, uneven)


class _MadeUpSamples:
    """Made-up samples."""

    def __init__(self, batch: dict[str, Tensor]) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return MORE_LABELS

    def __getitem__(self, index: int, /) -> dict[str, Tensor]:
        return {name: tensor[index] for name, tensor in self._batch.items()}


def _file(what: str, job: Job, data: PreparedData, cache_dir: Path) -> Path:
    """The cache file of a result, with a digest of all inputs in its name: all of the job that the model may feel."""
    named, but = loss_class(job.loss), frozenset({"precision"})  # a probe computes in fp32
    if what == "draws":
        but |= {"evaluation"}
        if named is None or (named.drops_out and not named.in_pairs):  # the same for every loss
            job = replace(job, loss=None, loss_options={})
    versions = (torch.__version__, transformers.__version__)
    lines = [
        FORMAT,
        job.fields_with(Effect.MODEL, but=but),
        replace(data, folder="", notes=()),
        source_states(job),
        versions,
    ]
    return cache_dir.absolute() / "probes" / f"{what}-{digest(lines, length=32)}.json"


def source_states(job: Job) -> list[Any]:
    """Returns what a job's model and numbers depend on by name alone, as digests.

    These are the source files of functions and classes that are a user's, and the config and code of a saved model.
    """
    names = (*code_of_steps(job), *functions_of(job.loss, job.loss_options))
    metrics, saved = map(installed_metric, job.evaluation.metrics), Path(job.model.from_pretrained or "")
    code = [source_state(name) for name in names] + [source_state(name) for name in metrics if name is not None]
    if job.model.from_pretrained is None or not saved.is_dir():
        return code
    return [
        *code,
        *((file.name, sha256_of(file)) for file in sorted((*saved.glob("config.json"), *saved.glob("*.py")))),
    ]


def code_of_steps(job: Job) -> list[str]:
    """Returns the dotted names of the functions and classes beyond the built-in kinds that a job's steps call."""
    names = (job.model.factory, job.data.factory, loss_code_path(job.loss), installed_source(job.data))
    return [name for name in names if name is not None]


def source_state(name: str) -> tuple[str, str | None]:
    """Returns the name of a user's function or class, with the digest of its source file."""
    return name, source_digest(resolve(name))

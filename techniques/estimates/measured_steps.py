"""Measured seconds of a job's step on one device, from the job's own trainer with few layers and few rows.

A model of many equal layers is built with a few of them. Marks before and after each layer, forward and backward,
measure a layer's time from the rest's (embeddings, head, loss). With t_k the seconds of a layer of kind k, n_k their
number in the whole model, and e the rest, a micro-batch of m rows takes

    T(m) = e(m) + sum of n_k t_k(m) = launch + m row

which two sizes m determine. A GPU computes while the host launches the operators of the layers that follow, so that a
micro-batch takes at least as long as launching it; with few layers the head's computation would hide that, so the
host's seconds are measured separately from the device's. A GPU computes also while a thread loads the samples of coming
steps, so loading is measured by itself; cores compute and load in turn. What the trainer does is measured as it is: the
precision, frozen and adapted weights, the reference of a loss, dropout, the optimizer, and samples padded to the data's
mean width.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from torch import nn

from ringmaster.codec import digest, from_json, to_json
from ringmaster.techniques import registry
from ringmaster.techniques.data import Dataset, Indices, PreparedData, fetch, sampler_of, width_of
from ringmaster.techniques.data.samples import PaddedDataset
from ringmaster.techniques.estimates.device_rates import in_children, measured_once
from ringmaster.techniques.estimates.layer_times import fill_at_random, kind_of
from ringmaster.techniques.estimates.rank_memory import on_gradient
from ringmaster.techniques.job import Job
from ringmaster.techniques.job_features import Effect
from ringmaster.techniques.loss import loss_function
from ringmaster.techniques.metric import why_generating
from ringmaster.techniques.model_facts import ModelFacts
from ringmaster.techniques.models.architectures import instantiate
from ringmaster.techniques.models.build import build_model, model_config, skeleton
from ringmaster.techniques.models.layers import layer_names
from ringmaster.techniques.models.peft_format import resolved
from ringmaster.techniques.probing.probe import source_states
from ringmaster.techniques.probing.tiny import tiny_config
from ringmaster.techniques.processes.order import TRIAL, GangOrder, Slot
from ringmaster.techniques.processes.ranks import alone, take_device
from ringmaster.techniques.training.batch_loader import BatchLoader, RowsRequest
from ringmaster.techniques.training.callbacks import StepPart, TrainerCallback, TrainerContext
from ringmaster.techniques.training.generation import num_expected
from ringmaster.techniques.training.rank_batches import RankBatches
from ringmaster.techniques.training.rank_job import LONGEST, WIDTH_MULTIPLE
from ringmaster.techniques.training.trainer import Trainer

VERSION = 3
MAX_SLOTS = 8  # slots that are measured at the same time
WAITING = 0.95  # of a micro-batch's seconds, in which the host launches it
MAX_ROWS, LARGE_S = 16, 0.15  # of the larger micro-batch: rows, and about its seconds
FEWEST_ROUNDS, MAX_ROUNDS, ENOUGH_S = 3, 12, 0.25
SLOW_S = 2.0  # of a size's rounds, after which no further one is begun
# For what takes two seconds on cores, and a GPU's context, libraries and kernels take longer to load. A step that hangs
# is left to a trial or a segment, which are watched.
TIMEOUTS_S = {"cpu": 10.0, "gpu": 60.0}
SAMPLED_ROWS, SAMPLED_BATCHES = 4096, 64  # whose widths are averaged
WRITTEN_BATCHES = 8  # whose answers are read
MAX_SAMPLES = 1 << 20  # of which an order is drawn


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of a job's step on one device, undivided.

    launch_s: of a micro-batch, whatever its rows.
    row_s: of each row more, forward and backward.
    host_s: in which the host launches the operators of a micro-batch, while a GPU computes; 0 on cores.
    update_s: of the optimizer, clipping included.
    forward_share: the forward's part of a micro-batch.
    layers_share: the part of a micro-batch that the forward of the repeated layers takes.
    load_s: of loading a row ahead of its step, while a GPU computes; 0 on cores, and where it is not worth a thread.
    """

    launch_s: float
    row_s: float
    update_s: float
    forward_share: float
    layers_share: float
    host_s: float = 0.0
    load_s: float = 0.0

    def generating_s(self, *, num_rows: int, num_tokens: float, width: float | None) -> float:
        """Returns the seconds in which a micro-batch of rows writes tokens, each by a forward of one token a row.

        width: of the rows of which the times are.
        """
        token_s = max(self.launch_s, self.host_s) + num_rows * self.row_s / (width or 1.0)
        return num_tokens * self.forward_share * token_s

    def with_generation(self, *, num_tokens: int, width: float) -> StepTimes:
        """Returns the times of steps that write the tokens of rows of a width before they are trained on."""
        first_s = self.generating_s(num_rows=0, num_tokens=num_tokens, width=width)
        row_s = self.row_s * num_tokens * self.forward_share / width
        share = (first_s + row_s) / max(self.launch_s + self.row_s, 1e-12)
        return replace(
            self,
            launch_s=self.launch_s + first_s,
            row_s=self.row_s + row_s,
            forward_share=(self.forward_share + share) / (1 + share),
        )

    def with_extra_forward(self, size: float) -> StepTimes:
        """Returns the times with a forward of another model for each row; `size` in sizes of the job's model."""
        return replace(self, row_s=self.row_s * (1 + size * self.forward_share))


@dataclass(frozen=True, kw_only=True)
class Widths:
    """The mean widths, in tokens, to which global batches are padded; None where samples are not padded.

    written: the mean number of tokens that a trained model writes to a held-out batch, for metrics that read them; None
        where none does.
    """

    training: float | None = None
    held_out: float | None = None
    written: float | None = None


def mean_widths(job: Job, training: Dataset, held_out: Dataset) -> Widths:
    """Returns the mean widths of global batches, as the job draws them from its samples."""
    size = job.global_batch_size
    last = min(len(held_out), job.max_evaluated_rows)
    kept = [range(first, min(first + size, last)) for first in range(0, last, size)]
    written = _mean_written(job, held_out, kept[:WRITTEN_BATCHES])
    if job.data.padding != LONGEST or job.compile:
        return Widths(written=written)
    num_batches = min(max(SAMPLED_ROWS // size, 1), SAMPLED_BATCHES)
    drawn: list[Any] = []
    if len(training) <= MAX_SAMPLES:
        sampler = sampler_of(job, training)
        drawn = [sampler.indices(step) for step in range(num_batches)]
    else:
        draws = torch.randint(len(training), (num_batches, size), generator=torch.Generator().manual_seed(job.seed))
        drawn = list(draws.numpy())
    return Widths(
        training=_mean_width(training, drawn), held_out=_mean_width(held_out, kept[:num_batches]), written=written
    )


def _mean_written(job: Job, held_out: Dataset, batches: Sequence[Any]) -> float | None:
    if why_generating(job.evaluation.metrics) is None or not batches:
        return None
    rows = [fetch(held_out, list(batch)) for batch in batches]
    most = job.evaluation.max_new_tokens
    return fmean(num_expected(row["labels"], most) if "labels" in row else most for row in rows)


def _mean_width(dataset: Dataset, batches: Sequence[Any]) -> float | None:
    widths = [width_of(dataset, batch, multiple_of=WIDTH_MULTIPLE) for batch in batches]
    known = [width for width in widths if width]  # images have none
    return fmean(known) if known else None


def measured_step_times(
    job: Job, *, data: PreparedData, facts: ModelFacts, width: float | None, slots: Sequence[Slot], cache_dir: Path
) -> StepTimes | None:
    """Returns the times of the job's steps, or None, with the reason in the log, where they cannot be measured.

    width: the mean width of its batches.
    slots: devices of one kind. All are measured at the same time, as all of them are busy in training.
    """
    slots = slots[:MAX_SLOTS]
    machine = [os.uname().nodename, [to_json(slot) for slot in slots], torch.__version__, transformers.__version__]
    what = [_measurable(job).fields_with(Effect.STEP), data.digest, facts, width, *source_states(job)]
    file = cache_dir / f"step-times-{digest([what, machine, VERSION], length=32)}.json"

    def measure() -> StepTimes:
        with TemporaryDirectory(dir=cache_dir) as folder:
            on_slot = partial(_measured, job, data=data, facts=facts, width=width, cache_dir=cache_dir, folder=folder)
            answers = in_children(
                [partial(on_slot, slot=slot) for slot in slots],
                timeout_s=TIMEOUTS_S[slots[0].kind],
                use_gpus=slots[0].kind == "gpu",
            )
        return from_json(StepTimes, {key: fmean(one[key] for one in answers) for key in answers[0]})

    return measured_once(StepTimes, file, measure, otherwise="steps are predicted by operations")


def _measurable(job: Job) -> Job:
    """The job without the weights of other models, which need not be there yet and do not matter to times."""
    adapter = None if job.adapter is None else replace(resolved(job.adapter), from_pretrained=None)
    job = replace(job.synchronous.plain, base=None, compile=False, adapter=adapter)
    return replace(job, features=tuple(each for each in job.features if Effect.TIME in each.effects))


def _measured(
    job: Job,
    *,
    data: PreparedData,
    facts: ModelFacts,
    width: float | None,
    slot: Slot,
    cache_dir: Path,
    folder: str,
) -> dict[str, Any]:
    device = take_device((slot,), 0, num_ranks=1)
    kinds = Counter(kind_of(layer) for layer in _layers(skeleton(job.model, data)))
    few = _few_layers(job, data, kinds)
    kinds_of_few = [kind_of(layer) for layer in _layers(few)]  # before they are adapted
    order = GangOrder(
        purpose=TRIAL,
        job=_measurable(job),
        technique=registry.BUILTIN["single"],
        config={"micro_batch": 1, "recompute": "none"},
        slots=(slot,),
        folder=folder,
        cache_dir=str(cache_dir),
        data=to_json(data),
    )
    steps = _TimedSteps(order, model=few, width=width, device=device)
    more = {kind: number - kinds_of_few.count(kind) for kind, number in kinds.items()}
    small, large = steps.times(kinds_of_few, more=more)
    row_s = max((large.total_s - small.total_s) / (large.num_rows - small.num_rows), 0.0)
    launch_s = 0.0 if small.waits_for_host else max(large.total_s - large.num_rows * row_s, 0.0)
    row_s = (large.total_s - launch_s) / large.num_rows
    trained = sum(p.numel() for p in steps.trainer.model.parameters() if p.requires_grad)
    times = StepTimes(
        launch_s=launch_s,
        row_s=row_s * (1.0 if steps.width is None or width is None else width / steps.width),
        update_s=min(small.update_s, large.update_s) * facts.num_updated / max(trained, 1),
        forward_share=large.forward_s / large.total_s,
        layers_share=large.layers_s / large.total_s,
        host_s=small.host_s,
        load_s=large.load_s / large.num_rows,
    )
    return to_json(times)  # type: ignore[no-any-return]


def _layers(model: nn.Module) -> list[nn.Module]:
    return [model.get_submodule(name) for name in layer_names(model)]


def _few_layers(job: Job, data: PreparedData, kinds: Mapping[str, int]) -> nn.Module:
    """The model with random weights and a few layers of each kind; all layers where that cannot be."""
    if job.model.factory is not None:
        return build_model(job.model, data=data, seed=0)
    config = model_config(job.model, data)
    with torch.device("meta"):
        few = instantiate(tiny_config(config, thin=False)).train()
        layers = _layers(few)
        if len(layers) >= sum(kinds.values()) or {*map(kind_of, layers)} != {*kinds}:
            few = instantiate(config).train()
    few.to_empty(device="cpu")
    few.tie_weights()  # type: ignore[operator]
    fill_at_random(few)
    return few.float()


@dataclass(frozen=True, kw_only=True)
class _MicroBatch:
    """Seconds of a micro-batch of the whole model: of all, of the forward, and of the layers' forward; of an update.

    host_s: of launching all of it. load_s: of loading its rows on the host, which the others do not contain.
    """

    num_rows: int
    total_s: float
    forward_s: float
    layers_s: float
    update_s: float
    host_s: float
    load_s: float

    @property
    def waits_for_host(self) -> bool:
        """Whether a GPU waited for the host, so that its own seconds are unknown."""
        return self.host_s > WAITING * self.total_s

    def with_load(self) -> _MicroBatch:
        """Returns the same micro-batch with its rows loaded when they are needed, as a part of it."""
        return replace(self, total_s=self.total_s + self.load_s, host_s=self.host_s + self.load_s, load_s=0.0)


class _StepTimer(TrainerCallback):
    """Notes when the parts of a trainer's step begin and end."""

    def __init__(self, device: torch.device) -> None:
        self._clock = _CudaClock() if device.type == "cuda" else _CpuClock()
        self._begun: dict[str, Any] = {}
        self._spans: dict[str, list[tuple[Any, Any]]] = {}

    def watch(self, model: nn.Module) -> None:
        """Notes the forward of a model, and the forward and backward of each of its layers."""
        model.register_forward_pre_hook(lambda *_: self.begin("forward"))
        model.register_forward_hook(lambda *_: self.end("forward"))
        for i, layer in enumerate(_layers(model)):
            layer.register_forward_pre_hook(
                lambda _, args, kwargs, i=i: self._begin_forward(i, args, kwargs), with_kwargs=True
            )
            layer.register_forward_hook(lambda _, args, out, i=i: self._end_forward(i, out))

    def observe_gradients(self, sums: Sequence[float], *, step: int, count: float, to_mean: float) -> None:
        """Ends the micro-batch, and begins the update."""
        self.end("step")
        self.begin("update")

    def after_step(self, trainer: TrainerContext) -> None:
        """Ends the update."""
        self.end("update")

    def restart(self) -> None:
        """Begins a step, without the times of those before."""
        self._spans.clear()
        self.begin("step")

    def begin(self, name: str) -> None:
        """Begins a part of a step."""
        self._begun[name] = self._clock.now()

    def end(self, name: str) -> None:
        """Ends a part of a step, if it has begun."""
        if name in self._begun:
            self._spans.setdefault(name, []).append((self._begun.pop(name), self._clock.now()))

    def seconds(self, name: str) -> float:
        """Returns all seconds of a part; 0 of one that was not run, as no gradient arrives in frozen layers."""
        return sum(max(self._clock.seconds(*span), 0.0) for span in self._spans.get(name, ()))

    def host_s(self, name: str) -> float:
        """Returns all seconds in which the host launched a part."""
        return sum(max(self._clock.host_s(*span), 0.0) for span in self._spans.get(name, ()))

    def _begin_forward(self, i: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        on_gradient([*args, *kwargs.values()], lambda: self.end(f"back {i}"))
        self.begin(f"ahead {i}")

    def _end_forward(self, i: int, out: Any) -> None:
        self.end(f"ahead {i}")
        on_gradient(out, lambda: self.begin(f"back {i}"))


class _TimedLoader(BatchLoader):
    """A loader whose loads are timed. It loads nothing ahead by itself, so that what loading takes is measured."""

    def __init__(self, dataset: Dataset, *, timer: _StepTimer, pins: bool) -> None:
        super().__init__(dataset, pins=pins)
        self._timer = timer

    def begin_step(self, following: Iterator[RowsRequest]) -> None:
        super().begin_step(iter(()))

    def batch(self, request: RowsRequest, **seeds: Callable[..., object] | None) -> dict[str, torch.Tensor]:
        """Loads the rows, as a loader's thread does without seeds."""
        self._timer.begin("load")
        batch = super().batch(request)
        self._timer.end("load")
        return batch


@dataclass(kw_only=True)
class _ChosenRows(RankBatches):
    """Steps of one micro-batch of chosen rows."""

    rows: Sequence[int] = ()
    row_width: int | None = None

    def samples(self, step: int) -> tuple[Indices, int | None]:
        """Returns the chosen rows."""
        return self.rows, self.row_width

    def places(self, step: int, part: StepPart) -> list[range]:
        """Returns all places."""
        return [range(len(self.rows))]


class _TimedSteps:
    """The steps of a trainer on one device, with micro-batches of several sizes.

    width: that of the padded batches; None where they have none.
    """

    def __init__(self, order: GangOrder, *, model: nn.Module, width: float | None, device: torch.device) -> None:
        self._timer = _StepTimer(device)
        technique = registry.load(order.technique)
        self.trainer = Trainer(order, technique, alone(device), beat=lambda: None, model=model, callbacks=[self._timer])
        self._job, training = order.job, self.trainer.batches.training
        own = training.width if isinstance(training, PaddedDataset) else None
        multiple = WIDTH_MULTIPLE
        self.width = None if width is None or own is None else min(-(-int(width + 0.999) // multiple) * multiple, own)
        given = {field.name: getattr(self.trainer.batches, field.name) for field in fields(self.trainer.batches)}
        given["loader"] = _TimedLoader(training, timer=self._timer, pins=device.type == "cuda")
        self._batches = self.trainer.batches = _ChosenRows(**given, row_width=self.width)
        self._timer.watch(self.trainer.unwrapped)
        reference, function = self.trainer.reference, loss_function(order.job.loss, order.job.loss_options)
        is_copy = function is not None and not function.needs_teacher  # with few layers, as the model itself
        if reference is not None and reference.model is not None and is_copy:
            self._timer.watch(reference.model)

    def times(self, kinds: Sequence[str], *, more: Mapping[str, int]) -> tuple[_MicroBatch, _MicroBatch]:
        """Returns the times of a small and a larger micro-batch of the whole model.

        kinds: of the layers that this model has. more: how many more of each kind the whole model has.
        """
        least = min(2, self._job.global_batch_size)  # batch normalisation refuses one row
        small = self._time(least, kinds, more)
        most = min(max(self._job.global_batch_size, least + 1), MAX_ROWS)
        num_rows = least
        while 2 * num_rows <= most and num_rows * small.total_s / least < LARGE_S:
            num_rows *= 2
        large = self._time(max(num_rows, least + 1), kinds, more)
        while large.waits_for_host and 2 * large.num_rows <= self._job.global_batch_size:
            large = self._time(2 * large.num_rows, kinds, more)  # else a row seems to take no time
        # Whether loads are slow may turn out between the two: both have them or neither.
        return (small, large) if self._batches.loader.is_ahead else (small.with_load(), large.with_load())

    def _time(self, num_rows: int, kinds: Sequence[str], more: Mapping[str, int]) -> _MicroBatch:
        self._batches.rows = [*islice(cycle(self._fitting()), num_rows)]
        self.trainer.step()
        rounds: list[_MicroBatch] = []
        started_s = time.perf_counter()
        while _goes_on(len(rounds), time.perf_counter() - started_s):
            self._timer.restart()
            self.trainer.step()
            rounds.append(self._micro_batch_of(num_rows, kinds, more))
        fields = ("total_s", "forward_s", "layers_s", "update_s", "host_s", "load_s")
        return _MicroBatch(num_rows=num_rows, **{name: min(getattr(one, name) for one in rounds) for name in fields})

    def _fitting(self) -> list[int]:
        """Returns samples that are no longer than the width of the measured batches, the longest ones first."""
        training = self._batches.training
        number = min(len(training), SAMPLED_ROWS)
        if self.width is None or not isinstance(training, PaddedDataset):
            return [*range(number)]
        lengths = [(training.longest([row]), row) for row in range(min(number, 256))]
        fitting = sorted((pair for pair in lengths if pair[0] <= self.width), reverse=True)
        return [row for _, row in fitting] or [min(lengths)[1]]

    def _micro_batch_of(self, num_rows: int, kinds: Sequence[str], more: Mapping[str, int]) -> _MicroBatch:
        load_s = self._timer.host_s("load")
        total_s, host_s = self._timer.seconds("step") - load_s, self._timer.host_s("step") - load_s
        forward_s = self._timer.seconds("forward")
        layers_s = sum(self._timer.seconds(f"ahead {i}") for i in range(len(kinds)))
        for kind, number in more.items():
            # The first layer's backward has no end where nothing before it is trained.
            alike = [i for i, each in enumerate(kinds) if each == kind]
            seen = [i for i in alike if i > 0] or alike
            ahead_s = fmean(self._timer.seconds(f"ahead {i}") for i in seen)
            total_s += number * (ahead_s + fmean(self._timer.seconds(f"back {i}") for i in seen))
            host_s += number * fmean(self._timer.host_s(f"ahead {i}") + self._timer.host_s(f"back {i}") for i in seen)
            forward_s += number * ahead_s
            layers_s += number * ahead_s
        return _MicroBatch(
            num_rows=num_rows,
            total_s=total_s,
            forward_s=forward_s,
            layers_s=min(layers_s, forward_s),
            update_s=self._timer.seconds("update"),
            host_s=host_s,
            load_s=load_s,
        )


def _goes_on(num_rounds: int, seconds: float) -> bool:
    """Whether another round is measured after some. A slow model's rounds are long, and need no repetition."""
    if num_rounds < FEWEST_ROUNDS:
        return not num_rounds or seconds < SLOW_S
    return num_rounds < MAX_ROUNDS and seconds < ENOUGH_S


class _CpuClock:
    """The processor time of this process, which other programs on the same cores do not lengthen."""

    def now(self) -> float:
        return time.process_time()

    def seconds(self, first: float, last: float) -> float:
        return last - first

    def host_s(self, first: float, last: float) -> float:
        return 0.0  # cores compute what they launch


class _CudaClock:
    """Events in the stream of operators, and when the host records them; reading an event waits for the last one."""

    def now(self) -> tuple[torch.cuda.Event, float]:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event, time.perf_counter()

    def seconds(self, first: tuple[torch.cuda.Event, float], last: tuple[torch.cuda.Event, float]) -> float:
        last[0].synchronize()
        return float(first[0].elapsed_time(last[0])) / 1e3

    def host_s(self, first: tuple[torch.cuda.Event, float], last: tuple[torch.cuda.Event, float]) -> float:
        return last[1] - first[1]

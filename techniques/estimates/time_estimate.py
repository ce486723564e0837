"""Estimates for one job: which configs fit in memory, and how long a step takes under each."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ringmaster.codec import digest, from_json
from ringmaster.techniques.black_box import BlackBox
from ringmaster.techniques.data import PreparedData, open_data
from ringmaster.techniques.data_source import LANGUAGE_MODELING, SampleTensor
from ringmaster.techniques.estimates.device_rates import Rates, disk_rates, rates, segment_costs
from ringmaster.techniques.estimates.layer_times import LayerTimes, layer_times
from ringmaster.techniques.estimates.measured_steps import StepTimes, Widths, mean_widths, measured_step_times
from ringmaster.techniques.estimates.memory import (
    EstimateError,
    Workload,
    adaptation_bytes,
    check_vocabulary,
    copies_reference,
    data_parallel,
    estimate_alone,
    kept_bytes_a_row,
    num_outlined_rows,
    predict_memory,
    sharding,
)
from ringmaster.techniques.job import DISTILLED, Job
from ringmaster.techniques.loss import CAUSAL, functions_of, loss_function
from ringmaster.techniques.model_facts import ModelFacts
from ringmaster.techniques.models.facts import model_facts
from ringmaster.techniques.models.model_folders import teacher_model
from ringmaster.techniques.preflight_result import ARITHMETIC, Candidate, MemoryEstimate, PreflightOrder, Refusal
from ringmaster.techniques.probing.probe import code_of_steps
from ringmaster.techniques.processes.order import Slot
from ringmaster.techniques.technique import WEIGHT_BYTES, Config, GangShape, Technique
from ringmaster.techniques.training.callbacks import further_configs

FORWARD_SHARE = 1 / 3  # of a micro-batch, where it was not measured: backward has twice as many operations
RECOMPUTED = 0.03  # the part of a micro-batch that selective recomputation computes again
OPTIMIZER_PASSES = 7  # per weight: reads of weight, gradient and both moments, and three writes
MEMORY_PREMIUM = 1.1  # for techniques that save memory: their exchanges are longer or finer than counted
# By mesh axis, how many times as long as counted a step takes on CPU slots: each rank computes what is not divided, and
# wraps what is, on the core that also computes. Fitted to steps of six options each on two cores.
CPU_PREMIUMS = {"tp": 1.3, "cp": 1.1}
# How many times as long CPU slots compute that one process drives: its threads wait for each other after each operator,
# and the operators of a model are shorter than the products by which the slots are compared. Fitted to 13 options.
THREADS_PREMIUM = 1.04
# How many times as long as by themselves CPU slots sum gradients, on the cores that compute backward meanwhile. Fitted
# to ten options.
GRADIENTS_PREMIUM = 1.8
# Exchanges of activations per layer, forward and backward: in tensor-parallel layers, without and with sequence
# parallelism; and in attention over divided tokens, by the kind of exchange.
CUT_EXCHANGES, SEQUENCE_EXCHANGES = 8, 12
TOKEN_EXCHANGES = {"ulysses": 8, "all_gather": 4}
EXPERT_EXCHANGES, CHOSEN_EXPERTS = 4, 2  # tokens go to experts and back; most models choose two of them
# For a pipeline with p consecutive stages: the share of its p - 1 waits that a schedule leaves, and the factor by which
# it launches more operators, because it has more stages or goes backward twice.
WAITS = {"1f1b": 1.0, "gpipe": 1.0, "interleaved": 0.5, "zero_bubble": 0.4}
MORE_OPERATORS = {"interleaved": 1.1, "zero_bubble": 1.4}


@dataclass(frozen=True, kw_only=True)
class Outline:
    """The work of one row of a job, forward and backward.

    num_flops: floating-point operations.
    num_bytes: bytes read and written.
    num_operators: operators of a micro-batch, equally many for a micro-batch of any size.
    kept_bytes: bytes of activations that are stored for backward.
    """

    num_flops: float
    num_bytes: float
    num_operators: float
    kept_bytes: float


def outline(workload: Workload) -> Outline | None:
    """Returns the outline of a job's model from one estimate on one device, or None where the estimate fails."""
    alone = estimate_alone(workload)
    if isinstance(alone, EstimateError):
        return None
    rows = num_outlined_rows(workload)
    return Outline(
        num_flops=alone.num_flops / rows,
        num_bytes=max(alone.num_bytes - _update_bytes(workload.facts), 0) / rows,
        num_operators=alone.num_operators,
        kept_bytes=kept_bytes_a_row(workload) or 0.0,
    )


def times_by_operations(model: Outline, *, facts: ModelFacts, rates: Rates) -> StepTimes:
    """Returns the times of a job's step by its operations, of which they are rough: kernels differ in their rates."""
    return StepTimes(
        launch_s=model.num_operators / rates.operators_per_s,
        row_s=model.num_flops / rates.flops_per_s + model.num_bytes / rates.bytes_per_s,
        update_s=_update_bytes(facts) / rates.bytes_per_s,
        forward_share=FORWARD_SHARE,
        layers_share=FORWARD_SHARE,
    )


def _update_bytes(facts: ModelFacts) -> int:
    return OPTIMIZER_PASSES * facts.num_updated * WEIGHT_BYTES


def predicted_step_s(
    technique: Technique,
    config: Config,
    shape: GangShape,
    *,
    workload: Workload,
    alone: StepTimes,
    num_operators: float,
    rates: Rates,
    times: LayerTimes | None = None,
) -> float:
    """Returns the predicted seconds of one global step.

    A rank has r rows in k micro-batches and computes the share c of each row. On one device a row takes w seconds, a
    micro-batch l more, and the optimizer u; the host launches a micro-batch in h and loads a row in d. L is the link's
    bytes per second, those of gradients apart, and m the seconds of a message. For a pipeline of p stages with n-fold
    sharded weights:
    t = max(r c w + k l / p, k h / p) (1 + recomputed) (1 + (p - 1) / k) + u / n + sent / L + messages * m
    and at least r d, as a thread loads the rows of the next step meanwhile.

    All ranks of a pipeline wait for the slowest one: the measured `times` of layers determine how much longer it
    computes.

    alone: the step on one device. num_operators: of a micro-batch.
    """
    job = workload.job
    axes, num_ranks = technique.mesh_shape(shape, config), technique.num_ranks(shape)
    slices, recompute = data_parallel(axes), config.get("recompute", "none")
    rows = job.global_batch_size / slices
    num_micro_batches = max(rows / max(int(config.get("micro_batch", rows)), 1), 1.0)
    faster = rates.times_of(shape.num_devices // num_ranks)
    if shape.kind == "cpu" and shape.num_devices > num_ranks:
        faster = max(faster / THREADS_PREMIUM, 1.0)
    pipeline, schedule = axes.get("pp", 1), config.get("schedule", "1f1b")
    launches = num_micro_batches * MORE_OPERATORS.get(schedule, 1.0) / pipeline
    computing_s = rows * slices / num_ranks * alone.row_s / faster + launches * alone.launch_s
    launching_s, watching_s = launches * alone.host_s, 0.0
    if recompute == "full":
        computing_s *= 1 + alone.layers_share
        launching_s *= rates.operators_per_s / rates.recomputed_operators_per_s
    elif recompute == "selective":
        computing_s *= 1 + RECOMPUTED
        watching_s = 1 / rates.watched_operators_per_s - 1 / rates.operators_per_s
        watching_s *= num_micro_batches * num_operators / pipeline
    if shape.kind == "gpu":  # it computes while the host launches what follows
        computing_s = max(computing_s, launching_s + watching_s)
    else:
        computing_s += watching_s
    computing_s *= 1 + WAITS.get(schedule, 1.0) * (pipeline - 1) / num_micro_batches
    if times is not None and pipeline > 1:
        computing_s *= times.imbalance(config, num_ranks=pipeline)
    num_workers = job.num_workers / slices if job.num_workers is not None else 1.0  # each has an optimizer
    updating_s = num_workers * alone.update_s / sharding(axes) / min(faster, 2.0)
    if shape.kind == "gpu" and technique.updates_on_host(config):
        # Each micro-batch copies the weights for its forward and again for its backward, and its gradients back.
        moved = (2 * workload.facts.parameter_bytes + workload.facts.num_updated * WEIGHT_BYTES) / sharding(axes)
        updating_s = _update_bytes(workload.facts) / sharding(axes) / rates.host_bytes_per_s
        updating_s += num_micro_batches * moved / rates.copy_bytes_per_s
    sent = _sent(axes, config, workload, rows=rows, num_micro_batches=num_micro_batches)
    gradients_s = sent.num_gradient_bytes / rates.gradient_bytes_per_s
    sending_s = sent.num_bytes / rates.link_bytes_per_s
    sending_s += gradients_s * (GRADIENTS_PREMIUM if shape.kind == "cpu" else 1.0)
    sending_s += sent.num_messages * rates.message_s + sent.num_wrapped * rates.wrapped_message_s
    step_s = (MEMORY_PREMIUM if technique.saves_memory_of else 1.0) * (computing_s + updating_s + sending_s)
    if shape.kind == "cpu":
        step_s *= math.prod(premium for axis, premium in CPU_PREMIUMS.items() if axes.get(axis, 1) > 1)
    return max(step_s, rows * alone.load_s)


@dataclass(kw_only=True)
class _RankTraffic:
    """What one rank sends in a step.

    num_bytes: of activations, and of weights that are gathered.
    num_gradient_bytes: of gradients.
    num_wrapped: messages between distributed tensors.
    """

    num_bytes: float = 0.0
    num_gradient_bytes: float = 0.0
    num_messages: float = 0.0
    num_wrapped: float = 0.0


def _sent(
    axes: dict[str, int], config: Config, workload: Workload, *, rows: float, num_micro_batches: float
) -> _RankTraffic:
    """What one rank sends in a step. Rings of n ranks move (n - 1) / n of a tensor, all-reduces twice as much."""
    facts, sent, k = workload.facts, _RankTraffic(), num_micro_batches
    layers = max(facts.num_layers, 1) / axes.get("pp", 1)
    own_bytes = facts.parameter_bytes / axes.get("tp", 1) / axes.get("pp", 1)
    updated = facts.num_updated / max(facts.num_parameters, 1)  # with an adapter, none of the model's own
    shards = axes.get("dp_shard", 1) if not config.get("sharded") else axes.get("cp", 1)
    if (size := axes.get("dp_expert", 1)) > 1:  # weights of experts are not gathered
        shards, own_bytes = size, own_bytes - facts.expert_bytes
    every, copies = 1.0, 1.0  # exchanges of gradients a step, and what is sent in one, in sums of all ranks
    if (num_workers := workload.job.num_workers) is not None:
        num_steps = workload.job.num_steps or 1
        every = math.prod(each.exchanges_a_step(num_steps=num_steps) for each in workload.job.features)
        # A rank sends the summand of each of its workers.
        copies = (num_workers / axes.get("dp_replicate", 1) + 1) / 2
    for size in (axes.get("dp_replicate", 1), axes.get("cp", 1) if not config.get("sharded") else 1):
        if size > 1:
            gradient_bytes = updated * own_bytes / axes.get("dp_shard", 1)
            sent.num_gradient_bytes += 2 * every * copies * (size - 1) / size * gradient_bytes
            sent.num_messages += every * layers / 4
    if shards > 1:  # gathered for each forward, and again for each backward if resharded; reduced once
        gathers = (2 if config.get("reshard", True) else 1) * k
        sent.num_bytes += gathers * (shards - 1) / shards * own_bytes
        sent.num_gradient_bytes += updated * (shards - 1) / shards * own_bytes
        sent.num_wrapped += (gathers + 1) * layers
    if facts.decoder is None:
        return sent
    hidden = rows * facts.decoder.seq_len * facts.decoder.hidden_size * WEIGHT_BYTES
    again = 1.5 if config.get("recompute") == "full" else 1.0
    if (size := axes.get("tp", 1)) > 1:
        exchanges = again * layers * (SEQUENCE_EXCHANGES if config.get("sequence_parallel") else CUT_EXCHANGES)
        sent.num_bytes += exchanges * (size - 1) / size * hidden
        sent.num_wrapped += exchanges * k
    if (size := axes.get("cp", 1)) > 1:
        exchanges = again * layers * TOKEN_EXCHANGES.get(config.get("exchange", ""), max(TOKEN_EXCHANGES.values()))
        sent.num_bytes += exchanges * (size - 1) / size * hidden / size
        sent.num_messages += exchanges * k
    if (size := axes.get("dp_expert", 1)) > 1:
        exchanges = again * layers * EXPERT_EXCHANGES
        sent.num_bytes += exchanges * CHOSEN_EXPERTS * (size - 1) / size * hidden
        sent.num_messages += 1.5 * exchanges * k  # the numbers of tokens go ahead of them
    if axes.get("pp", 1) > 1:
        sent.num_bytes += 2 * hidden
        sent.num_messages += 2 * k
    return sent


MAX_CONFIGS = 18  # configs listed for one technique and gang size; trials end sooner
# A config needs no memory estimate if its state fits in addition to so many times the activations of its rows and the
# weights.
ACTIVATIONS, WEIGHTS = 1.5, 3.0
MEASURED_LAYERS = 6  # largest layers, their gradients included, that a device holds while layers are measured on it
SURELY_KEPT = 0.7  # of the activations that one device alone stores: divided, slightly less is stored
TEXT_SAMPLES = 1 << 20


class Estimator:
    """Estimates memory and step times of techniques' configs for one job."""

    def __init__(self, job: Job, *, facts: ModelFacts, data: Mapping[str, Any], order: PreflightOrder) -> None:
        self._job, self._facts, self._order = job, facts, order
        self._times_by_rows: dict[int, LayerTimes | None] = {}
        self._workload = Workload(
            job=job,
            data=data,
            facts=facts,
            techniques=order.techniques,
            cache_dir=order.cache_dir,
            at_once=max(len(order.cores), 1),
            until_s=math.inf if order.timeout_s is None else time.monotonic() + order.timeout_s,
        )

    def weigh(self, technique: Technique, shape: GangShape) -> tuple[list[Candidate], list[tuple[Refusal, int]]]:
        """Returns the configs that fit, and the refusals of the others with the bytes that they need.

        At most `MAX_CONFIGS` configs are listed. Stages that take equally long may not fit where others do: if none of
        them fits, the stages are balanced by parameters.
        """
        configs = list(self._configs(technique, shape))
        candidates, too_large = self._weigh(technique, shape, configs)
        uncut = [{k: v for k, v in config.items() if k != "stage_layers"} for config in configs]
        if candidates or uncut == configs:
            return candidates, too_large
        candidates, others = self._weigh(technique, shape, uncut)
        return candidates, too_large + others

    def _weigh(
        self, technique: Technique, shape: GangShape, configs: Sequence[Config]
    ) -> tuple[list[Candidate], list[tuple[Refusal, int]]]:
        every = [(config, self._at_least(technique, config, shape)) for config in configs]
        listed = [row for row in every if row[1] <= shape.memory_bytes][:MAX_CONFIGS]
        too_large = [(self._refusal(technique, shape, c, n), n) for c, n in every if n > shape.memory_bytes]
        in_doubt = [config for config, least in listed if self._is_doubtful(technique, config, shape, least)]
        choices = [(technique, config, shape) for config in in_doubt]
        memory_of = dict(zip(map(digest, in_doubt), predict_memory(self._workload, choices), strict=True))
        candidates = []
        for config, least in listed:
            memory = memory_of.get(digest(config))
            if memory is not None:  # the estimate is of the job without its adaptation
                extra_bytes = self._adaptation_bytes(config) + (
                    self._reference_bytes if memory.source == ARITHMETIC else 0
                )
                memory = replace(memory, device_bytes=memory.device_bytes + extra_bytes)
            if memory is not None and memory.device_bytes > shape.memory_bytes:
                needed = memory.device_bytes
                too_large.append((self._refusal(technique, shape, config, needed), needed))
            else:
                candidates.append(self._candidate(technique, config, shape, least, memory))
        return candidates, too_large

    def _configs(self, technique: Technique, shape: GangShape) -> Iterator[Config]:
        """The technique's configs, with stages balanced by measured times if a device is available to measure on.

        Those with other kernels follow them; layers are recomputed by the plain ones only.
        """
        plain = list(technique.configs(self._job, shape, self._facts))
        choices = further_configs(self._job, technique, device_kind=shape.kind)
        others = [
            {**config, **further}
            for config in plain
            for further, reason in choices
            if not reason and config.get("recompute") == "none"
        ]
        for config in (*plain, *others):
            num_stages = technique.num_stages(shape, config)
            times = self._times(config) if num_stages > 1 else None
            if times is None:
                yield config
            else:
                yield {**config, "stage_layers": times.cut(num_stages, recompute=config.get("recompute", "none"))}

    def _times(self, config: Config) -> LayerTimes | None:
        """The times of the layers for micro-batches of this config."""
        if not self._order.slots or self._facts.decoder is None or self._is_large:
            return None  # stages are then balanced by parameters
        num_rows = int(config["micro_batch"])
        if num_rows not in self._times_by_rows:
            self._times_by_rows[num_rows] = layer_times(
                self._job,
                data=self._data,
                facts=self._facts,
                num_rows=num_rows,
                slots=self._busy_slots,
                cache_dir=Path(self._order.cache_dir),
            )
        return self._times_by_rows[num_rows]

    def _at_least(self, technique: Technique, config: Config, shape: GangShape) -> int:
        """The state and, if all of them are stored, most of the activations that one device alone would have."""
        state = technique.estimate_memory(self._job, shape, config, self._facts) + self._adaptation_bytes(config)
        state += self._reference_bytes
        if state > shape.memory_bytes:
            return state  # too large already: no step of such a model is run, not even on meta tensors
        if config.get("recompute") != "none" or "micro_batch" not in config or self._outline is None:
            return state
        return state + int(SURELY_KEPT * self._activations(technique, config, shape))

    @cached_property
    def _reference_bytes(self) -> int:
        """Bytes of the frozen copy that the job's loss compares with, and of the other models that it reads.

        Raises ValueError where a teacher has another vocabulary than the job.
        """
        num_bytes = self._facts.parameter_bytes if copies_reference(self._job) else 0
        for feature in self._job.features:
            for model in feature.frozen_models:
                facts = model_facts(model, data=self._data)
                num_bytes += facts.parameter_bytes
                if feature.teacher is not None:
                    check_vocabulary(facts, self._facts, name=feature.teacher)
        return num_bytes

    def _adaptation_bytes(self, config: Config) -> int:
        """Bytes that the job's adaptation needs in addition to the training state."""
        if self._job.adaptation is None:
            return 0
        num_rows = int(config.get("micro_batch", self._job.global_batch_size))
        return adaptation_bytes(self._job, num_rows=num_rows, data=self._data)

    def _activations(self, technique: Technique, config: Config, shape: GangShape) -> float:
        """Bytes of a micro-batch's activations: this device's share of what one device alone would store."""
        assert self._outline is not None
        share = data_parallel(technique.mesh_shape(shape, config)) / technique.num_ranks(shape)
        return share * int(config["micro_batch"]) * self._outline.kept_bytes

    def _candidate(
        self, technique: Technique, config: Config, shape: GangShape, least_bytes: int, memory: MemoryEstimate | None
    ) -> Candidate:
        step_s, num_ranks = self._step_s(technique, config, shape), technique.num_ranks(shape)
        return Candidate(
            technique=technique.name,
            config=config,
            num_devices=shape.num_devices,
            num_ranks=num_ranks,
            least_bytes=least_bytes,
            memory=memory,
            step_s=step_s,
            is_rough=step_s is not None and self._measured is None and self._is_of_own_code,
            launch_share=self._launch_share(step_s, num_ranks=num_ranks),
            **self._other_seconds(technique, config, num_ranks=num_ranks, step_s=step_s),
        )

    def _launch_share(self, step_s: float | None, *, num_ranks: int) -> float:
        """The part of a step that is neither computation of rows nor update: rows of another job in the same step share
        it."""
        if not step_s or self._alone is None:
            return 0.0
        rows_s = self._job.global_batch_size / num_ranks * self._alone.row_s
        return max(1 - (rows_s + self._alone.update_s) / step_s, 0.0)

    def _other_seconds(
        self, technique: Technique, config: Config, *, num_ranks: int, step_s: float | None
    ) -> dict[str, float]:
        """The predicted seconds outside the steps, by the names of a candidate's fields; none where they are
        unknown."""
        if isinstance(technique, BlackBox) or not self._order.slots:
            return {}
        alone, widths = self._alone, self._widths
        wider = widths.held_out / widths.training if widths.held_out and widths.training else 1.0
        return segment_costs(
            self._job,
            facts=self._facts,
            num_held_out=self._data.num_held_out,
            num_ranks=num_ranks,
            step_s=step_s or 0.0,
            forward_share=0.0 if alone is None else alone.forward_share * wider,
            generating_s=self._generating_s(config, num_ranks=num_ranks),
            disk=disk_rates(Path(self._order.cache_dir)),
        )

    def _generating_s(self, config: Config, *, num_ranks: int) -> float:
        """The seconds in which a batch of an evaluation is written to, for metrics that read what a model writes."""
        if self._alone is None or self._widths.written is None:
            return 0.0
        num_rows = -(-self._job.global_batch_size // num_ranks)
        micro_batch = min(int(config.get("micro_batch", num_rows)), num_rows)
        one_s = self._alone.generating_s(
            num_rows=micro_batch, num_tokens=self._widths.written, width=self._widths.training or self._data.seq_len
        )
        return -(-num_rows // micro_batch) * one_s

    def _refusal(self, technique: Technique, shape: GangShape, config: Config, num_bytes: int) -> Refusal:
        reason = f"needs {num_bytes / 2**30:.1f} GiB of {shape.memory_bytes / 2**30:.1f} a device"
        return Refusal(
            technique=technique.name, num_devices=shape.num_devices, reason=reason, config=config, is_too_large=True
        )

    def _is_doubtful(self, technique: Technique, config: Config, shape: GangShape, least_bytes: int) -> bool:
        if isinstance(technique, BlackBox) or "micro_batch" not in config:
            return False
        if self._order.forecast_all or self._outline is None:
            return self._order.forecast_all
        in_flight = technique.mesh_shape(shape, config).get("pp", 1)
        activations = ACTIVATIONS * in_flight * self._activations(technique, config, shape)
        return least_bytes + activations + WEIGHTS * self._facts.parameter_bytes > shape.memory_bytes

    def _step_s(self, technique: Technique, config: Config, shape: GangShape) -> float | None:
        if self._rates is None or isinstance(technique, BlackBox) or self._alone is None:
            return None
        return predicted_step_s(
            technique,
            config,
            shape,
            workload=self._workload,
            alone=self._alone,
            num_operators=0.0 if self._outline is None else self._outline.num_operators,
            rates=self._rates,
            times=self._times(config) if "stage_layers" in config else None,
        )

    @cached_property
    def _busy_slots(self) -> tuple[Slot, ...]:
        """The devices on which a job's layers are measured: slots share their memory's bandwidth, GPUs nothing."""
        return tuple(slot for i, slot in enumerate(self._order.slots) if i == 0 or slot.kind == "cpu")

    @cached_property
    def _alone(self) -> StepTimes | None:
        """The times of a step on one device: measured where the layers and the data are at hand, or by operations."""
        if functions_of(self._job.loss, self._job.loss_options) or self._job.is_black_box:
            return None  # most of a step is unknown
        alone = self._measured
        if alone is None and self._outline is not None and self._rates is not None:
            alone = times_by_operations(self._outline, facts=self._facts, rates=self._rates)
            function = loss_function(self._job.loss, self._job.loss_options)
            if function is not None and (num_tokens := function.num_written_tokens):
                width = (self._widths.training or self._data.seq_len or 1) + num_tokens
                alone = alone.with_generation(num_tokens=num_tokens, width=width)
        return alone if alone is None else alone.with_extra_forward(self._teacher_size)

    @cached_property
    def _measured(self) -> StepTimes | None:
        if self._is_large or self._order.describe_data:
            return None
        return measured_step_times(
            self._job,
            data=self._data,
            facts=self._facts,
            width=self._widths.training,
            slots=self._busy_slots,
            cache_dir=Path(self._order.cache_dir),
        )

    @cached_property
    def _is_of_own_code(self) -> bool:
        """Whether a step calls functions or classes of users or of other packages."""
        return any(name.partition(".")[0] != "ringmaster" for name in code_of_steps(self._job))

    @property
    def _teacher_size(self) -> float:
        """The size of a distilled job's teacher, which runs a forward for each row, in sizes of the job's model."""
        how = self._job.adaptation
        if how is None or how.kind != DISTILLED:
            return 0.0
        teacher = model_facts(teacher_model(self._job, None), data=self._data)
        return teacher.num_parameters / max(self._facts.num_parameters, 1)

    @cached_property
    def _widths(self) -> Widths:
        if self._order.describe_data:
            return Widths()
        training, held_out = open_data(self._job.data, cache_dir=Path(self._order.cache_dir), prepared=self._data)
        return mean_widths(self._job, training, held_out)

    @cached_property
    def _data(self) -> PreparedData:
        return from_json(PreparedData, self._workload.data)

    @property
    def _is_large(self) -> bool:
        """Whether the model's layers are too large to be measured on a device."""
        memory_bytes = min(shape.memory_bytes for shape in self._order.shapes)
        return MEASURED_LAYERS * self._facts.largest_layer_bytes > memory_bytes

    @cached_property
    def _outline(self) -> Outline | None:
        return None if self._job.is_black_box else outline(self._workload)

    @cached_property
    def _rates(self) -> Rates | None:
        if not self._order.slots:
            return None
        return rates(self._order.slots, precision=self._job.precision, cache_dir=Path(self._order.cache_dir))


def describe(job: Job) -> PreparedData | None:
    """Returns a description of a job's data, as far as memory depends on it, without preparing the data.

    Returns None where only preparation can determine it.
    """
    spec = job.data
    is_text = spec.kind in (None, LANGUAGE_MODELING)
    if spec.seq_len is None or spec.factory is not None or not is_text:
        return None
    of_model = {**job.model.config}.get("vocab_size")
    return PreparedData(
        name=spec.source or spec.path or spec.dataset or "text",
        digest="",
        num_samples=TEXT_SAMPLES,
        num_held_out=TEXT_SAMPLES,
        kind="tokens",
        vocab_size=of_model if isinstance(of_model, int) else None if job.model.from_pretrained else spec.vocab_size,
        seq_len=spec.seq_len,
        source="",
        tensors=_of_pairs(job),
    )


def _of_pairs(job: Job) -> tuple[SampleTensor, ...]:
    """The tensors of a sample, for a loss of pairs of sequences; () for other losses, as the kind determines them."""
    loss = loss_function(job.loss, job.loss_options)
    if loss is None or not loss.in_pairs or job.data.seq_len is None:
        return ()
    names = ("input_ids", "labels" if CAUSAL in loss.kinds and len(loss.kinds) == 1 else "attention_mask")
    return tuple(
        SampleTensor(name=name, dtype="int64", shape=(loss.num_sequences or 2, job.data.seq_len)) for name in names
    )

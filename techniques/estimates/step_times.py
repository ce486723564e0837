"""Predicted seconds of a step under an option: the job's step on one device, divided, and what is sent.

The step on one device is measured with few layers and rows (`measured_steps`), or computed from its operations and the
measured rates of the device. The mesh axes of a technique determine how it divides a step, so that a user's own
technique is predicted as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ringmaster.techniques.estimates.device_rates import Rates
from ringmaster.techniques.estimates.layer_times import LayerTimes
from ringmaster.techniques.estimates.memory import (
    Workload,
    data_parallel,
    estimate_alone,
    kept_bytes_a_row,
    num_outlined_rows,
    sharding,
)
from ringmaster.techniques.estimates.memory_cache import EstimateError
from ringmaster.techniques.model_facts import ModelFacts
from ringmaster.techniques.technique import WEIGHT_BYTES, Config, GangShape, Technique

FORWARD_SHARE = 1 / 3  # of a micro-batch, where it was not measured: backward has twice as many operations
RECOMPUTED = 0.03  # the part of a micro-batch that selective recomputation computes again
OPTIMIZER_PASSES = 7  # per weight: reads of weight, gradient and both moments, and three writes
MEMORY_PREMIUM = 1.1  # for techniques that save memory: their exchanges are longer or finer than counted
# Exchanges of activations per layer, forward and backward: in tensor-parallel layers, without and with sequence
# parallelism; and in attention over divided tokens, by the kind of exchange.
CUT_EXCHANGES, SEQUENCE_EXCHANGES = 8, 12
TOKEN_EXCHANGES = {"ulysses": 8, "all_gather": 4}
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


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of a job's step on one device, undivided.

    launch_s: of a micro-batch, whatever its rows.
    row_s: of each row more, forward and backward.
    update_s: of the optimizer, clipping included.
    forward_share: the forward's part of a micro-batch.
    layers_share: the part of a micro-batch that the forward of the repeated layers takes.
    """

    launch_s: float
    row_s: float
    update_s: float
    forward_share: float
    layers_share: float

    def with_forward_beside(self, size: float) -> StepTimes:
        """Returns the times with a forward of another model beside each row; `size` in sizes of the job's model."""
        return replace(self, row_s=self.row_s * (1 + size * self.forward_share))


def outline(workload: Workload) -> Outline | None:
    """Returns the outline of a job's model from one estimate on one device, or None where the estimate fails."""
    found = estimate_alone(workload)
    if isinstance(found, EstimateError):
        return None
    rows = num_outlined_rows(workload)
    weights = workload.facts.num_updated * WEIGHT_BYTES
    return Outline(
        num_flops=found.num_flops / rows,
        num_bytes=max(found.num_bytes - OPTIMIZER_PASSES * weights, 0) / rows,
        num_operators=found.num_operators,
        kept_bytes=kept_bytes_a_row(workload) or 0.0,
    )


def times_by_operations(model: Outline, *, facts: ModelFacts, rates: Rates) -> StepTimes:
    """Returns the times of a job's step by its operations, of which they are rough: kernels differ in their rates."""
    return StepTimes(
        launch_s=model.num_operators / rates.operators_per_s,
        row_s=model.num_flops / rates.flops_per_s + model.num_bytes / rates.bytes_per_s,
        update_s=OPTIMIZER_PASSES * facts.num_updated * WEIGHT_BYTES / rates.bytes_per_s,
        forward_share=FORWARD_SHARE,
        layers_share=FORWARD_SHARE,
    )


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
    micro-batch l more, and the optimizer u; L is the link's bytes per second and m the seconds of a message. For a
    pipeline of p stages with n-fold sharded weights:
    t = (r c w + k l / p) (1 + recomputed) (1 + (p - 1) / k) + u / n + sent / L + messages * m

    All ranks of a pipeline wait for the slowest one: the measured `times` of layers say how much longer it computes.

    alone: the step on one device. num_operators: of a micro-batch.
    """
    job = workload.job
    axes, num_ranks = technique.mesh_shape(shape, config), technique.num_ranks(shape)
    slices, recompute = data_parallel(axes), config.get("recompute", "none")
    rows = job.global_batch_size / slices
    num_micro_batches = max(rows / max(int(config.get("micro_batch", rows)), 1), 1.0)
    faster = rates.times_of(shape.num_devices // num_ranks)
    pipeline, schedule = axes.get("pp", 1), config.get("schedule", "1f1b")
    computing_s = rows * slices / num_ranks * alone.row_s / faster
    computing_s += num_micro_batches * alone.launch_s * MORE_OPERATORS.get(schedule, 1.0) / pipeline
    if recompute == "full":
        computing_s *= 1 + alone.layers_share
    elif recompute == "selective":
        watching_s = 1 / rates.watched_operators_per_s - 1 / rates.operators_per_s
        computing_s = computing_s * (1 + RECOMPUTED) + num_micro_batches * num_operators / pipeline * watching_s
    computing_s *= 1 + WAITS.get(schedule, 1.0) * (pipeline - 1) / num_micro_batches
    if times is not None and pipeline > 1:
        computing_s *= times.imbalance(config, num_ranks=pipeline)
    updating_s = alone.update_s / sharding(axes) / min(faster, 2.0)
    sent = _sent(axes, config, workload, rows=rows, num_micro_batches=num_micro_batches)
    sending_s = sent.num_bytes / rates.link_bytes_per_s
    sending_s += sent.num_messages * rates.message_s + sent.num_wrapped * rates.wrapped_message_s
    premium = MEMORY_PREMIUM if technique.saves_memory_of else 1.0
    return premium * (computing_s + updating_s + sending_s)


@dataclass(kw_only=True)
class _RankTraffic:
    """What one rank sends in a step.

    num_wrapped: messages between distributed tensors.
    """

    num_bytes: float = 0.0
    num_messages: float = 0.0
    num_wrapped: float = 0.0


def _sent(
    axes: dict[str, int], config: Config, workload: Workload, *, rows: float, num_micro_batches: float
) -> _RankTraffic:
    """What one rank sends in a step. Rings of n ranks move (n - 1) / n of a tensor, all-reduces twice as much."""
    facts, sent, k = workload.facts, _RankTraffic(), num_micro_batches
    layers = max(facts.num_layers, 1) / axes.get("pp", 1)
    mine = facts.parameter_bytes / axes.get("tp", 1) / axes.get("pp", 1)
    updated = facts.num_updated / max(facts.num_parameters, 1)  # of mine: beside an adapter no weight has a gradient
    shards = axes.get("dp_shard", 1) if not config.get("sharded") else axes.get("cp", 1)
    for size in (axes.get("dp_replicate", 1), axes.get("cp", 1) if not config.get("sharded") else 1):
        if size > 1:
            sent.num_bytes += 2 * (size - 1) / size * updated * mine / axes.get("dp_shard", 1)
            sent.num_messages += layers / 4
    if shards > 1:  # gathered for each forward, and again for each backward if resharded; reduced once
        gathers = (2 if config.get("reshard", True) else 1) * k
        sent.num_bytes += (gathers + updated) * (shards - 1) / shards * mine
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
    if axes.get("pp", 1) > 1:
        sent.num_bytes += 2 * hidden
        sent.num_messages += 2 * k
    return sent

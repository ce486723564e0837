"""Predicted seconds of a step: what is computed, read and sent, over how fast the devices have been seen to do it.

Only their order and ratios matter: a search tries first what looks quickest, and measures. The axes of a technique's
mesh say how it divides a step, so that a user's own technique is predicted as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from techniques.engine.layer_times import LayerTimes
from techniques.engine.memory import Workload, data_parallel, kept_bytes_a_row, num_outlined_rows, rehearse_alone
from techniques.engine.rates import Rates
from techniques.engine.rehearsals import Fault
from techniques.technique import WEIGHT_BYTES, Config, GangShape, Technique

# Shares of the model that are computed once more in backward: layers are nearly all of a forward, a third of a step.
RECOMPUTED = {"none": 0.0, "selective": 0.03, "full": 1 / 3}
FEWER_BYTES = {"none": 0.0, "selective": 0.2, "full": 1 / 3}
OPTIMIZER_PASSES = 7  # over each weight: reads of weight, gradient and both moments, and three writes
MEMORY_PREMIUM = 1.1  # of techniques that save another's memory, whose exchanges are longer or finer than counted
EXCHANGES_A_LAYER = {"tp": 8, "cp": 6}  # of activations, forward and backward


@dataclass(frozen=True, kw_only=True)
class Outline:
    """What one row of a job computes, forward and backward: floating-point operations, bytes read and written, and
    operators, which are as many for a micro-batch of any size. kept_bytes: activations a row, kept for backward.
    """

    num_flops: float
    num_bytes: float
    num_operators: float
    kept_bytes: float


def outline(workload: Workload) -> Outline | None:
    """The outline of a job's model, from one rehearsal on one device; None where it cannot be rehearsed."""
    found = rehearse_alone(workload)
    if isinstance(found, Fault):
        return None
    rows = num_outlined_rows(workload)
    weights = workload.facts.num_parameters * WEIGHT_BYTES
    return Outline(
        num_flops=found.num_flops / rows,
        num_bytes=max(found.num_bytes - OPTIMIZER_PASSES * weights, 0) / rows,
        num_operators=found.num_operators,
        kept_bytes=kept_bytes_a_row(workload) or 0.0,
    )


def predicted_step_s(
    technique: Technique,
    config: Config,
    shape: GangShape,
    *,
    workload: Workload,
    model: Outline,
    rates: Rates,
    times: LayerTimes | None = None,
) -> float:
    """Seconds of one global step.

    With r rows a rank in k micro-batches, c the share of a row that a rank computes, F, B, o and L the device's
    operations, bytes and operators a second and the link's bytes a second:
    t = (r c flops / F + r c bytes / B + k operators / o) (1 + (p - 1) / k) + optimizer / B + sent / L + messages * l,
    where of a pipeline of p the slowest stage is waited for, as measured `times` of layers have it.
    """
    job, facts = workload.job, workload.facts
    axes, num_ranks = technique.mesh_shape(shape, config), technique.num_ranks(shape)
    slices, recompute = data_parallel(axes), config.get("recompute", "none")
    rows = job.global_batch_size / slices
    num_micro_batches = max(rows / max(int(config.get("micro_batch", rows)), 1), 1.0)
    share, again = slices / num_ranks, 1 + RECOMPUTED.get(recompute, 0.0)
    speed = rates.with_devices(shape.num_devices // num_ranks)
    pipeline, operators = axes.get("pp", 1), model.num_operators * num_micro_batches * again
    computing_s = rows * share * again * model.num_flops / speed.flops_s
    computing_s += rows * share * (1 + FEWER_BYTES.get(recompute, 0.0)) * model.num_bytes / speed.bytes_s
    computing_s += operators / pipeline / speed.operators_s
    computing_s *= 1 + (pipeline - 1) / num_micro_batches
    if times is not None and pipeline > 1:
        computing_s *= times.imbalance(config, num_ranks=pipeline)
    updating_s = OPTIMIZER_PASSES * facts.parameter_bytes / _sharding(axes) / speed.bytes_s
    sent_bytes, num_messages = _sent(axes, config, workload, rows=rows, again=1 + (recompute == "full") / 2)
    sending_s = sent_bytes / rates.link_bytes_s + num_messages * rates.message_s
    premium = MEMORY_PREMIUM if technique.saves_memory_of else 1.0
    return premium * (computing_s + updating_s + sending_s)


def _sharding(axes: dict[str, int]) -> int:
    return axes.get("dp_shard", 1) * axes.get("tp", 1) * axes.get("pp", 1)


def _sent(
    axes: dict[str, int], config: Config, workload: Workload, *, rows: float, again: float
) -> tuple[float, float]:
    """Bytes and messages that a rank sends in a step: rings of n move (n - 1) / n of a tensor, all-reduces twice."""
    facts, layers = workload.facts, max(workload.facts.num_layers, 1)
    mine = facts.parameter_bytes / axes.get("tp", 1) / axes.get("pp", 1)
    sent, messages = 0.0, 0.0
    for axis in ("dp_replicate", "cp"):
        if (size := axes.get(axis, 1)) > 1:
            sent += 2 * (size - 1) / size * mine / axes.get("dp_shard", 1)
            messages += layers / 4
    if (size := axes.get("dp_shard", 1)) > 1:
        gathers = 3 if config.get("reshard", True) else 2
        sent += gathers * (size - 1) / size * mine
        messages += gathers * layers / axes.get("pp", 1)
    if facts.decoder is None:
        return sent, messages
    hidden = rows * facts.decoder.seq_len * facts.decoder.hidden_size * WEIGHT_BYTES
    micro_batches = rows / max(int(config.get("micro_batch", rows)), 1)
    for axis, exchanges in EXCHANGES_A_LAYER.items():
        if (size := axes.get(axis, 1)) > 1:
            per_layer = exchanges * again * layers / axes.get("pp", 1)
            sent += per_layer * (size - 1) / size * hidden / (size if axis == "cp" else 1)
            messages += per_layer * micro_batches
    if axes.get("pp", 1) > 1:
        sent += 2 * hidden
        messages += 2 * micro_batches
    return sent, messages

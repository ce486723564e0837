"""Measured times of a decoder's layers, and of the modules before and after them, on one device.

A pipeline is as fast as its slowest stage. The number of parameters does not determine the time of a layer: attention
grows with the square of the sequence length, an expert that is not selected costs nothing, and most of the head's time
is the loss over the vocabulary.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from ringmaster.codec import digest, from_json, to_json
from ringmaster.techniques.data import PreparedData
from ringmaster.techniques.estimates.device_rates import in_children, measured_once
from ringmaster.techniques.job import Job
from ringmaster.techniques.job_features import Effect
from ringmaster.techniques.model_facts import ModelFacts
from ringmaster.techniques.models.build import skeleton
from ringmaster.techniques.models.layers import layer_names
from ringmaster.techniques.probing.probe import source_states
from ringmaster.techniques.processes.order import Slot
from ringmaster.techniques.processes.ranks import take_device
from ringmaster.techniques.sharding.pipe import Stage, StageLayers, owners, partition
from ringmaster.techniques.technique import Config
from ringmaster.techniques.training.bound_loss import BoundLoss, bind_loss, with_made_up_reference

VERSION = 1
MAX_SLOTS = 8  # slots that are measured at the same time
MAX_TOKENS = 4096  # tokens of a timed micro-batch; above this, all times grow in proportion
STEPS_OF_DEAREST = 20  # resolution of costs: measurement noise must not move a stage boundary
FEWEST_ROUNDS, MAX_ROUNDS, ENOUGH_S = 3, 30, 0.2
WEIGHTS_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """Seconds that one device takes for a micro-batch, forward and backward.

    layers_s: seconds of each repeated layer, in order.
    forward_s: the forward's part of layers_s.
    entry_s: seconds of the modules before the first layer (embeddings).
    exit_s: seconds of the modules after the last layer (norm, head and loss).
    """

    layers_s: tuple[float, ...]
    forward_s: tuple[float, ...]
    entry_s: float
    exit_s: float

    def costs(self, *, recompute: str = "none") -> list[int]:
        """Returns the cost of each layer to a stage, in twentieths of the most expensive layer's cost.

        The first layer's cost includes the entry, the last layer's cost the exit. Full recomputation runs a layer's
        forward twice. "selective" recomputes so little that it is not counted.
        """
        again = 1.0 if recompute == "full" else 0.0
        each = [s + again * f for s, f in zip(self.layers_s, self.forward_s, strict=True)]
        unit = max(each) / STEPS_OF_DEAREST
        costs = [max(round(s / unit), 1) for s in each]
        costs[0] += round(self.entry_s / unit)
        costs[-1] += round(self.exit_s / unit)
        return costs

    def cut(self, num_stages: int, *, recompute: str = "none") -> list[int]:
        """Returns the number of layers of each stage such that the slowest stage is as fast as possible."""
        return [last - first for first, last in partition(self.costs(recompute=recompute), num_stages)]

    def imbalance(self, config: Config, *, num_ranks: int) -> float:
        """Returns the slowest rank's time over the mean time of all ranks, under a config with `stage_layers`."""
        costs = self.costs(recompute=config.get("recompute", "none"))
        firsts = [0, *accumulate(config["stage_layers"])]
        style = "v" if config.get("schedule") == "zero_bubble" else "loop"
        of_ranks = [0] * num_ranks
        for owner, (first, last) in zip(owners(num_ranks, len(firsts) - 1, style=style), pairwise(firsts), strict=True):
            of_ranks[owner] += sum(costs[first:last])
        return max(of_ranks) * num_ranks / sum(costs)


def layer_times(
    job: Job, *, data: PreparedData, facts: ModelFacts, num_rows: int, slots: Sequence[Slot], cache_dir: Path
) -> LayerTimes | None:
    """Returns the times of micro-batches of `num_rows`, or None, with the reason in the log, if measuring failed.

    slots: devices of one kind. All are measured at the same time, because in training the other stages keep them busy,
        and memory-bound work is slower then.
    cache_dir: where the times are stored; they are measured once for each machine.

    The job's model must be one that can be divided into stages.
    """
    assert facts.decoder is not None
    rows = min(num_rows, max(MAX_TOKENS // facts.decoder.seq_len, 1))
    slots = slots[:MAX_SLOTS]
    machine = [os.uname().nodename, [to_json(slot) for slot in slots]]
    libraries = [torch.__version__, transformers.__version__]
    # Layers are measured without an adapter: of the model's facts, those of an adapter do not count.
    model = job.fields_with(Effect.MODEL, but=frozenset({"evaluation"}))
    what = [model, facts.decoder, rows, *source_states(job)]
    file = cache_dir / f"layer-times-{digest([what, machine, libraries, VERSION], length=32)}.json"

    def measure() -> LayerTimes:
        on_slot = partial(_measured, job, data=data, num_rows=rows, slots=slots)
        works = [partial(on_slot, which=i) for i in range(len(slots))]
        answers = in_children(works, use_gpus=slots[0].kind == "gpu")
        return _mean([from_json(LayerTimes, one) for one in answers])

    return measured_once(LayerTimes, file, measure, otherwise="stages are balanced by parameters")


def _mean(measured: Sequence[LayerTimes]) -> LayerTimes:
    return LayerTimes(
        layers_s=tuple(map(fmean, zip(*(one.layers_s for one in measured), strict=True))),
        forward_s=tuple(map(fmean, zip(*(one.forward_s for one in measured), strict=True))),
        entry_s=fmean(one.entry_s for one in measured),
        exit_s=fmean(one.exit_s for one in measured),
    )


def _measured(job: Job, *, data: PreparedData, num_rows: int, slots: Sequence[Slot], which: int) -> dict[str, Any]:
    device = take_device((slots[which],), 0, num_ranks=1)
    model = skeleton(job.model, data)
    layers = [model.get_submodule(name) for name in layer_names(model)]
    kinds = [kind_of(layer) for layer in layers]
    loss = bind_loss(job.loss, model, job.model, options=job.loss_options)
    parts = {
        "nothing": StageLayers(first=0, last=0, has_entry=False, has_exit=False),
        "entry": StageLayers(first=0, last=0, has_entry=True, has_exit=False),
        "exit": StageLayers(first=0, last=0, has_entry=False, has_exit=True),
        **{
            kind: StageLayers(first=at, last=at + 1, has_entry=False, has_exit=False)
            for at, kind in enumerate(kinds)
            if kind not in kinds[:at]
        },
    }
    pieces = {
        name: _MeasuredModule(
            model, part, loss=loss, job=job, num_rows=num_rows, seq_len=data.seq_len or 1, device=device
        )
        for name, part in parts.items()
    }
    return to_json(_beyond_nothing(_median_s(pieces, first=which), kinds))  # type: ignore[no-any-return]


def _beyond_nothing(seconds: Mapping[str, tuple[float, float]], kinds: Sequence[str]) -> LayerTimes:
    """Subtracts the time of an empty stage, which builds masks and positions as every stage does."""
    idle_forward_s, idle_s = seconds["nothing"]
    return LayerTimes(
        layers_s=tuple(max(seconds[kind][1] - idle_s, 1e-9) for kind in kinds),
        forward_s=tuple(max(seconds[kind][0] - idle_forward_s, 0.0) for kind in kinds),
        entry_s=max(seconds["entry"][1] - idle_s, 0.0),
        exit_s=max(seconds["exit"][1] - idle_s, 0.0),
    )


def kind_of(layer: nn.Module) -> str:
    """Returns a key that is equal for layers that take equally long.

    Such layers have the same modules, with the same shapes and settings, such as the attention window.
    """
    modules = [
        (name, type(module).__name__, [list(p.shape) for p in module.parameters(recurse=False)], _settings(module))
        for name, module in layer.named_modules()
    ]
    return digest(modules)


def _settings(module: nn.Module) -> dict[str, Any]:
    plain = {
        name: value for name, value in vars(module).items() if isinstance(value, (bool, int, float, str, type(None)))
    }
    plain.pop("layer_idx", None)
    return plain


def _median_s(pieces: Mapping[str, _MeasuredModule], *, first: int) -> dict[str, tuple[float, float]]:
    """Returns the median seconds of each piece: of its forward, and of its forward and backward.

    The pieces run in turn, so that other load on the machine affects them equally. first: the piece to begin with, so
    that devices which are measured side by side run different pieces.
    """
    names = [*pieces][first % len(pieces) :] + [*pieces][: first % len(pieces)]
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for piece in pieces.values():
        piece.run()
    started_s = time.perf_counter()
    while (num := len(seconds[names[-1]])) < FEWEST_ROUNDS or (
        num < MAX_ROUNDS and time.perf_counter() - started_s < ENOUGH_S
    ):
        for name in names:
            seconds[name].append(pieces[name].run())
    return {name: (median(f for f, _ in taken), median(s for _, s in taken)) for name, taken in seconds.items()}


class _MeasuredModule:
    """A part of the model with random weights and inputs."""

    def __init__(
        self,
        model: nn.Module,
        part: StageLayers,
        *,
        loss: BoundLoss,
        job: Job,
        num_rows: int,
        seq_len: int,
        device: torch.device,
    ) -> None:
        config: Any = model.config
        in_half = job.precision == "bf16-params"
        dtype = torch.bfloat16 if in_half else torch.float32
        self._stage = _with_values(Stage(model, part), device).to(dtype)
        if job.precision == "bf16":
            self._stage.precision = lambda: torch.autocast(device.type, dtype=torch.bfloat16)
        else:
            self._stage.precision = nullcontext
        sequences = loss.function.num_sequences if loss.function is not None and loss.function.in_pairs else None
        sample_shape = (seq_len,) if sequences is None else (sequences, seq_len)
        samples = torch.randint(config.vocab_size, (num_rows, *sample_shape), device=device)
        tokens = samples.reshape(-1, seq_len)
        hidden = torch.randn(*tokens.shape, config.hidden_size, device=device, dtype=dtype)
        self._given = tokens if part.has_entry else hidden.requires_grad_()
        self._batch = with_made_up_reference(loss, {"input_ids": samples, "labels": samples})
        self._loss = loss if part.has_exit else None
        self._device = device

    def run(self) -> tuple[float, float]:
        """Returns the seconds of the forward, and of the forward and backward.

        Gradients accumulate, as in all micro-batches but one.
        """
        started_s = self._now_s()
        out: Tensor = self._stage(self._given)
        forward_s = self._now_s() - started_s
        if self._loss is None:
            out.backward(torch.ones_like(out))  # type: ignore[no-untyped-call]
        else:
            from transformers.modeling_outputs import CausalLMOutput

            self._loss(CausalLMOutput(logits=out), self._batch)[0].backward()  # type: ignore[no-untyped-call]
        return forward_s, self._now_s() - started_s

    def _now_s(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def _with_values(stage: Stage, device: torch.device) -> Stage:
    """Allocates the stage with random weights, and with zeros in buffers, which cost the same as other values."""
    stage.to_empty(device=device).train()
    fill_at_random(stage)
    return stage


def fill_at_random(module: nn.Module) -> None:
    """Fills weights with random values and buffers with zeros."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=WEIGHTS_STD)
        for buffer in module.buffers():
            buffer.zero_()

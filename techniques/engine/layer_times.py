"""How long each layer of a decoder takes, and what stands before and after them, measured on one device.

A pipeline is as fast as its slowest stage. What a layer takes is not told by its parameters: attention grows with the
square of the sequence, an expert that is not chosen costs nothing, and a head is mostly a loss over the vocabulary.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from ringmaster.techniques.engine.children import in_children
from ringmaster.techniques.engine.data import PreparedData
from ringmaster.techniques.engine.losses import Loss, loss_of
from ringmaster.techniques.engine.models import ModelFacts, layer_names
from ringmaster.techniques.engine.models.build import skeleton
from ringmaster.techniques.engine.order import Slot
from ringmaster.techniques.engine.ranks import take_device
from ringmaster.techniques.engine.stages import Part, Stage, owners, partition
from ringmaster.techniques.job import Job
from ringmaster.techniques.technique import Config
from ringmaster.techniques.values import digest, from_json, to_json

VERSION = 1
MOST_SLOTS = 8  # that are measured at once
MOST_TOKENS = 4096  # of a micro-batch that is timed: beyond, everything takes longer in proportion
STEPS_OF_DEAREST = 20  # what costs are rounded to: the noise of a measurement must not move a cut
FEWEST_ROUNDS, MOST_ROUNDS, ENOUGH_S = 3, 30, 0.2
WEIGHTS_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """Seconds that one device takes for a micro-batch, forward and backward.

    layers_s: of each repeated layer in order; forward_s: of which forward. entry_s, exit_s: of what stands before the
    first layer (embeddings), and after the last one (norm, head and loss).
    """

    layers_s: tuple[float, ...]
    forward_s: tuple[float, ...]
    entry_s: float
    exit_s: float

    def costs(self, *, recompute: str = "none") -> list[int]:
        """What a stage pays for each layer, in twentieths of the dearest, with entry and exit at the ends.

        Layers that are recomputed whole go forward twice; what "selective" recomputes is little.
        """
        again = 1.0 if recompute == "full" else 0.0
        each = [s + again * f for s, f in zip(self.layers_s, self.forward_s, strict=True)]
        unit = max(each) / STEPS_OF_DEAREST
        costs = [max(round(s / unit), 1) for s in each]
        costs[0] += round(self.entry_s / unit)
        costs[-1] += round(self.exit_s / unit)
        return costs

    def cut(self, num_stages: int, *, recompute: str = "none") -> list[int]:
        """How many layers each stage is given, so that the slowest takes as little time as can be."""
        return [last - first for first, last in partition(self.costs(recompute=recompute), num_stages)]

    def imbalance(self, config: Config, *, num_ranks: int) -> float:
        """How many times as long as all ranks on average the slowest computes, under a config with `stage_layers`."""
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
    """Times of micro-batches of `num_rows`, measured once a machine and kept in `cache_dir`.

    slots: devices of one kind, all measured at once, as other stages will be busy on them: what is bound by memory
    takes longer then. The job's model must be one that can be cut into stages. None where it could not be measured;
    the log says why.
    """
    assert facts.decoder is not None
    rows = min(num_rows, max(MOST_TOKENS // facts.decoder.seq_len, 1))
    slots = slots[:MOST_SLOTS]
    machine = [os.uname().nodename, [to_json(slot) for slot in slots]]
    libraries = [torch.__version__, transformers.__version__]
    what = [job.model, facts, job.loss, job.precision, rows]
    file = cache_dir / f"layer-times-{digest([what, machine, libraries, VERSION], length=32)}.json"
    if not file.exists():
        try:
            found = in_children(
                [lambda i=i: _measured(job, data=data, num_rows=rows, slots=slots, which=i) for i in range(len(slots))]  # type: ignore[misc]
            )
        except RuntimeError as error:
            print(f"stages are balanced by parameters: {error}", file=sys.stderr)
            return None
        aside = file.with_suffix(f".{os.getpid()}")
        aside.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(json.dumps(to_json(_mean([from_json(LayerTimes, one) for one in found]))))
        aside.rename(file)
    return from_json(LayerTimes, json.loads(file.read_text()))


def _mean(found: Sequence[LayerTimes]) -> LayerTimes:
    return LayerTimes(
        layers_s=tuple(map(fmean, zip(*(one.layers_s for one in found), strict=True))),
        forward_s=tuple(map(fmean, zip(*(one.forward_s for one in found), strict=True))),
        entry_s=fmean(one.entry_s for one in found),
        exit_s=fmean(one.exit_s for one in found),
    )


def _measured(job: Job, *, data: PreparedData, num_rows: int, slots: Sequence[Slot], which: int) -> dict[str, Any]:
    device = take_device((slots[which],), 0, num_ranks=1)
    model = skeleton(job.model, data)
    layers = [model.get_submodule(name) for name in layer_names(model)]
    kinds = [_kind(layer) for layer in layers]
    loss = loss_of(job.loss, model, job.model)
    parts = {
        "nothing": Part(first=0, last=0, has_entry=False, has_exit=False),
        "entry": Part(first=0, last=0, has_entry=True, has_exit=False),
        "exit": Part(first=0, last=0, has_entry=False, has_exit=True),
        **{kind: Part(first=at, last=at + 1, has_entry=False, has_exit=False) for at, kind in _firsts(kinds)},
    }
    pieces = {
        name: _Piece(model, part, loss=loss, job=job, num_rows=num_rows, seq_len=data.seq_len or 1, device=device)
        for name, part in parts.items()
    }
    seconds = _median_s(pieces, first=which)
    return to_json(_beyond_nothing(seconds, kinds))  # type: ignore[no-any-return]


def _beyond_nothing(seconds: Mapping[str, tuple[float, float]], kinds: Sequence[str]) -> LayerTimes:
    """What each piece takes beyond an empty stage, which makes masks and positions as every stage does."""
    idle_forward_s, idle_s = seconds["nothing"]
    return LayerTimes(
        layers_s=tuple(max(seconds[kind][1] - idle_s, 1e-9) for kind in kinds),
        forward_s=tuple(max(seconds[kind][0] - idle_forward_s, 0.0) for kind in kinds),
        entry_s=max(seconds["entry"][1] - idle_s, 0.0),
        exit_s=max(seconds["exit"][1] - idle_s, 0.0),
    )


def _kind(layer: nn.Module) -> str:
    """Equal for layers that take equally long: the same modules of the same shapes with the same settings, such as the
    reach of attention.
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


def _firsts(kinds: Sequence[str]) -> list[tuple[int, str]]:
    return [(at, kind) for at, kind in enumerate(kinds) if kind not in kinds[:at]]


def _median_s(pieces: Mapping[str, _Piece], *, first: int) -> dict[str, tuple[float, float]]:
    """Seconds of the forward, and of it with the backward: medians of some of each piece, taken in turn, so that what
    else the machine does meets them alike. first: where the turn begins, so that neighbours do different things.
    """
    names = [*pieces][first % len(pieces) :] + [*pieces][: first % len(pieces)]
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for piece in pieces.values():
        piece.run()
    started_s = time.perf_counter()
    while (num := len(seconds[names[-1]])) < FEWEST_ROUNDS or (
        num < MOST_ROUNDS and time.perf_counter() - started_s < ENOUGH_S
    ):
        for name in names:
            seconds[name].append(pieces[name].run())
    return {name: (median(f for f, _ in taken), median(s for _, s in taken)) for name, taken in seconds.items()}


class _Piece:
    """A part of the model with random weights, and what it is given."""

    def __init__(
        self, model: nn.Module, part: Part, *, loss: Loss, job: Job, num_rows: int, seq_len: int, device: torch.device
    ) -> None:
        config: Any = model.config
        in_half = job.precision == "bf16-params"
        dtype = torch.bfloat16 if in_half else torch.float32
        self._stage = _with_values(Stage(model, part), device).to(dtype)
        if job.precision == "bf16":
            self._stage.precision = lambda: torch.autocast(device.type, dtype=torch.bfloat16)
        else:
            self._stage.precision = nullcontext
        tokens = torch.randint(config.vocab_size, (num_rows, seq_len), device=device)
        hidden = torch.randn(num_rows, seq_len, config.hidden_size, device=device, dtype=dtype)
        self._given = tokens if part.has_entry else hidden.requires_grad_()
        self._batch = {"input_ids": tokens, "labels": tokens}
        self._loss = loss if part.has_exit else None
        self._device = device

    def run(self) -> tuple[float, float]:
        """Seconds of the forward, and of it with the backward; gradients add up, as in all micro-batches but one."""
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
    """Random weights in the place of none; buffers of zeros, which cost what others do."""
    stage.to_empty(device=device).train()
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.normal_(std=WEIGHTS_STD)
        for buffer in stage.buffers():
            buffer.zero_()
    return stage

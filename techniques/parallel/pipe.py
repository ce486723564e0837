"""One rank's part of a pipeline: its stages, the schedule that runs them, and its exchanges with other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from ringmaster.techniques.parallel.stages import Stage, adopt, keep, owners, parts_of
from ringmaster.techniques.technique import StepWork
from ringmaster.techniques.training.dropout import current
from ringmaster.techniques.training.gradients import local, settle_

# Stages per rank, how they are assigned to ranks, and the schedule.
SCHEDULES: dict[str, tuple[int, str, Any]] = {
    "gpipe": (1, "loop", ScheduleGPipe),
    "1f1b": (1, "loop", Schedule1F1B),
    "interleaved": (2, "loop", ScheduleInterleaved1F1B),
    "zero_bubble": (2, "v", ScheduleZBVZeroBubble),
}


LayOut = Callable[[nn.Module], nn.Module]


class Pipe(nn.Module):
    """The stages of a decoder on this rank of `group`.

    stage_layers: number of layers of each stage; None balances the stages by parameters.
    whole: the model with all that this rank holds, under the model's own names.

    If embedding and head share their weight, the ranks of both hold it, and add up its gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        device: str,
        *,
        schedule: str,
        lay_out: LayOut,
        hidden_dtype: torch.dtype = torch.float32,
        stage_layers: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        stages_a_rank, style, self._schedule_class = SCHEDULES[schedule]
        self._group, self._rank, self._hidden_dtype = group, dist.get_rank(group), hidden_dtype
        num_stages = stages_a_rank * group.size()
        self._owners = owners(group.size(), num_stages, style=style)
        parts = parts_of(model, num_stages, stage_layers=stage_layers)
        mine = [i for i, owner in enumerate(self._owners) if owner == self._rank]
        self._device = torch.empty(0, device=device).device  # with its index
        self._config: Any = model.config
        self.stages = nn.ModuleDict({str(i): Stage(model, parts[i]) for i in mine})
        is_tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight  # type: ignore[operator]
        held = [parts[i] for i in mine]
        keep(model, held, embedding=is_tied and any(part.has_exit for part in held))
        self.to(self._device)
        for i in mine:
            lay_out(self._stage(i))
            adopt(model, self._stage(i))
        if is_tied and any(part.has_exit for part in held):
            model.get_input_embeddings().weight = model.get_output_embeddings().weight  # type: ignore[operator]
        self.whole = model.to(self._device)
        self._tied_with = self._other_end() if is_tied else None
        self._runs: dict[tuple[int, ...], Any] = {}  # a schedule for each shape of micro-batches
        self._step: _Step | None = None

    @property
    def has_output(self) -> bool:
        """Whether this rank has the last stage."""
        return self._owners[-1] == self._rank

    @property
    def tied_replica(self) -> nn.Parameter | None:
        """The shared weight on the rank of the head, if the rank of the embedding holds, counts and writes it too.

        It is None on other ranks, and where one rank has both ends.
        """
        if self._tied_with is None or self._owners[0] == self._rank:
            return None
        return self.whole.get_input_embeddings().weight  # type: ignore[operator, no-any-return]

    def forward(self, tokens: Tensor, *, precision: Callable[[], Any]) -> Tensor | None:
        """Runs one batch through the stages; returns logits on the rank of the last stage, None on others."""
        hidden: Tensor = tokens
        for i, owner in enumerate(self._owners):
            before = self._owners[i - 1] if i else owner
            if owner == self._rank:
                if before != owner:
                    shape = (*tokens.shape, self._config.hidden_size)
                    hidden = torch.empty(shape, device=self._device, dtype=self._hidden_dtype)
                    dist.recv(hidden, src=self._global(before), group=self._group)
                hidden = self._stage(i, precision)(hidden)
            elif before == self._rank:
                dist.send(hidden.contiguous(), dst=self._global(owner), group=self._group)
        return hidden if self.has_output else None

    def forward_backward(self, work: StepWork) -> tuple[Tensor, float]:
        """Runs the schedule over all micro-batches, which must have equally many rows.

        Returns the sum and the count of the losses computed on this rank.
        """
        batches, draws = [], []
        for number in range(work.num_micro_batches):
            batches.append(work.batch(number))
            draws.append(current())
        if draws[0] is None:  # layers at the same position in their stages would draw the same numbers
            torch.manual_seed((torch.initial_seed() + self._rank) % (1 << 63))
        self._step = _Step(batches, work)
        first = work.inputs(batches[0])["input_ids"]
        shape = (len(batches), *first.shape)
        if shape not in self._runs:
            self._runs[shape] = self._build(first, len(batches))
        for i in self.stages:
            # Schedules run the micro-batches through a stage in order.
            self._stage(int(i), work.autocast).draws = iter(draws)
        is_first = self._owners[0] == self._rank
        tokens = [torch.cat([work.inputs(batch)["input_ids"] for batch in batches])] if is_first else []
        which = torch.arange(len(batches)) if self.has_output else None
        self._runs[shape].step(*tokens, target=which, return_outputs=False)
        settle_(self.parameters())
        self._add_tied()
        return self._step.loss_sum, self._step.count

    def _build(self, tokens: Tensor, num_micro_batches: int) -> Any:
        """Builds the schedule. Shapes are given, so that it makes no trial run, which would draw random numbers."""
        like: dict[str, Any] = {"device": "meta", "dtype": self._hidden_dtype}
        hidden = torch.empty(*tokens.shape, self._config.hidden_size, requires_grad=True, **like)
        logits = torch.empty(*tokens.shape, self._config.vocab_size, **like)
        stages = [
            PipelineStage(
                self.stages[i],
                int(i),
                len(self._owners),
                self._device,
                input_args=(tokens.to("meta") if int(i) == 0 else hidden,),
                output_args=(logits if int(i) == len(self._owners) - 1 else hidden,),
                group=self._group,
            )
            for i in self.stages
        ]
        given: Any = stages if len(stages) > 1 else stages[0]
        return self._schedule_class(given, num_micro_batches, loss_fn=self._loss, scale_grads=False)

    def _loss(self, logits: Tensor, which: Tensor) -> Tensor:
        assert self._step is not None
        return self._step.loss(logits, int(which))

    def _stage(self, i: int, precision: Callable[[], Any] = nullcontext) -> Stage:
        stage = self.stages[str(i)]
        assert isinstance(stage, Stage)
        stage.precision = precision
        return stage

    def _other_end(self) -> int | None:
        ends = (self._owners[0], self._owners[-1])
        if ends[0] == ends[1] or self._rank not in ends:
            return None
        return self._global(ends[1] if self._rank == ends[0] else ends[0])

    def _add_tied(self) -> None:
        """Adds up the gradients of the tied weight, from the embedding and the head at the two ends of the pipeline."""
        if self._tied_with is None:
            return
        tied: nn.Parameter = self.whole.get_input_embeddings().weight  # type: ignore[operator]
        if not tied.requires_grad:
            return
        assert tied.grad is not None
        gradient = local(tied.grad)
        others = torch.empty_like(gradient)
        exchange = [
            dist.P2POp(dist.isend, gradient.clone(), self._tied_with, group=self._group),
            dist.P2POp(dist.irecv, others, self._tied_with, group=self._group),
        ]
        for request in dist.batch_isend_irecv(exchange):
            request.wait()
        gradient += others

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self._group, rank)


class _Step:
    """Accumulates the losses of a step's micro-batches, as the last stage computes them."""

    def __init__(self, batches: list[dict[str, Tensor]], work: StepWork) -> None:
        self._batches, self._work = batches, work
        self.loss_sum, self.count = work.zero(), 0.0

    def loss(self, logits: Tensor, which: int) -> Tensor:
        from transformers.modeling_outputs import CausalLMOutput

        part, count = self._work.loss(CausalLMOutput(logits=logits), self._batches[which])
        self.loss_sum = self.loss_sum + part.detach()
        self.count += float(count)
        self._work.beat()
        return part

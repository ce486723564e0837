"""One rank's part of a pipeline: its stages, the schedule that runs them, and its exchanges with other ranks."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, pairwise
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

from ringmaster.compat.torch import is_view
from ringmaster.techniques.models.layers import layer_names
from ringmaster.techniques.technique import StepWork
from ringmaster.techniques.training.dropout import Draws, ResumedDraws, current
from ringmaster.techniques.training.exact_sums import SumTree, take_gradients
from ringmaster.techniques.training.gradients import local, settle_


@dataclass(frozen=True, kw_only=True)
class StageLayers:
    """The part of a model that a stage has: layers [first, last).

    has_entry: it has the modules before the first layer.
    has_exit: it has the modules after the last layer.
    """

    first: int
    last: int
    has_entry: bool
    has_exit: bool

    @property
    def layers(self) -> range:
        """The numbers of the layers in the whole model."""
        return range(self.first, self.last)


def partition(costs: Sequence[int], num_stages: int) -> list[tuple[int, int]]:
    """Divides layers of these costs into contiguous, non-empty [first, last) with the smallest possible maximum cost.

    The head's cost belongs to the last layer. The result is that of the smallest limit under which stages, filled one
    after another as far as the limit allows, are at most `num_stages`.
    """
    assert 1 <= num_stages <= len(costs)
    sums = sorted({sum(costs[i:j]) for i in range(len(costs)) for j in range(i + 1, len(costs) + 1)})
    return next(result for limit in sums if limit >= max(costs) and (result := _filled(costs, num_stages, limit)))


def _filled(costs: Sequence[int], num_stages: int, limit: int) -> list[tuple[int, int]] | None:
    """Stages of at most `limit`, or None where `num_stages` of them do not suffice.

    They are filled from the end, so that early stages are light: these store the activations of more micro-batches.
    """
    stages: list[tuple[int, int]] = []
    last = len(costs)
    for left in range(num_stages, 0, -1):
        first, total = last - 1, costs[last - 1]
        while first > left - 1 and total + costs[first - 1] <= limit:
            first -= 1
            total += costs[first]
        stages.insert(0, (first, last))
        last = first
    return stages if last == 0 else None


def parts_of(model: nn.Module, num_stages: int, *, stage_layers: Sequence[int] | None = None) -> list[StageLayers]:
    """Returns the stages of a decoder, with `stage_layers` layers each, or balanced by parameters where that is None.

    Only parameters of products count (a look-up costs nothing). Raises ValueError where `stage_layers` does not divide
    the layers.
    """
    names = layer_names(model)
    if stage_layers is None:
        costs = [sum(p.numel() for p in model.get_submodule(name).parameters()) for name in names]
        costs[-1] += model.get_output_embeddings().weight.numel()  # type: ignore[operator]
        stage_layers = [last - first for first, last in partition(costs, num_stages)]
    if len(stage_layers) != num_stages or min(stage_layers) < 1 or sum(stage_layers) != len(names):
        raise ValueError(
            f"stage_layers {list(stage_layers)} do not divide {len(names)} layers into {num_stages} stages. "
            f"To fix: give each of them at least one, or leave it to be measured"
        )
    firsts = [0, *accumulate(stage_layers)]
    return [
        StageLayers(first=first, last=last, has_entry=first == 0, has_exit=last == len(names))
        for first, last in pairwise(firsts)
    ]


class Stage(nn.Module):
    """One stage: the first takes token ids, others hidden states [rows, tokens, hidden]; the last returns logits.

    precision: returns the context of each forward.
    draws: the random draws of a step's forwards, in order.

    The caller sets both.
    """

    def __init__(self, model: nn.Module, part: StageLayers) -> None:
        super().__init__()
        # Modules of its own around the same parameters.
        self.model = copy.deepcopy(model, {id(p): p for p in model.parameters()})
        self.part = part
        keep(self.model, [part], embedding=part.has_entry)
        self.precision: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.draws: Iterator[Draws | None] = iter(())

    def forward(self, received: Tensor) -> Tensor:
        """Returns hidden states, or logits in the last stage."""
        with self.precision(), ResumedDraws(next(self.draws, None)):
            given = {"input_ids": received} if self.part.has_entry else {"inputs_embeds": received}
            if self.part.has_exit:
                logits: Tensor = self.model(**given, use_cache=False).logits
                return logits
            hidden: Tensor = self.model.base_model(**given, use_cache=False).last_hidden_state  # type: ignore[operator]
            return hidden.clone() if is_view(hidden) else hidden  # schedules detach in place what they have sent


def keep(model: nn.Module, parts: Sequence[StageLayers], *, embedding: bool) -> None:
    """Removes all but `parts` from a decoder, in place.

    embedding: whether the token embedding stays.
    """
    names = layer_names(model)
    body: nn.Module = model.base_model  # type: ignore[assignment]
    kept = {i for part in parts for i in part.layers}
    has_entry, has_exit = any(p.has_entry for p in parts), any(p.has_exit for p in parts)
    token_embedding: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
    before, after = _around_layers(body)
    for name in before:
        module = getattr(body, name)
        if not has_entry and not (module is token_embedding and embedding):
            setattr(body, name, _ZeroEmbedding() if isinstance(module, nn.Embedding) else nn.Identity())
    if not has_exit:
        for name in after:
            setattr(body, name, nn.Identity())
        model.set_output_embeddings(nn.Identity())  # type: ignore[operator]
    for i, name in enumerate(names):
        if i not in kept:
            model.set_submodule(name, _PassThrough(model.get_submodule(name)))


def adopt(model: nn.Module, stage: Stage) -> None:
    """Puts the modules of a stage, after they were laid out, in the places of the same parameters in `model`."""
    body, inner = model.base_model, stage.model.base_model
    before, after = _around_layers(inner)  # type: ignore[arg-type]
    names = layer_names(stage.model)  # those with parameters, which are the stage's own
    for name in (before if stage.part.has_entry else []) + (after if stage.part.has_exit else []):
        setattr(body, name, getattr(inner, name))
    if stage.part.has_exit:
        model.set_output_embeddings(stage.model.get_output_embeddings())  # type: ignore[operator]
    for name in names:
        model.set_submodule(name, stage.model.get_submodule(name))


def _around_layers(body: nn.Module) -> tuple[list[str], list[str]]:
    """Names of the modules that hidden states pass before and after the layers.

    Modules after the layers that have no parameters (rotary positions) are left out.
    """
    children = list(body.named_children())
    at = next(i for i, (_, child) in enumerate(children) if isinstance(child, nn.ModuleList))
    before = [name for name, _ in children[:at]]
    after = [name for name, child in children[at + 1 :] if any(True for _ in child.parameters())]
    return before, after


class _PassThrough(nn.Module):
    """Stand-in for another stage's layer; returns its input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        if hasattr(layer, "attention_type"):  # by which models select a layer's mask
            self.attention_type = layer.attention_type

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden


class _ZeroEmbedding(nn.Module):
    """Stand-in for an embedding that the first stage has added; returns zero."""

    def forward(self, ids: Tensor) -> Tensor:
        return torch.zeros((), device=ids.device)


def owners(num_ranks: int, num_stages: int, *, style: str) -> list[int]:
    """Returns the rank of each stage: in turn ("loop"), or back and forth ("v": rank 0 has the first and the last)."""
    loop = [stage % num_ranks for stage in range(num_stages)]
    if style == "loop":
        return loop
    return [rank if (stage // num_ranks) % 2 == 0 else num_ranks - 1 - rank for stage, rank in enumerate(loop)]


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
    exact: add gradients along the tree of `training.exact_sums`. The schedule must compute backwards as a whole.
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
        exact: bool = False,
    ) -> None:
        super().__init__()
        stages_a_rank, style, self._schedule_class = SCHEDULES[schedule]
        self._group, self._rank, self._hidden_dtype = group, dist.get_rank(group), hidden_dtype
        num_stages = stages_a_rank * group.size()
        self._owners = owners(group.size(), num_stages, style=style)
        parts = parts_of(model, num_stages, stage_layers=stage_layers)
        own = [i for i, owner in enumerate(self._owners) if owner == self._rank]
        self._device = torch.empty(0, device=device).device  # with its index
        self._config: Any = model.config
        self.stages = nn.ModuleDict({str(i): Stage(model, parts[i]) for i in own})
        is_tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight  # type: ignore[operator]
        held = [parts[i] for i in own]
        keep(model, held, embedding=is_tied and any(part.has_exit for part in held))
        self.to(self._device)
        for i in own:
            lay_out(self._stage(i))
            adopt(model, self._stage(i))
        if is_tied and any(part.has_exit for part in held):
            model.get_input_embeddings().weight = model.get_output_embeddings().weight  # type: ignore[operator]
        self.whole = model.to(self._device)
        self._tied_with = self._other_end() if is_tied else None
        self._trees = {i: SumTree() for i in self.stages} if exact else {}
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
        for tree in self._trees.values():
            for parameter, gradient in tree.pop().items():
                parameter.grad = gradient
        settle_(self.parameters())
        self._add_tied()
        return self._step.loss_sum, self._step.count

    def _build(self, tokens: Tensor, num_micro_batches: int) -> Any:
        """Builds the schedule. Shapes are given, so that it makes no trial run, which would draw random numbers."""
        like: dict[str, Any] = {"device": "meta", "dtype": self._hidden_dtype}
        hidden = torch.empty(*tokens.shape, self._config.hidden_size, requires_grad=True, **like)
        logits = torch.empty(*tokens.shape, self._config.vocab_size, **like)
        stages = [
            _Stage(
                self.stages[i],
                int(i),
                len(self._owners),
                self._device,
                input_args=(tokens.to("meta") if int(i) == 0 else hidden,),
                output_args=(logits if int(i) == len(self._owners) - 1 else hidden,),
                group=self._group,
                tree=self._trees.get(i),
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


class _Stage(PipelineStage):
    """A stage of PyTorch's schedules. tree: takes the gradients of each micro-batch, where sums are exact."""

    def __init__(self, *arguments: Any, tree: SumTree | None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._tree = tree

    def backward_one_chunk(self, *arguments: Any, **options: Any) -> None:
        """Runs the backward of a micro-batch; those of a stage run in order."""
        super().backward_one_chunk(*arguments, **options)
        if self._tree is not None:
            self._tree.add(take_gradients(self.submod.parameters()))


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

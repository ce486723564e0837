"""Divides a model into the stages of a pipeline: each is the model itself without the parts of the other stages.

The remaining modules keep their names. The model's own forward makes masks and positions. Hidden states enter where
embeddings would.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ringmaster.techniques.models import layer_names
from ringmaster.techniques.training.dropout import Draws, resumed


@dataclass(frozen=True, kw_only=True)
class Part:
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
    return next(found for limit in sums if limit >= max(costs) and (found := _filled(costs, num_stages, limit)))


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


def parts_of(model: nn.Module, num_stages: int, *, stage_layers: Sequence[int] | None = None) -> list[Part]:
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
        Part(first=first, last=last, has_entry=first == 0, has_exit=last == len(names))
        for first, last in pairwise(firsts)
    ]


class Stage(nn.Module):
    """One stage: the first takes token ids, others hidden states [rows, tokens, hidden]; the last returns logits.

    precision: returns the context of each forward.
    draws: the random draws of a step's forwards, in order.

    The caller sets both.
    """

    def __init__(self, model: nn.Module, part: Part) -> None:
        super().__init__()
        # Modules of its own around the same parameters.
        self.model = copy.deepcopy(model, {id(p): p for p in model.parameters()})
        self.part = part
        keep(self.model, [part], embedding=part.has_entry)
        self.precision: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.draws: Iterator[Draws | None] = iter(())

    def forward(self, received: Tensor) -> Tensor:
        """Returns hidden states, or logits in the last stage."""
        with self.precision(), resumed(next(self.draws, None)):
            given = {"input_ids": received} if self.part.has_entry else {"inputs_embeds": received}
            if self.part.has_exit:
                logits: Tensor = self.model(**given, use_cache=False).logits
                return logits
            hidden: Tensor = self.model.base_model(**given, use_cache=False).last_hidden_state  # type: ignore[operator]
            return hidden.clone() if hidden._is_view() else hidden  # schedules detach in place what they have sent


def keep(model: nn.Module, parts: Sequence[Part], *, embedding: bool) -> None:
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
            setattr(body, name, _Nothing() if isinstance(module, nn.Embedding) else nn.Identity())
    if not has_exit:
        for name in after:
            setattr(body, name, nn.Identity())
        model.set_output_embeddings(nn.Identity())  # type: ignore[operator]
    for i, name in enumerate(names):
        if i not in kept:
            model.set_submodule(name, _Passing(model.get_submodule(name)))


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


class _Passing(nn.Module):
    """Stand-in for another stage's layer; returns its input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        if hasattr(layer, "attention_type"):  # by which models select a layer's mask
            self.attention_type = layer.attention_type

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden


class _Nothing(nn.Module):
    """Stand-in for an embedding that the first stage has added; returns zero."""

    def forward(self, ids: Tensor) -> Tensor:
        return torch.zeros((), device=ids.device)


def owners(num_ranks: int, num_stages: int, *, style: str) -> list[int]:
    """Returns the rank of each stage: in turn ("loop"), or back and forth ("v": rank 0 has the first and the last)."""
    loop = [stage % num_ranks for stage in range(num_stages)]
    if style == "loop":
        return loop
    return [rank if (stage // num_ranks) % 2 == 0 else num_ranks - 1 - rank for stage, rank in enumerate(loop)]

"""What several adapters give a base at once: whose rows are where, and which adapters are computed side by side."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from torch import Tensor, nn

from ringmaster.techniques.engine.fused.insets import Insets
from ringmaster.techniques.engine.fused.owned import Owners
from ringmaster.techniques.engine.fused.packing import Share, blocks_of, positions_of, starts_of
from ringmaster.techniques.engine.fused.prefixes import Layers, Prefixed, layers_of
from ringmaster.techniques.engine.fused.runs import Inset, Runs

LEAST_BATCHED_ROWS = 8  # a product of fewer rows takes another kernel alone than in a batch


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """What one adapter computes in a step: with what it has in the base, and what of its batch the model is given.

    layout: equal for adapters whose tensors have equal names and shapes.
    """

    insets: Insets
    inputs: dict[str, Tensor]
    layout: tuple[Any, ...] = ()

    @property
    def num_rows(self) -> int:
        """Samples."""
        return len(next(iter(self.inputs.values())))

    def share(self, *, is_packed: bool) -> Share:
        """What it has of a batch."""
        length = self.inputs["input_ids"].shape[1] if is_packed else 1
        return Share(num_rows=self.num_rows, length=length, num_before=self.insets.num_before)


class Batch:
    """Adapters with samples of certain shapes, in an order that stays; their tensors may change their values only."""

    def __init__(self, parts: Sequence[Part], shares: Sequence[Share], *, is_packed: bool = True) -> None:
        self._is_packed = is_packed
        self.insets, self.shares = [part.insets for part in parts], tuple(shares)
        self.blocks, self.sizes = blocks_of(shares), [share.size for share in shares]
        self._device = next(iter(parts[0].inputs.values())).device
        self._runs: dict[tuple[str, int, int], Runs] = {}
        self._owners: dict[str, Owners | None] = {}

    @cached_property
    def positions(self) -> Tensor:
        """Of each token in its sample, [1, tokens]."""
        return positions_of(self.shares, self._device)

    def route(self, site: str, num_rows: int, length: int) -> Runs:
        """The adapters at a layer whose input has so many rows: those of one kind, rank and size side by side.

        length: of the input's first dimension, in which stacked samples lie. Raises ValueError where it is not theirs.
        """
        key = (site, num_rows, length)
        if key not in self._runs:
            num_parts = sum(self.sizes)
            if len(self.insets) > 1 and (num_rows if self._is_packed else length) % num_parts:
                raise ValueError(
                    f"{site} is given {num_rows} rows, {length} in its first dimension, for a batch of {num_parts}, so "
                    "that it cannot be told whose they are. To fix: leave it out of the adapter's targets, or train "
                    "the jobs one by one"
                )
            self._runs[key] = self._runs_at(site, num_rows)
        return self._runs[key]

    def prefixes(self, model: nn.Module) -> dict[int, Layers]:
        """Of each block whose samples have one, by its start."""
        found: dict[int, list[Prefixed]] = {}
        for insets, share, start in zip(self.insets, self.shares, starts_of(self.shares), strict=True):
            if insets.prefix is not None:
                block = next(block.start for block in self.blocks if block.start <= start < block.stop)
                mine = Prefixed(embeddings=insets.prefix, num_rows=share.num_rows)
                found.setdefault(block, []).append(mine)
        return {start: layers_of(model, prefixed) for start, prefixed in found.items()}

    def owners(self, module: str) -> Owners | None:
        """Who has weights of its own of a module, None where nobody has."""
        if module not in self._owners:
            weights = [insets.weights.get(module) for insets in self.insets]
            found = Owners(weights=weights, shares=self.shares, is_packed=self._is_packed) if any(weights) else None
            self._owners[module] = found
        return self._owners[module]

    def expect_gradients(self) -> None:
        """Before a backward: gradients that are there are of the last one."""
        for runs in self._runs.values():
            for run in runs:
                run.has_gradients = False

    @property
    def sites_with_gradients(self) -> set[str]:
        """The layers that a backward has come through."""
        return {site for (site, *_), runs in self._runs.items() if any(run.has_gradients for run in runs)}

    def _runs_at(self, site: str, num_rows: int) -> Runs:
        if len(self.insets) == 1:  # all rows are theirs, however they lie
            return self._runs_of_one(site, num_rows)
        times = num_rows // sum(self.sizes)  # rows of a product for each of the batch
        runs, beside = Runs(), list[Inset]()
        start = stop = size = 0
        for insets, share, first in zip(self.insets, self.shares, starts_of(self.shares), strict=True):
            inset = insets.at.get(site)
            if inset is None:
                continue
            is_next = first * times == stop and share.size * times == size
            if beside and not (is_next and _are_alike(inset, beside, size)):
                runs.add(beside, start=start, num_rows=size)
                beside = []
            if not beside:
                start, size = first * times, share.size * times
            beside.append(inset)
            stop = first * times + size
        if beside:
            runs.add(beside, start=start, num_rows=size)
        return runs

    def _runs_of_one(self, site: str, num_rows: int) -> Runs:
        runs, inset = Runs(), self.insets[0].at.get(site)
        if inset is not None:
            runs.add([inset], start=0, num_rows=num_rows)
        return runs


class Batches:
    """Batches that were made before, which a group's step after step is."""

    def __init__(self, *, is_packed: bool) -> None:
        self._is_packed = is_packed
        self._known: dict[Hashable, Batch] = {}

    def of(self, parts: Sequence[Part]) -> Batch:
        """The batch of these parts, in this order."""
        shares = [part.share(is_packed=self._is_packed) for part in parts]
        key = tuple((id(part.insets), share) for part, share in zip(parts, shares, strict=True))
        if key not in self._known:
            if len(self._known) >= 4 * len(parts) + 64:  # whoever has left, and lengths that change
                self._known.clear()
            self._known[key] = Batch(
                parts, shares, is_packed=self._is_packed
            )  # which keeps the insets, so that their ids stay theirs
        return self._known[key]


def in_order(parts: Sequence[Part]) -> list[int]:
    """The parts' numbers, so that those that can be computed side by side are neighbours."""
    return sorted(range(len(parts)), key=lambda i: _likeness(parts[i]))


def shape_of(part: Part) -> tuple[Any, ...]:
    """What stacked samples must have in common."""
    shapes = tuple((key, tuple(value.shape[1:])) for key, value in sorted(part.inputs.items()))
    return (*shapes, ("prefix", (part.insets.num_before,)))


def in_chunks(parts: Sequence[Part], order: Sequence[int], *, tokens_at_once: int | None) -> Iterator[list[int]]:
    """The order cut into pieces that are as even as can be, of `tokens_at_once` at most where a part has not more."""
    sizes = [parts[i].share(is_packed=True).size for i in order]
    num_chunks = 1 if tokens_at_once is None else -(-sum(sizes) // tokens_at_once)
    middles = [start + size / 2 for start, size in zip(_starts(sizes), sizes, strict=True)]
    chunk_of = [int(middle * num_chunks / sum(sizes)) for middle in middles]
    for _, numbered in groupby(zip(chunk_of, order, strict=True), key=lambda pair: pair[0]):
        yield [i for _, i in numbered]


def _starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:i]) for i in range(len(sizes))]


def _are_alike(inset: Inset, others: Sequence[Inset], num_rows: int) -> bool:
    return num_rows >= LEAST_BATCHED_ROWS and inset.likeness == others[0].likeness


def _likeness(part: Part) -> tuple[Any, ...]:
    return shape_of(part), part.num_rows, part.layout

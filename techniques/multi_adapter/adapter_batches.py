"""Batches of several adapters' samples: which rows belong to which adapter, and which adapters compute together."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any

from torch import Tensor, nn

from ringmaster.techniques.multi_adapter import packed_attention
from ringmaster.techniques.multi_adapter.adapter_runs import AdapterModule, AdapterModules, AdapterRuns, OwnWeights

MIN_BATCHED_ROWS = 8  # a product of fewer rows runs on another kernel alone than in a batch


@dataclass(frozen=True, kw_only=True, eq=False)
class AdapterBatch:
    """One adapter's part of a step.

    adapter_modules: the adapter's modules in the base.
    inputs: the tensors of its batch that the model's forward takes.
    layout: equal for adapters whose tensors have equal names and shapes.
    """

    adapter_modules: AdapterModules
    inputs: dict[str, Tensor]
    layout: tuple[Any, ...] = ()

    @property
    def num_rows(self) -> int:
        """The number of samples."""
        return len(next(iter(self.inputs.values())))

    def share(self, *, is_packed: bool) -> packed_attention.BatchShare:
        """The adapter's share of a batch. is_packed: whether samples of several lengths lie in one row."""
        length = self.inputs["input_ids"].shape[1] if is_packed else 1
        return packed_attention.BatchShare(
            num_rows=self.num_rows, length=length, num_before=self.adapter_modules.num_before
        )


class FusedBatch:
    """Adapters with samples of given shapes, in a fixed order. Only the values of their tensors may change."""

    def __init__(
        self, parts: Sequence[AdapterBatch], shares: Sequence[packed_attention.BatchShare], *, is_packed: bool = True
    ) -> None:
        self._is_packed = is_packed
        self.adapter_modules, self.shares = [part.adapter_modules for part in parts], tuple(shares)
        self.blocks, self.sizes = packed_attention.blocks_of(shares), [share.size for share in shares]
        self._device = next(iter(parts[0].inputs.values())).device
        self._runs: dict[tuple[str, int, int], AdapterRuns] = {}
        self._owners: dict[str, OwnWeights | None] = {}

    @cached_property
    def positions(self) -> Tensor:
        """The position of each token in its sample, [1, tokens]."""
        return packed_attention.positions_of(self.shares, self._device)

    def route(self, site: str, num_rows: int, length: int) -> AdapterRuns:
        """The runs of adapters at a layer. A run joins neighbours of one kind, rank and number of rows.

        num_rows: the rows of the layer's input.
        length: the size of the input's first dimension, along which samples are stacked.
        Raises ValueError if the rows cannot be divided among the adapters' samples.
        """
        key = (site, num_rows, length)
        if key not in self._runs:
            num_parts = sum(self.sizes)
            if len(self.adapter_modules) > 1 and (num_rows if self._is_packed else length) % num_parts:
                raise ValueError(
                    f"{site} is given {num_rows} rows, {length} in its first dimension, for a batch of {num_parts}, so "
                    "that it is unknown whose they are. To fix: leave it out of the adapter's targets, or train "
                    "the jobs one by one"
                )
            self._runs[key] = self._runs_at(site, num_rows)
        return self._runs[key]

    def prefixes(self, model: nn.Module) -> dict[int, packed_attention.PrefixLayers]:
        """The prefix keys and values of each block whose samples have a prefix, by the block's start."""
        result: dict[int, list[packed_attention.BatchPrefix]] = {}
        for adapter_modules, share, start in zip(
            self.adapter_modules, self.shares, packed_attention.starts_of(self.shares), strict=True
        ):
            if adapter_modules.prefix is not None:
                block = next(block.start for block in self.blocks if block.start <= start < block.stop)
                prefix = packed_attention.BatchPrefix(embeddings=adapter_modules.prefix, num_rows=share.num_rows)
                result.setdefault(block, []).append(prefix)
        return {start: packed_attention.prefix_layers(model, prefixed) for start, prefixed in result.items()}

    def owners(self, module: str) -> OwnWeights | None:
        """The adapters' own weights of a module; None if no adapter has any."""
        if module not in self._owners:
            weights = [adapter_modules.weights.get(module) for adapter_modules in self.adapter_modules]
            result = (
                OwnWeights(weights=weights, shares=self.shares, is_packed=self._is_packed) if any(weights) else None
            )
            self._owners[module] = result
        return self._owners[module]

    def expect_gradients(self) -> None:
        """Prepares for a backward: marks existing gradients as those of the previous one, to be overwritten."""
        for runs in self._runs.values():
            for run in runs:
                run.has_gradients = False

    @property
    def sites_with_gradients(self) -> set[str]:
        """The layers whose adapters got gradients in this backward."""
        return {site for (site, *_), runs in self._runs.items() if any(run.has_gradients for run in runs)}

    def _runs_at(self, site: str, num_rows: int) -> AdapterRuns:
        if len(self.adapter_modules) == 1:  # all rows belong to one adapter
            return self._runs_of_one(site, num_rows)
        times = num_rows // sum(self.sizes)  # rows of the product per row of the batch
        runs, neighbours = AdapterRuns(), list[AdapterModule]()
        start = stop = size = 0
        for adapter_modules, share, first in zip(
            self.adapter_modules, self.shares, packed_attention.starts_of(self.shares), strict=True
        ):
            adapter_module = adapter_modules.at.get(site)
            if adapter_module is None:
                continue
            is_next = first * times == stop and share.size * times == size
            is_batched = size >= MIN_BATCHED_ROWS and is_next
            if neighbours and not (is_batched and adapter_module.likeness == neighbours[0].likeness):
                runs.add(neighbours, start=start, num_rows=size)
                neighbours = []
            if not neighbours:
                start, size = first * times, share.size * times
            neighbours.append(adapter_module)
            stop = first * times + size
        if neighbours:
            runs.add(neighbours, start=start, num_rows=size)
        return runs

    def _runs_of_one(self, site: str, num_rows: int) -> AdapterRuns:
        runs, adapter_module = AdapterRuns(), self.adapter_modules[0].at.get(site)
        if adapter_module is not None:
            runs.add([adapter_module], start=0, num_rows=num_rows)
        return runs


class FusedBatchCache:
    """A cache of batches: most steps of a group have the same adapters and sample shapes as an earlier step."""

    def __init__(self, *, is_packed: bool) -> None:
        self._is_packed = is_packed
        self._known: dict[Hashable, FusedBatch] = {}

    def of(self, parts: Sequence[AdapterBatch]) -> FusedBatch:
        """The batch of these parts, in this order, from the cache if it is there."""
        shares = [part.share(is_packed=self._is_packed) for part in parts]
        key = tuple((id(part.adapter_modules), share) for part, share in zip(parts, shares, strict=True))
        if key not in self._known:
            if len(self._known) >= 4 * len(parts) + 64:  # entries of jobs that left, and of other lengths
                self._known.clear()
            self._known[key] = FusedBatch(
                parts, shares, is_packed=self._is_packed
            )  # the batch holds the adapter modules, so their ids are not reused
        return self._known[key]


def in_order(parts: Sequence[AdapterBatch]) -> list[int]:
    """The indices of the parts, sorted so that parts that can compute together are neighbours."""
    return sorted(range(len(parts)), key=lambda i: (shape_of(parts[i]), parts[i].num_rows, parts[i].layout))


def shape_of(part: AdapterBatch) -> tuple[Any, ...]:
    """The shapes that samples must have in common to be stacked."""
    shapes = tuple((key, tuple(value.shape[1:])) for key, value in sorted(part.inputs.items()))
    return (*shapes, ("prefix", (part.adapter_modules.num_before,)))


def in_chunks(
    parts: Sequence[AdapterBatch], order: Sequence[int], *, tokens_at_once: int | None
) -> Iterator[list[int]]:
    """Cuts `order` into chunks of similar size, of about `tokens_at_once` tokens; a larger part stays whole."""
    sizes = [parts[i].share(is_packed=True).size for i in order]
    num_chunks = 1 if tokens_at_once is None else -(-sum(sizes) // tokens_at_once)
    middles = [end - size / 2 for end, size in zip(accumulate(sizes), sizes, strict=True)]
    chunk_of = [int(middle * num_chunks / sum(sizes)) for middle in middles]
    for _, numbered in groupby(zip(chunk_of, order, strict=True), key=lambda pair: pair[0]):
        yield [i for _, i in numbered]

"""Adapters that are computed side by side at one layer: what they train as one tensor, and where gradients go."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

Operands = tuple[Tensor, Tensor]
"""Of a batched product: [n, p, q] and [n, q, r]."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Pair:
    """One adapter's matrices at one linear layer: A [rank, in], B [out, rank], and what their product is scaled by.

    Their gradients are put where their `grad` is, where they have one.
    """

    a: Tensor
    b: Tensor
    scaling: float

    @property
    def likeness(self) -> Hashable:
        """Equal for those that can be computed side by side."""
        return Pair, self.a.shape, self.b.shape


@dataclass(frozen=True, kw_only=True, eq=False)
class Factors:
    """What one (IA)3 multiplies a linear layer's outputs by, [out, 1], or its inputs, [1, in].

    Their gradients are put where their `grad` is, where they have one.
    """

    values: Tensor
    of_inputs: bool

    @property
    def likeness(self) -> Hashable:
        """Equal for those that can be computed side by side."""
        return Factors, self.values.shape, self.of_inputs


Inset = Pair | Factors
"""What one adapter has at one linear layer."""


class _Stretch:
    """Rows [start, stop) of the batch: `num_rows` of each of some neighbouring adapters.

    has_gradients: whether a backward has come through since they were last expected.
    """

    def __init__(self, *, start: int, num_rows: int, num_adapters: int) -> None:
        self.start, self.num_rows, self.num_adapters = start, num_rows, num_adapters
        self.stop = start + num_rows * num_adapters
        self.has_gradients = False

    def of(self, rows: Tensor) -> Tensor:
        """Theirs of all rows [rows, features], as [adapters, num_rows, features]."""
        return rows[self.start : self.stop].view(self.num_adapters, self.num_rows, -1)


class Run(_Stretch):
    """Neighbouring LoRAs of one rank at one layer."""

    def __init__(self, *, start: int, num_rows: int, pairs: Sequence[Pair]) -> None:
        super().__init__(start=start, num_rows=num_rows, num_adapters=len(pairs))
        self._a, self._b = _Matrices([pair.a for pair in pairs]), _Matrices([pair.b for pair in pairs])
        self.early, self.late = _factors([pair.scaling for pair in pairs], like=pairs[0].a)

    @property
    def a(self) -> Tensor:
        """[adapters, rank, in]"""
        return self._a.values

    @property
    def b(self) -> Tensor:
        """[adapters, out, rank]"""
        return self._b.values

    def take_gradients(self, of_a: Operands, of_b: Operands, *, product: Callable[..., Tensor]) -> None:
        """Multiplies both and keeps them as gradients; a layer that is used twice in a step gets their sum."""
        for matrices, operands in ((self._a, of_a), (self._b, of_b)):
            room = matrices.gradients
            if room is None or self.has_gradients:
                matrices.put(product(*operands), is_added=self.has_gradients)
            elif room.dtype == operands[0].dtype:
                product(*operands, out=room)
            else:
                room.copy_(product(*operands))
        self.has_gradients = True


class ScalingRun(_Stretch):
    """Neighbouring (IA)3s at one layer, all of which scale its outputs, or its inputs."""

    def __init__(self, *, start: int, num_rows: int, factors: Sequence[Factors]) -> None:
        super().__init__(start=start, num_rows=num_rows, num_adapters=len(factors))
        self._factors = _Matrices([each.values for each in factors])

    @property
    def factors(self) -> Tensor:
        """[adapters, 1, features]"""
        return self._factors.values.reshape(self.num_adapters, 1, -1)

    def take_gradients(self, by_row: Tensor) -> None:
        """Adds up gradients [adapters, num_rows, features] over the rows, as a separate run does, and keeps them."""
        found = torch.sum(by_row, dim=1, dtype=torch.float32).view_as(self._factors.values)
        self._factors.put(found, is_added=self.has_gradients)
        self.has_gradients = True


@dataclass(frozen=True)
class Runs:
    """What there is to compute at one layer beside its own product."""

    products: list[Run] = field(default_factory=list)
    of_inputs: list[ScalingRun] = field(default_factory=list)
    of_outputs: list[ScalingRun] = field(default_factory=list)

    def __iter__(self) -> Iterator[Run | ScalingRun]:
        return chain(self.products, self.of_inputs, self.of_outputs)

    def add(self, insets: Sequence[Inset], *, start: int, num_rows: int) -> None:
        """Neighbours that are alike, with as many rows each, the first of which is row `start`."""
        pairs = [inset for inset in insets if isinstance(inset, Pair)]
        factors = [inset for inset in insets if isinstance(inset, Factors)]
        if pairs:
            self.products.append(Run(start=start, num_rows=num_rows, pairs=pairs))
        else:
            scaled = self.of_inputs if factors[0].of_inputs else self.of_outputs
            scaled.append(ScalingRun(start=start, num_rows=num_rows, factors=factors))


class _Matrices:
    """Matrices of one shape, and their gradients, as one tensor each; not copied where they lie evenly in memory."""

    def __init__(self, matrices: Sequence[Tensor]) -> None:
        self._matrices = matrices
        self._values = evenly(matrices)
        gradients = [matrix.grad for matrix in matrices if matrix.grad is not None]
        self.gradients = evenly(gradients) if len(gradients) == len(matrices) else None

    @property
    def values(self) -> Tensor:
        return self._values if self._values is not None else torch.stack([matrix.detach() for matrix in self._matrices])

    def put(self, gradients: Tensor, *, is_added: bool) -> None:
        for matrix, gradient in zip(self._matrices, gradients, strict=True):
            if matrix.grad is None:
                matrix.grad = gradient.to(matrix.dtype)
            elif is_added:
                matrix.grad.add_(gradient)
            else:
                matrix.grad.copy_(gradient)


def evenly(tensors: Sequence[Tensor]) -> Tensor | None:
    """Tensors of one shape as one more-dimensional view, or None where they do not lie at even distances."""
    first = tensors[0].detach()
    places = [tensor.data_ptr() for tensor in tensors]
    distance = places[1] - places[0] if len(places) > 1 else first.numel() * first.element_size()
    storage = first.untyped_storage().data_ptr()
    is_even = distance > 0 and all(
        place == places[0] + i * distance
        and tensor.untyped_storage().data_ptr() == storage
        and tensor.stride() == first.stride()
        for i, (place, tensor) in enumerate(zip(places, tensors, strict=True))
    )
    if not is_even:
        return None
    strides = (distance // first.element_size(), *first.stride())
    return first.as_strided((len(tensors), *first.shape), strides, first.storage_offset())


def _factors(scalings: Sequence[float], *, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """What a run's products are scaled by, [adapters, 1, 1]: early, as thin as they are, or late, as separate runs do.

    Powers of two may be early: they change no digit, wherever they are multiplied with.
    """
    if all(scaling == 1 for scaling in scalings):
        return None, None
    factors = torch.tensor(scalings, dtype=torch.float32, device=like.device).view(-1, 1, 1)
    return (factors, None) if all(math.frexp(scaling)[0] == 0.5 for scaling in scalings) else (None, factors)

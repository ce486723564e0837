"""The modules of several adapters on one base, and runs: neighbouring adapters that compute as a batch at a layer.

Modules of which adapters have their own weights compute each adapter's rows in the shape of a separate run, so the
results are equal. While such a module computes, the weights are instance attributes of it, which Python finds before
the module's parameters.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ringmaster.techniques.job_specs import Adapter
from ringmaster.techniques.models.adapters import AdaptedLinear, is_norm
from ringmaster.techniques.models.peft_format import PREFIX
from ringmaster.techniques.multi_adapter.packed_attention import BatchShare

Operands = tuple[Tensor, Tensor]
"""The operands of a batched product: [n, p, q] and [n, q, r]."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LoraMatrices:
    """One LoRA's matrices at one linear layer: a [rank, in], b [out, rank], and the scaling of their product.

    Gradients are written into the matrices' `grad`, which is allocated if it is None.
    """

    a: Tensor
    b: Tensor
    scaling: float

    @property
    def likeness(self) -> Hashable:
        """A key that is equal for pairs that can compute as a batch."""
        return LoraMatrices, self.a.shape, self.b.shape


@dataclass(frozen=True, kw_only=True, eq=False)
class ScalingFactors:
    """The factors by which one (IA)3 multiplies a linear layer's outputs, [out, 1], or its inputs, [1, in].

    values: the factors. Their gradients are written into their `grad`, which is allocated if it is None.
    of_inputs: whether they multiply the inputs.
    """

    values: Tensor
    of_inputs: bool

    @property
    def likeness(self) -> Hashable:
        """A key that is equal for factors that can compute as a batch."""
        return ScalingFactors, self.values.shape, self.of_inputs


AdapterModule = LoraMatrices | ScalingFactors
"""The module of one adapter at one linear layer."""


class _RowRange:
    """Rows [start, stop) of the batch: `num_rows` rows of each of `num_adapters` neighbouring adapters.

    has_gradients: whether the current backward has written gradients already.
    """

    def __init__(self, *, start: int, num_rows: int, num_adapters: int) -> None:
        self.start, self.num_rows, self.num_adapters = start, num_rows, num_adapters
        self.stop = start + num_rows * num_adapters
        self.has_gradients = False

    def of(self, rows: Tensor) -> Tensor:
        """A view of the adapters' rows of [rows, features], as [adapters, num_rows, features]."""
        return rows[self.start : self.stop].view(self.num_adapters, self.num_rows, -1)


class LoraRun(_RowRange):
    """Neighbouring LoRAs of equal rank at one layer."""

    def __init__(self, *, start: int, num_rows: int, pairs: Sequence[LoraMatrices]) -> None:
        super().__init__(start=start, num_rows=num_rows, num_adapters=len(pairs))
        self._a, self._b = _StackedMatrices([pair.a for pair in pairs]), _StackedMatrices([pair.b for pair in pairs])
        self.early, self.late = _factors([pair.scaling for pair in pairs], like=pairs[0].a)

    @property
    def a(self) -> Tensor:
        """The adapters' A matrices, [adapters, rank, in]."""
        return self._a.values

    @property
    def b(self) -> Tensor:
        """The adapters' B matrices, [adapters, out, rank]."""
        return self._b.values

    def take_gradients(self, of_a: Operands, of_b: Operands, *, product: Callable[..., Tensor]) -> None:
        """Computes the gradients of A and B as products and stores them.

        The gradients of a layer that is used twice in a step are summed.
        """
        for matrices, operands in ((self._a, of_a), (self._b, of_b)):
            room = matrices.gradients
            if room is None or self.has_gradients:
                matrices.put(product(*operands), is_added=self.has_gradients)
            elif room.dtype == operands[0].dtype:
                product(*operands, out=room)
            else:
                room.copy_(product(*operands))
        self.has_gradients = True


class ScalingRun(_RowRange):
    """Neighbouring (IA)3s at one layer. Either all scale its outputs, or all scale its inputs."""

    def __init__(self, *, start: int, num_rows: int, factors: Sequence[ScalingFactors]) -> None:
        super().__init__(start=start, num_rows=num_rows, num_adapters=len(factors))
        self._factors = _StackedMatrices([each.values for each in factors])

    @property
    def factors(self) -> Tensor:
        """The adapters' factors, [adapters, 1, features]."""
        return self._factors.values.reshape(self.num_adapters, 1, -1)

    def take_gradients(self, by_row: Tensor) -> None:
        """Sums gradients [adapters, num_rows, features] over the rows, as a separate run does, and stores them."""
        result = torch.sum(by_row, dim=1, dtype=torch.float32).view_as(self._factors.values)
        self._factors.put(result, is_added=self.has_gradients)
        self.has_gradients = True


@dataclass(frozen=True)
class AdapterRuns:
    """The runs of adapters at one layer.

    products: LoRAs.
    of_inputs: (IA)3s that scale the layer's inputs.
    of_outputs: (IA)3s that scale the layer's outputs.
    """

    products: list[LoraRun] = field(default_factory=list)
    of_inputs: list[ScalingRun] = field(default_factory=list)
    of_outputs: list[ScalingRun] = field(default_factory=list)

    def __iter__(self) -> Iterator[LoraRun | ScalingRun]:
        return chain(self.products, self.of_inputs, self.of_outputs)

    def add(self, adapter_modules: Sequence[AdapterModule], *, start: int, num_rows: int) -> None:
        """Adds a run of neighbouring adapter modules of equal `likeness`, with `num_rows` rows each from `start` on."""
        pairs = [adapter_module for adapter_module in adapter_modules if isinstance(adapter_module, LoraMatrices)]
        factors = [adapter_module for adapter_module in adapter_modules if isinstance(adapter_module, ScalingFactors)]
        if pairs:
            self.products.append(LoraRun(start=start, num_rows=num_rows, pairs=pairs))
        else:
            scaled = self.of_inputs if factors[0].of_inputs else self.of_outputs
            scaled.append(ScalingRun(start=start, num_rows=num_rows, factors=factors))


class _StackedMatrices:
    """Matrices of one shape as one tensor, and their gradients as another. Evenly spaced ones are not copied."""

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
    """A view of tensors of one shape, stacked along a new first dimension; None if they are not evenly spaced."""
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
    """The scalings of a run's products, [adapters, 1, 1], as (early, late); at most one of the two is not None.

    Late factors scale the products, as separate runs do. Early factors scale the smaller operands of rank width. They
    are used if all scalings are powers of two, which are exact wherever they are multiplied.
    """
    if all(scaling == 1 for scaling in scalings):
        return None, None
    factors = torch.tensor(scalings, dtype=torch.float32, device=like.device).view(-1, 1, 1)
    return (factors, None) if all(math.frexp(scaling)[0] == 0.5 for scaling in scalings) else (None, factors)


ModuleWeights = Mapping[str, Tensor]
"""An adapter's own parameters of one module, by their names in the module."""


@dataclass(frozen=True, kw_only=True)
class OwnWeights:
    """The adapters' own weights of one module, for the shares of a batch.

    weights: the own weights of each share's adapter, None if it has none.
    shares: the shares of the batch.
    is_packed: whether samples of several lengths lie in one row.
    """

    weights: Sequence[ModuleWeights | None]
    shares: Sequence[BatchShare]
    is_packed: bool

    def rows_of(self, x: Tensor) -> list[Tensor]:
        """Splits `x` into each share's rows: [samples, ...] or, if packed, [samples, tokens, ...].

        Raises ValueError if the rows cannot be divided among the shares.
        """
        if len(self.shares) == 1:
            return [x]
        if self.is_packed:
            parts = torch.split(x[0], [share.size for share in self.shares])
            return [p.view(s.num_rows, s.length, *p.shape[1:]) for p, s in zip(parts, self.shares, strict=True)]
        times, left_over = divmod(len(x), sum(share.size for share in self.shares))
        if left_over:
            raise ValueError(
                f"a module that an adapter trains as it is got {len(x)} rows, and it is unknown whose they are. "
                "To fix: leave it out of modules_to_save, or train the jobs one by one"
            )
        return list(torch.split(x, [times * share.size for share in self.shares]))

    def joined(self, rows: Sequence[Tensor]) -> Tensor:
        """Joins each share's rows into one tensor; the inverse of `rows_of`."""
        return torch.cat([each.flatten(0, 1) for each in rows]).unsqueeze(0) if self.is_packed else torch.cat([*rows])


class PerAdapterModule(nn.Module):
    """A module of which several adapters in a batch may have own weights.

    adapts: the plain class of the module.
    owners: returns the owners of the current batch, None if no adapter has own weights.
    """

    adapts: type[nn.Module]
    owners: Callable[[], OwnWeights | None]

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102 - as of any module
        owners = self.owners()
        of_all: Callable[[Tensor], Tensor] = super().forward
        if owners is None:
            return of_all(x)
        if len(owners.weights) == 1 and (own := owners.weights[0]) is not None:
            return self._computed(x, own)
        rows = owners.rows_of(x)
        # The rows without own weights are computed together, with the base's weights.
        is_shared = any(weights is None for weights in owners.weights)
        result = owners.rows_of(of_all(x)) if is_shared else list(rows)
        for i, weights in enumerate(owners.weights):
            if weights is not None:
                result[i] = self._computed(rows[i], weights)
        return owners.joined(result)

    def _computed(self, x: Tensor, weights: ModuleWeights) -> Tensor:
        with _substituted(self, weights):
            result: Tensor = self.adapts.forward(self, x)
        return result


class PerAdapterNorm(PerAdapterModule):
    """An RMS norm of transformers, computed once for all rows with a weight that has one row per row of the input.

    The norm uses its input twice, and both gradients are added to the gradient of the residual connection. Computing
    the shares separately would add them in another order.
    """

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102 - as of any module
        owners = self.owners()
        if owners is None:
            normalised: Tensor = self.adapts.forward(self, x)
            return normalised
        shared: Tensor = self.weight  # type: ignore[assignment]
        of_rows = [
            (shared if own is None else own["weight"]).expand(rows.shape)
            for own, rows in zip(owners.weights, owners.rows_of(x.detach()), strict=True)
        ]
        return self._computed(x, {"weight": owners.joined(of_rows) if len(of_rows) > 1 else of_rows[0]})


@contextmanager
def _substituted(module: nn.Module, weights: ModuleWeights) -> Iterator[None]:
    """Substitutes a module's weights within the context, cast to the dtype of its own."""
    before: dict[str, Any] = {key: module.__dict__[key] for key in weights if key in module.__dict__}
    module.__dict__.update({key: value.to(getattr(module, key).dtype) for key, value in weights.items()})
    try:
        yield
    finally:
        for key in weights:
            del module.__dict__[key]
        module.__dict__.update(before)


@cache
def per_adapter_class(plain: type[nn.Module]) -> type[nn.Module]:
    """The `PerAdapterModule` subclass of a module class. Linear layers have theirs in `multi_adapter.shared_linear`."""
    kind = PerAdapterNorm if is_norm(plain) else PerAdapterModule
    return type(f"Owned{plain.__name__}", (kind, plain), {"adapts": plain})


@dataclass(frozen=True, kw_only=True, eq=False)
class AdapterModules:
    """The modules of one adapter.

    at: the modules at linear layers, by the layers' names.
    weights: the adapter's own weights of other modules, by the modules' names.
    prefix: the prefix, [virtual tokens, layers * 2 * heads * dim], or None.
    """

    at: Mapping[str, AdapterModule] = field(default_factory=dict)
    weights: Mapping[str, ModuleWeights] = field(default_factory=dict)
    prefix: Tensor | None = None

    @property
    def num_before(self) -> int:
        """The number of virtual tokens."""
        return 0 if self.prefix is None else len(self.prefix)


def adapter_modules_of(
    adapter: Adapter, sites: Sequence[AdaptedLinear], own: Sequence[str], state: Mapping[str, Tensor]
) -> AdapterModules:
    """The modules of an adapter whose tensors are `state`, named as on a model of its own.

    sites: the linear layers that it adapts.
    own: the names of the modules of which it has its own weights.
    """
    weights: dict[str, dict[str, Tensor]] = {name: {} for name in own}
    for name, tensor in state.items():
        module, _, key = name.rpartition(".")
        if module in weights:
            weights[module][key] = tensor
    at = {site.name: _at(site, adapter, state) for site in sites}
    return AdapterModules(at=at, weights=weights, prefix=state.get(PREFIX))


def _at(site: AdaptedLinear, adapter: Adapter, state: Mapping[str, Tensor]) -> AdapterModule:
    if adapter.kind == "ia3":
        return ScalingFactors(values=state[f"{site.name}.ia3_l"], of_inputs=site.scales_input)
    a, b = (state[f"{site.name}.lora_{matrix}.weight"] for matrix in "AB")
    return LoraMatrices(a=a, b=b, scaling=adapter.scaling)

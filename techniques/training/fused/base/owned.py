"""Modules of a base that compute each adapter's rows with the adapter's own weights, if it has any.

Each adapter's rows get the shape of a separate run, so the results are equal. While the module computes, the weights
are instance attributes of it, which Python finds before the module's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ringmaster.techniques.models.adapters.leaves import is_norm
from ringmaster.techniques.training.fused.packing import Share

Weights = Mapping[str, Tensor]
"""An adapter's own parameters of one module, by their names in the module."""


@dataclass(frozen=True, kw_only=True)
class Owners:
    """The adapters' own weights of one module, for the shares of a batch.

    weights: the own weights of each share's adapter, None if it has none.
    shares: the shares of the batch.
    is_packed: whether samples of several lengths lie in one row.
    """

    weights: Sequence[Weights | None]
    shares: Sequence[Share]
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
                f"a module that an adapter trains as it is got {len(x)} rows, and it cannot be told whose they are. "
                "To fix: leave it out of modules_to_save, or train the jobs one by one"
            )
        return list(torch.split(x, [times * share.size for share in self.shares]))

    def joined(self, rows: Sequence[Tensor]) -> Tensor:
        """Joins each share's rows into one tensor; the inverse of `rows_of`."""
        return torch.cat([each.flatten(0, 1) for each in rows]).unsqueeze(0) if self.is_packed else torch.cat([*rows])


class Owned(nn.Module):
    """A module of which several adapters in a batch may have own weights.

    adapts: the plain class of the module.
    owners: returns the owners of the current batch, None if no adapter has own weights.
    """

    adapts: type[nn.Module]
    owners: Callable[[], Owners | None]

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
        found = owners.rows_of(of_all(x)) if is_shared else list(rows)
        for i, weights in enumerate(owners.weights):
            if weights is not None:
                found[i] = self._computed(rows[i], weights)
        return owners.joined(found)

    def _computed(self, x: Tensor, weights: Weights) -> Tensor:
        with _standing_in(self, weights):
            found: Tensor = self.adapts.forward(self, x)
        return found


class OwnedNorm(Owned):
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
def _standing_in(module: nn.Module, weights: Weights) -> Iterator[None]:
    """Substitutes a module's weights within the context, cast to the dtype of its own."""
    before: dict[str, Any] = {key: module.__dict__[key] for key in weights if key in module.__dict__}
    module.__dict__.update({key: value.to(getattr(module, key).dtype) for key, value in weights.items()})
    try:
        yield
    finally:
        for key in weights:
            del module.__dict__[key]
        module.__dict__.update(before)


def owned_class(plain: type[nn.Module]) -> type[nn.Module]:
    """The `Owned` subclass of a module class. Linear layers have theirs in `fused.base.linear`."""
    if plain not in _CLASSES:
        how = OwnedNorm if is_norm(plain) else Owned
        _CLASSES[plain] = type(f"Owned{plain.__name__}", (how, plain), {"adapts": plain})
    return _CLASSES[plain]


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}

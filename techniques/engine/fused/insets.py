"""What an adapter has in a base that it shares with others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ringmaster.techniques.adapters.attaching import Site
from ringmaster.techniques.adapters.modules import PREFIX, scaling
from ringmaster.techniques.engine.fused.owned import Weights
from ringmaster.techniques.engine.fused.runs import Factors, Inset, Pair
from ringmaster.techniques.job import Adapter


@dataclass(frozen=True, kw_only=True, eq=False)
class Insets:
    """Of one adapter. at: of linear layers, by their names. weights: its own, of modules by their names.
    prefix: [virtual tokens, layers * 2 * heads * dim].
    """

    at: Mapping[str, Inset] = field(default_factory=dict)
    weights: Mapping[str, Weights] = field(default_factory=dict)
    prefix: Tensor | None = None

    @property
    def num_before(self) -> int:
        """Virtual tokens."""
        return 0 if self.prefix is None else len(self.prefix)


def insets_of(adapter: Adapter, sites: Sequence[Site], own: Sequence[str], state: Mapping[str, Tensor]) -> Insets:
    """Of an adapter whose tensors are `state`, by the names that they have on a model of their own.

    own: the modules of which it has weights of its own.
    """
    weights: dict[str, dict[str, Tensor]] = {name: {} for name in own}
    for name, tensor in state.items():
        module, _, key = name.rpartition(".")
        if module in weights:
            weights[module][key] = tensor
    at = {site.name: _at(site, adapter, state) for site in sites}
    return Insets(at=at, weights=weights, prefix=state.get(PREFIX))


def _at(site: Site, adapter: Adapter, state: Mapping[str, Tensor]) -> Inset:
    if adapter.kind == "ia3":
        return Factors(values=state[f"{site.name}.ia3_l"], of_inputs=site.scales_input)
    scale = scaling(rank=adapter.rank, alpha=adapter.alpha, rank_stabilised=adapter.rank_stabilised)
    return Pair(a=state[f"{site.name}.lora_A.weight"], b=state[f"{site.name}.lora_B.weight"], scaling=scale)

"""The modules that an adapter adds to a shared base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ringmaster.techniques.interface.job import Adapter
from ringmaster.techniques.models.adapters.attaching import AdaptedLinear
from ringmaster.techniques.models.adapters.modules import PREFIX, scaling
from ringmaster.techniques.training.fused.base.owned import Weights
from ringmaster.techniques.training.fused.base.runs import AdapterModule, Factors, Pair


@dataclass(frozen=True, kw_only=True, eq=False)
class AdapterModules:
    """The modules of one adapter.

    at: the modules at linear layers, by the layers' names.
    weights: the adapter's own weights of other modules, by the modules' names.
    prefix: the prefix, [virtual tokens, layers * 2 * heads * dim], or None.
    """

    at: Mapping[str, AdapterModule] = field(default_factory=dict)
    weights: Mapping[str, Weights] = field(default_factory=dict)
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
        return Factors(values=state[f"{site.name}.ia3_l"], of_inputs=site.scales_input)
    scale = scaling(rank=adapter.rank, alpha=adapter.alpha, rank_stabilised=adapter.rank_stabilised)
    return Pair(a=state[f"{site.name}.lora_A.weight"], b=state[f"{site.name}.lora_B.weight"], scaling=scale)

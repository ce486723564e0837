"""Structured pruning: a smaller model of the same class, made of layers and of channels within them of a larger one.

Unlike zeros among the weights, what is left out takes no time. The model is dense and of its class, so that everything
trains, quantizes and serves it as any other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ringmaster.techniques.models.architectures import kept_layers
from ringmaster.techniques.models.model_folders import few

OF_HEADS = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
"""The fields of a config that stay: what they divide is not a set of channels that can be chosen one by one."""

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class TensorSource:
    """What a tensor of a smaller model is taken from.

    name: of the larger model's tensor.
    layer: the path of the innermost numbered module that has the tensor; empty for none.
    cuts: the dimensions that have fewer channels, each with the number in the larger and in the smaller model.
    """

    name: str
    layer: str
    cuts: Mapping[int, tuple[int, int]]


@torch.no_grad()
def narrow(whole: nn.Module, small: nn.Module) -> None:
    """Copies the layers and channels that are kept of a model into a smaller one.

    Layers are taken at equal distances, the first and the last among them, as in DistilBERT (Sanh et al.,
    arXiv:1910.01108). Within a layer, the channels are kept whose weights have the largest norm, over all tensors that
    read or write them (Fang et al., DepGraph, arXiv:2301.12900).

    Raises ValueError where `small` is none of `whole`'s layers and of channels within them.
    """
    theirs, own, sources = whole.state_dict(), small.state_dict(), tensor_sources(whole, small)
    norms: dict[tuple[str, int], Tensor] = {}
    for source in sources.values():
        for dim, (num_channels, _) in source.cuts.items():
            squares = theirs[source.name].double().square().movedim(dim, 0).reshape(num_channels, -1).sum(1)
            key = source.layer, num_channels
            norms[key] = norms.get(key, torch.zeros_like(squares)) + squares
    for name, source in sources.items():
        tensor = theirs[source.name]
        for dim, (num_channels, num_kept) in source.cuts.items():
            kept = norms[source.layer, num_channels].topk(num_kept).indices.sort().values
            tensor = tensor.index_select(dim, kept)
        own[name].copy_(tensor)


def tensor_sources(whole: nn.Module, small: nn.Module) -> dict[str, TensorSource]:
    """Returns the source of each tensor of `small`, by its name; neither model needs values.

    Raises ValueError, with every reason, where a tensor has none.
    """
    fields = [getattr(model, "config", None) for model in (whole, small)]
    faults = [
        f"model.config.{key} differs from the base's, and pruning keeps it"
        for key in OF_HEADS
        if len({getattr(each, key, None) for each in fields}) > 1
    ]
    theirs, own = ({name: tuple(t.shape) for name, t in model.state_dict().items()} for model in (whole, small))
    sources = dict(zip(own, _sources(own, theirs), strict=True))
    cuts: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for name, source in sources.items():
        shape = theirs.get(source.name, ())
        if len(shape) != len(own[name]) or (source.cuts and not source.layer):
            faults.append(f"{name} is {list(own[name])}, and the base's {list(shape) or 'is missing'}")
        faults += [f"{name} has more channels than the base's" for n, k in source.cuts.values() if k > n]
        cuts[source.layer].update(source.cuts.values())
    faults += [f"{layer} differs in more than one width" for layer, each in cuts.items() if len(each) > 1]
    if faults:
        raise ValueError(
            f"structured pruning: {few(faults)}. To fix: change only the number of layers, and the width between "
            "the matrices of each (intermediate_size), in model.config"
        )
    return sources


def _sources(own: Shapes, theirs: Shapes) -> Iterator[TensorSource]:
    nums, nums_there = _num_layers(own), _num_layers(theirs)
    for name, shape in own.items():
        parts: list[str] = []
        layer = ""
        for part in name.split("."):
            if part.isdecimal():
                at, at_there = ".".join(name.split(".")[: len(parts)]), ".".join(parts)
                kept = kept_layers(nums_there.get(at_there, 0), nums[at])
                part = str(kept[int(part)])
                layer = f"{at_there}.{part}"
            parts.append(part)
        source = ".".join(parts)
        sizes = zip(theirs.get(source, ()), shape, strict=False)
        yield TensorSource(name=source, layer=layer, cuts={i: each for i, each in enumerate(sizes) if len({*each}) > 1})


def _num_layers(shapes: Shapes) -> dict[str, int]:
    """Returns how many numbered modules each module has, by its path."""
    result: dict[str, int] = defaultdict(int)
    for parts in (name.split(".") for name in shapes):
        for i, part in enumerate(parts):
            if part.isdecimal():
                at = ".".join(parts[:i])
                result[at] = max(result[at], int(part) + 1)
    return result

"""An adapter's parameters, and their gradients, one behind the other in one row of memory.

An optimizer then updates a row at once, and adapters of one layout whose rows lie below each other are multiplied
without being copied together. Optimizers work element by element, so that nothing is computed otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringmaster.techniques.engine.fused.runs import evenly
from ringmaster.techniques.engine.state import Reader

ALIGNMENT = 16  # numbers: a cache line of fp32, and what the widest kernels compute at once


@dataclass(frozen=True, kw_only=True)
class _Place:
    name: str
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + torch.Size(self.shape).numel()

    def of(self, row: Tensor, *, first: int = 0) -> Tensor:
        """Its part of a row, or of a piece of a row that begins at `first`."""
        return row[self.start - first : self.stop - first].view(self.shape)


class Row:
    """The parameters of `tree`, moved into a row. They stay the same objects, with the same names.

    segments: parameters that together are all of the row's, as few as possible, for an optimizer: kernels compute the
    last few of a tensor's numbers in another way, so that only tensors without such a rest are joined.
    layout: rows of equal layouts can lie below each other.
    gradients: of all parameters, None before they are laid anywhere.
    num_moves: how often the row was moved, which invalidates views of its parameters.
    """

    def __init__(self, tree: nn.Module) -> None:
        self._parameters = dict(tree.named_parameters())
        self._places, self.num_elements = _places(self._parameters)
        self._cuts = list(_cuts(self._places))
        self.layout = tuple((place.name, place.shape) for place in self._places)
        first = next(iter(self._parameters.values()))
        self.segments = [nn.Parameter(first.new_empty(0)) for _ in self._cuts]
        self.num_moves = -1
        self.gradients: Tensor | None = None  # which it gets where it is laid
        self._move(first.new_zeros(self.num_elements), None)

    def states(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """The tensors of the optimizer of `segments`, as `engine.state.named_optimizer_state` names them."""
        named = {}
        for segment, places in zip(self.segments, self._cuts, strict=True):
            state = {key: value for key, value in optimizer.state.get(segment, {}).items() if isinstance(value, Tensor)}
            for place in places:
                for key, value in state.items():
                    own = place.of(value, first=places[0].start) if value.shape == segment.shape else value
                    named[f"optimizer/{place.name}/{key}"] = own
        return named

    def restore(self, reader: Reader, optimizer: torch.optim.Optimizer) -> None:
        """Fills the state of the optimizer of `segments`."""
        for segment, places in zip(self.segments, self._cuts, strict=True):
            state = optimizer.state[segment]
            for place in places:
                for key in reader.states_of(place.name):
                    found = reader.state(f"optimizer/{place.name}/{key}", self._parameters[place.name], optimizer)
                    if found.shape == place.shape:
                        whole = state.setdefault(key, torch.zeros_like(segment, dtype=found.dtype, requires_grad=False))
                        place.of(whole, first=places[0].start).copy_(found)
                    else:
                        state[key] = found  # a step counter, the same for all

    def _move(self, values: Tensor, gradients: Tensor | None) -> None:
        """To a new place in memory, [num_elements] each. Gradients are not kept."""
        for place in self._places:
            parameter = self._parameters[place.name]
            place.of(values).copy_(parameter.detach())
            parameter.grad = None
            parameter.data = place.of(values)
            parameter.grad = None if gradients is None else place.of(gradients)
        for segment, places in zip(self.segments, self._cuts, strict=True):
            where = slice(places[0].start, places[-1].stop)
            segment.grad = None
            segment.data = values[where]
            segment.grad = None if gradients is None else gradients[where]
        self.gradients = gradients
        self._values, self.num_moves = values, self.num_moves + 1


def lay_below(rows: Sequence[Row]) -> None:
    """Moves rows of one layout into one matrix, in this order, unless they are there, and another for gradients."""
    if all(row.gradients is not None for row in rows) and evenly([row._values for row in rows]) is not None:
        return
    shape, like = (len(rows), rows[0].num_elements), rows[0]._values
    for row, values, gradients in zip(rows, like.new_zeros(shape), like.new_zeros(shape), strict=True):
        row._move(values, gradients)


def sum_gradients(rows: Sequence[Row]) -> None:
    """Adds up the rows' gradients over all ranks, which have the same rows in the same order: in one exchange."""
    gradients = [row.gradients for row in rows if row.gradients is not None]
    together = torch.cat(gradients)
    dist.all_reduce(together)
    torch._foreach_copy_(gradients, torch.split(together, [len(each) for each in gradients]))


def _places(parameters: Mapping[str, Tensor]) -> tuple[list[_Place], int]:
    """Where each tensor begins, aligned; and the length of a row."""
    places, end = [], 0
    for name, parameter in parameters.items():
        places.append(_Place(name=name, start=end, shape=tuple(parameter.shape)))
        end = -(-places[-1].stop // ALIGNMENT) * ALIGNMENT
    return places, end


def _cuts(places: Sequence[_Place]) -> Iterator[list[_Place]]:
    """Neighbours that have no rest beyond whole vectors together, others by themselves."""
    joined: list[_Place] = []
    for place in places:
        is_even = (place.stop - place.start) % ALIGNMENT == 0
        if is_even:
            joined.append(place)
        if joined and not is_even:
            yield joined
            joined = []
        if not is_even:
            yield [place]
    if joined:
        yield joined

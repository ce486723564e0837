"""Rows of parameters: all parameters of an adapter in contiguous memory, and rows of equal layout as one matrix.

An optimizer updates a row at once, and adapters of equal layout whose rows form one matrix are multiplied as a batch
without a copy. Optimizers work element by element, so the results do not change.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringmaster.compat.torch import foreach_copy_
from ringmaster.techniques.checkpoints.state import Reader
from ringmaster.techniques.multi_adapter.adapter_runs import evenly
from ringmaster.techniques.training.optimizers import ParameterSettings

ALIGNMENT = 16  # elements: one cache line of fp32, and the widest kernels' vector


@dataclass(frozen=True, kw_only=True)
class _ParameterPlace:
    name: str
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + torch.Size(self.shape).numel()

    def of(self, row: Tensor, *, first: int = 0) -> Tensor:
        """A view of the parameter's part of a row, or of a piece of a row that begins at `first`."""
        return row[self.start - first : self.stop - first].view(self.shape)


class ParameterRow:
    """The parameters of `tree`, moved into a row. They stay the same objects, with the same names.

    layout: the parameters' names and shapes. Rows of equal layout can form one matrix.
    segments: flat parameters that together cover the row, for an optimizer. They are as few as possible. Kernels
        compute the last few elements of a tensor in another way, so only tensors without such a remainder are joined,
        and only those of equal optimizer settings.
    num_moves: how often the row was moved, which invalidates views of its parameters.
    values: the row of all parameters.
    gradients: the row of all gradients; None before `lay_below` allocates it.
    """

    def __init__(self, tree: nn.Module, *, settings: Mapping[str, ParameterSettings] | None = None) -> None:
        self._parameters = dict(tree.named_parameters())
        self._places, self.num_elements = _places(self._parameters)
        self._cuts = list(_cuts(self._places, settings or {}))
        self.layout = tuple((place.name, place.shape) for place in self._places)
        first = next(iter(self._parameters.values()))
        self.segments = [nn.Parameter(first.new_empty(0)) for _ in self._cuts]
        self.num_moves = -1
        self.gradients: Tensor | None = None  # allocated by `lay_below`
        self._move(first.new_zeros(self.num_elements), None)

    def names(self) -> dict[nn.Parameter, str]:
        """The name of one parameter in each segment; all of a segment have the same settings."""
        return {segment: places[0].name for segment, places in zip(self.segments, self._cuts, strict=True)}

    def states(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """The optimizer's state tensors, named as `techniques.checkpoints.state.named_optimizer_state` names them."""
        named = {}
        for segment, places in zip(self.segments, self._cuts, strict=True):
            state = {key: value for key, value in optimizer.state.get(segment, {}).items() if isinstance(value, Tensor)}
            for place in places:
                for key, value in state.items():
                    own = place.of(value, first=places[0].start) if value.shape == segment.shape else value
                    named[f"optimizer/{place.name}/{key}"] = own
        return named

    def restore(self, reader: Reader, optimizer: torch.optim.Optimizer) -> None:
        """Fills the state of the optimizer of `segments` from a checkpoint."""
        for segment, places in zip(self.segments, self._cuts, strict=True):
            state = optimizer.state[segment]
            for place in places:
                for key in reader.states_of(place.name):
                    result = reader.state(f"optimizer/{place.name}/{key}", self._parameters[place.name], optimizer)
                    if result.shape == place.shape:
                        whole = state.setdefault(
                            key, torch.zeros_like(segment, dtype=result.dtype, requires_grad=False)
                        )
                        place.of(whole, first=places[0].start).copy_(result)
                    else:
                        state[key] = result  # a step counter, equal for all parameters

    def parts_of(self, row: Tensor) -> dict[str, Tensor]:
        """The views of a row like this one at the places of the parameters, by name."""
        return {place.name: place.of(row) for place in self._places}

    def _move(self, values: Tensor, gradients: Tensor | None) -> None:
        """Moves the row to new memory, [num_elements] each. The gradients' values are lost."""
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
        self.values, self.num_moves = values, self.num_moves + 1


def lay_below(rows: Sequence[ParameterRow]) -> None:
    """Moves rows of one layout, in order, into one matrix, and their gradients into another, unless they lie so."""
    if all(row.gradients is not None for row in rows) and evenly([row.values for row in rows]) is not None:
        return
    shape, like = (len(rows), rows[0].num_elements), rows[0].values
    for row, values, gradients in zip(rows, like.new_zeros(shape), like.new_zeros(shape), strict=True):
        row._move(values, gradients)


def sum_gradients(rows: Sequence[ParameterRow]) -> None:
    """Sums the rows' gradients over all ranks in one all-reduce. All ranks have the same rows in the same order."""
    gradients = [row.gradients for row in rows if row.gradients is not None]
    flat = torch.cat(gradients)
    dist.all_reduce(flat)
    foreach_copy_(gradients, torch.split(flat, [len(each) for each in gradients]))


def _places(parameters: Mapping[str, Tensor]) -> tuple[list[_ParameterPlace], int]:
    """The place of each tensor, with an aligned start, and the length of the row."""
    places, end = [], 0
    for name, parameter in parameters.items():
        places.append(_ParameterPlace(name=name, start=end, shape=tuple(parameter.shape)))
        end = -(-places[-1].stop // ALIGNMENT) * ALIGNMENT
    return places, end


def _cuts(
    places: Sequence[_ParameterPlace], settings: Mapping[str, ParameterSettings]
) -> Iterator[list[_ParameterPlace]]:
    """Groups neighbouring places whose sizes are multiples of `ALIGNMENT`; each other place is its own group.

    Places of unequal settings are in different groups.
    """
    joined: list[_ParameterPlace] = []
    for place in places:
        is_even = (place.stop - place.start) % ALIGNMENT == 0
        if joined and (not is_even or settings.get(place.name) != settings.get(joined[0].name)):
            yield joined
            joined = []
        if is_even:
            joined.append(place)
        else:
            yield [place]
    if joined:
        yield joined


def in_order_of(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sorts an adapter's tensors into the order of the model's modules, in which gradient norms are summed."""
    places = {name: place for place, (name, _) in enumerate(model.named_modules())}

    def place(name: str) -> int:
        while name not in places:
            name = name.rpartition(".")[0]
        return places[name]

    return {name: state[name] for name in sorted(state, key=place)}


def tree_of(state: Mapping[str, Tensor]) -> nn.Module:
    """A tree of empty modules that hold the tensors as parameters under their dotted names, in order."""
    root = nn.Module()
    for name, value in state.items():
        module = root
        *path, key = name.split(".")
        for word in path:
            if not hasattr(module, word):
                module.add_module(word, nn.Module())
            module = module.get_submodule(word)
        module.register_parameter(key, nn.Parameter(value))
    return root

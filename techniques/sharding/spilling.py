"""Keeps a model's weights in host memory, and copies slices of them to the device while their layers compute.

A slice is copied for its forward and again for its backward. The slice that is needed next is prefetched, so that at
most two are on the device. Only copies of the weights move. Parameters, their gradients and the optimizer stay on the
host under their own names, so that everything else works as in one process.

The tensors that autograd saves for the backward would keep the copies on the device. So autograd saves a reference in
place of each weight, and gets the weight itself when it needs it.

Sources: FairScale's OffloadModel; Pudipeddi et al., L2L (arXiv:2002.05645); Nagrecha, Hydra (arXiv:2110.08633).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ringmaster.compat.torch import own_buffers, own_parameters, storage_key
from ringmaster.techniques.models.layers import layer_names
from ringmaster.techniques.training.recomputation import drawing_again

MAX_RESIDENT = 2  # the slice that computes, and the next one


@dataclass(frozen=True, eq=False)
class OffloadUnit:
    """A module that gets its weights as a whole: a repeated layer, or a module outside of the layers.

    whole: with all submodules; otherwise with its own parameters alone (a module that contains layers).
    """

    module: nn.Module
    whole: bool
    is_layer: bool

    def places(self) -> list[tuple[nn.Module, str, nn.Parameter]]:
        """Returns each parameter with its module and its name there; a shared parameter appears at every place."""
        modules = self.module.modules() if self.whole else [self.module]
        return [(m, name, p) for m in modules for name, p in own_parameters(m).items() if p is not None]


@dataclass(eq=False)
class Slice:
    """Units that are copied together, in the order in which the model names them.

    copies: the copies of the parameters, while they are on the device.
    """

    index: int
    units: list[OffloadUnit]
    parameters: list[nn.Parameter] = field(default_factory=list)
    copies: list[Tensor] = field(default_factory=list)
    arrival: torch.cuda.Event | None = None

    def __post_init__(self) -> None:
        self.parameters = list(dict.fromkeys(p for unit in self.units for _, _, p in unit.places()))


def slices_of(model: nn.Module, num_slices: int) -> list[Slice]:
    """Divides the layers into `num_slices` runs of about equal number; every other module is a slice of its own."""
    slices: list[list[OffloadUnit]] = []
    names = layer_names(model)
    layers = {model.get_submodule(name): i * num_slices // len(names) for i, name in enumerate(names)}
    ancestors = {model.get_submodule(_parent(name, depth)) for name in names for depth in range(name.count(".") + 1)}
    current: int | None = None

    def walk(module: nn.Module) -> None:
        nonlocal current
        is_layer = module in layers
        if is_layer and layers[module] == current:
            slices[-1].append(OffloadUnit(module, whole=True, is_layer=True))
            return
        unit = OffloadUnit(module, whole=module not in ancestors, is_layer=is_layer)
        if unit.places():
            slices.append([unit])
            current = layers.get(module)
        if not unit.whole:
            for child in module.children():
                walk(child)

    walk(model)
    return [Slice(index=i, units=units) for i, units in enumerate(slices)]


def _parent(name: str, depth: int) -> str:
    return ".".join(name.split(".")[:depth])


class HostOffload:
    """Copies the slices of a model between host and device.

    Call `bind` with a device before the model is called, and `settle` after each backward.
    """

    def __init__(self, model: nn.Module, *, num_slices: int, recompute: bool, host_activations: bool) -> None:
        self._model = model
        self._slices = slices_of(model, num_slices)
        self._recompute, self._host_activations = recompute, host_activations
        self._device: torch.device | None = None
        self._resident: list[Slice] = []  # in order of use, the latest last
        self._direction, self._at = 1, 0
        # The key is the storage: a view shares it, and tensors without values have no addresses.
        self._homes: dict[int, tuple[Slice, int]] = {}
        self._returned: list[tuple[nn.Parameter, Tensor]] = []
        self._inward: Any = None
        self._outward: Any = None
        for part in self._slices:
            for unit in part.units:
                unit.module.forward = self._spilled(part, unit)

    def bind(self, device: torch.device) -> None:
        """Sets the device on which the model computes: its buffers move there, its weights do not."""
        if device == self._device:
            return
        self._device = device
        for module in self._model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                own_buffers(module)[name] = buffer.to(device)
        if device.type == "cuda":  # copies overlap with computation only from pinned memory
            self._inward, self._outward = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
            for parameter in self._model.parameters():
                parameter.data = parameter.data.pin_memory()

    def settle(self) -> None:
        """Adds the gradients that a backward returned to those of the parameters, on the host."""
        if self._outward is not None:
            self._outward.synchronize()
        for parameter, gradient in self._returned:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._returned.clear()

    def returned(self) -> Iterator[Tensor]:
        """Returns the gradients that were sent to the host since the last `settle`."""
        return (gradient for _, gradient in self._returned)

    def forget(self) -> None:
        """Drops all copies, because the weights have changed."""
        while self._resident:
            self._evict(self._resident[0])

    # -- host to device ------------------------------------------------------------------------------------------------

    def need(self, part: Slice) -> list[Tensor]:
        """Returns the slice's copies, on the device for what is computed next; prefetches the slice after it."""
        if part.index != self._at:
            self._direction = 1 if part.index > self._at else -1
            self._at = part.index
        if part in self._resident:
            self._resident.remove(part)
        else:
            self._make_room(MAX_RESIDENT - 1)
            self._fetch(part)
        self._resident.append(part)
        following = part.index + self._direction
        if 0 <= following < len(self._slices) and self._slices[following] not in self._resident:
            self._make_room(MAX_RESIDENT - 1)
            self._fetch(self._slices[following])
            self._resident.insert(0, self._slices[following])
        if part.arrival is not None:
            torch.cuda.current_stream(self._device).wait_event(part.arrival)
        return part.copies

    def _fetch(self, part: Slice) -> None:
        with torch.no_grad(), torch.cuda.stream(self._inward) if self._inward is not None else nullcontext():
            part.copies = [torch.empty_like(p, device=self._device) for p in part.parameters]
            for copy, parameter in zip(part.copies, part.parameters, strict=True):
                copy.copy_(parameter, non_blocking=True)
            if self._inward is not None:
                part.arrival = self._inward.record_event()
        for i, copy in enumerate(part.copies):
            if copy.numel():
                self._homes[storage_key(copy.untyped_storage())] = (part, i)

    def _make_room(self, num_left: int) -> None:
        while len(self._resident) > num_left:
            self._evict(self._resident[0])

    def _evict(self, part: Slice) -> None:
        self._resident.remove(part)
        for copy in part.copies:
            self._homes.pop(storage_key(copy.untyped_storage()), None)
            if self._device is not None and self._device.type == "cuda":  # used on this stream, allocated on another
                copy.record_stream(torch.cuda.current_stream(self._device))
        part.copies = []

    # -- device to host ------------------------------------------------------------------------------------------------

    def take_home(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Sends a gradient to the host; `settle` adds it up."""
        if self._outward is None:
            self._returned.append((parameter, gradient.clone()))
            return
        home = torch.empty_like(gradient, device="cpu", pin_memory=True)
        self._outward.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._outward):
            home.copy_(gradient, non_blocking=True)
        gradient.record_stream(self._outward)
        self._returned.append((parameter, home))

    # -- computing ---------------------------------------------------------------------------------------------------

    def _spilled(self, part: Slice, unit: OffloadUnit) -> Callable[..., Any]:
        """Wraps the unit's forward, so that its weights are on the device while it runs."""
        inner, places = unit.module.forward, unit.places()
        parameters = list(dict.fromkeys(p for _, _, p in places))

        def forward(*args: Any, **kwargs: Any) -> Any:
            copies: tuple[Tensor, ...] = _OffloadFunction.apply(self, part, *parameters)  # type: ignore[no-untyped-call]
            visiting = dict(zip(parameters, copies, strict=True))
            with _substituted([(module, name, visiting[p]) for module, name, p in places]):
                return inner(*args, **kwargs)

        if unit.is_layer and self._recompute:
            return partial(self._recomputed, forward)
        return partial(self._kept, forward)

    def _kept(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with saved_tensors_hooks(self._ticket, self._redeem):
            return forward(*args, **kwargs)

    def _recomputed(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a forward that saves only the layer's input for backward.

        With `host_activations` the input is saved in host memory, and copied back for the backward.
        """
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        is_cuda = self._device is not None and self._device.type == "cuda"
        with save_on_cpu(pin_memory=is_cuda) if self._host_activations else nullcontext():
            return checkpoint(forward, *args, use_reentrant=False, context_fn=drawing_again, **kwargs)

    def _ticket(self, saved: Tensor) -> Any:
        """What autograd saves: for a weight or a view of it, a reference; for other tensors, the tensor itself."""
        home = self._homes.get(storage_key(saved.untyped_storage()))
        if home is None:
            return saved
        part, i = home
        return part, i, saved.size(), saved.stride(), saved.storage_offset()

    def _redeem(self, ticket: Any) -> Tensor:
        if isinstance(ticket, Tensor):
            return ticket
        part, i, size, stride, offset = ticket
        copy: Tensor = self.need(part)[i]
        return copy.as_strided(size, stride, offset)


class _OffloadFunction(torch.autograd.Function):
    """Maps a unit's parameters on the host to their copies on the device; backward sends gradients to the host."""

    @staticmethod
    def forward(ctx: Any, spilled: HostOffload, part: Slice, *parameters: nn.Parameter) -> tuple[Tensor, ...]:
        copies = dict(zip(part.parameters, spilled.need(part), strict=True))
        visiting = tuple(copies[p].detach() for p in parameters)
        ctx.spilled, ctx.parameters = spilled, parameters
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(copy for copy, p in zip(visiting, parameters, strict=True) if not p.requires_grad)
        )
        return visiting

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        for parameter, gradient in zip(ctx.parameters, gradients, strict=True):
            if gradient is not None and parameter.requires_grad:
                ctx.spilled.take_home(parameter, gradient)
        return (None, None, *(None for _ in gradients))


@contextmanager
def _substituted(places: Sequence[tuple[nn.Module, str, Tensor]]) -> Iterator[None]:
    """Replaces parameters by tensors, also where a copy in another precision hides a parameter."""
    before = [(own_parameters(module)[name], module.__dict__.get(name)) for module, name, _ in places]
    for (module, name, tensor), (_, rounded) in zip(places, before, strict=True):
        own_parameters(module)[name] = tensor  # type: ignore[assignment]
        if rounded is not None:
            module.__dict__[name] = tensor.to(rounded.dtype)
    try:
        yield
    finally:
        for (module, name, _), (parameter, rounded) in zip(places, before, strict=True):
            own_parameters(module)[name] = parameter
            if rounded is not None:
                module.__dict__[name] = rounded

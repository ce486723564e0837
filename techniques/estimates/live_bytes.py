"""Counts the bytes of live tensors, operator by operator: what an allocator would hold, without fragmentation."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

SETTING_UP = "setting up"


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that counts each storage from the operator that creates it until its last reference is gone.

    peaks: the most bytes alive at the same time, by phase; `enter` begins a phase.
    num_flops, num_bytes, num_operators: floating-point operations, bytes read and written, and operators since `reset`.
        Operators that only return a view are not counted.

    Wrappers (distributed tensors) count as the tensors that they wrap. A tensor that was created earlier is counted
    when an operator returns it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes: dict[int, int] = {}
        self._watched: dict[int, Any] = {}
        self._live = 0
        self._phase = SETTING_UP
        self.peaks: dict[str, int] = {}
        self.reset()

    def __enter__(self) -> Self:
        """Starts to count.

        Only one such mode may be active at a time: resizing a storage is no operator, so its method is patched
        globally.
        """
        resize = self._resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> Any:
            done = resize(storage, size)
            if (known := self._sizes.get(storage._cdata)) is not None:  # FSDP frees gathered weights by resizing
                size = self._sizes[storage._cdata] = storage.nbytes()
                self._live += size - known
                self._note_peak()
            return done

        torch.UntypedStorage.resize_ = counted  # type: ignore[assignment, method-assign]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    @property
    def live(self) -> int:
        """Bytes alive now."""
        return self._live

    @property
    def peak(self) -> int:
        """The most bytes alive at once since `reset`."""
        return max(self.peaks.values(), default=self._live)

    def reset(self) -> None:
        """Clears peaks and counts; live tensors stay counted."""
        self.peaks.clear()
        self.num_flops = self.num_bytes = self.num_operators = 0

    def enter(self, phase: str) -> None:
        """Begins `phase`: all peaks from now on belong to it."""
        self._phase = phase
        self._note_peak()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs the operator, then counts its results; wrappers are unwrapped first, as operators on what they wrap."""
        if any(hasattr(kind, "__tensor_flatten__") and kind is not FakeTensor for kind in types):
            return NotImplemented
        out = self.run(func, args, dict(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and not _is_wrapper(leaf)]
        is_new = [self._count(tensor) for tensor in tensors]
        self._note_work(func, args, kwargs or {}, out, does_more=any(is_new) or func._schema.is_mutable)
        self._note_peak()
        return out

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs `func` and returns its result; a subclass may compute the result itself."""
        return func(*args, **kwargs)

    def _count(self, tensor: Tensor) -> bool:
        """Counts a tensor's storage; returns whether it is new."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        known = self._sizes.get(key)
        if known is None:
            self._watched[key] = weakref.ref(storage, lambda _: self._forget(key))
        self._sizes[key] = size
        self._live += size - (known or 0)
        return known is None

    def _forget(self, key: int) -> None:
        del self._watched[key]
        size = self._sizes.pop(key)  # first: process group threads run this too, possibly between load and store
        self._live -= size

    def _note_peak(self) -> None:
        self.peaks[self._phase] = max(self.peaks.get(self._phase, 0), self._live)

    def _note_work(self, func: Any, args: Any, kwargs: Mapping[str, Any], out: Any, *, does_more: bool) -> None:
        if not does_more:
            return
        given = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
        self.num_operators += 1
        self.num_bytes += sum(tensor.numel() * tensor.element_size() for tensor in given)
        if (formula := flop_registry.get(func.overloadpacket)) is not None:
            self.num_flops += int(formula(*args, **kwargs, out_val=out))
        elif "flash_attention_for_cpu" in func.overloadpacket.__name__:
            self.num_flops += _attention_flops(given, is_backward="backward" in func.overloadpacket.__name__)


def watch_layers(live: LiveBytes, layers: list[nn.Module]) -> None:
    """Makes each layer's forward and backward a phase: "forward 0", ..., "backward 0".

    The head and the loss belong to the last layer's forward. The embedding's backward belongs to the first layer's
    backward.
    """
    for i, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda *_, i=i: live.enter(f"forward {i}"))
        layer.register_forward_hook(lambda _module, _args, out, i=i: _on_gradient(out, live, f"backward {i}"))


def _on_gradient(out: Any, live: LiveBytes, phase: str) -> None:
    for leaf in tree_leaves(out):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(lambda _: live.enter(phase))  # type: ignore[no-untyped-call]
            return


def _is_wrapper(tensor: Tensor) -> bool:
    return is_traceable_wrapper_subclass(tensor)


def _attention_flops(given: list[Tensor], *, is_backward: bool) -> int:
    """Floating-point operations of attention over tensors [rows, heads, tokens, dim].

    The forward has two products, q k^T and p v. The backward has five, one of which recomputes the scores.
    """
    query, key = (given[1], given[2]) if is_backward else (given[0], given[1])
    rows, heads, num_queries, dim = query.shape
    return (5 if is_backward else 2) * 2 * rows * heads * num_queries * key.shape[2] * dim

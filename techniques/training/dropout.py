"""Dropout that does not depend on how a batch is divided.

Whether an element is dropped is a hash of (seed, step, position of its sample in the global batch, module, number of
the draw in that module, indices of the element). So ranks, micro-batches and recomputed layers draw the same as an
undivided batch; nothing is stored, and the order of draws has no effect.

`Draws` are the draws of a forward pass, `drawing` replaces torch's random functions and transformers' SpecAugment by
them (`nn.Dropout` and transformers look these up at each call, so that no model has to be changed), and `find_sites`
finds, by running a model, which of its draws are for tensors that hold samples.
"""

from __future__ import annotations

import math
import random
import re
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from ringmaster.compat.transformers import span_mask_functions
from ringmaster.techniques.models.layers import DROPOUTS

Site = tuple[str, int]
"""A place that draws: the name of the innermost module, and the number of its earlier draws in this pass."""

_LAYER_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def kind_of(site: Site) -> Site:
    """Returns the site with `*` for layer numbers: layers of the same kind have the same result."""
    return _LAYER_NUMBER.sub("*", site[0]), site[1]


class UnsampledShapeError(ValueError):
    """Raised for a mask whose first dimension holds no samples, such as tokens that are routed to an expert."""


class Draws:
    """The random draws of one forward pass over one micro-batch.

    seed: the seed of the job and the step.
    samples: the position of each row in the global batch.
    shared: kinds of sites whose tensors hold no samples, so that one mask serves all samples.
    """

    def __init__(self, *, seed: int, samples: Sequence[int], shared: Collection[Site] = ()) -> None:
        self.seed = seed
        self._place: list[str] = [""]
        self._rows = mixed(np.asarray(samples, dtype=np.uint64) ^ key_of(seed))
        self._none = mixed(key_of(seed, "shared").reshape(1))
        self._shared = shared
        self._counts: dict[str, int] = {}

    def resumed(self) -> Draws:
        """Returns a copy that makes the same draws from here on, independent of further draws of the original."""
        copied = object.__new__(Draws)
        copied.__dict__.update(self.__dict__, _place=list(self._place), _counts=dict(self._counts))
        return copied

    @contextmanager
    def divided(self, num_rows: int) -> Iterator[None]:
        """Draws for `num_rows` consecutive rows of each sample within the context."""
        rows = self._rows
        own = np.array([key_of("row", row) for row in range(num_rows)])
        self._rows = mixed((rows[:, None] ^ own).ravel())
        try:
            yield
        finally:
            self._rows = rows

    def enter_module(self, module: str) -> None:
        """Begins the forward of the module with this name."""
        self._place.append(module)

    def leave_module(self) -> None:
        """Ends the forward of the innermost module."""
        self._place.pop()

    def kept(self, shape: Sequence[int], p: float, device: torch.device) -> Tensor:
        """Returns a bool tensor of `shape`, False with probability p. Raises UnsampledShapeError."""
        keys, rest = self._keys(shape)
        return kept(keys, rest, p, device).reshape(shape)

    def uniform(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Returns an fp32 tensor of `shape`, uniform in [0, 1). Raises UnsampledShapeError."""
        keys, rest = self._keys(shape)
        bits = random_bits(keys, rest, device).bitwise_right_shift_(8).bitwise_and_((1 << 24) - 1)
        return bits.reshape(shape).float().mul_(2.0**-24)

    def row_seeds(self, num_rows: int) -> list[int]:
        """Returns a seed for each row of a tensor, for functions that draw from numpy. Raises UnsampledShapeError."""
        keys, rest = self._keys((num_rows,))
        return [int(key_of(int(key), row)) & 0xFFFFFFFF for key in keys for row in range(rest[0])]

    def _keys(self, shape: Sequence[int]) -> tuple[Keys, tuple[int, ...]]:
        """A key for each sample, and the shape of one sample's part of a tensor."""
        site = self._next_site()
        num_samples = len(self._rows)
        if not shape or (self._shared and kind_of(site) in self._shared):
            return mixed(self._none ^ _key_of_site(site)), tuple(shape)
        if shape[0] % num_samples:
            raise UnsampledShapeError(
                f"dropout in {site[0] or 'the model'} draws for a tensor of shape {list(shape)}, whose first dimension "
                f"does not hold the {num_samples} samples of the batch"
            )
        return mixed(self._rows ^ _key_of_site(site)), (shape[0] // num_samples, *shape[1:])

    def _next_site(self) -> Site:
        place = self._place[-1]
        number = self._counts.get(place, 0)
        self._counts[place] = number + 1
        return place, number


@lru_cache(maxsize=1 << 14)
def _key_of_site(site: Site) -> np.uint64:
    return key_of(*site)


# Not thread-local: autograd recomputes layers in threads of its own.
_current: Draws | None = None
_thread = threading.local()


def current() -> Draws | None:
    """Returns the draws of the running forward pass, or None where torch's own generator is used."""
    return None if getattr(_thread, "draws_itself", False) else _current


@contextmanager
def torchs_own_draws() -> Iterator[None]:
    """Lets this thread draw from torch's own generators: samples that it loads are not part of a forward pass."""
    _thread.draws_itself = True
    try:
        yield
    finally:
        _thread.draws_itself = False


def use(draws: Draws | None) -> None:
    """Makes the following forward pass draw from `draws`.

    It also seeds the generators of torch, numpy and Python with the step's seed, because the hash does not replace
    them. So scalars that a model draws from them agree over ranks and micro-batches.
    """
    global _current
    _current = draws
    if draws is not None:
        seed_generators(draws.seed)


def seed_generators(*parts: int) -> None:
    """Seeds the generators of torch, numpy and Python with a hash of these numbers."""
    seed = int(key_of(*parts))
    seed_torch(seed >> 1)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def seed_torch(seed: int) -> None:
    """Seeds torch's generators of the host and of the GPUs in use.

    `torch.manual_seed` also formats the stack for each kind of accelerator: 100 times as long, for each sample.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


class ResumedDraws:
    """Context that draws from a copy of `draws`, for a part of a forward pass that runs at another time than the rest.

    It may be entered several times: some schedules recompute a layer twice.
    """

    def __init__(self, draws: Draws | None) -> None:
        self._draws, self._before = draws and draws.resumed(), list[Draws | None]()

    def __enter__(self) -> None:
        global _current
        self._before.append(_current)
        _current = self._draws and self._draws.resumed()

    def __exit__(self, *_: object) -> None:
        global _current
        _current = self._before.pop()


def name_modules(model: nn.Module) -> None:
    """Registers hooks by which modules of `model` report their names while they run.

    These are dropouts, and all modules with children. Other draws of a leaf module count as its parent's. Call it once,
    before a technique lays the model out.
    """
    for name, module in model.named_modules():
        if isinstance(module, DROPOUTS) or any(True for _ in module.children()):
            module.register_forward_pre_hook(partial(_before_forward, name))
            module.register_forward_hook(_after_forward, always_call=True)


def _before_forward(name: str, module: nn.Module, given: Any) -> None:
    if _current is not None:
        _current.enter_module(name)


def _after_forward(module: nn.Module, given: Any, output: Any) -> None:
    if _current is not None:
        _current.leave_module()


Keys = NDArray[np.uint64]

# splitmix64 (Steele et al., Fast Splittable Pseudorandom Number Generators, OOPSLA 2014).
_SPLITMIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
# lowbias32, found by search for small bias: github.com/skeeto/hash-prospector.
_LOWBIAS = (0x7FEB352D, 0x846CA68B - (1 << 32))
# Odd constants, one per dimension: fractional parts of square roots of primes. Further dimensions share the last.
_ODD = tuple(
    constant - (1 << 32) if constant >= 1 << 31 else constant
    for constant in (0x6A09E667, 0xBB67AE85, 0x3C6EF373, 0xA54FF53B, 0x510E527F, 0x9B05688B, 0x1F83D9AB)
)
# Elements that are hashed at once: on a CPU as many as fit into a core's cache.
_CHUNK = {"cpu": 1 << 16}
_LARGEST_CHUNK = 1 << 22


def mixed(values: Keys) -> Keys:
    """Returns splitmix64's output function of each uint64."""
    values = values + _SPLITMIX[0]
    values = (values ^ (values >> np.uint64(30))) * _SPLITMIX[1]
    values = (values ^ (values >> np.uint64(27))) * _SPLITMIX[2]
    mixed_values: Keys = values ^ (values >> np.uint64(31))
    return mixed_values


def key_of(*parts: int | str) -> np.uint64:
    """Returns a 64-bit hash of these values."""
    return np.uint64(int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little"))


def random_bits(keys: Keys, shape: Sequence[int], device: torch.device) -> Tensor:
    """Returns int32 [len(keys), *shape], each value equally likely: the bits of one tensor for each key."""
    filled = torch.empty(len(keys), *shape, dtype=torch.int32, device=device)
    for bits, first, last in _chunks(keys, shape, device):
        filled[first:last] = bits
    return filled


def kept(keys: Keys, shape: Sequence[int], p: float, device: torch.device) -> Tensor:
    """Returns bool [len(keys), *shape], False with probability p."""
    threshold = min(round(p * 2**32), 2**32 - 1) - 2**31
    filled = torch.empty(len(keys), *shape, dtype=torch.bool, device=device)
    for bits, first, last in _chunks(keys, shape, device):
        torch.ge(bits, threshold, out=filled[first:last])
    return filled


def _chunks(keys: Keys, shape: Sequence[int], device: torch.device) -> Iterator[tuple[Tensor, int, int]]:
    """Bits of consecutive keys, with the index of the first key and the index after the last."""
    halves = torch.from_numpy(keys.view(np.int32).reshape(-1, 2).copy()).to(device)
    add, multiply = (half.reshape(-1, *[1] * len(shape)) for half in (halves[:, 0], halves[:, 1] | 1))
    index = _index(shape, device)
    size = _CHUNK.get(device.type, _LARGEST_CHUNK)
    rows = max(1, size // max(1, index.numel()))
    shifted = torch.empty(min(rows, len(keys)), *shape, dtype=torch.int32, device=device)
    for first in range(0, len(keys), rows):
        last = min(first + rows, len(keys))
        bits = torch.addcmul(add[first:last], multiply[first:last], index)
        yield _finalize_(bits, shifted[: last - first]), first, last


def _finalize_(bits: Tensor, shifted: Tensor) -> Tensor:
    """Applies lowbias32 in place, without its last shift, which only affects the low bits.

    Right shifts of int32 repeat the sign bit, so the repeated bits are cleared.
    """
    for shift, factor in zip((16, 15), _LOWBIAS, strict=True):
        torch.bitwise_right_shift(bits, shift, out=shifted)
        shifted &= (1 << (32 - shift)) - 1
        bits ^= shifted
        bits *= factor
    return bits


def _index(shape: Sequence[int], device: torch.device) -> Tensor:
    """The sum over dimensions of index times an odd constant, int32.

    So the value of an element does not depend on the lengths of the dimensions, which padding to the longest sample of
    a micro-batch changes.
    """
    total = torch.zeros([1] * len(shape), dtype=torch.int32, device=device)
    for dimension, length in enumerate(shape):
        along = [1] * len(shape)
        along[dimension] = length
        steps = torch.arange(length, dtype=torch.int32, device=device) * _ODD[min(dimension, len(_ODD) - 1)]
        total = total + steps.reshape(along)
    return total


_rand, _rand_like = torch.rand, torch.rand_like
_attention = functional.scaled_dot_product_attention
_dropouts: dict[str, Callable[..., Tensor]] = {
    name: getattr(functional, name) for name in ("dropout", "dropout1d", "dropout2d", "dropout3d")
}


@contextmanager
def drawing() -> Iterator[None]:
    """Replaces torch's random functions that a model in training calls; outside of it nothing is drawn by hash."""
    names: list[tuple[Any, str, Any]] = [
        (functional, "scaled_dot_product_attention", scaled_dot_product_attention),
        (torch, "rand", rand),
        (torch, "rand_like", rand_like),
    ]
    names += [(functional, name, _dropout_of(name)) for name in _dropouts]
    names += [(module, name, _by_row(function)) for module, name, function in span_mask_functions()]
    before = [(module, name, getattr(module, name)) for module, name, _ in names]
    for module, name, function in names:
        setattr(module, name, function)
    try:
        yield
    finally:
        use(None)
        for module, name, function in before:
            setattr(module, name, function)


def _by_row(span_masks: Callable[..., Any]) -> Callable[..., NDArray[np.bool_]]:
    """Replacement of a function of transformers that draws the spans of speech that SpecAugment masks: row by row."""

    def masks_of_rows(
        shape: tuple[int, int], mask_prob: float, mask_length: int, attention_mask: Tensor | None = None, **more: Any
    ) -> NDArray[np.bool_]:
        if (draws := current()) is None:
            whole: NDArray[np.bool_] = span_masks(shape, mask_prob, mask_length, attention_mask=attention_mask, **more)
            return whole
        masks, state = [], np.random.get_state()
        for row, seed in enumerate(draws.row_seeds(shape[0])):
            np.random.seed(seed)
            own = None if attention_mask is None else attention_mask[row : row + 1]
            masks.append(span_masks((1, shape[1]), mask_prob, mask_length, attention_mask=own, **more))
        np.random.set_state(state)
        return np.concatenate(masks)

    return masks_of_rows


def _dropout_of(name: str) -> Callable[..., Tensor]:
    """Replacement of `torch.nn.functional.dropout`, or of its variants that drop whole channels."""
    torchs, dimensions = _dropouts[name], int(name[-2]) if name.endswith("d") else None

    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        draws = current()
        if draws is None or not training or not 0.0 < p < 1.0:
            return torchs(input, p, training, inplace)
        shape = input.shape
        if dimensions is not None:  # one draw per channel of a sample; the sample dimension may be missing
            shape = torch.Size([*shape[: input.dim() - dimensions], *[1] * dimensions])
        return _Dropout.apply(input, draws.kept(shape, p, input.device), 1.0 / (1.0 - p))  # type: ignore[no-any-return, no-untyped-call]

    return dropout


class _Dropout(torch.autograd.Function):
    """Saves one byte per element for backward, as torch's own dropout on a GPU does."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, keep: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return _masked(input, keep, scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        return _masked(gradients[0], keep, ctx.scale), None, None


def _masked(values: Tensor, keep: Tensor, scale: float) -> Tensor:
    # On a CPU a product with bytes takes a fifth of the time of `masked_fill`, and half that of `where`.
    masked = values * keep.view(torch.uint8)
    return masked if scale == 1.0 else masked.mul_(scale)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Runs torch's function and kernels if nothing is dropped, else the formula in torch's documentation.

    What can be applied to the query, the value, the mask or the output is not applied to the scores and the weights,
    which are larger: [..., queries, keys].
    """
    draws = current()
    if draws is None or not 0.0 < dropout_p < 1.0:
        return _attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = query * (1.0 / math.sqrt(query.shape[-1]) if scale is None else scale) @ key.transpose(-2, -1)
    bias = _bias(attn_mask, is_causal=is_causal, scores=scores)
    lonely = None  # queries that may attend to no key, which get zeros, as in torch
    if bias is not None:
        lonely = bias.isneginf().all(-1, keepdim=True)
        scores = scores + bias.masked_fill(lonely, 0.0)
    weights = torch.softmax(scores, -1)
    keep = draws.kept(weights.shape, dropout_p, weights.device)
    output: Tensor = _Dropout.apply(weights, keep, 1.0) @ (value * (1.0 / (1.0 - dropout_p)))  # type: ignore[no-untyped-call]
    return output if lonely is None else output.masked_fill(lonely, 0.0)


def _bias(mask: Tensor | None, *, is_causal: bool, scores: Tensor) -> Tensor | None:
    """Returns what an attention mask adds to the scores: minus infinity where a query may not attend to a key."""
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=scores.dtype).masked_fill_(mask.logical_not(), -math.inf)
    if is_causal:
        above = torch.full(scores.shape[-2:], -math.inf, dtype=scores.dtype, device=scores.device).triu_(1)
        mask = above if mask is None else mask + above
    return mask


def rand(*size: Any, **options: Any) -> Tensor:
    """Replaces torch.rand, for a shape that begins with the samples, or for a scalar that all samples share."""
    draws = current()
    if draws is None or options.get("generator") is not None or options.get("out") is not None:
        return _rand(*size, **options)
    shape = options.pop("size", None) or (size[0] if size and not isinstance(size[0], int) else size)
    return _drawn(draws, tuple(shape), options)


def rand_like(input: Tensor, **options: Any) -> Tensor:
    """Replaces torch.rand_like, likewise for a tensor whose shape begins with the samples, or for a scalar."""
    draws = current()
    if draws is None:
        return _rand_like(input, **options)
    return _drawn(draws, tuple(input.shape), {"dtype": input.dtype, "device": input.device, **options})


def _drawn(draws: Draws, shape: tuple[int, ...], options: dict[str, Any]) -> Tensor:
    device = torch.device(options.get("device") or torch.get_default_device())
    values = draws.uniform(shape, device).to(options.get("dtype") or torch.get_default_dtype())
    return values.requires_grad_(bool(options.get("requires_grad")))


FEW, MORE = 2, 3  # numbers of samples in the two forward passes that are compared


@dataclass(frozen=True, kw_only=True)
class DrawSites:
    """The random draws of a model in training; each site represents all layers of its kind.

    draws: whether there are any.
    scalars: whether scalars are drawn, by which a model may leave whole layers out.
    shared: sites that draw for tensors that hold no samples, such as an embedding of relative positions.
    reason: why the draws cannot be equal under every division of a batch; empty where they can.
    """

    draws: bool = False
    scalars: bool = False
    shared: tuple[Site, ...] = ()
    reason: str = ""


class _RecordingDraws(Draws):
    """Records the length of the first dimension of each requested tensor, instead of drawing."""

    def __init__(self) -> None:
        super().__init__(seed=0, samples=(0,))
        self.lengths: dict[Site, int] = {}
        self.draws = self.scalars = False

    def kept(self, shape: Sequence[int], p: float, device: torch.device) -> Tensor:
        self._note(shape)
        return torch.ones(shape, dtype=torch.bool, device=device)

    def uniform(self, shape: Sequence[int], device: torch.device) -> Tensor:
        self._note(shape)
        return torch.full(shape, 0.5, device=device)

    def row_seeds(self, num_rows: int) -> list[int]:
        self._note((num_rows,))
        return [0] * num_rows

    def _note(self, shape: Sequence[int]) -> None:
        site = self._next_site()
        self.draws = True
        self.scalars = self.scalars or not shape
        if shape:
            self.lengths[kind_of(site)] = shape[0]


def find_sites(forward: Callable[[int], object]) -> DrawSites:
    """Compares the draws of a forward pass over two samples with those of one over three.

    forward: runs the model in training mode over that many samples; its modules must be named (`name_modules`).
    """
    few, more = (_recorded(forward, num) for num in (FEW, MORE))
    lengths = {site: (few.lengths.get(site, 0), more.lengths.get(site, 0)) for site in {**few.lengths, **more.lengths}}
    shared = [site for site, (length, longer) in lengths.items() if length == longer]
    lost = [site for site, (a, b) in lengths.items() if a != b and (a == 0 or a % FEW or a * MORE != b * FEW)]
    reason = ""
    if lost:
        reason = (
            f"dropout in {lost[0][0] or 'the model'} draws for tensors without a dimension of samples (such as tokens "
            "that are routed to experts), so that dividing a batch would change what is dropped"
        )
    return DrawSites(
        draws=few.draws or more.draws,
        scalars=few.scalars or more.scalars,
        shared=tuple(sorted(shared)),
        reason=reason,
    )


def _recorded(forward: Callable[[int], object], num_samples: int) -> _RecordingDraws:
    recording = _RecordingDraws()
    with drawing():
        use(recording)
        forward(num_samples)
    return recording

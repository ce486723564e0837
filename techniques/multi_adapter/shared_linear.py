"""A linear layer of a frozen base that computes each adapter's rows exactly as that adapter alone would.

Let x_i [n, in] be the rows of adapter i. y = W x is computed for all rows at once. LoRAs of equal rank and equal
numbers of rows are computed as a batch:

    h_i = x_i A_i^T     y_i <- y_i + s_i h_i B_i^T
    dB_i = (s_i g_i)^T h_i     dh_i = s_i g_i B_i     dA_i = dh_i^T x_i     dx_i <- dx_i + dh_i A_i

For (IA)3s, let z be x or y, and l the factors of the layer's inputs or of its outputs:

    z_i <- l_i * z_i     dl_i = sum over rows of dz_i * z_i     dz_i <- l_i * dz_i

These are the operations of `models.adapter_modules` and its autograd for one adapter alone, in the same order. A
batched product or sum equals each separate one bit by bit; products for which it would not are computed one by one.
Ranks are not padded and adapters are not concatenated, because both would add in another order. The layer writes
gradients directly into each adapter's own tensors (`multi_adapter.adapter_runs`).

Source: Ye et al., mLoRA (arXiv:2312.02515), BatchLoRA, for the one base product; the order of operations is ours.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ringmaster.techniques.multi_adapter.adapter_runs import AdapterRuns, LoraRun, PerAdapterModule, ScalingRun

# Up to this rank a fused add (addmm) may round as product and sum do: the inner dimension is one block of the kernel.
ADDED_RANK = 128
# On CPUs a batch of products with fewer multiplications each does not run on MKL; a single product always does.
# Source: `bmm_out_or_baddbmm_` in torch's aten/src/ATen/native/LinearAlgebra.cpp.
FEWEST_MULTIPLICATIONS = 400

Route = Callable[[int, int], AdapterRuns]
"""(num_rows, length) -> runs: a layer's runs for an input of `num_rows` rows whose first dimension is `length`."""


class _SharedLayer(nn.Module):
    """y = W x + b, with the changes of the adapters that are in the batch.

    route: returns the runs of adapters for the input.
    anchor: a scalar that requires a gradient and never gets one. It gives the adapters' operations a backward when x
        requires no gradient.
    """

    route: Route
    anchor: Tensor

    def forward(self, x: Tensor) -> Tensor:
        runs = self.route(x.numel() // x.shape[-1], len(x))
        scaled = x
        if runs.of_inputs:
            scaled = _ScaleRows.apply(x, self.anchor, runs.of_inputs, False)  # type: ignore[no-untyped-call]
        y: Tensor = super().forward(scaled)
        if runs.products:  # their rows are unscaled; with `x` as input, gradients are summed as in a separate run
            y = _AddLora.apply(y, x, self.anchor, runs.products)  # type: ignore[no-untyped-call]
        if runs.of_outputs:
            y = _ScaleRows.apply(y, self.anchor, runs.of_outputs, True)  # type: ignore[no-untyped-call]
        return y


@cache
def shared_class(plain: type[nn.Module]) -> type[nn.Module]:
    """Returns the class of the linear layers of class `plain` that serve several adapters."""
    return type(f"Shared{plain.__name__}", (PerAdapterModule, _SharedLayer, plain), {"adapts": plain})


class _AddLora(torch.autograd.Function):
    """Adds the runs' products to `y` in its dtype. In place, as nothing else has saved `y`."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, anchor: Tensor, runs: Sequence[LoraRun]) -> Tensor:
        flat_x, flat_y = x.reshape(-1, x.shape[-1]).to(y.dtype), y.view(-1, y.shape[-1])
        kept = [flat_x]
        for run in runs:
            a, b = run.a.to(y.dtype), run.b.to(y.dtype)
            h = _product(run.of(flat_x), a.mT)
            _add_product(run, run.of(flat_y), h, b.mT)
            kept += [a, b, h]
        ctx.mark_dirty(y)
        ctx.runs, ctx.dtype = runs, x.dtype
        ctx.save_for_backward(*kept)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = gradients
        flat_x, *kept = ctx.saved_tensors
        flat_g = g.reshape(-1, g.shape[-1])
        dx = _room_for(flat_x, ctx.runs) if ctx.needs_input_grad[1] else None
        for i, run in enumerate(ctx.runs):
            a, b, h = kept[3 * i : 3 * i + 3]
            scaled = _times(run.of(flat_g), run.late)
            dh, h = _times(_product(scaled, b), run.early), _times(h, run.early)
            run.take_gradients((dh.mT, run.of(flat_x)), (scaled.mT, h), product=_product)
            if dx is not None:
                _product(dh, a, out=run.of(dx))
        return g, None if dx is None else dx.view(*g.shape[:-1], -1).to(ctx.dtype), None, None


class _ScaleRows(torch.autograd.Function):
    """Multiplies the runs' rows of `x` by their factors. `in_place` requires that nothing else has saved `x`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, runs: Sequence[ScalingRun], in_place: bool) -> Tensor:
        scaled = x if in_place else x.clone(memory_format=torch.contiguous_format)
        flat_x, flat_scaled = x.reshape(-1, x.shape[-1]), scaled.view(-1, x.shape[-1])
        kept = []
        for run in runs:
            rows = run.of(flat_x).clone() if in_place else run.of(flat_x)
            factors = run.factors
            torch.mul(rows, factors, out=run.of(flat_scaled))
            kept += [rows, factors]
        if in_place:
            ctx.mark_dirty(x)
        ctx.runs = runs
        ctx.save_for_backward(*kept)
        return scaled

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = gradients
        kept = ctx.saved_tensors
        flat_g = g.reshape(-1, g.shape[-1])
        dx = torch.empty_like(flat_g) if ctx.needs_input_grad[0] else None
        for i, run in enumerate(ctx.runs):
            rows, factors = kept[2 * i : 2 * i + 2]
            run.take_gradients(run.of(flat_g) * rows)
            if dx is not None:
                torch.mul(run.of(flat_g), factors, out=run.of(dx))
        if dx is not None:
            for gap in _gaps(ctx.runs, len(dx)):
                dx[gap] = flat_g[gap]
        return None if dx is None else dx.view_as(g), None, None, None


def _add_product(run: LoraRun, y: Tensor, h: Tensor, b: Tensor) -> None:
    """Adds s h b to y, rounded as in a separate run."""
    h = _times(h, run.early)
    is_added_exactly = 1 < h.shape[-1] <= ADDED_RANK and (len(y) == 1 or _is_batched(h, b)) and _adds_exactly(y, h, b)
    if run.late is not None or y.dtype != torch.float32 or not is_added_exactly:
        y.add_(_times(_product(h, b), run.late))
    elif len(y) == 1:
        y[0].addmm_(h[0], b[0])
    else:
        y.baddbmm_(h, b)


def _times(x: Tensor, factors: Tensor | None) -> Tensor:
    """`x` times `factors`, in the dtype of `x`."""
    return x if factors is None else (x * factors).to(x.dtype)


def _room_for(x: Tensor, runs: Sequence[LoraRun]) -> Tensor:
    """An uninitialized tensor like `x`, with zeros in the rows that no run writes."""
    dx = torch.empty_like(x)
    for gap in _gaps(runs, len(x)):
        dx[gap].zero_()
    return dx


def _gaps(runs: Sequence[LoraRun | ScalingRun], num_rows: int) -> Iterator[slice]:
    """The rows that belong to no run."""
    for end, start in zip([0, *(run.stop for run in runs)], [*(run.start for run in runs), num_rows], strict=True):
        if end < start:
            yield slice(end, start)


def _product(first: Tensor, second: Tensor, *, out: Tensor | None = None) -> Tensor:
    """[n, rows, inner] @ [n, inner, columns], each product by the kernel of a separate run."""
    num = first.shape[0]
    if num == 1 and out is None:
        return torch.mm(first.squeeze(0), second.squeeze(0)).unsqueeze(0)
    if _is_batched(first, second):
        return torch.bmm(first, second, out=out)
    if out is None:
        out = first.new_empty(num, first.shape[1], second.shape[2])
    for i in range(num):
        torch.mm(first[i], second[i], out=out[i])
    return out


def _is_batched(first: Tensor, second: Tensor) -> bool:
    """Whether products are computed as a batch: on a CPU, if each is then bitwise equal to a separate product.

    On a CPU a separate product with a side of 1 is a matrix-vector product, and a batch of products with few
    multiplications runs on another kernel. Other devices give no bitwise equality, and a kernel launch costs more than
    such products.
    """
    if (num := first.shape[0]) == 1 or first.device.type != "cpu":
        return num > 1
    rows, inner, columns = *first.shape[1:], second.shape[2]
    return min(rows, inner, columns) > 1 and rows * inner * columns >= FEWEST_MULTIPLICATIONS


def _adds_exactly(y: Tensor, h: Tensor, b: Tensor) -> bool:
    """Whether a fused add (addmm, baddbmm) on a CPU is bitwise equal to a product and a separate sum.

    MKL selects kernels by the shapes and by the processor's vendor, so this is measured, once for each shape.
    """
    if y.device.type != "cpu":
        return True  # no bitwise equality on such devices anyway
    return _measured_to_add_exactly(_layout(y), _layout(h), _layout(b), min(len(y), 2))


Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""The shape and the strides of a batch's matrices."""


def _layout(matrices: Tensor) -> Layout:
    return tuple(matrices.shape[1:]), tuple(matrices.stride()[1:])


@cache
def _measured_to_add_exactly(y: Layout, h: Layout, b: Layout, num: int) -> bool:
    to, first, second = _drawn(y, h, b, num=num)
    expected = torch.stack([to[i] + first[i] @ second[i] for i in range(num)])
    result = torch.baddbmm(to, first, second) if num > 1 else torch.addmm(to[0], first[0], second[0])[None]
    return torch.equal(result, expected)


def _drawn(*layouts: Layout, num: int) -> Iterator[Tensor]:
    """A batch of random matrices for each layout, from a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    for shape, strides in layouts:
        size = 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
        yield torch.randn(num, size, generator=generator).as_strided((num, *shape), (size, *strides))

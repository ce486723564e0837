"""Sums whose bits do not depend on the number of devices that hold the summands.

The gradient of a step is a sum over samples, and floating-point addition is not associative. An exact job (`Job.exact`)
therefore fixes the grouping. Every forward and backward computes one chunk of samples, so that kernels see the same
shapes on every gang. The chunks' gradients are added along one balanced binary tree, whose leaves are the chunks of the
global batch in order. The number of chunks and that of the ranks are powers of two, so that a subtree belongs to one
rank, or to several ranks as a whole. Addition commutes, so that only the grouping counts.

    ((c0 + c1) + (c2 + c3)) + ((c4 + c5) + (c6 + c7))

The norm of the gradient needs no grouping: see `gradients.exact_norm`.

Source of the chunks: Li et al., EasyScale (SC 2023).
"""

import os
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringmaster.compat.torch import foreach_add_, tree_flatten, tree_unflatten
from ringmaster.compat.torch_distributed import all_gather
from ringmaster.techniques.models.layers import layer_names
from ringmaster.techniques.training.gradients import local

Summands = dict[Any, Tensor]


def use_exact_kernels(device: torch.device) -> None:
    """Makes kernels add in one order: on a GPU what has no such kernel raises, and a CPU computes in one thread.

    On a CPU sums are divided among threads, whose number would follow from the cores of a device.
    """
    if device.type == "cpu":
        torch.set_num_threads(1)
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first product is computed
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def group_by_layer(model: nn.Module) -> None:
    """Makes each layer add up its gradients of an input before they are added to those of other layers.

    FSDP's hooks do so. Without them autograd adds them one by one, which differs where layers share an input that each
    uses several times, as the layers of a decoder share the output of the encoder.
    """

    def separate(_: nn.Module, *inputs: Any) -> Any:
        leaves, spec = tree_flatten(inputs)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if places:
            outputs = _GradientGroup.apply(*(leaves[i] for i in places))  # type: ignore[no-untyped-call]
            for place, output in zip(places, outputs, strict=True):
                leaves[place] = output
        return tree_unflatten(leaves, spec)

    for name in layer_names(model):
        model.get_submodule(name).register_forward_pre_hook(separate, with_kwargs=True)


class _GradientGroup(torch.autograd.Function):
    """Returns its inputs; their gradients are passed on together, once all are there."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


class SumTree:
    """Sums of chunks in order, such as gradients by parameter, added as a binary counter counts.

    Of n chunks it keeps log2(n) sums at most.

    balanced: whether to add along the balanced tree; otherwise each summand is added to the sum so far.
    """

    def __init__(self, *, balanced: bool = True) -> None:
        self._balanced = balanced
        self._sums: list[tuple[int, Summands]] = []  # of neighbouring subtrees: their numbers of chunks, and sums

    def add(self, summands: Summands) -> None:
        """Adds the next chunk, and keeps its tensors."""
        size, total = 1, summands
        while self._sums and (self._sums[-1][0] == size or not self._balanced):
            total = _added(self._sums.pop()[1], total)
            size *= 2
        self._sums.append((size, total))

    def add_to(self, last: Summands) -> None:
        """Adds the chunks so far to some summands of the last chunk, in their tensors; keeps the chunks."""
        for _, total in reversed(self._sums):
            _added(last, {key: total[key] for key in last if key in total})

    def pop(self) -> Summands:
        """Returns the sums over all chunks, and begins again."""
        ((_, total),) = self._sums
        self.clear()
        return total

    def clear(self) -> None:
        """Forgets all chunks."""
        self._sums.clear()


def take_gradients(parameters: Iterable[nn.Parameter]) -> Summands:
    """Returns the gradients by parameter, and removes them there."""
    gradients: Summands = {}
    for parameter in parameters:
        if parameter.grad is not None:
            gradients[parameter], parameter.grad = parameter.grad, None
    return gradients


@torch.no_grad()
def _added(left: Summands, right: Summands) -> Summands:
    """Returns left + right, in the tensors of `left`; what is missing on one side counts as zeros there."""
    both = [key for key in left if key in right]
    if both:
        foreach_add_([local(left[key]) for key in both], [local(right[key]) for key in both])
    total = {**right, **left}
    for key in left.keys() ^ right.keys():
        local(total[key]).add_(0.0)  # as where a rank adds zeros: the sum is then no -0.0
    return total


def sum_of_ranks(summands: Tensor, *, num_ranks: int) -> Tensor:
    """Returns the sum of the ranks' parts of a flat tensor, along the tree over ranks, in place; a view."""
    parts = summands.view(num_ranks, -1)
    while len(parts) > 1:
        parts = parts[0::2].add_(parts[1::2])
    return parts[0]


MAX_SENT = 2
"""Buckets whose parts are on their way while the sums before them are gathered: a slow link is never idle."""


class BucketSums:
    """Adds the gradients in DDP's buckets along the tree, over this rank's chunks and then over the ranks.

    `send` is DDP's communication hook. During the backward of the last chunk it sends part q of each bucket to rank q,
    which adds, and gathers the sums. So it sends what a ring sends, 2 (p - 1) / p of the gradient. All ranks call these
    operations in one order.

    tree: the chunks before the last one.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.tree = group, SumTree()
        self._sent: deque[tuple[Tensor, Tensor, Tensor, Any]] = deque()
        self._gathering: list[tuple[Tensor, Tensor, Tensor, Any]] = []

    def send(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Sends a bucket; what it returns is not a sum yet."""
        flat: Tensor = bucket.buffer()
        self.tree.add_to(dict(zip(bucket.parameters(), bucket.gradients(), strict=True)))
        sent = nn.functional.pad(flat, (0, -len(flat) % self._group.size()))
        arriving = torch.empty_like(sent)
        work = dist.all_to_all_single(arriving, sent, group=self._group, async_op=True)
        self._sent.append((flat, sent, arriving, work))
        if len(self._sent) > MAX_SENT:
            self._gather()
        future = torch.futures.Future[Tensor](devices=[flat.device] if flat.is_cuda else None)
        future.set_result(flat)
        return future

    def _gather(self) -> None:
        """Waits for the parts of the first bucket that was sent, adds them, and gathers the sums."""
        flat, sent, arriving, work = self._sent.popleft()
        work.wait()
        own = sum_of_ranks(arriving, num_ranks=self._group.size())
        self._gathering.append((flat, sent, own, all_gather(sent, own, group=self._group, async_op=True)))

    def finish(self) -> None:
        """Replaces the gradients in the buckets by their sums."""
        while self._sent:
            self._gather()
        for flat, gathered, _, work in self._gathering:
            work.wait()
            flat.copy_(gathered[: len(flat)])
        self._gathering.clear()
        self.tree.clear()

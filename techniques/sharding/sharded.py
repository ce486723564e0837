"""ZeRO stage 2: replicated weights, sharded gradients and optimizer state, with communication overlapped.

Let w be the weights of a bucket, g(q) the gradient that rank q computes, and [r] the shard of rank r:

    backward   g[r] = sum over q of g(q)[r]        reduce-scatter, as soon as all gradients of the bucket are there
    step       w[r] <- optimizer(w[r], g[r])
    forward    w = (w[0], ..., w[n-1])             all-gather, started by the step, awaited by the first reader of w

Source: Megatron-LLaMA's OverlappedDistributedOptimizer, after ZeRO (arXiv:1910.02054).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ringmaster.compat.torch_distributed import all_gather, reduce_scatter
from ringmaster.techniques.checkpoints.state import Reader
from ringmaster.techniques.sharding.buckets import Bucket, BucketRange, ParameterShard, divide
from ringmaster.techniques.training.exact_sums import SumTree, sum_of_ranks


class ShardedModel(nn.Module):
    """A model of which this rank trains its shards.

    The shards are the parameters of this module. The parameters of `inner` keep their names, and are views of the
    buckets.

    every_micro_batch: exchange gradients after each micro-batch and accumulate them as shards; otherwise accumulate
        them whole, and exchange them in the last micro-batch's backward.
    most_live_buckets: maximum number of gradient buffers, if backward reaches the buckets in their order: one is being
        filled, the others are being sent.
    overlap: overlap exchanges with computation; otherwise one after the other, when all gradients are there.
    rounds: send gradients in bf16, and accumulate them in fp32 at the receiver.
    exact: add along the tree of `training.exact_sums`, after each micro-batch over the ranks.
    """

    def __init__(
        self,
        inner: nn.Module,
        group: ProcessGroup,
        *,
        bucket_bytes: int,
        most_live_buckets: int,
        every_micro_batch: bool,
        overlap: bool,
        rounds: bool = False,
        exact: bool = False,
    ) -> None:
        super().__init__()
        self._inner = (inner,)  # in a tuple, so that its parameters are not this module's
        self.group, self._every_micro_batch, self._overlap = group, every_micro_batch or exact, overlap
        self.buckets = divide(inner, bucket_bytes=bucket_bytes, rank=group.rank(), num_ranks=group.size())
        nothing = nn.Parameter(self.buckets[0].weights[:0])  # for a rank that has only padding; gives the device
        self.shard_weights = nn.ParameterList([part.weight for part in self.parameter_shards()] or [nothing])
        self._reduction = _Reduction(
            self.buckets, group, most_live=most_live_buckets, overlap=overlap, rounds=rounds, exact=exact
        )
        self._gathering = _Gathering(inner, self.buckets, group)
        self._exchanges = False
        for bucket in self.buckets:
            for slot in bucket.slots:
                slot.parameter.register_post_accumulate_grad_hook(self._hook(bucket, slot))  # type: ignore[no-untyped-call]

    @property
    def inner(self) -> nn.Module:
        """The model whose weights are trained."""
        return self._inner[0]

    def parameter_shards(self) -> Iterator[ParameterShard]:
        """Yields the shards that this rank updates."""
        for bucket in self.buckets:
            yield from bucket.parameter_shards

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model, whose modules wait for their weights."""
        self._gathering.before_forward()
        return self.inner(*args, **kwargs)

    def train(self, mode: bool = True) -> ShardedModel:
        """Sets the training mode of the model too."""
        self.inner.train(mode)
        return super().train(mode)

    @contextmanager
    def micro_batch(self, *, is_last: bool) -> Iterator[None]:
        """Wraps a forward and backward; after the last one the shards have their gradients, summed over ranks."""
        self._exchanges = is_last or self._every_micro_batch
        yield
        self.wait_for_weights()  # those that nothing read: the optimizer must not overwrite weights in transit
        if self._exchanges:
            self._reduction.finish_backward()
        if is_last:
            self._reduction.hand_over()

    def gather_updates(self) -> None:
        """Starts to gather the shards that all ranks have updated; call it after the optimizer's step."""
        self._gathering.start()
        if not self._overlap:
            self.wait_for_weights()

    def wait_for_weights(self) -> None:
        """Waits until all weights are equal on all ranks."""
        self._gathering.wait(self.buckets)

    def _hook(self, bucket: Bucket, slot: BucketRange) -> Any:
        def arrived(_: Tensor) -> None:
            if self._exchanges and self._overlap:
                self._reduction.arrived(bucket, slot)

        return arrived


class _Reduction:
    """Reduces gradients of parameters to summed gradients of shards."""

    def __init__(
        self, buckets: list[Bucket], group: ProcessGroup, *, most_live: int, overlap: bool, rounds: bool, exact: bool
    ) -> None:
        self._buckets, self._group, self._most_live, self._overlap = buckets, group, most_live, overlap
        self._exact, self._sends_summands = exact, exact or rounds
        self._dtype = torch.bfloat16 if rounds else torch.float32
        self._slots = [slot for bucket in buckets for slot in bucket.slots]
        self._has_gradient = torch.zeros(len(self._slots), dtype=torch.uint8)
        self._filling: dict[Bucket, Tensor] = {}
        self._under_way: deque[tuple[Bucket, Tensor, Tensor, Any]] = deque()
        self._free: list[Tensor] = []
        # Of each bucket, over ranks and micro-batches so far, fp32 [shard_size].
        self._sums = {bucket: SumTree(balanced=exact) for bucket in buckets}
        self._start_backward()

    def _start_backward(self) -> None:
        self._num_sent = 0
        self._missing = {bucket: set(bucket.slots) for bucket in self._buckets}

    def arrived(self, bucket: Bucket, slot: BucketRange) -> None:
        """Collects a gradient. Full buckets are sent at once, in one order that is the same on every rank."""
        assert slot in self._missing[bucket], f"{slot.name} has got its gradient twice in one backward"
        self._collect(bucket, slot)
        while self._num_sent < len(self._buckets) and not self._missing[self._next()]:
            self._send()

    def finish_backward(self) -> None:
        """Sends the remaining buckets, with zeros for parameters without a gradient, and waits for all sums."""
        while self._num_sent < len(self._buckets):
            bucket = self._next()
            for slot in list(self._missing[bucket]):
                self._collect(bucket, slot)
            self._send()
            if not self._overlap:
                self._receive()
        while self._under_way:
            self._receive()
        self._start_backward()

    def hand_over(self) -> None:
        """Sets the gradients of the shards.

        The gradient is None for parameters that got none on any rank: optimizers skip those.
        """
        dist.all_reduce(self._has_gradient, op=dist.ReduceOp.MAX, group=self._group)
        has_gradient = self._has_gradient.tolist()
        for bucket in self._buckets:
            total = self._sums[bucket].pop()[bucket]
            for part in bucket.parameter_shards:
                part.weight.grad = part.of(total) if has_gradient[part.slot.index] else None
        self._has_gradient.zero_()

    def _next(self) -> Bucket:
        return self._buckets[self._num_sent]

    def _collect(self, bucket: Bucket, slot: BucketRange) -> None:
        target = slot.of(self._buffer(bucket))
        gradient = slot.parameter.grad
        if gradient is None:
            target.zero_()
        else:
            target.copy_(gradient)
            slot.parameter.grad = None
            self._has_gradient[slot.index] = 1
        self._missing[bucket].remove(slot)

    def _buffer(self, bucket: Bucket) -> Tensor:
        """The bucket's buffer; a new bucket takes a free one, or waits for the oldest exchange if all are in use."""
        if bucket not in self._filling:
            while not self._free and self._under_way and len(self._filling) + len(self._under_way) >= self._most_live:
                self._receive()
            size = max(other.weights.numel() for other in self._buckets)
            free = self._free.pop() if self._free else bucket.weights.new_zeros(size, dtype=self._dtype)
            self._filling[bucket] = free
        return self._filling[bucket]

    def _send(self) -> None:
        bucket = self._next()
        self._num_sent += 1
        buffer = self._filling.pop(bucket)
        flat = buffer[: bucket.weights.numel()]
        if not self._sends_summands:
            arriving = torch.empty_like(bucket.shard(bucket.weights))
            work = reduce_scatter(arriving, flat, group=self._group, async_op=True)
        else:  # a sum formed on the way would be rounded at each rank, or be formed in another order
            arriving = torch.empty_like(flat)
            work = dist.all_to_all_single(arriving, flat, group=self._group, async_op=True)
        self._under_way.append((bucket, buffer, arriving, work))

    def _receive(self) -> None:
        bucket, buffer, arriving, work = self._under_way.popleft()
        work.wait()
        self._free.append(buffer)
        total = arriving
        if self._exact:
            total = sum_of_ranks(arriving, num_ranks=bucket.num_ranks).clone()  # a view would keep the summands
        elif self._sends_summands:
            total = arriving.view(-1, bucket.shard_size).sum(0, dtype=torch.float32)
        self._sums[bucket].add({bucket: total})


class _Gathering:
    """Gathers updated shards into whole weights.

    A module waits, before its forward, for its own parameters. Some parameters are read by other modules, such as an
    attention's output projection in `nn.MultiheadAttention`. So the start of the model's forward waits for all
    parameters whose module has not been called so far.
    """

    def __init__(self, model: nn.Module, buckets: list[Bucket], group: ProcessGroup) -> None:
        self._buckets, self._group = buckets, group
        self._under_way: dict[Bucket, Any] = {}
        self._unannounced = {slot.parameter: bucket for bucket in buckets for slot in bucket.slots}
        bucket_of = dict(self._unannounced)
        for module in model.modules():
            own = [p for p in module.parameters(recurse=False) if p in bucket_of]
            if own:
                module.register_forward_pre_hook(self._hook(own, {bucket_of[p]: None for p in own}))

    def start(self) -> None:
        """Sends this rank's shards, those of the first layers first, as forward needs these first."""
        for bucket in reversed(self._buckets):
            assert bucket not in self._under_way
            own = bucket.shard(bucket.weights)
            work = all_gather(bucket.weights, own, group=self._group, async_op=True)
            self._under_way[bucket] = work

    def before_forward(self) -> None:
        """Waits for weights that are read by modules other than their own."""
        self.wait(self._unannounced.values())

    def wait(self, buckets: Iterable[Bucket]) -> None:
        """Waits until these buckets are whole."""
        for bucket in buckets:
            if (work := self._under_way.pop(bucket, None)) is not None:
                work.wait()

    def _hook(self, own: list[nn.Parameter], buckets: Iterable[Bucket]) -> Any:
        def before_forward(*_: Any) -> None:
            for parameter in own:
                self._unannounced.pop(parameter, None)
            self.wait(buckets)

        return before_forward


# The name that torch's optimizers give to the only state with one value per parameter instead of per element.
STEP = "step"


def gathered_state(model: ShardedModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Returns the optimizer's tensors by canonical name, in host memory, each on one rank only.

    All ranks must call it together. Bucket i is gathered on rank i modulo the number of ranks, one state of one bucket
    at a time. So no rank ever holds more than its part of the whole and one bucket.
    """
    model.wait_for_weights()
    rank, num_ranks = model.group.rank(), model.group.size()
    kept = _kept_anywhere(model, optimizer)
    named: dict[str, Tensor] = {}
    for i, bucket in enumerate(model.buckets):
        writer = i % num_ranks
        for key in sorted({key for slot in bucket.slots for key in kept.get(slot.name, {})} - {STEP}):
            whole = _gather(bucket, _shard_of_state(bucket, key, optimizer), model=model, writer=writer)
            if whole is not None:
                having = [slot for slot in bucket.slots if key in kept.get(slot.name, {})]
                named |= {f"optimizer/{slot.name}/{key}": slot.of(whole) for slot in having}
        if rank == writer:
            steps = {slot.name: kept[slot.name][STEP] for slot in bucket.slots if STEP in kept.get(slot.name, {})}
            named |= {f"optimizer/{name}/{STEP}": torch.tensor(step) for name, step in steps.items()}
    return named


def restore_shards(reader: Reader, model: ShardedModel, optimizer: torch.optim.Optimizer) -> None:
    """Fills the state of this rank's shards from a checkpoint, reading one tensor at a time."""
    for part in model.parameter_shards():
        for key in reader.states_of(part.slot.name):
            value = reader.state(f"optimizer/{part.slot.name}/{key}", part.slot.parameter, optimizer)
            optimizer.state[part.weight][key] = value if key == STEP else part.of_parameter(value).clone()


def _kept_anywhere(model: ShardedModel, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, float | None]]:
    """The optimizer's states by parameter and name: the number of steps, None for tensors.

    The result is equal on all ranks. A rank knows only the states of its shards. Parameters that have got no gradient
    yet have no state.
    """
    # SGD without momentum has a state that is None.
    own: dict[str, dict[str, float | None]] = {
        part.slot.name: {
            key: float(value) if key == STEP else None for key, value in state.items() if isinstance(value, Tensor)
        }
        for part in model.parameter_shards()
        if (state := optimizer.state.get(part.weight))
    }
    of_ranks: list[Any] = [None] * model.group.size()
    dist.all_gather_object(of_ranks, own, group=model.group)
    return {name: keys for of_rank in of_ranks for name, keys in of_rank.items()}


def _shard_of_state(bucket: Bucket, key: str, optimizer: torch.optim.Optimizer) -> Tensor:
    shard = torch.zeros_like(bucket.shard(bucket.weights))
    for part in bucket.parameter_shards:
        value = optimizer.state.get(part.weight, {}).get(key)
        if value is not None:
            part.of(shard).copy_(value)
    return shard


def _gather(bucket: Bucket, shard: Tensor, *, model: ShardedModel, writer: int) -> Tensor | None:
    """All ranks' shards, concatenated in the writer's host memory; None on other ranks."""
    if model.group.rank() != writer:
        dist.gather(shard, group=model.group, group_dst=writer)
        return None
    flat = torch.empty_like(bucket.weights)
    dist.gather(shard, list(flat.chunk(bucket.num_ranks)), group=model.group, group_dst=writer)
    return flat.cpu()

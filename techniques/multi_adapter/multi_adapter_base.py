"""One frozen base whose layers serve several adapters at once and compute each adapter's own gradients.

The decoder of a causal language model runs for all adapters at once, its head for one after another: only one
adapter's logits are in memory at a time, as each adapter's backward runs from its loss to its hidden states before the
next adapter's head runs. The head's products have as many rows as in a separate run.

The base may be sharded over ranks: each layer's weights are gathered when it computes, and nothing is reduced (Zhao et
al., PyTorch FSDP, arXiv:2304.11277).
"""

import ctypes
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions, CausalLMOutput

from ringmaster.techniques.models.adapter_modules import is_adaptable
from ringmaster.techniques.models.adapters import AdaptedLinear
from ringmaster.techniques.models.layers import layer_names
from ringmaster.techniques.multi_adapter import adapter_batches
from ringmaster.techniques.multi_adapter.adapter_runs import (
    AdapterRuns,
    OwnWeights,
    PerAdapterModule,
    per_adapter_class,
)
from ringmaster.techniques.multi_adapter.packed_attention import (
    PackedAttention,
    PrefixLayers,
    TokenBlock,
    packed_attention,
    packed_tokens,
    prefix_as_cache,
)
from ringmaster.techniques.multi_adapter.shared_linear import shared_class
from ringmaster.techniques.training.bound_loss import SumAndCount
from ringmaster.techniques.training.gradients import HALF, compute_in_half, round_weights
from ringmaster.techniques.training.recomputation import recompute_layers

NUM_PROBED_TOKENS = 8


class LanguageModelHead:
    """The head of a model: runs the model's own forward with given hidden states in place of its decoder's."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.decoder: nn.Module = model.base_model  # type: ignore[assignment]

    def hidden_states(self, **inputs: Any) -> Tensor:
        """The decoder's hidden states, [rows, tokens, hidden]."""
        result: Tensor = self.decoder(use_cache=False, **inputs).last_hidden_state
        return result

    def __call__(self, hidden: Tensor, tokens: Tensor) -> Any:
        """The model's output for the hidden states [rows, tokens, hidden] of `tokens`."""
        self.decoder.forward = lambda *_, **__: BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden)
        try:
            return self._model(input_ids=tokens, use_cache=False)
        finally:
            del self.decoder.forward  # the class's own forward applies again


def head_of(model: nn.Module) -> LanguageModelHead | None:
    """The head of a model whose forward is its decoder and then its head, as tried on a few tokens; else None."""
    if getattr(model, "base_model", model) is model:
        return None
    head, device = LanguageModelHead(model), next(model.parameters()).device
    tokens = torch.zeros((1, NUM_PROBED_TOKENS), dtype=torch.int64, device=device)
    inputs = {"input_ids": tokens, "position_ids": torch.arange(NUM_PROBED_TOKENS, device=device).unsqueeze(0)}
    with torch.no_grad():
        whole = model(use_cache=False, **inputs).logits
        try:
            hidden = head.hidden_states(**inputs)
            divided, others = head(hidden, tokens).logits, head(hidden + 1, tokens).logits
        except (AttributeError, TypeError):  # the forward uses more of the decoder than its hidden states
            return None
    is_handed_them = not torch.equal(divided, others)  # the forward uses them, not a part of the decoder directly
    return head if is_handed_them and torch.equal(whole, divided) else None


# Per thread. More tokens are not faster and need more memory; the wider the model, the fewer tokens keep a thread busy.
TOKENS_AT_ONCE, NUMBERS_AT_ONCE = 512, 2**17

AdapterLoss = Callable[[Any], SumAndCount]
"""The loss of a part: from its output, a `CausalLMOutput`, to (sum, count)."""


@dataclass(frozen=True, kw_only=True)
class BackwardResult:
    """The result of a forward and backward for one part.

    loss_sum: the sum of the loss.
    count: the number of elements that the loss is summed over.
    idle: the layers of the adapter that the model did not use.
    """

    loss_sum: Tensor
    count: float
    idle: frozenset[str]


class MultiAdapterBase:
    """A base whose forward serves several adapters at once.

    If the base is a causal language model that keeps packed samples apart (`packed_attention`), samples of all lengths
    are packed into one row. Else samples of equal shape are stacked, and a step takes one forward per shape.

    model: the base, whose weights stay frozen. It may be sharded over ranks (`shard`).
    recompute: the recomputation of its layers' activations, "none" or "full".
    unrounded: modules whose weights stay in fp32 for every precision, because adapters that join later start from them.
    attention: for a sharded base, the result of `packed_attention` before it was sharded.

    tokens_at_once: about how many tokens are packed into one row at most; None for no limit.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        recompute: str = "none",
        unrounded: Collection[str] = (),
        attention: PackedAttention | None = None,
    ) -> None:
        self._unrounded = unrounded
        self.model = model.requires_grad_(False)
        self._packed = attention if isinstance(model, FSDPModule) else packed_attention(model)
        device = next(model.parameters()).device
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        is_cpu = device.type == "cpu"
        if is_cpu:
            keep_freed_memory()
        # The target size of a packed forward and backward, which keeps a CPU's threads busy.
        self.tokens_at_once = _tokens_for(model) * torch.get_num_threads() if is_cpu else None
        self._head = None
        if self._packed is not None:
            self._packed.blocks = [TokenBlock(start=0, stop=NUM_PROBED_TOKENS, length=NUM_PROBED_TOKENS)]
            # A sharded base gathers its weights only when the whole model runs, not its decoder or head alone.
            self._head = None if isinstance(model, FSDPModule) else head_of(model)
        recompute_layers(model, recompute)
        self._precision: str | None = None
        self._batches = adapter_batches.FusedBatchCache(is_packed=self._packed is not None)
        self._batch: adapter_batches.FusedBatch | None = None

    @property
    def packs(self) -> bool:
        """Whether samples of several lengths are packed into one row; else samples of equal shape are stacked."""
        return self._packed is not None

    def open(self, sites: Sequence[AdaptedLinear], own: Sequence[str] = ()) -> None:
        """Prepares the modules at `sites` to take adapters, and those named `own` to use adapters' own weights."""
        for name in (*(site.name for site in sites), *own):
            module: Any = self.model.get_submodule(name)
            if isinstance(module, PerAdapterModule):
                continue
            plain: type[nn.Module] = type(module)
            kind = shared_class if is_adaptable(module) else per_adapter_class
            module.__class__ = kind(plain)  # type: ignore[arg-type]
            module.route, module.anchor = partial(self._route, name), self._anchor
            module.owners = partial(self._owners, name)

    def forget(self) -> None:
        """Drops the cached batches, and with them the memory that their adapters used before they moved."""
        self._batches, self._batch = adapter_batches.FusedBatchCache(is_packed=self._packed is not None), None

    def compute_in(self, precision: str) -> None:
        """Sets the precision of all further computation, as the trainer does for a job of this precision.

        The first precision is final: another one raises ValueError. With bf16-params the base, which is never updated,
        is stored in bf16 only.
        """
        if self._precision not in (None, precision):
            raise ValueError(
                f"one base cannot be computed in {self._precision} and in {precision} at once. To fix: train jobs of "
                "other precisions in a group of their own"
            )
        if self._precision is None and precision == "bf16-params":
            if not isinstance(self.model, FSDPModule):  # a sharded base was rounded before sharding
                round_weights(self.model, but=self._unrounded)
            compute_in_half(self.model)
        self._precision = precision

    def forward(self, parts: Sequence[adapter_batches.AdapterBatch]) -> list[CausalLMOutput]:
        """The logits of each part, in the order of the parts."""
        outputs: dict[int, CausalLMOutput] = {}
        for chosen in self._divided(parts):
            outputs |= zip(chosen, self._forward([parts[i] for i in chosen]), strict=True)
        return [outputs[i] for i in range(len(parts))]

    def outputs(self, parts: Sequence[adapter_batches.AdapterBatch]) -> Iterator[tuple[int, CausalLMOutput]]:
        """Yields the part's index and logits, in any order. No two outputs need to be in memory at once."""
        for chosen in self._divided(parts):
            yield from zip(chosen, self._forward([parts[i] for i in chosen]), strict=True)

    @property
    def divides_head(self) -> bool:
        """Whether the decoder runs for all adapters at once and the head for each by itself."""
        return self._head is not None

    def hidden_states(
        self,
        parts: Sequence[adapter_batches.AdapterBatch],
        *,
        positions: Tensor,
        attention: Callable[..., tuple[Tensor, None]],
    ) -> Tensor:
        """The decoder's hidden states of the parts' tokens, [tokens, hidden]; a base with a divided head has them.

        positions: of each token in its sequence, [tokens].
        attention: computes the attention in place of `packed_attention.PackedAttention`.
        """
        assert self._packed is not None
        batch = self._enter(parts)
        self._packed.replacement = attention
        try:
            return self._packed_states(batch, parts, positions.unsqueeze(0))
        finally:
            self._packed.replacement = None

    def logits(self, hidden: Tensor, parts: Sequence[adapter_batches.AdapterBatch]) -> Tensor:
        """The head's logits [tokens, vocabulary] of hidden states [tokens, hidden] that belong to the parts."""
        assert self._head is not None
        self._enter(parts)
        tokens = packed_tokens([part.inputs["input_ids"] for part in parts])
        with self._autocast():
            logits: Tensor = self._head(hidden.unsqueeze(0), tokens).logits
        return logits[0]

    def learn(
        self, parts: Sequence[adapter_batches.AdapterBatch], losses: Sequence[AdapterLoss]
    ) -> list[BackwardResult]:
        """Runs forward, losses and backward; writes the gradients of each loss's sum into the part's own tensors.

        Gradients of one part never reach another part, not even if they are not finite.
        """
        learnt: dict[int, BackwardResult] = {}
        for chosen in self._divided(parts):
            chosen_parts = [parts[i] for i in chosen]
            batch = self._enter(chosen_parts)
            result = self._backward(batch, chosen_parts, [losses[i] for i in chosen])
            used = batch.sites_with_gradients
            for i, part, (loss_sum, count, used_by_head) in zip(chosen, chosen_parts, result, strict=True):
                idle = frozenset(part.adapter_modules.at.keys() - used - used_by_head)
                learnt[i] = BackwardResult(loss_sum=loss_sum.detach(), count=float(count), idle=idle)
        return [learnt[i] for i in range(len(parts))]

    def _divided(self, parts: Sequence[adapter_batches.AdapterBatch]) -> Iterator[list[int]]:
        """Yields the indices of the parts that compute together."""
        order = adapter_batches.in_order(parts)
        if self._packed is not None:
            yield from adapter_batches.in_chunks(parts, order, tokens_at_once=self.tokens_at_once)
        else:
            for _, same in groupby(order, key=lambda i: adapter_batches.shape_of(parts[i])):
                yield list(same)

    def _forward(self, parts: Sequence[adapter_batches.AdapterBatch]) -> Iterator[CausalLMOutput]:
        batch = self._enter(parts)
        if self._head is None:
            yield from self._whole(batch, parts)
            return
        for part, hidden in zip(parts, self._hidden_states(batch, parts), strict=True):
            self._enter([part])
            yield self._head_of(hidden, part)

    def _backward(
        self,
        batch: adapter_batches.FusedBatch,
        parts: Sequence[adapter_batches.AdapterBatch],
        losses: Sequence[AdapterLoss],
    ) -> list[tuple[Tensor, Tensor | int, set[str]]]:
        """(sum, count, the sites of the head) of each part."""
        batch.expect_gradients()
        if self._head is None:
            result = [loss(output) for loss, output in zip(losses, self._whole(batch, parts), strict=True)]
            torch.autograd.backward([total for total, _ in result])
            return [(total, count, set()) for total, count in result]
        hidden = self._hidden_states(batch, parts)
        gradients, learnt = [], []
        for part, states, loss in zip(parts, hidden, losses, strict=True):
            leaf = states.detach().requires_grad_()
            alone = self._enter([part])
            alone.expect_gradients()
            total, count = loss(self._head_of(leaf, part))
            total.backward()  # type: ignore[no-untyped-call]
            gradients.append(leaf.grad)
            learnt.append((total, count, alone.sites_with_gradients))
        self._enter(parts)  # for layers that are recomputed
        if hidden[0].requires_grad:
            torch.autograd.backward(hidden, gradients)
        return learnt

    def _hidden_states(
        self, batch: adapter_batches.FusedBatch, parts: Sequence[adapter_batches.AdapterBatch]
    ) -> list[Tensor]:
        """The hidden states of each part, [rows, tokens, hidden]."""
        pieces = self._packed_states(batch, parts, batch.positions).split(batch.sizes)  # type: ignore[no-untyped-call]
        return [x.view(share.num_rows, share.length, -1) for x, share in zip(pieces, batch.shares, strict=True)]

    def _packed_states(
        self, batch: adapter_batches.FusedBatch, parts: Sequence[adapter_batches.AdapterBatch], positions: Tensor
    ) -> Tensor:
        assert self._head is not None
        tokens = self._packed_tokens(batch, parts)
        with self._autocast():
            return self._head.hidden_states(input_ids=tokens, position_ids=positions)[0]

    def _head_of(self, hidden: Tensor, part: adapter_batches.AdapterBatch) -> CausalLMOutput:
        assert self._head is not None
        with self._autocast():
            return CausalLMOutput(logits=self._head(hidden, part.inputs["input_ids"]).logits)

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._anchor.device.type, dtype=HALF, enabled=self._precision == "bf16")

    def _whole(
        self, batch: adapter_batches.FusedBatch, parts: Sequence[adapter_batches.AdapterBatch]
    ) -> Iterator[CausalLMOutput]:
        """Yields the logits of each part from one forward of the whole model."""
        if self._packed is not None:
            tokens = self._packed_tokens(batch, parts)
            with self._autocast():
                logits = self.model(input_ids=tokens, position_ids=batch.positions, use_cache=False).logits[0]
        else:
            inputs: dict[str, Any] = {key: torch.cat([part.inputs[key] for part in parts]) for key in parts[0].inputs}
            for layers in batch.prefixes(self.model).values():  # all stacked samples have a prefix, or none has
                inputs |= _behind(layers, inputs)
            with self._autocast():
                logits = self.model(**inputs).logits
        for share, own_logits in zip(batch.shares, logits.split(batch.sizes), strict=True):
            yield CausalLMOutput(
                logits=own_logits.view(share.num_rows, share.length, -1) if self._packed else own_logits
            )

    def _packed_tokens(
        self, batch: adapter_batches.FusedBatch, parts: Sequence[adapter_batches.AdapterBatch]
    ) -> Tensor:
        assert self._packed is not None
        for part in parts:
            if names := part.inputs.keys() - {"input_ids"}:
                raise ValueError(
                    f"samples have {', '.join(sorted(names))} besides their tokens, which a base that packs samples "
                    "does not read. To fix: train the job alone, with techniques that leave out shared_base"
                )
        self._packed.prefixes = batch.prefixes(self.model)  # kept for layers that are recomputed in the backward
        return packed_tokens([part.inputs["input_ids"] for part in parts])

    def _enter(self, parts: Sequence[adapter_batches.AdapterBatch]) -> adapter_batches.FusedBatch:
        """Makes the batch of these parts the current one, also for layers that are recomputed in a backward."""
        self._batch = self._batches.of(parts)
        if self._packed is not None:
            self._packed.blocks = self._batch.blocks
        return self._batch

    def _owners(self, module: str) -> OwnWeights | None:
        return self._batch.owners(module) if self._batch is not None else None

    def _route(self, site: str, num_rows: int, length: int) -> AdapterRuns:
        return self._batch.route(site, num_rows, length) if self._batch is not None else AdapterRuns()


def _tokens_for(model: nn.Module) -> int:
    """The number of tokens that keep a thread busy."""
    width = getattr(getattr(model, "config", None), "hidden_size", 1)
    return max(1, min(TOKENS_AT_ONCE, NUMBERS_AT_ONCE // width))


def _behind(layers: PrefixLayers, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
    """The model's further inputs for a prefix before stacked samples."""
    added: dict[str, Any] = {"past_key_values": prefix_as_cache(layers), "use_cache": False}
    if (mask := inputs.get("attention_mask")) is not None:
        added["attention_mask"] = torch.cat([mask.new_ones(len(mask), layers[0][0].shape[-2]), mask], dim=1)
    return added


def shard(model: nn.Module, mesh: DeviceMesh, *, precision: str, unrounded: Collection[str] = ()) -> None:
    """Shards the base in place over the ranks of `mesh`: every layer, and the parameters outside of the layers.

    precision: the jobs' precision. For bf16-params the weights are rounded here, which is not possible after sharding.
    unrounded: modules whose weights are not rounded.
    """
    model.requires_grad_(False)  # before sharding, so that no memory is allocated for gradients
    if precision == "bf16-params":
        round_weights(model, but=unrounded)
    for name in layer_names(model):
        fully_shard(model.get_submodule(name), mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
LARGEST_THRESHOLD_BYTES = 32 * 2**20  # the largest M_MMAP_THRESHOLD that glibc accepts


@cache
def keep_freed_memory() -> None:
    """Makes glibc keep freed memory for this process; does nothing with other C libraries.

    Activations of many adapters are so large that glibc would return each of them to the system, and each page would be
    zeroed again in the next step: six thousand pages, a twentieth of a step's time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST_THRESHOLD_BYTES)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)

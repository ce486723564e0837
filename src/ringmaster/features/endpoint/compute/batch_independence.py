"""How long rows must be for their bits not to depend on what they are computed with, found by measurement.

A library for matrix products takes other kernels for few rows than for many, and divides them among threads; kernels
of elementwise operations compute what fills no vector by another function. So the bits of a row can depend on the size
of the batch. On a CPU this ends at a few rows for each thread: from there on, every row of a product is summed in one
order. Where it ends is measured with the base itself, as it depends on the processor and on the number of threads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ringmaster.features.endpoint.compute.client_adapter import ClientAdapter
from ringmaster.features.endpoint.compute.requests import AdapterSpec, LossRequest, TokenRow
from ringmaster.features.endpoint.compute.row_blocks import PaddedLength, RequestRowBlock, blocks_of
from ringmaster.techniques.models.adapter_modules import is_adaptable
from ringmaster.techniques.multi_adapter.adapter_batches import AdapterBatch
from ringmaster.techniques.multi_adapter.multi_adapter_base import MultiAdapterBase
from ringmaster.techniques.multi_adapter.parameter_rows import lay_below

MULTIPLES = (16, 32, 64, 128)
LENGTHS = (1, 2, 1, 3, 1, 4, 4)
"""The lengths of the probed clients' rows, in multiples. Each has one row, and the last one as many as fill a batch."""
RANKS = (2, 8, 8, 2, 8, 3, 8)
TOGETHER = ((0, 1, 2, 3, 4, 5, 6), (0, 2), (5, 0), (4, 3, 1), (6, 3))
"""The clients that are computed at once."""
MAX_FILLING_TOKENS = 1024


class _Probe:
    """Clients whose results are compared."""

    def __init__(self, stem: MultiAdapterBase, *, multiple: int, max_rank: int) -> None:
        self._stem, model = stem, stem.model
        draw = torch.Generator().manual_seed(multiple)
        num_tokens: int = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
        device = next(model.parameters()).device
        padded = PaddedLength(multiple=multiple, max_positions=multiple * max(LENGTHS))
        self._adapters, self._blocks = list[ClientAdapter](), list[RequestRowBlock]()
        room = (stem.tokens_at_once or MAX_FILLING_TOKENS) - multiple * sum(LENGTHS[:-1])
        nums = [*(1 for _ in LENGTHS[:-1]), max(1, min(room, MAX_FILLING_TOKENS) // (multiple * LENGTHS[-1]))]
        for length, rank, num in zip(LENGTHS, RANKS, nums, strict=True):
            adapter = ClientAdapter(AdapterSpec(rank=min(rank, max_rank), train_unembed=has_free_head(model)), model)
            for weight in adapter.weights().values():
                weight.copy_(0.02 * torch.randn(weight.shape, generator=draw))
            stem.open(adapter.sites)
            lay_below([adapter.row])
            drawn = torch.randint(num_tokens, (num, length * multiple), generator=draw)
            rows = tuple(TokenRow(tokens=tuple(x.tolist()), loss_inputs={"target_tokens": x.roll(-1)}) for x in drawn)
            request = LossRequest(client="", rows=rows, loss="cross_entropy")
            self._adapters.append(adapter)
            self._blocks += blocks_of(request, padded=padded, device=device)

    def results(self, chosen: Sequence[int]) -> list[list[Tensor]]:
        """Returns the log-probabilities and the gradients of the chosen clients, computed at once."""
        parts = [
            AdapterBatch(
                adapter_modules=self._adapters[i].modules(),
                inputs={"input_ids": self._blocks[i].tokens},
                layout=self._adapters[i].row.layout,
            )
            for i in chosen
        ]
        self._stem.learn(parts, [self._blocks[i].loss for i in chosen])
        return [[self._blocks[i].logprobs.clone(), self._adapters[i].gradients.clone()] for i in chosen]

    def is_independent(self) -> bool:
        """Returns whether no client's bits depend on the others."""
        alone = {i: self.results([i])[0] for i in range(len(self._adapters))}
        return all(
            all(map(torch.equal, own, alone[i]))
            for chosen in TOGETHER
            for i, own in zip(chosen, self.results(chosen), strict=True)
        )


def independent_multiple(stem: MultiAdapterBase, *, max_rank: int, max_positions: int) -> int | None:
    """Returns the fewest tokens to whose multiples rows are padded for their bits to be their own; None for none."""
    for multiple in MULTIPLES:
        if multiple * max(LENGTHS) > max_positions:
            return None
        is_independent = _Probe(stem, multiple=multiple, max_rank=max_rank).is_independent()
        stem.forget()
        if is_independent:
            return multiple
    return None


def has_free_head(model: nn.Module) -> bool:
    """Returns whether the model has a head that can be adapted."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return head is not None and is_adaptable(head)

"""The rows of a request in blocks that are computed at once, so that a block depends on its request alone.

The shapes of a matrix product determine the order of its sums. So what shapes a client's rows have must not depend on
who else is there: a row is padded to a multiple of a fixed number of tokens, and rows of equal length form blocks of a
bounded number of tokens. Attention is causal, so padding behind a row changes nothing in it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ringmaster.features.endpoint.compute.requests import LossRequest
from ringmaster.features.endpoint.compute.token_losses import LOSSES, TARGETS, logprobs_of

MAX_BLOCK_TOKENS = 1024
PADDING = 0


@dataclass(frozen=True, kw_only=True)
class PaddedLength:
    """How rows are padded: to a multiple of `multiple` tokens, but to no more than the model has positions for."""

    multiple: int
    max_positions: int

    def of(self, num_tokens: int) -> int:
        """Returns the length of a row of `num_tokens` tokens."""
        return min(-(-num_tokens // self.multiple) * self.multiple, max(self.max_positions, num_tokens))


@dataclass(eq=False)
class RequestRowBlock:
    """Rows of one request that have one length with their padding.

    places: the rows' numbers in the request. lengths: their numbers of tokens.
    tokens: [rows, length]. inputs: the tensors of the loss, of all rows one after another, without padding.
    logprobs: those of the targets, once computed, likewise.
    """

    request: LossRequest
    places: Sequence[int]
    lengths: Sequence[int]
    tokens: Tensor
    inputs: Mapping[str, Tensor]
    logprobs: Tensor = field(default_factory=lambda: torch.empty(0))

    def loss(self, output: Any) -> tuple[Tensor, int]:
        """Returns the sum of the loss, and the number of tokens that it sums; keeps the log-probabilities."""
        logits = output.logits.flatten(0, 1)
        if sum(self.lengths) != len(logits):
            kept = [torch.arange(n) + i * self.tokens.shape[1] for i, n in enumerate(self.lengths)]
            logits = logits.index_select(0, torch.cat(kept).to(logits.device))
        logprobs = logprobs_of(logits.float(), self.inputs[TARGETS])
        self.logprobs = logprobs.detach()
        loss = LOSSES[self.request.loss]
        values = loss.values(logprobs, self.inputs, self.request.loss_config, lengths=self.lengths)
        return values.sum(), len(logits)

    def outputs(self) -> Iterator[tuple[int, Tensor]]:
        """Yields each row's number and the log-probabilities of its targets, on the CPU."""
        yield from zip(self.places, torch.split(self.logprobs.cpu(), list(self.lengths)), strict=True)


def blocks_of(request: LossRequest, *, padded: PaddedLength, device: torch.device) -> list[RequestRowBlock]:
    """Divides the rows of a request into blocks."""
    loss = LOSSES[request.loss]
    names = [TARGETS, *loss.inputs, *loss.optional]

    def shape(place: int) -> tuple[int, tuple[int, ...], tuple[str, ...]]:
        row = request.rows[place]
        given = tuple(name for name in names if name in row.loss_inputs)
        return padded.of(len(row.tokens)), tuple(row.loss_inputs[TARGETS].shape[1:]), given

    blocks = []
    for (length, _, given), alike in groupby(sorted(range(len(request.rows)), key=shape), key=shape):
        places, size = list(alike), max(1, MAX_BLOCK_TOKENS // length)
        for start in range(0, len(places), size):
            chosen = places[start : start + size]
            rows = [request.rows[place] for place in chosen]
            tokens = torch.full((len(rows), length), PADDING, dtype=torch.int64)
            for i, row in enumerate(rows):
                tokens[i, : len(row.tokens)] = torch.tensor(row.tokens)
            inputs = {
                name: torch.cat([row.loss_inputs[name] for row in rows])
                .to(torch.int64 if name == TARGETS else torch.float32)
                .to(device)
                for name in given
            }
            blocks.append(
                RequestRowBlock(
                    request=request,
                    places=chosen,
                    lengths=[len(row.tokens) for row in rows],
                    tokens=tokens.to(device),
                    inputs=inputs,
                )
            )
    return blocks

"""What clients of a training endpoint ask of it, and what they get: values without behaviour, and one error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class AdapterSpec:
    """The LoRA of one client.

    rank: its rank.
    seed: determines its initial values.
    train_mlp, train_attn, train_unembed: which linear modules it adapts: those of the feed-forward layers, those of the
        attention, and the head.
    """

    rank: int
    seed: int = 0
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True


@dataclass(frozen=True, kw_only=True)
class EndpointLimits:
    """The limits of an endpoint.

    max_adapters: the most clients at a time.
    max_rank: the largest rank of an adapter.
    seq_len: the most tokens of a row, and of a prompt with what is sampled after it.
    memory_bytes: the most memory of the process; None for what the machine has.
    """

    max_adapters: int
    max_rank: int
    seq_len: int
    memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class TokenRow:
    """One sequence.

    tokens: the input tokens.
    loss_inputs: tensors of one value for each token, [T]: `target_tokens` (the token that follows each, so already
        shifted), `weights`, `logprobs` (those of the policy that sampled), `advantages`.
    """

    tokens: tuple[int, ...]
    loss_inputs: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class LossRequest:
    """A loss of one client's rows, and its gradients where `with_gradients`."""

    client: str
    rows: tuple[TokenRow, ...]
    loss: str
    loss_config: Mapping[str, float] = field(default_factory=dict)
    with_gradients: bool = True


@dataclass(frozen=True, kw_only=True)
class LossResult:
    """outputs: for each row, tensors by name: `logprobs` [T]. metrics: `loss:sum`, and what else the loss reports."""

    outputs: tuple[Mapping[str, Tensor], ...]
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class AdamStep:
    """One step of AdamW with the gradients that the client's requests have summed up.

    grad_clip_norm: the largest norm of the gradients; 0 for no clipping.
    """

    client: str
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SamplingRequest:
    """Sequences to sample after a prompt.

    client: whose adapter samples, as it is now; None for the base without an adapter.
    checkpoint: a folder that `Endpoint.save` returned, whose weights sample in place of a client's.
    temperature: 0 takes the most probable token.
    top_k: -1 for no limit.
    stop: sequences of tokens, or texts, at which a sequence ends; they are part of it. None for the end-of-sequence
        tokens of the model, () for none at all.
    seed: equal seeds sample equal sequences; None for another one each time.
    topk_prompt_logprobs: how many of the most probable tokens are returned at each place of the prompt.
    topk_sample_logprobs: likewise at each sampled token.
    target_prompt_tokens: tokens whose logprobs are returned at each place of the prompt but the first; -1 for none.
    prompt_alt_tokens: how many tokens are drawn, with the temperature, at each place of the prompt but the first.
    """

    prompt: tuple[int, ...]
    client: str | None = None
    checkpoint: Path | None = None
    num_samples: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: Sequence[tuple[int, ...] | str] | None = None
    seed: int | None = None
    with_prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_tokens: tuple[tuple[int, ...], ...] | None = None
    prompt_alt_tokens: int = 0


TokenLogprobs = tuple[tuple[int, float], ...]
"""Pairs of a token and its logprob."""


@dataclass(frozen=True, kw_only=True)
class SampledSequence:
    """logprobs: of each token, at temperature 1. stop_reason: "stop" or "length".

    topk_logprobs: the most probable tokens in the place of each, the most probable first.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: str
    topk_logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class SampleResult:
    """The sequences, and what was asked of the prompt.

    prompt_logprobs: of each token of the prompt given those before it; None for the first one.
    topk_prompt_logprobs: the most probable tokens, the most probable first; None for the first place.
    target_prompt_logprobs: of `target_prompt_tokens`; 0 for -1.
    prompt_alt_tokens: the tokens that were drawn in each place but the first.
    """

    sequences: tuple[SampledSequence, ...]
    prompt_logprobs: tuple[float | None, ...] | None = None
    topk_prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    target_prompt_logprobs: tuple[tuple[float, ...], ...] | None = None
    prompt_alt_tokens: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class RequestRefusal:
    """What one request is answered with in place of a result, and why; the others of its batch are computed.

    drops_gradients: whether the gradients since the client's last step are gone.
    """

    reason: str
    drops_gradients: bool = False


@dataclass(frozen=True, kw_only=True)
class ClientState:
    """A client's adapter, the number of its optimizer steps, and the norm of the gradients of the last one."""

    spec: AdapterSpec
    step: int
    grad_norm: float | None = None


@dataclass(frozen=True, kw_only=True)
class Price:
    """What one more client costs.

    step_s_now, step_s_after: the seconds of one computation over one row of every client, without and with it.
    memory_bytes_after, memory_bytes_limit: the memory of the process with it, and the most that it may have.
    """

    step_s_now: float
    step_s_after: float
    memory_bytes_after: int
    memory_bytes_limit: int


class EndpointLostError(RuntimeError):
    """What an endpoint has in memory is ahead of what is on disk: it has to be opened anew from there."""

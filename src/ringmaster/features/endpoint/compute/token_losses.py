"""The losses that a client can name: sums over tokens of a function of the log-probability of each target.

With l the log-probability of a target under the adapter, q that under the policy that sampled it, A its advantage, w
its weight and r = exp(l - q):

    cross_entropy          -w l
    importance_sampling    -r A
    ppo                    -min(r A, clip(r) A)         (Schulman et al., arXiv:1707.06347, section 3)
    gspo                   -min(s A, clip(s) A)         (Zheng et al., arXiv:2507.18071, section 4.3)
    cispo                  -sg(clip(r)) A l             (MiniMax, arXiv:2506.13585, section 3.1; sg stops the gradient)
    dro                    -(l A - beta / 2 (l - q)^2)  (Richemond et al., arXiv:2405.19107)

In gspo, s has the value of exp of the mean of l - q over the tokens of the row that `sequence_ratio_mask` marks, and
the gradient of s l in each token. A row may give the thresholds of clipping for each token in place of the config.

Nothing is divided by a number of tokens or rows: a client does that by its weights or advantages.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from ringmaster.features.endpoint.compute.requests import LossRequest, TokenRow

TARGETS, WEIGHTS, LOGPROBS, ADVANTAGES = "target_tokens", "weights", "logprobs", "advantages"
LOW, HIGH, BETA = "clip_low_threshold", "clip_high_threshold", "beta"
RATIO_MASK = "sequence_ratio_mask"
CLIPPING = {LOW: 0.8, HIGH: 1.2}

Inputs = Mapping[str, Tensor]
Config = Mapping[str, float]


def _cross_entropy(logprobs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    return -logprobs * inputs[WEIGHTS] if WEIGHTS in inputs else -logprobs


def _importance_sampling(logprobs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    return -torch.exp(logprobs - inputs[LOGPROBS]) * inputs[ADVANTAGES]


def _clipped(ratio: Tensor, inputs: Inputs, config: Config) -> Tensor:
    if LOW not in inputs and HIGH not in inputs:
        return torch.clamp(ratio, config[LOW], config[HIGH])
    low, high = (inputs.get(name, torch.as_tensor(config.get(name))).to(ratio) for name in (LOW, HIGH))
    return torch.clamp(ratio, low, high)


def _smaller(ratio: Tensor, inputs: Inputs, config: Config) -> Tensor:
    return -torch.min(ratio * inputs[ADVANTAGES], _clipped(ratio, inputs, config) * inputs[ADVANTAGES])


def _ppo(logprobs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    return _smaller(torch.exp(logprobs - inputs[LOGPROBS]), inputs, config)


def _gspo(logprobs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    log_ratio = (logprobs.detach() - inputs[LOGPROBS])[inputs[RATIO_MASK] != 0].mean()
    return _smaller(torch.exp(log_ratio + logprobs - logprobs.detach()), inputs, config)


def _cispo(logprobs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    ratio = torch.exp(logprobs.detach() - inputs[LOGPROBS])
    return -_clipped(ratio, inputs, config) * inputs[ADVANTAGES] * logprobs


def _dro(logprobs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    penalty = 0.5 * config[BETA] * (logprobs - inputs[LOGPROBS]) ** 2
    return -(logprobs * inputs[ADVANTAGES] - penalty)


@dataclass(frozen=True, kw_only=True)
class TokenLoss:
    """A loss: from the targets' log-probabilities, a row's inputs and the config, to the loss of each target.

    inputs: the names of what a row must give, besides its targets. optional: of what it may give.
    config: the keys that it takes, with their defaults; NaN for one that the config or each row must give.
    is_of_rows: whether it is computed row by row, as the value of a token depends on the others of its row.
    """

    compute: Callable[[Tensor, Inputs, Config], Tensor]
    inputs: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    config: Config = field(default_factory=dict)
    is_of_rows: bool = False

    def values(self, logprobs: Tensor, inputs: Inputs, config: Config, *, lengths: Sequence[int]) -> Tensor:
        """Returns the loss of each target, from tensors of rows of these lengths, one after another."""
        config = {**self.config, **config}
        if not self.is_of_rows:
            return self.compute(logprobs, inputs, config)
        divided = {name: torch.split(value, list(lengths)) for name, value in inputs.items()}
        return torch.cat(
            [
                self.compute(own, {name: parts[i] for name, parts in divided.items()}, config)
                for i, own in enumerate(torch.split(logprobs, list(lengths)))
            ]
        )


OF_POLICY, THRESHOLDS = (LOGPROBS, ADVANTAGES), (LOW, HIGH)
LOSSES: Mapping[str, TokenLoss] = {
    "cross_entropy": TokenLoss(compute=_cross_entropy, optional=(WEIGHTS,)),
    "importance_sampling": TokenLoss(compute=_importance_sampling, inputs=OF_POLICY),
    "ppo": TokenLoss(compute=_ppo, inputs=OF_POLICY, optional=THRESHOLDS, config=CLIPPING),
    "cispo": TokenLoss(compute=_cispo, inputs=OF_POLICY, optional=THRESHOLDS, config=CLIPPING),
    "gspo": TokenLoss(
        compute=_gspo,
        inputs=(*OF_POLICY, RATIO_MASK),
        optional=THRESHOLDS,
        config=dict.fromkeys(THRESHOLDS, math.nan),
        is_of_rows=True,
    ),
    "dro": TokenLoss(compute=_dro, inputs=OF_POLICY, config={BETA: 0.05}),
}


def loss_obstacle(request: LossRequest) -> str | None:
    """Returns why the loss of a request cannot be computed: its name or a key is not known, or a row lacks a tensor."""
    loss = LOSSES.get(request.loss)
    if loss is None:
        return f"there is no loss {request.loss!r}. To fix: take one of {', '.join(LOSSES)}, or a custom loss"
    if unknown := sorted(request.loss_config.keys() - loss.config.keys()):
        return f"loss {request.loss} has no setting {unknown[0]!r}. To fix: use {', '.join(loss.config) or 'none'}"
    settings = {**loss.config, **request.loss_config}
    for i, row in enumerate(request.rows):
        if reason := _row_obstacle(row, loss, settings):
            return f"row {i} of loss {request.loss} {reason}"
    return None


def _row_obstacle(row: TokenRow, loss: TokenLoss, settings: Config) -> str | None:
    targets = row.loss_inputs.get(TARGETS)
    if targets is None:
        return f"has no {TARGETS}"
    if targets.dim() not in (1, 2) or len(targets) != len(row.tokens) or not targets.numel():
        return f"has {TARGETS} of shape {list(targets.shape)} for {len(row.tokens)} tokens"
    if targets.is_floating_point():
        return f"has {TARGETS} that are not integers"
    for name in loss.inputs:
        if name not in row.loss_inputs:
            return f"has no {name}"
    for name in (*loss.inputs, *loss.optional):
        given = row.loss_inputs.get(name)
        if given is not None and given.shape != targets.shape:
            return f"has {name} of shape {list(given.shape)} for {TARGETS} of shape {list(targets.shape)}"
    if loss.is_of_rows and targets.dim() != 1:
        return f"has {TARGETS} of shape {list(targets.shape)}, and the loss takes one for each token"
    if RATIO_MASK in loss.inputs and not (row.loss_inputs[RATIO_MASK] != 0).any():
        return f"has a {RATIO_MASK} that marks no token"
    for name, value in settings.items():
        if math.isnan(value) and name not in row.loss_inputs:
            return f"needs {name}, in loss_fn_config or for each token: the loss has no default"
    return None


def logprobs_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the log-probabilities of targets, [tokens] or [tokens, choices], under logits [tokens, vocabulary]."""
    if targets.dim() == 1:
        return -functional.cross_entropy(logits, targets, reduction="none")
    return torch.log_softmax(logits, dim=-1).gather(-1, targets)

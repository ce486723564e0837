"""Optimizers around others: one that gathers what ranks hold in parts, and one that acts for several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ringmaster.techniques.training.gradients import local, share_of, whole


class WholeTensors(torch.optim.Optimizer):
    """Takes the steps of an optimizer that needs whole tensors, on DTensors of which each rank holds a part.

    One parameter at a time, every rank gathers the weight, its gradient and its state, takes the same step on them, and
    keeps its part of the result. So the state of the parameter's shape stays divided as the parameter is, and one whole
    tensor, with its gradient and state, is in memory at a time. All other state is equal on all ranks.
    """

    def __init__(
        self, kind: Callable[..., torch.optim.Optimizer], groups: list[dict[str, Any]], **options: Any
    ) -> None:
        self._kind = kind
        example = kind([nn.Parameter(torch.zeros(1, 1))], **options)
        super().__init__(groups, example.defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates all parameters that have a gradient. All ranks that hold parts of them must call it together."""
        assert closure is None, "the gradients are there already"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        gathered, state = nn.Parameter(whole(parameter.detach())), self.state[parameter]
        gathered.grad = whole(parameter.grad)  # type: ignore[arg-type]
        inner = self._kind([{**group, "params": [gathered]}])
        inner.state[gathered] = {key: whole(value) for key, value in state.items()}
        inner.step()
        local(parameter).copy_(share_of(gathered, parameter))
        for key, value in inner.state[gathered].items():
            state[key] = self._divided(value, parameter, state.get(key)) if value.shape == parameter.shape else value

    def _divided(self, value: Tensor, parameter: nn.Parameter, before: Tensor | None) -> Tensor:
        """The rank's part of a state of the parameter's shape, in the parameter's layout."""
        kept = torch.zeros_like(parameter, dtype=value.dtype, requires_grad=False) if before is None else before
        local(kept).copy_(share_of(value, parameter))
        return kept


class Together(torch.optim.Optimizer):
    """Several optimizers of different parameters as one: their groups one after another, and all their state."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._parts = tuple(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})
        for part in parts:
            self.defaults.update(part.defaults)
            part.state = self.state  # the groups are shared already

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Takes a step of each optimizer."""
        assert closure is None, "the gradients are there already"
        for part in self._parts:
            part.step()

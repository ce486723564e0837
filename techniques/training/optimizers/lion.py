"""Lion: the sign of an average of gradients.

Source: Chen et al., Symbolic Discovery of Optimization Algorithms (arXiv:2302.06675).
"""

from __future__ import annotations

from typing import Any

import torch

from ringmaster.techniques.training.gradients import local


class Lion(torch.optim.Optimizer):
    """Updates each element by the learning rate in the direction of its averaged gradient (algorithm 2).

    With w a weight, g its gradient, m the average (state `exp_avg`), betas = (b1, b2) and lambda the weight decay:

        w <- (1 - lr lambda) w - lr sign(b1 m + (1 - b1) g)
        m <- b2 m + (1 - b2) g

    Every element is updated by itself, so each rank may update the part of a parameter that it holds.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas must be at least 0 and less than 1, not {betas}")
        if weight_decay < 0.0:
            raise ValueError(f"weight_decay must be at least 0, not {weight_decay}")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates all parameters that have a gradient."""
        assert closure is None, "the gradients are there already"
        for group in self.param_groups:
            updated = [p for p in group["params"] if p.grad is not None]
            if not updated:  # the foreach operators refuse empty lists
                continue
            for parameter in updated:
                if not self.state[parameter]:
                    self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
            weights, gradients = [local(p) for p in updated], [local(p.grad) for p in updated]
            averages = [local(self.state[p]["exp_avg"]) for p in updated]
            rate, (beta1, beta2) = group["lr"], group["betas"]
            direction = torch._foreach_mul(averages, beta1)
            torch._foreach_add_(direction, gradients, alpha=1.0 - beta1)
            torch._foreach_sign_(direction)
            torch._foreach_mul_(weights, 1.0 - rate * group["weight_decay"])
            torch._foreach_add_(weights, direction, alpha=-rate)
            torch._foreach_mul_(averages, beta2)
            torch._foreach_add_(averages, gradients, alpha=1.0 - beta2)

"""A user's own model, data and loss. The batch file next to this module names them as "my_models:function".

Factories must be in a module, not in the script that is started: worker processes import them.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class Spirals(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Points [2] on `num_arms` interleaved spirals, labelled by their arm; synthetic and not linearly separable."""

    def __init__(self, *, size: int, num_arms: int, noise: float, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.num_labels = num_arms
        self.labels = torch.arange(size) % num_arms
        radius = torch.rand(size, generator=draw)
        angle = 2 * torch.pi * (self.labels / num_arms + radius)
        points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
        self.points = points + noise * torch.randn(size, 2, generator=draw)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        # The keys are the argument names of the model's forward; `labels` goes to the loss.
        return {"points": self.points[index], "labels": self.labels[index]}


def spirals(*, size: int = 2048, num_arms: int = 3, noise: float = 0.02) -> tuple[Spirals, Spirals]:
    """Returns the data (training, held_out), both with `__len__` and `__getitem__`."""
    training = Spirals(size=size, num_arms=num_arms, noise=noise, seed=0)
    held_out = Spirals(size=size // 8, num_arms=num_arms, noise=noise, seed=1)
    return training, held_out


class Perceptron(nn.Module):
    """Residual layers applied to the points."""

    def __init__(self, *, width: int, depth: int, num_labels: int) -> None:
        super().__init__()
        self.stem = nn.Linear(2, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, num_labels)

    def forward(self, points: Tensor) -> Tensor:
        """Returns logits [batch, num_labels] of `points` [batch, 2]."""
        hidden = torch.relu(self.stem(points))
        for layer in self.layers:
            hidden = hidden + torch.relu(layer(hidden))
        return self.head(hidden)


def perceptron(*, width: int = 64, depth: int = 4, num_labels: int = 3) -> nn.Module:
    """Returns the model: any torch module, with weights drawn here, after the job's seed was set."""
    return Perceptron(width=width, depth=depth, num_labels=num_labels)


def focal(logits: Tensor, batch: Mapping[str, Tensor], *, gamma: float = 2.0) -> tuple[Tensor, int]:
    """Returns the loss as (sum, count), never a mean, so that it is the same for every division of the batch.

    The focal loss of Lin et al. 2017 (arXiv:1708.02002) gives easy samples a smaller weight.
    """
    log_p = torch.log_softmax(logits, dim=-1).gather(1, batch["labels"][:, None]).squeeze(1)
    losses = -((1 - log_p.exp()) ** gamma) * log_p
    return losses.sum(), len(losses)

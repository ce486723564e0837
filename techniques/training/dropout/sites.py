"""Finds which of a model's draws are for tensors that hold samples, by running it, for any architecture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ringmaster.techniques.training.dropout.draws import Draws, Site, kind_of, use
from ringmaster.techniques.training.dropout.functions import drawing

FEW, MORE = 2, 3  # numbers of samples in the two forward passes that are compared


@dataclass(frozen=True, kw_only=True)
class DrawSites:
    """The random draws of a model in training; each site stands for all layers of its kind.

    draws: whether there are any.
    scalars: whether scalars are drawn, by which a model may leave whole layers out.
    shared: sites that draw for tensors that hold no samples, such as an embedding of relative positions.
    reason: why the draws cannot be equal under every division of a batch; empty where they can.
    """

    draws: bool = False
    scalars: bool = False
    shared: tuple[Site, ...] = ()
    reason: str = ""


class _Recording(Draws):
    """Records the length of the first dimension of each requested tensor, instead of drawing."""

    def __init__(self) -> None:
        super().__init__(seed=0, samples=(0,))
        self.lengths: dict[Site, int] = {}
        self.draws = self.scalars = False

    def kept(self, shape: Sequence[int], p: float, device: torch.device) -> Tensor:
        self._note(shape)
        return torch.ones(shape, dtype=torch.bool, device=device)

    def uniform(self, shape: Sequence[int], device: torch.device) -> Tensor:
        self._note(shape)
        return torch.full(shape, 0.5, device=device)

    def _note(self, shape: Sequence[int]) -> None:
        site = self._next_site()
        self.draws = True
        self.scalars = self.scalars or not shape
        if shape:
            self.lengths[kind_of(site)] = shape[0]


def find_sites(forward: Callable[[int], object]) -> DrawSites:
    """Compares the draws of a forward pass over two samples with those of one over three.

    forward: runs the model in training mode over that many samples; its modules must be named (`name_modules`).
    """
    few, more = (_recorded(forward, num) for num in (FEW, MORE))
    lengths = {site: (few.lengths.get(site, 0), more.lengths.get(site, 0)) for site in {**few.lengths, **more.lengths}}
    shared = [site for site, (length, longer) in lengths.items() if length == longer]
    lost = [site for site, (a, b) in lengths.items() if a != b and (a == 0 or a % FEW or a * MORE != b * FEW)]
    reason = ""
    if lost:
        reason = (
            f"dropout in {lost[0][0] or 'the model'} draws for tensors without a dimension of samples (such as tokens "
            "that are routed to experts), so that dividing a batch would change what is dropped"
        )
    return DrawSites(
        draws=few.draws or more.draws,
        scalars=few.scalars or more.scalars,
        shared=tuple(sorted(shared)),
        reason=reason,
    )


def _recorded(forward: Callable[[int], object], num_samples: int) -> _Recording:
    recording = _Recording()
    with drawing():
        use(recording)
        forward(num_samples)
    return recording

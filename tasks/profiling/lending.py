"""Devices for trials: idle ones, lent for one wave of trials at a time, so that jobs which are ready get them next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

from ringmaster.tasks.cluster import Device

_Device = TypeVar("_Device")


@dataclass(frozen=True, kw_only=True)
class DevicesWanted:
    """How many devices of one node.

    fills: whether all idle ones are of use, to be as busy as neighbours will be, where nobody else has work for them.
    presses: whether gangs checkpoint and make room where too few devices are idle.
    """

    least: int
    most: int
    fills: bool = False
    presses: bool = False

    def of(self, idle: Sequence[_Device], *, are_others_at_work: bool) -> tuple[_Device, ...]:
        """Those of the idle devices that are lent; none where they are too few."""
        if len(idle) < self.least:
            return ()
        return tuple(idle if self.fills and not are_others_at_work else idle[: self.most])


Lend = Callable[[DevicesWanted], AbstractContextManager[tuple[Device, ...]]]
"""Lends devices while it is open, and waits until they are idle. Raises DevicesBusy where that takes too long."""


class DevicesBusy(Exception):
    """The devices of a node were used by others for longer than trials are worth waiting for."""

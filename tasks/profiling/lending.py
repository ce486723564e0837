"""Loans of idle devices for trials, for one wave of trials each, so that ready jobs get the devices next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

from ringmaster.tasks.cluster import Device

_Device = TypeVar("_Device")


@dataclass(frozen=True, kw_only=True)
class DevicesWanted:
    """The number of devices that are requested on one node.

    least: the fewest devices that are of use.
    most: the most devices that are of use.
    fills: whether all idle devices are of use while no other job needs them, so that the trials' neighbours are as busy
        as they will be later.
    presses: whether gangs write checkpoints and stop if too few devices are idle.
    """

    least: int
    most: int
    fills: bool = False
    presses: bool = False

    def of(self, idle: Sequence[_Device], *, are_others_at_work: bool) -> tuple[_Device, ...]:
        """Returns the idle devices to lend; none if there are too few."""
        if len(idle) < self.least:
            return ()
        return tuple(idle if self.fills and not are_others_at_work else idle[: self.most])


Lend = Callable[[DevicesWanted], AbstractContextManager[tuple[Device, ...]]]
"""Lends devices while the context is open, and waits until they are idle. Raises DevicesBusy after too long a wait."""

"""Timeouts after which the parts of a pool act on the silence of another part."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Self

VARIABLE = "RINGMASTER_PATIENCE"

BLIND_S = 10.0
"""The time between two checks of nodes or requests after which, unless said otherwise, all silences are measured
anew.
"""


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Heartbeat interval and timeouts of a pool.

    All nodes of a pool and its executor must have the same values, or two processes could use one device.

    beat_every_s: the time between two heartbeats of a worker.
    fence_after_s: the time without a stored heartbeat after which a node ends its own ranks.
    lost_after_s: the time without a heartbeat after which the executor gives the node's jobs to other nodes. It exceeds
        `fence_after_s` by more than the time that ending ranks takes.
    """

    beat_every_s: float = 5.0
    lost_after_s: float = 60.0
    fence_after_s: float = 40.0

    def __post_init__(self) -> None:
        if not 0 < self.beat_every_s < self.fence_after_s < self.lost_after_s:
            raise ValueError(
                f"a heartbeat every {self.beat_every_s:g} s, lost after {self.lost_after_s:g} s and fenced after "
                f"{self.fence_after_s:g} s do not go together. To fix: beat < fence < lost"
            )

    @property
    def blind_after_s(self) -> float:
        """The time without a check of the nodes after which an executor restarts the timeouts of all nodes.

        No heartbeat could be seen while the database was unreachable for all processes, so that time is no silence.
        """
        return (self.lost_after_s - self.fence_after_s) / 2

    @classmethod
    def of_environment(cls) -> Self:
        """Returns the values in RINGMASTER_PATIENCE, as "beat,lost,fence" in seconds ("5,60,40" by default)."""
        text = os.environ.get(VARIABLE)
        if text is None:
            return cls()
        try:
            beat_every_s, lost_after_s, fence_after_s = (float(part) for part in text.split(","))
        except ValueError:
            raise ValueError(
                f'{VARIABLE}={text} is not understood. To fix: write "beat,lost,fence" in seconds, as in "5,60,40"'
            ) from None
        return cls(beat_every_s=beat_every_s, lost_after_s=lost_after_s, fence_after_s=fence_after_s)

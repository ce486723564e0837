"""How long the parts of a pool wait for each other before they act on a silence."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Self

VARIABLE = "RINGMASTER_PATIENCE"


@dataclass(frozen=True, kw_only=True)
class Patience:
    """The same on all nodes of a pool and for its executor, or two could own a device.

    beat_every_s: between two words of a worker that lives. fence_after_s: without one that went through, a node ends
    its ranks by itself. lost_after_s: without one, the executor gives the node's jobs to others; later than the fence,
    by more than ending ranks takes.
    """

    beat_every_s: float = 5.0
    lost_after_s: float = 60.0
    fence_after_s: float = 40.0

    def __post_init__(self) -> None:
        if not 0 < self.beat_every_s < self.fence_after_s < self.lost_after_s:
            raise ValueError(
                f"a beat every {self.beat_every_s:g} s, lost after {self.lost_after_s:g} s and fenced after "
                f"{self.fence_after_s:g} s do not go together. To fix: beat < fence < lost"
            )

    @property
    def blind_after_s(self) -> float:
        """After so long without a look at the nodes, an executor gives them all time again.

        While the database was away for all, no beat could have been seen: those silences are counted anew.
        """
        return (self.lost_after_s - self.fence_after_s) / 2

    @classmethod
    def of_environment(cls) -> Self:
        """What RINGMASTER_PATIENCE says as "beat,lost,fence" in seconds ("5,60,40" unless set)."""
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

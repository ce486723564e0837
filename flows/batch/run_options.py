"""The options of a run, which a command reads before it imports what trains."""

from dataclasses import dataclass
from typing import Literal

ProfilingMode = Literal["measure", "predict"]
"""What a plan without training does about runtimes that were never measured."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of a run.

    resume: whether to resume the last run of the batch, which was interrupted.
    checkpoint_every_s: seconds between checkpoints; None to derive them from the cost of one checkpoint.
    seed: seed of the planner. A pool's executor uses its own seed.
    """

    resume: bool = False
    checkpoint_every_s: float | None = None
    seed: int = 0

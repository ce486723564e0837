"""The key `trackers` of a batch."""

from dataclasses import dataclass
from typing import Annotated

from ringmaster.techniques.job_features import Choices, Description, Distinct, FileKeys

TRACKERS = ("tensorboard", "trackio", "wandb")
"""Each is the name of the extra that installs it, too."""


@dataclass(frozen=True, kw_only=True)
class TrackersKey(FileKeys):
    """Trackers that get the curves of the jobs in addition to MLflow."""

    trackers: Annotated[
        tuple[Annotated[str, Choices(TRACKERS)], ...],
        Distinct(),
        Description("trackers that get the curves, too, such as [tensorboard, wandb]"),
    ] = ()


BATCH_KEYS = (TrackersKey,)

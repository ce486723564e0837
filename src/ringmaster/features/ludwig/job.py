"""The key `ludwig` of a job's entry, which holds a configuration or names its file."""

from dataclasses import dataclass
from typing import Annotated, Any

from ringmaster.techniques.job_features import Description, FileKeys


@dataclass(frozen=True, kw_only=True)
class LudwigKey(FileKeys):
    """A Ludwig configuration in place of keys of a job."""

    ludwig: Annotated[
        Any,
        Description(
            "a Ludwig configuration or its file, such as ludwig.yaml, in place of model, loss, optimizer and length, "
            "which may override it"
        ),
    ] = None


ENTRY_KEYS = (LudwigKey,)

"""Keys of features under `due` of a production model: further conditions under which it is retrained.

The module `batch` of a feature lists their classes in `DUE_KEYS`.
"""

from collections.abc import Iterator

from ringmaster.features import listed
from ringmaster.findings import Finding, Location, Raw
from ringmaster.techniques.job_features import FileKeys

MAX_DAYS = 36_500
"""The largest number of days; dates have a limited range."""


class DueKeys(FileKeys):
    """Keys of a feature under `due`, the base of frozen dataclasses."""

    @classmethod
    def findings(cls, model: Raw, *, at: Location) -> Iterator[Finding]:
        """Yields the faults of a model's entry, of which each value is of its type. at: the place of the entry."""
        yield from ()


def due_keys() -> tuple[type[DueKeys], ...]:
    """Returns the classes of all features."""
    return tuple(listed("batch", "DUE_KEYS"))

"""The quotas of users in batch files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ringmaster.features.quotas.terms import Quotas
from ringmaster.tasks.batch.file_hooks import BatchFileHook
from ringmaster.tasks.batch.sections import Section


class QuotasInFiles(BatchFileHook):
    """The quotas of a batch."""

    def planning_features(self, batch: Section, *, folder: Path) -> Mapping[str, Any]:
        """Returns the quotas of the file."""
        users = batch.model_dump(exclude_none=True)["users"]
        return {Quotas.key: {"users": users}} if users else {}


BATCH_FILE_HOOKS = (QuotasInFiles(),)

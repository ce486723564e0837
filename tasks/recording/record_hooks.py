"""What optional features add to the records of jobs and models in MLflow.

The module `pages` of a feature lists its hooks in `RECORD_HOOKS`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from ringmaster.features import listed
from ringmaster.tasks.storage.journal import JobRecord
from ringmaster.techniques import Job
from ringmaster.techniques.processes.gang_events import Steps


class RecordHook:
    """What a feature adds to the records. By default nothing. record: of the job in the journal."""

    def tags(self, record: JobRecord) -> Mapping[str, str]:
        """Returns tags of the run of a job."""
        return {}

    def metrics(self, steps: Steps) -> Mapping[str, float]:
        """Returns metrics of the run of a job after some of its steps, such as {"train/NAME": 12.0}."""
        return {}

    def params(self, record: JobRecord) -> Mapping[str, Any]:
        """Returns parameters of a finished model."""
        return {}

    def components(self, job: Job) -> Mapping[str, str]:
        """Returns the prefixes of parameters by the names of components of a finished model."""
        return {}

    def paragraphs(self, job: Job, record: JobRecord) -> Iterator[str]:
        """Yields paragraphs, in markdown, for the page of a finished model."""
        yield from ()


def record_hooks() -> Iterator[RecordHook]:
    """Returns the hooks of all features."""
    return listed("pages", "RECORD_HOOKS")

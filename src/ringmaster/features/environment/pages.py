"""The environment of a job, in the records of its model."""

from collections.abc import Iterator, Mapping
from typing import Any

from ringmaster.features.environment.execute import EnvironmentRecord, UsedEnvironment
from ringmaster.tasks.recording.record_hooks import RecordHook
from ringmaster.tasks.storage.journal import JobRecord
from ringmaster.techniques import Job
from ringmaster.text import code_span


class EnvironmentReport(RecordHook):
    """Says in which environment a model was trained."""

    def params(self, record: JobRecord) -> Mapping[str, Any]:
        """Returns its digest, the version of Python, and the packages."""
        if (used := _used(record)) is None:
            return {}
        packages = " ".join(f"{name}=={version}" for name, version in used.packages.items())
        return {"environment": {"digest": used.digest, "python": used.python, "packages": packages}}

    def paragraphs(self, job: Job, record: JobRecord) -> Iterator[str]:
        """Yields the same for the page of the model."""
        if (used := _used(record)) is not None:
            packages = ", ".join(code_span(f"{name} {version}") for name, version in used.packages.items())
            yield f"Trained by Python {code_span(used.python)} with {packages} (environment {code_span(used.digest)})."


def _used(record: JobRecord) -> UsedEnvironment | None:
    kept = record.feature(EnvironmentRecord)
    return None if kept is None else kept.environment


RECORD_HOOKS = (EnvironmentReport(),)

"""What the records of a model in MLflow say of its gradients."""

from collections.abc import Iterator

from ringmaster.tasks.recording.record_hooks import RecordHook
from ringmaster.tasks.storage.journal import JobRecord
from ringmaster.techniques import Job
from ringmaster_centralization.job import Centralization


class CentralizationReport(RecordHook):
    """Adds a paragraph to the page of a model whose gradients were centralized."""

    def paragraphs(self, job: Job, record: JobRecord) -> Iterator[str]:
        """Yields the source of the method."""
        if job.feature(Centralization) is not None:
            yield "Its gradients were centralized (Yong et al., arXiv:2004.01461)."


RECORD_HOOKS = (CentralizationReport(),)

"""The source of a clone, in the records of its run and of its model."""

from collections.abc import Iterator, Mapping

from ringmaster.tasks.recording.record_hooks import RecordHook
from ringmaster.tasks.storage.journal import JobRecord
from ringmaster.techniques import Job
from ringmaster.text import markdown

CLONE_TAG = "ringmaster.clone_of"  # a tag of the run of a clone: its source, and the step from which it continues


class CloneReport(RecordHook):
    """Names the source of a clone."""

    def tags(self, record: JobRecord) -> Mapping[str, str]:
        """Returns the source, and the step from which the clone continues."""
        return {CLONE_TAG: source} if (source := _source(record)) else {}

    def paragraphs(self, job: Job, record: JobRecord) -> Iterator[str]:
        """Yields the source."""
        if source := _source(record):
            yield f"A clone of {markdown(source)}."


RECORD_HOOKS = (CloneReport(),)


def _source(record: JobRecord) -> str:
    """Returns of which job a job is a clone, and from which step on; empty for one that is none."""
    if (variation := record.variation) is None:
        return ""
    where = "from its first step" if variation.step is None else f"step {variation.step}"
    return f"{variation.job}, {where}"

"""The source of a clone, in the records of its run and of its model."""

from collections.abc import Iterator, Mapping
from typing import Any

from ringmaster.tasks.execution.job_table import ADDED
from ringmaster.tasks.recording.record_hooks import RecordHook
from ringmaster.techniques import Job
from ringmaster.text import markdown

CLONE_TAG = "ringmaster.clone_of"  # a tag of the run of a clone: its source, and the step from which it goes on


class CloneReport(RecordHook):
    """Names the source of a clone."""

    def tags(self, details: Mapping[str, Any]) -> Mapping[str, str]:
        """Returns the source, and the step from which the clone goes on."""
        return {CLONE_TAG: source} if (source := _source(details)) else {}

    def paragraphs(self, job: Job, details: Mapping[str, Any]) -> Iterator[str]:
        """Yields the source."""
        if source := _source(details):
            yield f"A clone of {markdown(source)}."


RECORD_HOOKS = (CloneReport(),)


def _source(details: Mapping[str, Any]) -> str:
    """Returns of which job a job is a clone, and from which step on; empty for one that is none."""
    if not (added := details.get(ADDED)):
        return ""
    where = "from its first step" if added["step"] is None else f"step {added['step']}"
    return f"{added['job']}, {where}"

"""What the records of jobs keep of their environments."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ringmaster.codec import from_json
from ringmaster.features.environment.job import RESULT
from ringmaster.tasks.execution.executor_hooks import ExecutorHook
from ringmaster.tasks.execution.progress import RunningSegment
from ringmaster.tasks.storage.journal import RecordFeature
from ringmaster.techniques.processes.gang_events import Outcome


@dataclass(frozen=True, kw_only=True)
class UsedEnvironment:
    """What has trained a job. python: its version. packages: their versions, by name."""

    digest: str
    python: str
    packages: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class EnvironmentRecord(RecordFeature):
    """The environment of the newest segment of a job."""

    environment: UsedEnvironment | None = field(default=None)


class EnvironmentNotes(ExecutorHook):
    """Keeps what a segment reports of its environment."""

    def decide(self, running: RunningSegment, outcome: Outcome) -> str | None:
        """Writes it to the record of the job; others decide what follows."""
        if (used := outcome.result.get(RESULT)) is not None:
            record = EnvironmentRecord(environment=from_json(UsedEnvironment, used))
            self._execution.job_table.write(running.segment.job, features=(record,))
        return None


RECORD_FEATURES = (EnvironmentRecord,)
EXECUTOR_HOOKS = (EnvironmentNotes,)

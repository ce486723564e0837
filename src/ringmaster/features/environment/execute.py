"""What the records of jobs keep of their environments, and how the files of locks reach the nodes of a pool."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringmaster.codec import from_json
from ringmaster.features.environment.job import FOLDER, RESULT, EnvironmentSpec, environments_folder
from ringmaster.features.environment.lock_files import kept_lock, packed, unpack
from ringmaster.tasks.execution.executor_hooks import ExecutorHook
from ringmaster.tasks.execution.progress import RunningSegment
from ringmaster.tasks.pool.node_hooks import NodeHook
from ringmaster.tasks.storage.journal import RecordFeature
from ringmaster.techniques import Job
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
        if (used := outcome.result.others.get(RESULT)) is not None:
            record = EnvironmentRecord(environment=from_json(UsedEnvironment, used))
            self._execution.job_table.write(running.segment.job, features=(record,))
        return None


class LockFilesOnNodes(NodeHook):
    """Sends the files of locks to nodes that do not share the home of whoever submits a batch."""

    def facts(self, jobs: Iterable[Job]) -> Mapping[str, Any]:
        """Returns the files of each lock that jobs name."""
        facts: dict[str, Any] = {}
        for job in jobs:
            spec = job.feature(EnvironmentSpec)
            if spec is not None and spec.lock is not None and spec.digest is not None and _fact(spec) not in facts:
                facts[_fact(spec)] = packed(spec.digest, spec.lock, root=environments_folder())
        return {key: files for key, files in facts.items() if files is not None}

    def prepare(self, job: Job, *, cache_dir: Path, read: Callable[[str], Any]) -> None:
        """Keeps the files of the job's lock on this machine, if they are not here."""
        spec, root = job.feature(EnvironmentSpec), cache_dir / FOLDER
        if spec is None or spec.lock is None or spec.digest is None:
            return
        if not kept_lock(spec.digest, spec.lock, root=root).is_file() and (files := read(_fact(spec))) is not None:
            unpack(files, spec.digest, spec.lock, root=root)


def _fact(spec: EnvironmentSpec) -> str:
    return f"environment:{spec.digest}"


RECORD_FEATURES = (EnvironmentRecord,)
EXECUTOR_HOOKS = (EnvironmentNotes,)
NODE_HOOKS = (LockFilesOnNodes(),)

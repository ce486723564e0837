"""What optional features do on the nodes of a pool: files of a batch that its machines need before they run its jobs.

The module `execute` of a feature lists its hooks in `NODE_HOOKS`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sqlalchemy import select

from ringmaster.features import listed
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.journal import Journal
from ringmaster.tasks.storage.schema import FACTS
from ringmaster.techniques import Job


class NodeHook:
    """What a feature does on nodes. By default nothing."""

    def facts(self, jobs: Iterable[Job]) -> Mapping[str, Any]:
        """Returns what nodes need of the jobs of a batch, JSON values by keys that are the same in each batch."""
        return {}

    def prepare(self, job: Job, *, cache_dir: Path, read: Callable[[str], Any]) -> None:
        """Prepares this machine for a job. cache_dir: of the job. read: returns a fact; None where there is none."""


def store_facts(jobs: Iterable[Job], journal: Journal) -> None:
    """Stores in the journal of a batch what nodes need of its jobs."""
    for hook in _hooks():
        if facts := hook.facts(jobs):
            journal.put_all(facts)


def prepare_node(job: Job, *, cache_dir: str, database: Database) -> None:
    """Prepares this machine for a job of a pool's batch."""

    def read(key: str) -> Any:
        stored = database.scalar(select(FACTS.c.value).where(FACTS.c.key == key).limit(1))
        return stored[0] if isinstance(stored, list) and stored else None

    for hook in _hooks():
        hook.prepare(job, cache_dir=Path(cache_dir), read=read)


def _hooks() -> Iterator[NodeHook]:
    return listed("execute", "NODE_HOOKS")

"""Names that a shell completes: of batches, and of jobs that were trained, as the home's folders have them.

No server is asked, and no database is opened: a shell waits for the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import typer

from ringmaster.files import folders_in
from ringmaster.flows import settings
from ringmaster.flows.dated_runs import in_order
from ringmaster.text import is_printable_name

MAX_RUNS = 20
"""The most runs of a batch, the newest ones, whose jobs are completed."""


def batch_names(incomplete: str) -> list[str]:
    """Returns the batches whose names begin with a text."""
    return _beginning(incomplete, (folder.name for folder in _batches()))


def job_names(context: typer.Context, incomplete: str) -> list[str]:
    """Returns the jobs whose names begin with a text, of the batch that the command line names."""
    return _beginning(incomplete, _jobs_of(context.params.get("batch")))


def batch_or_job_names(context: typer.Context, incomplete: str) -> list[str]:
    """Returns the batches and jobs whose names begin with a text; after the name of a batch, its jobs."""
    before = context.params.get("names") or ()
    names = _jobs_of(before[0]) if before else (*batch_names(incomplete), *_jobs_of(context.params.get("batch")))
    return _beginning(incomplete, names)


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete) and is_printable_name(name)]


def _batches() -> list[Path]:
    with suppress(OSError):
        return folders_in(settings.home() / "batches")
    return []


def _jobs_of(batch: str | None) -> Iterator[str]:
    """Yields the jobs of a batch, or of all batches, that have a gang's folder, which is called NUMBER-JOB."""
    for folder in _batches():
        if batch in (None, folder.name):
            with suppress(OSError):
                for run in reversed(in_order(folders_in(folder))[-MAX_RUNS:]):
                    for gang in folders_in(run / "gangs"):
                        yield gang.name.partition("-")[2]

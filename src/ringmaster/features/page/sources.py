"""Where a page finds runs: the batches that ran on this machine alone, or the batches of a pool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ringmaster.flows.dated_runs import runs_below
from ringmaster.flows.reports.watch import WatchTarget
from ringmaster.flows.settings import PoolAddress
from ringmaster.tasks.pool.submissions import Submissions
from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.tasks.storage.journal import Journal
from ringmaster.tasks.timeline.reader import TimelineReader

MAX_RUNS = 100  # that a page lists
TIMEOUT_S = 5.0  # for a database; a page shows that it does not answer, and tries again
PAGE_OF_FLOW_RUN = "flow_run_page"  # the fact with the page of a batch's flow run in Prefect


@dataclass(frozen=True, kw_only=True)
class RunName:
    """A run that a page can show. id: in addresses; empty for all of a pool. name: for people."""

    id: str
    name: str


class RunSource(Protocol):
    """Where runs are found. What is called may raise the errors of databases and files."""

    is_pool: bool

    def runs(self) -> list[RunName]:
        """Returns the runs, the newest first."""

    def newest(self) -> str | None:
        """Returns the id of the run that a page shows where none is chosen; None where there is none yet."""

    def opened(self, run: str) -> Any:
        """Returns a context manager that yields the run as a `WatchTarget`."""

    def details(self, target: WatchTarget, batches: list[str]) -> Mapping[str, Mapping[str, Any]]:
        """Returns the price of a device's hour and the pages of batches, by id, as far as they are known."""


class HomeRuns:
    """The runs of a home. since_s: without a choice, those that were written since then, in seconds since the epoch."""

    is_pool = False

    def __init__(self, home: Path, *, since_s: float = 0.0) -> None:
        self._folder, self._since_s = home / "batches", since_s

    def runs(self) -> list[RunName]:
        """Returns the runs, the newest first."""
        folders = reversed(runs_below(self._folder, "*/*")[-MAX_RUNS:])
        return [RunName(id=f"{run.parent.name}/{run.name}", name=f"{run.parent.name}, {run.name}") for run in folders]

    def newest(self) -> str | None:
        """Returns the newest run."""
        for run in self.runs():
            files = self._folder.glob(f"{run.id}/journal.db*")
            if max((file.stat().st_mtime for file in files), default=0.0) >= self._since_s:
                return run.id
        return None

    @contextmanager
    def opened(self, run: str) -> Iterator[WatchTarget]:
        """Opens the journal of a run."""
        file = self._folder / run / "journal.db"
        with closing(Database(file_url(file), timeout_s=TIMEOUT_S, is_reader=True)) as database:
            yield WatchTarget(TimelineReader(database, name=file.parent.parent.name), is_pool=False)

    def details(self, target: WatchTarget, batches: list[str]) -> Mapping[str, Mapping[str, Any]]:
        """Returns what is known of the only batch, whose id is empty."""
        journal = target.timeline_reader.archive.journal
        return {"": _details(journal, journal.get("batch") or {}, name=str((journal.get("batch") or {}).get("name")))}


class PoolBatches:
    """The batches of a pool."""

    is_pool = True

    def __init__(self, address: PoolAddress) -> None:
        self._address = address

    def runs(self) -> list[RunName]:
        """Returns all of the pool, and its batches, the newest first."""
        with closing(Database(self._address.database, timeout_s=TIMEOUT_S, is_reader=True)) as database:
            names = Submissions(database).names()
        every = [RunName(id=key, name=f"{name} ({key})") for key, name, _ in reversed(names[-MAX_RUNS:])]
        return [RunName(id="", name="the whole pool"), *every]

    def newest(self) -> str:
        """Returns the id of all of the pool."""
        return ""

    @contextmanager
    def opened(self, run: str) -> Iterator[WatchTarget]:
        """Opens the database for one batch, or for all."""
        with closing(Database(self._address.database, timeout_s=TIMEOUT_S, is_reader=True)) as database:
            yield WatchTarget(TimelineReader(database, name="the pool", is_pool=True), is_pool=True, batch=run or None)

    def details(self, target: WatchTarget, batches: list[str]) -> Mapping[str, Mapping[str, Any]]:
        """Returns what is known of batches, by id."""
        database = target.timeline_reader.archive.database
        active = Submissions(database).names()
        names = {key: name for key, name, _ in active}
        return {key: _details(Journal(database, batch=key), {}, name=names.get(key, key)) for key in batches}


def _details(journal: Journal, content: Mapping[str, Any], *, name: str) -> Mapping[str, Any]:
    content = content or journal.get("batch") or {}
    page = journal.get(PAGE_OF_FLOW_RUN)
    price = content.get("price_per_device_hour", 1.0)
    return {
        "name": name,
        "price_per_device_hour": price if price != 1.0 else None,
        "page": page if str(page).startswith(("http://", "https://")) else None,
    }

"""Where a page finds runs: the batches that ran on this machine alone, or the batches of a pool."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from sqlalchemy import func, select

from ringmaster.errors import InputError
from ringmaster.flows.dated_runs import runs_below
from ringmaster.flows.pool.batch_requests import database_of, open_database
from ringmaster.flows.reports.watch import WatchTarget
from ringmaster.flows.settings import PoolAddress
from ringmaster.model_lineage import model_pages
from ringmaster.tasks.control.requests import ANSWERED, RequestKind
from ringmaster.tasks.pool.submissions import Submissions
from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.tasks.storage.fact_keys import BATCH, FLOW_RUN_PAGE
from ringmaster.tasks.storage.journal import Journal
from ringmaster.tasks.storage.schema import JOBS, REQUESTS, json_field
from ringmaster.tasks.timeline.reader import TimelineReader

MAX_RUNS = 100  # that a page lists
MAX_REQUESTS = 100  # of persons, that a page shows
OF_PROCESSES = (RequestKind.LEND, RequestKind.NODE, RequestKind.TRAIN)
TIMEOUT_S = 5.0  # for a database; a page shows that it does not answer, and tries again
MODEL_URI = re.compile(r"models:/([^/@]+)/(\d+)")


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

    def control(self, run: str, batch: str) -> Any:
        """Returns a context manager that yields the database to which requests about a batch go, and the batch's name.

        Raises InputError where the run has ended.
        """

    def details(self, target: WatchTarget, batches: list[str]) -> Mapping[str, Mapping[str, Any]]:
        """Returns the price of a device's hour, pages, models and results of batches, by id, as far as known."""


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

    @contextmanager
    def control(self, run: str, batch: str) -> Iterator[tuple[Database, str]]:
        """Opens the journal of a running run."""
        name, _, stamp = run.partition("/")
        newest = runs_below(self._folder / name)[-1:]
        if [each.name for each in newest] != [stamp]:
            raise InputError([f"{run} has ended: there is a newer run of {name}"])
        with database_of(name) as database:
            yield database, name

    def details(self, target: WatchTarget, batches: list[str]) -> Mapping[str, Mapping[str, Any]]:
        """Returns what is known of the only batch, whose id is empty."""
        journal = target.timeline_reader.archive.journal
        return {"": _details(journal, name=str((journal.get(BATCH) or {}).get("name")))}


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

    @contextmanager
    def control(self, run: str, batch: str) -> Iterator[tuple[Database, str]]:
        """Opens the pool's database."""
        with open_database(self._address) as database:
            yield database, batch or run

    def details(self, target: WatchTarget, batches: list[str]) -> Mapping[str, Mapping[str, Any]]:
        """Returns what is known of batches, by id."""
        database = target.timeline_reader.archive.database
        names = {key: name for key, name, _ in Submissions(database).names()}
        server = self._address.mlflow_uri
        return {key: _details(Journal(database, batch=key), name=names.get(key, key), server=server) for key in batches}


def num_models(target: WatchTarget) -> int:
    """Returns how many jobs have a recorded model, which happens after they have ended."""
    query = select(func.count(json_field(JOBS.c.details, "model_uri")))
    return target.timeline_reader.archive.database.scalar(query) or 0


def requests_of(target: WatchTarget, batches: list[str], *, since_s: float) -> list[dict[str, Any]]:
    """Returns what persons have requested about batches and what was answered, the newest `MAX_REQUESTS`.

    since_s: the time from which on `at_s` counts.
    """
    here = REQUESTS.c.kind.not_in(OF_PROCESSES) & REQUESTS.c.status.in_(ANSWERED) & (REQUESTS.c.made_s >= since_s)
    query = select(REQUESTS).where(here).order_by(REQUESTS.c.id.desc()).limit(MAX_REQUESTS)
    result = [
        {"at_s": row.made_s - since_s, "text": str(row.answer.get("message", row.status)), "status": row.status}
        for row in target.timeline_reader.archive.database.rows(query)
        if isinstance(row.content, dict) and isinstance(row.answer, dict)
        if row.content.get("batch") in batches and not row.content.get("is_dry")
    ]
    return result[::-1]


def _details(journal: Journal, *, name: str, server: str = "") -> Mapping[str, Any]:
    """Returns what is known of a batch beside its timeline.

    server: address of MLflow's pages; empty where there are none.
    """
    price = (journal.get(BATCH) or {}).get("price_per_device_hour", 1.0)
    pages = {"Prefect": journal.get(FLOW_RUN_PAGE), "MLflow": _page(server, f"#/runs/{journal.get('run')}")}
    models, results = {}, {}
    for job, record in journal.jobs().items():
        results[job] = dict(record.metrics)
        if match := MODEL_URI.fullmatch(record.model_uri or ""):
            page = _page(server, model_pages.model_version_path(*match.groups()))
            models[job] = {"uri": match[0], "page": page, "folder": record.model_dir}
    return {
        "name": name,
        "price_per_device_hour": None if price == 1.0 else price,
        "pages": {title: page for title, page in pages.items() if str(page).startswith(("http://", "https://"))},
        "models": models,
        "results": results,
    }


def _page(server: str, path: str) -> str | None:
    """Returns the address of a page of MLflow, without credentials; None without a server."""
    parts = urlsplit(server)
    place = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{place}/{path}" if place and "None" not in path else None

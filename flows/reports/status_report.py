"""The state of runs of batches: a row for each job, and the table that `ringmaster status` prints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from rich.cells import cell_len
from rich.text import Text
from sqlalchemy.exc import SQLAlchemyError

from ringmaster.codec import from_json, to_json
from ringmaster.errors import DatabaseFileError, InputError
from ringmaster.flows import settings
from ringmaster.flows.output import error_console
from ringmaster.flows.pool.batch_requests import open_database
from ringmaster.flows.process_log import report_faults
from ringmaster.tasks.execution.events import PredictedEnd
from ringmaster.tasks.execution.progress import JobFigures
from ringmaster.tasks.pool.submissions import BatchStatus, PendingBatch, Submissions, pending
from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.tasks.storage.journal import (
    LEADER,
    JobRecord,
    JobStatus,
    Journal,
    SegmentRecord,
    jobs_of_file,
    segments_of_file,
)
from ringmaster.tasks.timeline.drawing import FIGURES
from ringmaster.tasks.timeline.queries import Archive
from ringmaster.tasks.timeline.reader import TimelineReader
from ringmaster.tasks.timeline.run_timeline import JobLine, end_text
from ringmaster.text import printable

T = TypeVar("T")

PATIENCE_S = 2.0  # with a database that is full or locked
MOST_NAMED = 4  # devices whose numbers are shown
MOST_IN_CELL = 500  # characters of a message; --json has all of it
STATUS_COLUMNS = ("batch", "run", "job", "status", "step", *FIGURES, "ends in", "message", "trained with")


@dataclass(frozen=True, kw_only=True)
class StatusRun:
    """A run of a batch, on this machine or on a pool. rows: of its jobs."""

    batch: str
    folder: Path
    rows: list[dict[str, Any]]


def runs_of(batch: str | None, *, has_figures: bool = True) -> list[StatusRun]:
    """Returns the runs to look at: those of one batch, or of all. Raises InputError where there is no such batch.

    has_figures: whether the rows of jobs that run have their speeds and ends, for which much more is read.
    """
    every = [*_runs_here(has_figures=has_figures), *_runs_on_pool(has_figures=has_figures)]
    runs = [run for run in every if batch in (None, run.batch) or any(row["run"] == batch for row in run.rows)]
    if batch is not None and not runs and (settings.home() / "batches" / batch).is_dir():
        error_console().print(f"no job of {batch} has been in a plan: its last run waits for that, or ended before")
    elif batch is not None and not runs:
        there = ", ".join(dict.fromkeys(run.batch for run in every)) or "none"
        raise InputError([f"there is no batch {batch!r} under {settings.home()}; there are {there}"])
    return runs


def _runs_here(*, has_figures: bool) -> Iterator[StatusRun]:
    """The newest run of each batch that ran on this machine alone."""
    newest = {file.parent.parent: file for file in sorted((settings.home() / "batches").glob("*/*/journal.db"))}
    for file in newest.values():
        batch, folder = file.parent.parent.name, file.parent
        try:
            records = jobs_of_file(file)
            options = _options(segments_of_file(file)) if has_figures else {}
            lines = _lines_here(file, batch) if has_figures and _is_running(records) else {}
            rows = _rows(records, batch, folder.name, options=options, lines=lines)
            yield StatusRun(batch=batch, folder=folder, rows=rows)
        except DatabaseFileError as error:  # the other batches are shown
            report_faults(error.faults)


def _lines_here(file: Path, batch: str) -> dict[str, JobLine]:
    """Returns what is known of the jobs of a batch that runs on this machine alone; nothing where only that is lacking.

    Whoever opens a `Database` must be able to write to it, which not everybody who may read a journal is.
    """
    try:
        with closing(Database(file_url(file), patience_s=PATIENCE_S)) as database:
            return _lines(TimelineReader(database, name=batch))
    except (DatabaseFileError, SQLAlchemyError):
        return {}


def _runs_on_pool(*, has_figures: bool) -> Iterator[StatusRun]:
    """The runs that stand on the pool that this machine belongs to, and the newest one of each batch."""
    address = settings.pool()
    if address is None:
        return
    with open_database(address) as database:
        submissions = Submissions(database)
        every = submissions.names()
        newest = {name: key for key, name, _ in every}
        shown = {key: name for key, name, status in every if status == BatchStatus.SUBMITTED or newest[name] == key}
        folders = submissions.folders()
        records: dict[str, list[JobRecord]] = {key: [] for key in shown}
        for qualified, record in Journal(database, batch=None).jobs(batches=list(shown)).items():
            key, _, job = qualified.partition("/")
            records[key].append(replace(record, name=job))
        segments = Archive(database, is_pool=True).segments(list(shown), since_s=0.0) if has_figures else []
        options = _options(segments)
        is_running = has_figures and any(map(_is_running, records.values()))
        lines = _lines(TimelineReader(database, name="the pool", is_pool=True)) if is_running else {}
        for key, name in shown.items():
            mine = (_of_batch(options, key), _of_batch(lines, key))
            rows = _rows(records[key], name, key, options=mine[0], lines=mine[1])
            yield StatusRun(batch=name, folder=Path(folders[key]), rows=rows)
        for found in pending(database):
            yield StatusRun(
                batch=found.name, folder=settings.home() / "batches" / found.name, rows=_pending_rows(found)
            )


def _pending_rows(found: PendingBatch) -> list[dict[str, Any]]:
    """Returns a row for each job of a batch that was handed over, and of which no job is in a plan yet."""
    return [_row(found.name, found.run, job, status=found.status, step=0, message=found.message) for job in found.jobs]


def _rows(
    records: Iterable[JobRecord],
    batch: str,
    run: str,
    *,
    options: Mapping[str, str],
    lines: Mapping[str, JobLine],
) -> list[dict[str, Any]]:
    """Returns a row for each job.

    options: technique and devices of its newest segment. lines: what is known of it while the batch runs.
    """
    found = []
    for record in records:
        line = lines.get(record.name)
        row = _row(
            *(batch, run, record.name),
            status=record.status,
            step=record.step if line is None else max(record.step, line.step),
            message=record.message,
            leader=record.details.get(LEADER),
            option=options.get(record.name, ""),
        )
        if line is not None:
            row |= {"num_steps": line.num_steps, "figures": to_json(line.figures), "ends_in": to_json(line.predicted)}
        found.append(row)
    return found


def _row(
    batch: str, run: str, job: str, *, status: str, step: int, message: str, leader: str | None = None, option: str = ""
) -> dict[str, Any]:
    """Returns a row. leader: the job whose gang trained it too. option: technique and devices of its newest segment."""
    row = {"batch": batch, "run": run, "job": job, "status": status, "step": step, "message": message}
    return {**row, "leader": leader, "option": option, "num_steps": None, "figures": {}, "ends_in": None}


def _options(segments: Sequence[SegmentRecord]) -> dict[str, str]:
    """Returns technique and devices of the newest segment of each job: "ddp on vm:cpu:0,1"."""
    found: dict[str, str] = {}
    for segment in segments:
        what = segment.what
        devices: dict[str, list[str]] = {}
        for name in what["devices"]:
            place, _, number = name.rpartition(":")
            devices.setdefault(place, []).append(number)
        where = " ".join(f"{place}:{','.join(numbers)}" for place, numbers in devices.items())
        many = f"{len(what['devices'])} devices"
        option = f"{what['technique']} on {where if len(what['devices']) <= MOST_NAMED else many}"
        batch, slash, _ = segment.job.rpartition("/")
        found |= dict.fromkeys((segment.job, *(f"{batch}{slash}{name}" for name in what.get("fellows", {}))), option)
    return found


def _is_running(records: Iterable[JobRecord]) -> bool:
    return any(record.status == JobStatus.RUNNING for record in records)


def _lines(reader: TimelineReader) -> dict[str, JobLine]:
    """Returns what is known of the jobs of a batch or a pool that runs, by name. Their ends count from now."""
    run_timeline = reader.read()
    return {line.name: line for line in run_timeline.later(run_timeline.now_s).jobs}


def _of_batch(values: Mapping[str, T], batch: str) -> dict[str, T]:
    """Returns the values of the jobs of one batch of a pool, by the names within it."""
    return {name.removeprefix(f"{batch}/"): value for name, value in values.items() if name.startswith(f"{batch}/")}


def status_table(rows: Iterable[Mapping[str, Any]]) -> Text:
    """Returns the table that `status` prints, as lines: a table of rich takes a millisecond a row. rows: of jobs.

    Columns of figures, and of predicted ends, that no job has are left out.
    """
    every = [_cells(row) for row in rows]
    may_lack = (*FIGURES, "ends in")
    columns = [name for name in STATUS_COLUMNS if name not in may_lack or any(row[name] for row in every)]
    cells = [[printable(row[name], limit=MOST_IN_CELL) for name in columns] for row in every]
    widths = [max(map(cell_len, column)) for column in zip(columns, *cells, strict=True)]
    text = Text(no_wrap=True)
    for row_cells in (columns, *cells):
        line = " ".join(cell + " " * (width - cell_len(cell)) for cell, width in zip(row_cells, widths, strict=True))
        text.append(f" {line.rstrip()}\n", "bold" if row_cells is columns else None)
    return text


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    """Returns the texts of a row of `status`, by column."""
    figures = from_json(JobFigures, row.get("figures", {}))
    leader = None if row["leader"] is None else f"beside {row['leader']}"
    plain = {name: "" if row[name] is None else str(row[name]) for name in ("batch", "run", "job", "status")}
    return {
        **plain,
        "step": f"{row['step']}/{row['num_steps']}" if row.get("num_steps") else str(row["step"]),
        **dict(zip(FIGURES, figures.cells, strict=True)),
        "ends in": "" if row.get("ends_in") is None else end_text(from_json(PredictedEnd, row["ends_in"])),
        "message": row["message"] or figures.phase,
        "trained with": " ".join(filter(None, (row.get("option"), leader))),
    }

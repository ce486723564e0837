"""Commands that look: which techniques there are, how batches stand and go on, what a job printed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from ringmaster.flows import settings
from ringmaster.flows.faults import InputError
from ringmaster.flows.output import AsJson, error_console, output_console, print_json, write_document
from ringmaster.flows.process.process_log import report_faults
from ringmaster.text import printable

MOST_IN_CELL = 500  # characters of a message; --json has all of it

if TYPE_CHECKING:
    from ringmaster.tasks.pool.handed_over import Pending
    from ringmaster.tasks.storage.journal import JobRecord


def techniques(
    model: Annotated[
        Path | None,
        typer.Option(help="A file with a job, or a batch file: what would fit, and why others would not."),
    ] = None,
    job: Annotated[str | None, typer.Option(help="Of a batch file, this job alone.")] = None,
    devices: Annotated[
        int | None, typer.Option(help="How many GPUs, with --memory; by default the devices of this machine.", min=1)
    ] = None,
    memory: Annotated[str | None, typer.Option(help="Of each GPU, such as 80GiB.")] = None,
    nodes: Annotated[int, typer.Option(help="Over how many machines the GPUs are divided.", min=1)] = 1,
    as_json: AsJson = False,
) -> None:
    """List the techniques and what each needs; with --model, which of them could train it, in how much memory."""
    from ringmaster.techniques.interface import registry

    if model is not None:
        from ringmaster.flows.reports.technique_report import look_ahead, print_technique_report

        found = look_ahead(model, job=job, num_devices=devices, memory=memory, num_nodes=nodes)
        print_json(found.to_json()) if as_json else print_technique_report(found)
        raise typer.Exit(1 if found.faults else 0)
    if job is not None or devices is not None or memory is not None:
        raise InputError(["--job, --devices and --memory say how a model would be trained. To fix: name it by --model"])
    every = [(name, registry.load(registry.dotted_path(name))) for name in registry.names()]
    if as_json:
        print_json([{"name": name, "summary": t.summary, "needs": t.needs} for name, t in every])
        return
    table = Table("technique", "what it does", "what it needs", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name, technique in every:
        table.add_row(name, technique.summary, technique.needs)
    output_console().print(table)


def status(
    batch: Annotated[str | None, typer.Argument(help="A batch's name; all batches where it is left out.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show how the newest run of each batch stands, and all runs that stand on a pool."""
    rows = [row for run in _runs(batch) for row in run.rows]
    if as_json:
        print_json(rows)
        return
    output_console().print(status_table(rows), end="", soft_wrap=True)


def status_table(rows: Iterable[Mapping[str, Any]]) -> Text:
    """Returns the table that `status` prints, as lines: a table of rich takes a millisecond a row. rows: of jobs."""
    columns = ("batch", "run", "job", "status", "step", "message", "trained with")
    cells = [
        ["" if value is None else printable(str(value), limit=MOST_IN_CELL) for value in row.values()] for row in rows
    ]
    widths = [max(map(cell_len, column)) for column in zip(columns, *cells, strict=True)]
    text = Text(no_wrap=True)
    for row_cells in (columns, *cells):
        line = " ".join(cell + " " * (width - cell_len(cell)) for cell, width in zip(row_cells, widths, strict=True))
        text.append(f" {line.rstrip()}\n", "bold" if row_cells is columns else None)
    return text


def logs(
    job: Annotated[str, typer.Argument(help="A job's name.")],
    rank: Annotated[int, typer.Option(help="Which worker process of the gang.")] = 0,
    batch: Annotated[str | None, typer.Option(help="The batch, where several have a job of that name.")] = None,
) -> None:
    """Print what a job's worker printed in its last segment."""
    names = []
    for run in sorted(_runs(batch), key=lambda run: run.folder.name, reverse=True):
        names += [str(row["job"]) for row in run.rows]
        every = sorted((run.folder / "gangs").glob("[0-9]*-*"))
        leaders = {row["leader"] for row in run.rows if row["job"] == job}  # whose gang trained it, where one did
        gangs = [path for path in every if path.name.partition("-")[2] in {job, *leaders} and any(path.iterdir())]
        if gangs:
            file = gangs[-1] / f"rank-{rank}.log"
            if not file.exists():
                ranks = sorted(path.stem.removeprefix("rank-") for path in gangs[-1].glob("rank-*.log"))
                raise InputError([f"{job} has no rank {rank}; it has {', '.join(ranks) or 'none'}"])
            text = file.read_text(errors="replace")
            write_document(text)
            if not text:
                error_console().print(f"rank {rank} of {job} has printed nothing in its last segment")
            return
    raise InputError([f"no segment of a job {job!r} has run here; there are jobs {', '.join(names) or 'none'}"])


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A run of a batch, on this machine or on a pool. rows: of its jobs."""

    batch: str
    folder: Path
    rows: list[dict[str, Any]]


def _runs(batch: str | None) -> list[_Run]:
    """The runs to look at: those of one batch, or of all. Raises InputError where there is no such batch."""
    every = [*_runs_here(), *_runs_on_pool()]
    runs = [run for run in every if batch in (None, run.batch) or any(row["run"] == batch for row in run.rows)]
    if batch is not None and not runs and (settings.home() / "batches" / batch).is_dir():
        error_console().print(f"no job of {batch} has been in a plan: its last run waits for that, or ended before")
    elif batch is not None and not runs:
        there = ", ".join(dict.fromkeys(run.batch for run in every)) or "none"
        raise InputError([f"there is no batch {batch!r} under {settings.home()}; there are {there}"])
    return runs


def _runs_here() -> Iterator[_Run]:
    """The newest run of each batch that ran on this machine alone."""
    from ringmaster.tasks.storage.database import DatabaseFault
    from ringmaster.tasks.storage.journal import jobs_of_file

    newest = {file.parent.parent: file for file in sorted((settings.home() / "batches").glob("*/*/journal.db"))}
    for file in newest.values():
        batch, folder = file.parent.parent.name, file.parent
        try:
            yield _Run(batch=batch, folder=folder, rows=_rows(jobs_of_file(file), batch, folder.name))
        except DatabaseFault as error:  # the other batches are shown
            report_faults(error.faults)


def _runs_on_pool() -> Iterator[_Run]:
    """The runs that stand on the pool that this machine belongs to, and the newest one of each batch."""
    address = settings.pool()
    if address is None:
        return
    from ringmaster.flows.pool.asking import open_database
    from ringmaster.tasks.pool.handed_over import pending
    from ringmaster.tasks.pool.submissions import BatchStatus, Submissions
    from ringmaster.tasks.storage.journal import Journal

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
        for key, name in shown.items():
            yield _Run(batch=name, folder=Path(folders[key]), rows=_rows(records[key], name, key))
        for found in pending(database):
            yield _Run(batch=found.name, folder=settings.home() / "batches" / found.name, rows=_pending_rows(found))


def _pending_rows(found: Pending) -> list[dict[str, Any]]:
    """A row a job of a batch that was handed over, and of which no job is in a plan yet."""
    known = {"status": found.status, "step": 0, "message": found.message, "leader": None}
    return [{"batch": found.name, "run": found.run, "job": job, **known} for job in found.jobs]


def _rows(records: Iterable[JobRecord], batch: str, run: str) -> list[dict[str, Any]]:
    """A row a job; leader: the job whose gang trained it too, None where it had its own."""
    from ringmaster.tasks.storage.journal import LEADER

    return [
        {
            "batch": batch,
            "run": run,
            "job": record.name,
            "status": record.status,
            "step": record.step,
            "message": record.message,
            "leader": record.details.get(LEADER),
        }
        for record in records
    ]


def watch(
    batch: Annotated[
        str | None,
        typer.Argument(help="A batch's name, in a pool its id too; the pool, or here the newest batch, by default."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print how it stands now, and end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show by device what was planned, what happens and what comes, until the batch has ended."""
    from ringmaster.flows.reports.watch import opened, watch_on, watch_once

    with opened(batch) as watched, suppress(KeyboardInterrupt):  # Ctrl-C is how one stops looking
        watch_once(watched, as_json=as_json) if once else watch_on(watched, as_json=as_json)

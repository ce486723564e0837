"""Commands that look: which techniques there are, how batches stand and go on, what a job printed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TextIO

import typer
from rich.table import Table

from ringmaster.errors import InputError
from ringmaster.flows.output import AsJson, error_console, output_console, print_json, write_document

FOLLOW_EVERY_S = 0.5
MOST_CHARACTERS = 1_000_000  # of a log that are read at a time


def techniques(
    model: Annotated[
        Path | None,
        typer.Option(help="File with a job, or batch file: list what would fit, and why others would not."),
    ] = None,
    job: Annotated[str | None, typer.Option(help="Name of the only job to look at.")] = None,
    devices: Annotated[
        int | None, typer.Option(help="Number of GPUs, with --memory; default: the devices of this machine.", min=1)
    ] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of each GPU, such as 80GiB.")] = None,
    nodes: Annotated[int, typer.Option(help="Number of machines over which the GPUs are divided.", min=1)] = 1,
    as_json: AsJson = False,
) -> None:
    """List the techniques and what each needs; with --model, which of them could train it, in how much memory."""
    from ringmaster.techniques import registry

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
    batch: Annotated[str | None, typer.Argument(help="Name of a batch; default: all batches.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show how the newest run of each batch stands, and all runs that stand on a pool."""
    from ringmaster.flows.reports.status_report import runs_of, status_table

    rows = [row for run in runs_of(batch) for row in run.rows]
    if as_json:
        print_json(rows)
        return
    output_console().print(status_table(rows), end="", soft_wrap=True)


def logs(
    names: Annotated[
        list[str],
        typer.Argument(metavar="[BATCH] JOB", help="Name of a job, after that of its batch where several have it."),
    ],
    rank: Annotated[int, typer.Option(help="Rank of the worker process in its gang.")] = 0,
    batch: Annotated[str | None, typer.Option(help="Name of the batch, as an option.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the job has ended, from gang to gang.")
    ] = False,
) -> None:
    """Print what a job's worker logged and printed in its last segment."""
    if len(names) > 2 or (len(names) == 2 and batch is not None):
        raise InputError([f"logs are of one job, not of {' '.join(names)}. To fix: ringmaster logs BATCH JOB"])
    batch, job = (names[0] if len(names) == 2 else batch), names[-1]
    gang = _last_gang(batch, job)
    if follow:
        with suppress(KeyboardInterrupt):  # Ctrl-C is how one stops looking
            for text in _followed(gang, batch=batch, rank=rank):
                write_document(text)
                sys.stdout.flush()
        return
    num_characters = 0
    with _opened(gang, rank) as file:
        while text := file.read(MOST_CHARACTERS):
            num_characters += len(text)
            write_document(text)
    if not num_characters:
        error_console().print(f"rank {rank} of {job} has printed nothing in its last segment")


def _followed(gang: _Gang, *, batch: str | None, rank: int) -> Iterator[str]:
    """Yields a log and what is added to it, and then the logs of the job's next gangs, until the job has ended."""
    clock = threading.Event()
    while True:
        with _opened(gang, rank) as file:
            has_next = is_over = False
            while not (has_next or is_over):
                newest = _last_gang(batch, gang.job)  # before the log is read, so that no line of it is missed
                while True:
                    text = file.read(MOST_CHARACTERS)
                    yield text
                    if len(text) < MOST_CHARACTERS:
                        break
                has_next = newest.folder != gang.folder and (newest.folder / f"rank-{rank}.log").exists()
                is_over = newest.is_over
                if not text:
                    clock.wait(FOLLOW_EVERY_S)
        if not has_next:
            return
        gang = newest


def _opened(gang: _Gang, rank: int) -> TextIO:
    """Opens the log of a rank. Raises InputError where that is not possible."""
    file = gang.log(rank)
    try:
        return file.open(errors="replace")
    except OSError as error:  # of another user's run
        raise InputError([f"{file} cannot be read: {error.strerror}"]) from error


@dataclass(frozen=True, kw_only=True)
class _Gang:
    """The newest gang of a job. is_over: whether the job has ended."""

    job: str
    folder: Path
    is_over: bool

    def log(self, rank: int) -> Path:
        """Returns the log of a rank. Raises InputError if there is none."""
        file = self.folder / f"rank-{rank}.log"
        if not file.exists():
            ranks = sorted(path.stem.removeprefix("rank-") for path in self.folder.glob("rank-*.log"))
            raise InputError([f"{self.job} has no rank {rank}; it has {', '.join(ranks) or 'none'}"])
        return file


def _last_gang(batch: str | None, job: str) -> _Gang:
    """Returns the newest gang of a job. Raises InputError if there is none, with the reason or the names of jobs."""
    from ringmaster.flows.reports.status_report import runs_of
    from ringmaster.tasks.storage.journal import ENDED

    names: list[str] = []
    idle: list[str] = []  # why a job of that name has no gang
    for run in sorted(runs_of(batch, has_figures=False), key=lambda run: run.folder.name, reverse=True):
        names += [str(row["job"]) for row in run.rows]
        mine = [row for row in run.rows if row["job"] == job]
        every = sorted((run.folder / "gangs").glob("[0-9]*-*"), key=lambda path: int(path.name.partition("-")[0]))
        leaders = {row["leader"] for row in mine}  # whose gang trained it, where one did
        gangs = [path for path in every if path.name.partition("-")[2] in {job, *leaders} and any(path.iterdir())]
        if gangs:
            return _Gang(job=job, folder=gangs[-1], is_over=all(row["status"] in ENDED for row in mine))
        for row in mine:
            why = f": {row['message']}" if row["message"] else ""
            idle.append(f"{job} of {run.batch} has no log here, as no gang has trained it; it is {row['status']}{why}")
    raise InputError(idle or [f"there is no job {job!r}; there are {', '.join(dict.fromkeys(names)) or 'none'}"])


def watch(
    batch: Annotated[
        str | None,
        typer.Argument(help="Name of a batch, or its id in a pool; default: the pool, or the newest batch here."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print how it stands now, and end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show by device what was planned, what happens and what comes, until the batch has ended."""
    from ringmaster.flows.reports.watch import opened, watch_on, watch_once

    with opened(batch) as watched, suppress(KeyboardInterrupt):  # Ctrl-C is how one stops looking
        watch_once(watched, as_json=as_json) if once else watch_on(watched, as_json=as_json)

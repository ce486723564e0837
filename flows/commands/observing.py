"""Commands that start nothing: states of batches, logs of jobs, timelines, schemas of files."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

import typer

from ringmaster.errors import InputError, RingmasterError
from ringmaster.features import listed
from ringmaster.files import folders_in
from ringmaster.flows import settings
from ringmaster.flows.commands.parameters import with_parameters
from ringmaster.flows.completion import batch_names, batch_or_job_names
from ringmaster.flows.dated_runs import folder_date
from ringmaster.flows.output import (
    AsJson,
    error_console,
    output_console,
    print_json,
    print_lines,
    report_faults,
    write_document,
)
from ringmaster.flows.resident_processes import resident_processes
from ringmaster.text import join_limited

FOLLOW_EVERY_S = 0.5
FILE_KINDS = ("batch", "sweep", "retraining", "policy", "tests")  # with schemas in `flows.file_schemas`
MAX_CHARACTERS = 1_000_000  # of a log that are read at a time


def schema(kind: str = "batch") -> None:
    """Print the JSON schema of batch files, or of files of another kind, by which editors complete and check them."""
    from ringmaster.flows.file_schemas import schema_of

    write_document(json.dumps(schema_of(kind), indent=1) + "\n")


def schema_command() -> Callable[..., None]:
    """Returns the command `schema`, which knows the kinds of files of features, too (`FILE_SCHEMAS`)."""

    def print_schema(*, kind: str) -> None:
        schema(kind)

    kinds: Any = Literal.__getitem__((*FILE_KINDS, *(kind for kind, _ in listed("commands", "FILE_SCHEMAS"))))
    argument = Annotated[kinds, typer.Argument(help="Kind of the files.")]
    return with_parameters(schema, print_schema, kind=(argument, FILE_KINDS[0]))


def status(
    batch: Annotated[
        str | None, typer.Argument(help="Name of a batch; default: all batches.", autocompletion=batch_names)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the state of the newest run of each batch, and of all runs on a pool; exit 1 where the pool is not up."""
    from ringmaster.flows.reports.watch import faults_of, runs_of, status_table

    fault = settings.pool_fault()
    print_lines(error_console(), [fault] if fault else settings.pool_lacks(), style="yellow")
    runs = runs_of(batch)
    rows, faults = [row for run in runs for row in run.rows], faults_of(runs)
    if as_json:
        print_json(rows)
    elif rows or not faults:
        output_console().print(status_table(rows), end="", soft_wrap=True)
    if faults:
        report_faults(faults)
    if not as_json:
        print_lines(output_console(), filter(None, [resident_processes().status(settings.home())]))
    if fault or faults:
        raise typer.Exit(1)
    if not as_json and (pool := settings.recorded_pool()) is not None:
        from ringmaster.flows.pool.batch_requests import limits_in_words, open_database

        with open_database(pool) as database:
            print_lines(output_console(), limits_in_words(database))


def logs(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="[BATCH] JOB",
            help="Name of a job, after that of its batch where several have it.",
            autocompletion=batch_or_job_names,
        ),
    ],
    rank: Annotated[int, typer.Option(help="Rank of the worker process in its gang.")] = 0,
    batch: Annotated[str | None, typer.Option(help="Name of the batch, as an option.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the log until the job has ended, from gang to gang.")
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
        while text := file.read(MAX_CHARACTERS):
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
                    text = file.read(MAX_CHARACTERS)
                    yield text
                    if len(text) < MAX_CHARACTERS:
                        break
                has_next = newest.folder != gang.folder and (newest.folder / f"rank-{rank}.log").exists()
                is_over = newest.is_over
                if not text:
                    clock.wait(FOLLOW_EVERY_S)
        if not has_next:
            return
        gang = newest


def _opened(gang: _Gang, rank: int) -> TextIO:
    """Opens the log of a rank. Raises InputError if there is none, and OSError if it cannot be read."""
    file = gang.folder / f"rank-{rank}.log"
    if not file.exists():
        ranks = sorted(int(path.stem.removeprefix("rank-")) for path in gang.folder.glob("rank-*.log"))
        raise InputError([f"{gang.job} has no rank {rank}; it has {', '.join(map(str, ranks)) or 'none'}"])
    return file.open(errors="replace")


@dataclass(frozen=True, kw_only=True)
class _Gang:
    """The newest gang of a job. is_over: whether the job has ended."""

    job: str
    folder: Path
    is_over: bool


def _last_gang(batch: str | None, job: str) -> _Gang:
    """Returns the newest gang of a job. Raises InputError if there is none, with the reason or the names of jobs."""
    from ringmaster.flows.reports.watch import faults_of, runs_of
    from ringmaster.tasks.storage.journal import ENDED

    names: list[str] = []
    idle: list[str] = []  # why a job of that name has no gang
    runs = runs_of(batch, has_figures=False)
    for run in sorted(runs, key=lambda run: folder_date(run.folder), reverse=True):
        names += [str(row["job"]) for row in run.rows]
        own = [row for row in run.rows if row["job"] == job]
        every = [path for path in folders_in(run.folder / "gangs") if path.name.partition("-")[0].isdecimal()]
        every.sort(key=lambda path: int(path.name.partition("-")[0]))
        leads = {row["leader"] for row in own}  # whose gang trained it, where one did
        gangs = [path for path in every if path.name.partition("-")[2] in {job, *leads} and any(path.iterdir())]
        if gangs:
            return _Gang(job=job, folder=gangs[-1], is_over=all(row["status"] in ENDED for row in own))
        for row in own:
            why = f": {row['message']}" if row["message"] else ""
            idle.append(f"{job} of {run.batch} has no log here, as no gang has trained it; it is {row['status']}{why}")
    if faults := faults_of(runs):
        raise RingmasterError(join_limited(faults))
    fault = settings.pool_fault()
    unseen = [fault] if fault else settings.pool_lacks()
    raise InputError(
        idle or [f"there is no job {job!r}; there are {', '.join(dict.fromkeys(names)) or 'none'}", *unseen]
    )


def watch(
    batch: Annotated[
        str | None,
        typer.Argument(
            help="Name of a batch, or its id in a pool; default: the pool, or the newest batch here.",
            autocompletion=batch_names,
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the current state, and exit.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show past, running and upcoming segments by device, until the batch has ended."""
    from ringmaster.flows.reports.watch import opened, print_timeline, watch_on

    with opened(batch) as watched, suppress(KeyboardInterrupt):  # Ctrl-C is how one stops looking
        print_timeline(watched.read(), as_json=as_json) if once else watch_on(watched, as_json=as_json)

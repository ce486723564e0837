"""Commands that look: which techniques there are, how batches stand, what a job printed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from flows import settings
from flows.faults import InputError
from flows.output import AsJson, print_json


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
    from techniques import registry

    if model is not None:
        from flows.outlook import look_ahead, print_outlook

        found = look_ahead(model, job=job, num_devices=devices, memory=memory, num_nodes=nodes)
        print_json(found.to_json()) if as_json else print_outlook(found)
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
    Console().print(table)


def status(
    batch: Annotated[str | None, typer.Argument(help="A batch's name; all batches where it is left out.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show how the newest run of each batch stands."""
    rows = [row for folder in _newest_runs(batch) for row in _job_rows(folder)]
    if as_json:
        print_json(rows)
        return
    table = Table("batch", "run", "job", "status", "step", "message", box=None, header_style="bold")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)


def logs(
    job: Annotated[str, typer.Argument(help="A job's name.")],
    rank: Annotated[int, typer.Option(help="Which worker process of the gang.")] = 0,
    batch: Annotated[str | None, typer.Option(help="The batch, where several have a job of that name.")] = None,
) -> None:
    """Print what a job's worker printed in its last segment."""
    names = []
    for folder in sorted(_newest_runs(batch), key=lambda folder: folder.name, reverse=True):
        names += [str(row["job"]) for row in _job_rows(folder)]
        every = sorted((folder / "gangs").glob("[0-9]*-*"))
        gangs = [path for path in every if path.name.partition("-")[2] == job]
        if gangs:
            file = gangs[-1] / f"rank-{rank}.log"
            if not file.exists():
                ranks = sorted(path.stem.removeprefix("rank-") for path in gangs[-1].glob("rank-*.log"))
                raise InputError([f"{job} has no rank {rank}; it has {', '.join(ranks) or 'none'}"])
            sys.stdout.write(file.read_text(errors="replace"))
            return
    raise InputError([f"no segment of a job {job!r} has run here; there are jobs {', '.join(names) or 'none'}"])


def _newest_runs(batch: str | None) -> list[Path]:
    """The folder of the newest run of each batch, or of one."""
    root = settings.home() / "batches"
    found = sorted(path.name for path in root.glob("*") if path.is_dir())
    if batch is not None and batch not in found:
        raise InputError([f"there is no batch {batch!r} under {root}; there are {', '.join(found) or 'none'}"])
    runs = [sorted((root / name).glob("*/journal.db")) for name in found if batch in (None, name)]
    return [files[-1].parent for files in runs if files]


def _job_rows(folder: Path) -> Iterator[dict[str, Any]]:
    from tasks.execution.journal import Journal

    journal = Journal.of_file(folder / "journal.db")
    try:
        for record in journal.jobs().values():
            yield {
                "batch": folder.parent.name,
                "run": folder.name,
                "job": record.name,
                "status": record.status,
                "step": record.step,
                "message": record.message,
            }
    finally:
        journal.close()

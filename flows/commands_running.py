"""Commands that run a batch, or its first stage alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from flows import settings
from flows.output import AsJson, error_console, print_json

if TYPE_CHECKING:
    from tasks.batch import Batch

HEARTBEAT_S = 30

BatchFile = Annotated[Path, typer.Argument(help="A batch file; examples/mixed_batch.yaml shows all that it can say.")]


def run(
    batch_file: BatchFile,
    as_json: AsJson = False,
    resume: Annotated[
        bool, typer.Option(help="Go on with the last run of this batch, which did not end well.")
    ] = False,
    checkpoint_every: Annotated[
        float | None,
        typer.Option(help="Seconds between checkpoints; by default from what one costs.", min=0.1),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the planner.")] = 0,
) -> None:
    """Profile, plan, train, evaluate and record the jobs of a batch file; while a pool is up, on the pool."""
    from tasks.batch import load_batch

    batch = load_batch(batch_file)
    raise typer.Exit(train(batch, resume=resume, checkpoint_every=checkpoint_every, seed=seed, as_json=as_json))


def train(
    batch: Batch, *, resume: bool = False, checkpoint_every: float | None = None, seed: int = 0, as_json: bool = False
) -> int:
    """Trains a batch under a view of its progress and prints what came of it; returns the exit code."""
    home = settings.home()
    settings.embed(home)
    if settings.pool() is None:
        from flows.workshop import warm_up

        warm_up(batch)
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

    from flows.report import print_report
    from flows.train_batch import train_batch
    from flows.views import shown

    console = error_console()
    # Nobody watches an embedded run's heartbeat, and ending its thread costs a second. A pool's server does.
    heartbeat_s = None if settings.pool() is None else HEARTBEAT_S
    with shown(console), temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: heartbeat_s}):
        result = train_batch(
            batch.to_json(), name=batch.name, resume=resume, checkpoint_every_s=checkpoint_every, seed=seed
        )
    print_report(result, console, home=home)
    if as_json:
        print_json(result.to_json())
    return result.exit_code


def profile(
    batch_file: BatchFile,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the planning problem is written.")],
    as_json: AsJson = False,
) -> None:
    """Measure the jobs of a batch file, and write what is to be planned: `ringmaster plan` reads it."""
    from tasks.batch import load_batch

    batch = load_batch(batch_file)
    settings.embed(settings.home())
    from flows.profile_batch import profile_batch
    from flows.views import shown

    console = error_console()
    with shown(console):
        measured = profile_batch(batch.to_json())
    for name, fault in measured.profiled.faults.items():
        console.print(f"[red]{name}:[/] {escape(fault)}", highlight=False)
    if measured.problem is not None:
        output.write_text(json.dumps(measured.problem.to_json(), indent=1) + "\n")
        num_jobs, num_trials = len(measured.problem.jobs), measured.profiled.num_trials
        console.print(f"{num_trials} trials; {num_jobs} jobs to plan in {output}", highlight=False)
    if as_json:
        print_json(measured.to_json())
    raise typer.Exit(1 if measured.profiled.faults else 0)

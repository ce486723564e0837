"""The command line. Results go to stdout, all else to stderr; exit 0 done, 2 a fault in the input, 1 anything else."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from flows import settings

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Trains batches of models: parallelism, devices and schedule chosen by one certified optimizer.",
)

INPUT_FAULT, FAILURE = 2, 1

BatchFile = Annotated[Path, typer.Argument(help="A batch file; examples/mixed_batch.yaml shows all that it can say.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]


@app.command()
def run(
    batch_file: BatchFile,
    as_json: AsJson = False,
    resume: Annotated[bool, typer.Option(help="Go on with the last run of this batch, which was interrupted.")] = False,
    checkpoint_every: Annotated[
        float | None,
        typer.Option(help="Seconds between checkpoints; by default from what one costs.", min=0.1),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the planner.")] = 0,
) -> None:
    """Profile, plan, train, evaluate and record the jobs of a batch file."""
    from tasks.batch import load_batch

    batch = load_batch(batch_file)
    home = settings.home()
    settings.embed(home)
    from flows.workshop import warm_up

    warm_up(batch)
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

    from flows.report import print_report
    from flows.train_batch import train_batch
    from flows.views import LinesView, LiveView, current_view

    console = Console(stderr=True)
    view = LiveView(console) if console.is_terminal else LinesView(console)
    current_view.set(view)
    # Nobody watches an embedded run's heartbeat, and ending its thread costs a second.
    with view, temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        result = train_batch(
            batch.to_json(), name=batch.name, resume=resume, checkpoint_every_s=checkpoint_every, seed=seed
        )
    print_report(result, console, home=home)
    if as_json:
        _print_json(result.to_json())
    raise typer.Exit(result.exit_code)


@app.command()
def techniques(as_json: AsJson = False) -> None:
    """List the techniques, and what each needs."""
    from rich.table import Table

    from techniques import registry

    found = [(name, registry.load(registry.dotted_path(name))) for name in registry.names()]
    if as_json:
        _print_json([{"name": name, "summary": t.summary, "needs": t.needs} for name, t in found])
        return
    table = Table("technique", "what it does", "what it needs", box=None, header_style="bold")
    for name, technique in found:
        table.add_row(name, technique.summary, technique.needs)
    Console().print(table)


def _print_json(value: Any) -> None:
    json.dump(value, sys.stdout)
    sys.stdout.write("\n")


def main() -> None:
    """The entry point: faults in the input are told without a traceback."""
    from flows.faults import InputError
    from tasks.batch import BatchFileError
    from tasks.planning import ProblemError

    try:
        app(standalone_mode=False)
    except typer.Exit as leave:
        sys.exit(leave.exit_code)
    except typer.Abort:
        sys.exit(FAILURE)
    except (BatchFileError, ProblemError, InputError) as error:
        sys.stderr.write("\n".join(str(fault) for fault in error.faults) + "\n")
        sys.exit(INPUT_FAULT)


if __name__ == "__main__":
    main()

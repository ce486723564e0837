"""The command `ringmaster jobs clone`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ringmaster.flows.commands.pool import BatchName, Yes, consent, values_of
from ringmaster.flows.completion import job_names
from ringmaster.flows.output import AsJson, error_console, print_outcome

if TYPE_CHECKING:
    from ringmaster.flows.pool.batch_requests import ControllerAnswer


def clone(
    batch: BatchName,
    job: Annotated[
        str, typer.Argument(metavar="JOB", help="Name of the job to clone, in any state.", autocompletion=job_names)
    ],
    changes: Annotated[
        list[str],
        typer.Option("--set", metavar="KEY=VALUE", help="What differs, such as optimizer.lr=1e-4; may be repeated."),
    ] = [],  # noqa: B006 - never changed
    warm: Annotated[
        bool, typer.Option("--warm", help="Go on from the job's newest checkpoint, optimizer included.")
    ] = False,
    at_step: Annotated[
        int | None, typer.Option(help="With --warm: the step of an earlier checkpoint that is kept.", min=1)
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the clone; default: JOB-clone1, ...")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what it delays, and for whom.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Add a job to a batch that runs: one of its jobs with other settings. Its price is shown first."""
    from ringmaster.features.clones.batch_requests import clone_job
    from ringmaster.flows.pool.batch_requests import database_of

    def accept(priced: ControllerAnswer) -> None:
        error_console().print(priced.message, soft_wrap=True)
        if priced.jump:
            consent(priced.jump, is_given=dry_run or yes)

    with database_of(batch) as database:
        answer = clone_job(
            database,
            batch=batch,
            job=job,
            settings_of_clone=values_of(changes),
            name=name,
            is_warm=warm,
            at_step=at_step,
            is_dry=dry_run,
            accept=accept,
        )
    print_outcome(vars(answer), as_json=as_json)
    raise typer.Exit(0 if answer.is_done else 1)


COMMANDS = {"jobs": (clone,)}

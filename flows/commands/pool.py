"""Commands that change what a pool does: add jobs, cancel, pause and resume them, and say which matter more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ringmaster.errors import InputError
from ringmaster.flows.commands.running import show_result, training
from ringmaster.flows.examples import located
from ringmaster.flows.output import AsJson, error_console, print_json

BatchName = Annotated[
    str, typer.Argument(metavar="BATCH", help="A batch's name, or the id that `ringmaster status` shows.")
]
Jobs = Annotated[list[str] | None, typer.Argument(metavar="[JOB]...", help="Some of its jobs; all where left out.")]


def submit(
    jobs_file: Annotated[Path, typer.Argument(metavar="JOBS.yaml", help="A batch file with the jobs to add.")],
    batch: Annotated[str, typer.Option(help="The batch that they belong to, whether it runs already or not.")],
    wait: Annotated[bool, typer.Option("--wait", help="Follow them here to their end, as `run` does.")] = False,
    checkpoint_every: Annotated[
        float | None, typer.Option(help="Seconds between checkpoints; by default from what one costs.", min=0.1)
    ] = None,
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="Without a tiny step of each job here, where its data is not.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Add jobs to what the pool trains; they are measured and join the plan that all batches share."""
    from ringmaster.flows.pool.batch_requests import pool_address
    from ringmaster.tasks.batch import load_batch
    from ringmaster.tasks.batch.field_types import NAME_REMEDY, is_name

    pool = pool_address()
    if not is_name(batch):
        raise InputError([f"--batch {batch!r} is no name. To fix: {NAME_REMEDY}"])
    jobs = replace(load_batch(located(jobs_file)), name=batch)
    if not unchecked:
        from ringmaster.flows.batch.probe import check_jobs

        check_jobs(jobs)
    if wait:
        with training(jobs, is_verbose=False) as end:
            from ringmaster.flows.batch.context import as_parameter
            from ringmaster.flows.train_batch import train_batch

            end.result = train_batch(as_parameter(jobs), name=batch, checkpoint_every_s=checkpoint_every)
        raise typer.Exit(show_result(end.result, as_json=as_json))
    from ringmaster.flows.batch.context import batch_in_file
    from ringmaster.flows.pool.batch_requests import ANSWER_PATIENCE_S, in_time, open_database
    from ringmaster.tasks.pool.requests import Requests
    from ringmaster.tasks.pool.submissions import hand_over
    from ringmaster.tasks.storage.releases import check_release

    with open_database(pool) as database:
        database.read(check_release)
        requests = Requests(database)
        number = hand_over(requests, jobs.to_json(), file=batch_in_file(jobs), checkpoint_every_s=checkpoint_every)
        error_console().print(f"batch {batch} (jobs: {len(jobs.jobs)}) is handed over")
        with in_time(ANSWER_PATIENCE_S) as is_over:
            run = requests.wait(number, until=is_over).answer.get("flow_run")
    if run is None:
        said = "its flow run begins once a controller leads (`ringmaster pool controller`) and Prefect answers"
    else:
        said = f"its flow run: {pool.prefect_api.removesuffix('/api')}/runs/flow-run/{run}"
    follow = f"`ringmaster status {batch}` and `ringmaster watch` follow it"
    error_console().print(said, follow, sep="\n", soft_wrap=True)
    if as_json:
        print_json({"batch": batch, "jobs": [job.name for job in jobs.jobs], "flow_run": run})


def cancel(batch: BatchName, jobs: Jobs = None, as_json: AsJson = False) -> None:
    """End a batch, or some of its jobs, for good; those that run write a checkpoint first."""
    _ask("cancel", batch, jobs, as_json=as_json)


def pause(batch: BatchName, jobs: Jobs = None, as_json: AsJson = False) -> None:
    """Have a batch, or some of its jobs, stand still until `resume`; those that run write a checkpoint first."""
    _ask("pause", batch, jobs, as_json=as_json)


def resume(batch: BatchName, jobs: Jobs = None, as_json: AsJson = False) -> None:
    """Have the paused jobs of a batch, or some of them, go on from their checkpoints."""
    _ask("resume", batch, jobs, as_json=as_json)


def set_priority(
    batch: BatchName,
    priority: Annotated[float, typer.Argument(metavar="N", help="1 is usual; at 2 an end counts twice.")],
    jobs: Jobs = None,
    as_json: AsJson = False,
) -> None:
    """Say how much a batch, or some of its jobs, matters beside all others: the plan is made anew."""
    from ringmaster.tasks.pool.requests import MOST_PRIORITY

    if not 0 < priority <= MOST_PRIORITY:
        what = f"a priority is a number above 0 and at most {MOST_PRIORITY:.0f}, not {priority:g}"
        raise InputError([f"{what}. To fix: 1 is usual, 2 counts twice"])
    _ask("set-priority", batch, jobs, as_json=as_json, priority=priority)


def _ask(kind: str, batch: str, jobs: list[str] | None, *, as_json: bool, **more: Any) -> None:
    """Asks, and prints what the controller answers; exit 1 where none has answered yet."""
    from ringmaster.flows.pool.batch_requests import ask_about, open_database, pool_address
    from ringmaster.tasks.pool.requests import RequestKind

    with open_database(pool_address()) as database:
        answers = ask_about(database, RequestKind(kind), batch=batch, jobs=jobs or (), **more)
    if as_json:
        print_json([vars(answer) for answer in answers])
    else:
        console = error_console()
        for answer in answers:
            console.print(f"{answer.batch}: {answer.message}")
    raise typer.Exit(0 if all(answer.is_done for answer in answers) else 1)

"""Commands that train: a batch or its first stage alone, a sweep, and the retraining of production models."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ringmaster.errors import InputError
from ringmaster.flows import settings
from ringmaster.flows.batch.run_options import ProfilingMode, RunOptions
from ringmaster.flows.interrupts import Interrupts
from ringmaster.flows.output import (
    AsJson,
    Verbose,
    announce,
    error_console,
    message,
    output_console,
    print_json,
    print_lines,
    print_outcome,
    print_rows,
    styled,
    working,
    write_file,
)
from ringmaster.flows.resident_processes import resident_processes
from ringmaster.flows.settings import resolve_path

if TYPE_CHECKING:
    from ringmaster.flows.batch.dry_run import DryRun
    from ringmaster.flows.batch.result import BatchResult
    from ringmaster.flows.caller import Caller
    from ringmaster.tasks.batch import Batch

HEARTBEAT_S = 30
STARTING_SERVERS = "starting Prefect's server for this run, usually 10 s, and opening MLflow's records"

BatchFile = Annotated[Path, typer.Argument(help="Batch file; examples/mixed_batch.yaml shows its settings.")]
PlannerSeed = Annotated[int, typer.Option(help="Seed of the planner (ignored on a pool).", min=0)]
CheckpointEvery = Annotated[
    float | None, typer.Option(help="Seconds between checkpoints; default: derived from the cost of one.", min=0.1)
]


def run(
    context: typer.Context,
    batch_file: BatchFile,
    as_json: AsJson = False,
    resume: Annotated[bool, typer.Option(help="Resume the last unfinished run of this batch.")] = False,
    checkpoint_every: CheckpointEvery = None,
    seed: PlannerSeed = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only plan: show when it would end, and what that would cost.")
    ] = False,
    ask: Annotated[bool, typer.Option("--ask", help="Show the plan, and ask before anything is trained.")] = False,
    profiles: Annotated[
        ProfilingMode,
        typer.Option(help="Predict unknown runtimes, as a run does, or measure them; with --dry-run and --ask."),
    ] = "predict",
    engine: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Engine of the segments; default: RINGMASTER_ENGINE, or `local`. A pool's controller has its own.",
        ),
    ] = "",
    data: Annotated[
        Path | None, typer.Option(help="Rows of a Ludwig configuration, which then is the batch file.", exists=True)
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Profile, plan, train, evaluate and record the jobs of a batch file; while a pool is up, on the pool."""
    if dry_run and ask:
        raise InputError(["--dry-run trains nothing, so there is nothing to --ask. To fix: give one of the two"])
    settings.choose_engine(engine)
    interrupts = context.ensure_object(Interrupts)
    with working(f"reading {batch_file}"):
        from ringmaster.tasks.batch import load_batch

        batch = load_batch(resolve_path(batch_file), data=data)
    settings.check_checkpoint_root(settings.checkpoint_root())  # before servers and workers are started
    if dry_run or ask:
        exit_code = _plan_only(
            batch,
            profiles=profiles,
            seed=seed,
            is_resumed=resume,
            is_result=dry_run,
            as_json=as_json,
            interrupts=interrupts,
        )
        if dry_run:
            raise typer.Exit(exit_code)
        typer.confirm("Train it?", err=True, abort=True)
    options = RunOptions(resume=resume, checkpoint_every_s=checkpoint_every, seed=seed)
    result = train_and_show(batch, options, is_verbose=verbose, interrupts=interrupts)
    raise typer.Exit(show_result(result, as_json=as_json))


def _plan_only(
    batch: Batch,
    *,
    profiles: ProfilingMode,
    seed: int,
    is_resumed: bool,
    is_result: bool,
    as_json: bool,
    interrupts: Interrupts,
) -> int:
    """Plans a batch and shows the plan; returns the exit code.

    is_resumed: whether to plan what the last run of the batch has left.
    is_result: whether the plan is the result of the command, and goes to stdout.
    """
    result = estimate(batch, profiles=profiles, seed=seed, is_resumed=is_resumed, interrupts=interrupts)
    if as_json and is_result:
        print_json(result.to_json())
        return result.exit_code
    page = output_console() if is_result else error_console()
    if result.plan is not None and result.problem is not None:
        from ringmaster.flows.reports.plan_report import print_gantt

        print_gantt(result.plan, result.problem, page)
    print_lines(page, result.sentences())
    return result.exit_code


def estimate(
    batch: Batch, *, profiles: ProfilingMode, seed: int, is_resumed: bool = False, interrupts: Interrupts
) -> DryRun:
    """Plans a batch that is not trained, and shows the progress of that."""
    settings.prepare_environment(settings.home())
    with working("loading what looks at jobs and plans; no server is started"):
        from ringmaster.flows.batch.dry_run import dry_run
        from ringmaster.flows.caller import opened_caller

    with opened_caller(interrupts) as caller:
        return dry_run(batch, profiles=profiles, seed=seed, is_resumed=is_resumed, caller=caller)


def train_and_show(
    batch: Batch,
    options: RunOptions = RunOptions(),
    *,
    is_verbose: bool = False,
    interrupts: Interrupts | None = None,
) -> BatchResult:
    """Trains a batch, and shows its progress.

    interrupts: the signals that the command handles, if it does.
    """
    interrupts = interrupts or Interrupts()
    with prepared_caller(batch, interrupts=interrupts, is_verbose=is_verbose, is_resumed=options.resume) as caller:
        from ringmaster.flows.batch.flow_runs import result_of
        from ringmaster.flows.train_batch import train_batch

        return result_of(partial(train_batch, batch, name=batch.name, **asdict(options), caller=caller))


def train_or_resume(batch: Batch) -> BatchResult:
    """Trains a batch whose models a command promotes, or what an interrupted call of the same command has left of it.

    Raises typer.Exit where it is interrupted.
    """
    settings.prepare_environment(settings.home())  # before Prefect is imported
    from ringmaster.flows.retraining.train_models import can_go_on

    result = train_and_show(batch, RunOptions(resume=can_go_on(batch)))
    if result.status == "interrupted":
        error_console().print("interrupted: nothing is promoted, and the same command continues the training")
        raise typer.Exit(result.exit_code)
    return result


@contextmanager
def prepared_caller(
    batch: Batch | None, *, interrupts: Interrupts, is_verbose: bool, is_resumed: bool = False
) -> Iterator[Caller]:
    """Prepares this process for a flow that trains, and shows its progress. Import Prefect inside the context only.

    Yields the caller of the flow, with the servers that it has started for a run without a pool.

    batch: the jobs; None where the flow chooses them.
    interrupts: the signals that the command handles.
    is_resumed: whether an earlier run is resumed, whose finished jobs are not inspected again.
    """
    settings.prepare_environment(settings.home())
    is_alone, resident = settings.checked_pool() is None, resident_processes()
    with ExitStack() as stack:
        with working(STARTING_SERVERS) if is_alone else nullcontext(announce) as notice:
            prefect = fork_server = preflight = kept = None
            if is_alone:
                from ringmaster.flows.services.first_processes import fork_server_for, start_prefect

                kept = stack.enter_context(resident.use(settings.home()))
            if is_alone and batch is not None:
                from ringmaster.tasks.background_worker import in_a_thread

                fork_server = fork_server_for(batch.jobs, kept=kept)
                stack.callback(fork_server.close)
                # If it fails, its first user starts it again and gets the error.
                in_a_thread("fork server", fork_server.start)
            if is_alone:
                prefect = start_prefect(kept=kept, stays=resident.stays())
            if fork_server is not None:
                stack.callback(resident.hand_over, settings.home(), fork_server=fork_server, prefect=prefect)
                from ringmaster.flows.batch import context

                assert batch is not None
                home = settings.home()
                if not is_resumed:
                    preflight = context.start_preflight(batch, server=fork_server, home=home, notice=notice)
                context.warm_up_ledger(context.ledger_of(home, notice=notice), batch)
            from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

            from ringmaster.flows.caller import opened_caller

        started = {"prefect": prefect, "fork_server": fork_server, "preflight": preflight}
        caller = stack.enter_context(opened_caller(interrupts, is_verbose=is_verbose, **started))
        # Nobody watches an embedded run's heartbeat, and ending its thread costs a second. A pool's server does.
        heartbeat_s = None if is_alone else HEARTBEAT_S
        stack.enter_context(temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: heartbeat_s}))
        yield caller


def show_result(result: BatchResult, *, as_json: bool) -> int:
    """Prints the result of a batch; returns the exit code."""
    from ringmaster.flows.reports.plan_report import print_report

    print_report(result, error_console(), home=settings.home())
    print_outcome(result.to_json(), as_json=as_json)
    if settings.checked_pool() is None and not resident_processes().stays():
        announce("ending Prefect's server of this run")
    return result.exit_code


def profile(
    context: typer.Context,
    batch_file: BatchFile,
    output: Annotated[Path, typer.Option("--output", "-o", help="File for the planning problem.")],
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Measure the jobs of a batch file, and write what is to be planned: `ringmaster plan` reads it."""
    from ringmaster.tasks.batch import load_batch

    batch = load_batch(resolve_path(batch_file))
    settings.prepare_environment(settings.home())
    from ringmaster.flows.batch.dry_run import profile_batch
    from ringmaster.flows.caller import opened_caller

    console = error_console()
    with opened_caller(context.ensure_object(Interrupts), is_verbose=verbose) as caller:
        measured = profile_batch(batch, caller=caller)
    for name, fault in measured.profiled.faults.items():
        console.print(styled(f"{name}:", "red"), message(fault))
    if measured.problem is not None:
        write_file(output, json.dumps(measured.problem.to_json(), indent=1) + "\n")
        num_jobs, num_trials = len(measured.problem.jobs), measured.profiled.num_trials
        console.print(f"{num_trials} trials; {num_jobs} jobs to plan in {output}")
    print_outcome(measured.to_json(), as_json=as_json)
    raise typer.Exit(2 if measured.profiled.unfit else 1 if measured.profiled.faults else 0)


def sweep(
    context: typer.Context,
    sweep_file: Annotated[Path, typer.Argument(help="Sweep file; examples/sweep.yaml shows its settings.")],
    as_json: AsJson = False,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the last unfinished run of this sweep.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only plan all trials to their ends, which early stopping spares some.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Train one job under many values as one planned batch, stop what is not worth it, and rank the rest."""
    with working(f"reading {sweep_file}"):
        from ringmaster.flows.sweep_form import check_name, load_sweep, spec_of

        form = load_sweep(resolve_path(sweep_file))
        batch = spec_of(form).batch()
    interrupts = context.ensure_object(Interrupts)
    if dry_run:
        from ringmaster.flows.batch.context import ledger_of

        check_name(form, ledger_of(settings.home(), notice=announce))
        raise typer.Exit(
            _plan_only(
                batch,
                profiles="predict",
                seed=form.seed,
                is_resumed=resume,
                is_result=True,
                as_json=as_json,
                interrupts=interrupts,
            )
        )
    with prepared_caller(batch, interrupts=interrupts, is_verbose=verbose, is_resumed=resume) as caller:
        from ringmaster.flows.batch.flow_runs import result_of
        from ringmaster.flows.sweep import sweep as sweep_flow

        result = result_of(lambda: sweep_flow(**form.parameters(), resume=resume, caller=caller))
    console = error_console()
    print_rows(console, result["leaderboard"])
    if (won := result["best"]) is not None:
        from ringmaster.flows.sweep import winner_lines

        metric, num_trials = f"held-out {result['metric']}", len(result["leaderboard"])
        console.print(f"the best of {num_trials} trials: {won['job']}, {metric} {won[metric]:.4g}", soft_wrap=True)
        print_lines(console, winner_lines(won, folder=result["folder"], challenger=result["challenger"]))
    print_lines(console, result["notes"])
    print_lines(console, [f"not recorded: {fault}" for fault in result["faults"]], style="yellow")
    if result["batch"]["faults"]:
        console.print("To fix: remove the cause, and `ringmaster sweep SWEEP.yaml --resume` records the rest")
    print_outcome(result, as_json=as_json)
    raise typer.Exit(exit_code(result))


def retrain(
    context: typer.Context,
    models_file: Annotated[Path, typer.Argument(help="File of models, such as examples/retraining.yaml.")],
    night: Annotated[
        str | None, typer.Option(help="Date of the run, such as 2026-11-20; default: that of the last start.")
    ] = None,
    force: Annotated[list[str], typer.Option(help="Model to train in any case; may be given again.")] = [],  # noqa: B006
    forget: Annotated[
        str | None, typer.Option(help="Train nothing: forget the run of a date, which a wrong clock began.")
    ] = None,
    as_json: AsJson = False,
    seed: PlannerSeed = 0,
    verbose: Verbose = False,
) -> None:
    """Train the production models that are due, as many as fit before the deadline, and promote the better ones.

    A retraining run is stored under its date: repeated, it resumes where it was interrupted, runs the models again that
    failed, and trains nothing twice.
    """
    with working(f"reading {models_file}"):
        from ringmaster.tasks.retraining.production import load_production

        # An invalid file is reported before slow imports.
        production = load_production(models_file)
    if forget is not None:
        settings.prepare_environment(settings.home())
        from ringmaster.flows.retraining.retraining_run import forget_run

        forget_run(production, forget)
        print_outcome({"name": production.name, "forgotten": forget}, [f"{forget} is forgotten"], as_json=as_json)
        return
    with prepared_caller(None, interrupts=context.ensure_object(Interrupts), is_verbose=verbose) as caller:
        from ringmaster.flows.batch.flow_runs import result_of
        from ringmaster.flows.retrain_daily import retrain_daily

        result = result_of(
            lambda: retrain_daily(file=str(models_file), night=night, force=force, seed=seed, caller=caller)
        )
    from rich.markdown import Markdown

    error_console().print(Markdown(result["report"], hyperlinks=False))
    print_outcome(result, as_json=as_json)
    raise typer.Exit(exit_code(result))


def exit_code(result: Mapping[str, Any]) -> int:
    """Returns 0 if a sweep or a retraining run is done and all of it is recorded, else 1."""
    return 0 if result["status"] == "done" and not result["faults"] else 1

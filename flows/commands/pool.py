"""Commands of a pool: its processes, and requests that add, cancel, pause, resume and prioritize jobs."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ringmaster.errors import InputError
from ringmaster.flows import settings
from ringmaster.flows.commands.running import CheckpointEvery, PlannerSeed, show_result, training
from ringmaster.flows.output import AsJson, error_console, print_json
from ringmaster.flows.process.process_log import ProcessRole, log_to_stderr, notice

pool_app = typer.Typer(no_args_is_help=True, help="The processes of a pool: its controller, and a worker on each node.")
jobs_app = typer.Typer(
    no_args_is_help=True, help="Cancel, pause and resume jobs that a pool trains, and set their priorities."
)

LOOK_EVERY_S = 1.0  # for a pool that is not there yet
NO_DEVICES = "none"
LONGEST_DRAIN_S = 25.0  # of the 30 s that a spot notice gives

BatchName = Annotated[
    str, typer.Argument(metavar="BATCH", help="Name of a batch, or the id that `ringmaster status` shows.")
]
Jobs = Annotated[list[str] | None, typer.Argument(metavar="[JOB]...", help="Names of its jobs; default: all jobs.")]


@pool_app.command()
def controller(
    seed: PlannerSeed = 0,
    engine: Annotated[
        str, typer.Option(metavar="NAME", help="Engine of the segments; default: RINGMASTER_ENGINE, or `workers`.")
    ] = "",
) -> None:
    """Plan and decide for the pool, until SIGTERM or Ctrl-C; where another controller leads, stand by for it.

    One a pool is enough; a second one, on another machine, takes over within seconds where the first one dies.
    """
    from ringmaster.flows.pool.batch_requests import pool_address

    log_to_stderr(ProcessRole.CONTROLLER)
    settings.choose_engine(engine)
    pool = pool_address()
    settings.embed(settings.home())
    from ringmaster.flows.pool.controller import serve_pool

    serve_pool(pool, notice=notice, seed=seed)


@pool_app.command()
def worker(
    name: Annotated[str | None, typer.Option(help="Name of this node in the pool; default: the machine's.")] = None,
    devices: Annotated[
        str, typer.Option(help="auto (the GPUs, or else CPU slots), cpu:N, gpu:N, gpu:all, or none with --flows.")
    ] = "auto",
    flows: Annotated[bool, typer.Option("--flows", help="Run flows here, in addition to segments of jobs.")] = False,
    address: Annotated[
        str | None,
        typer.Option(help="Address of this node for other nodes; default: the one that reaches the pool."),
    ] = None,
    drain: Annotated[
        float, typer.Option(help="Seconds that running jobs have to write a checkpoint when the worker ends.", min=0.0)
    ] = LONGEST_DRAIN_S,
) -> None:
    """Serve this machine's devices as a node of the pool, until SIGTERM or Ctrl-C: jobs then write a checkpoint."""
    from ringmaster.flows.pool.own_node import NodeOptions, cluster_of, node_name

    log_to_stderr(ProcessRole.NODE)
    if devices == NO_DEVICES and not flows:
        raise InputError(["--devices none serves nothing. To fix: add --flows, or leave out --devices"])
    name = node_name(name)
    cluster = cluster_of(devices) if devices != NO_DEVICES else None
    pool = _wait_for_pool()
    settings.embed(settings.home())
    from ringmaster.flows.pool import node

    if cluster is None:
        node.serve_flows(pool, name=name, notice=notice)
        return
    os.environ[settings.OWN_NODE] = name  # for the flows that run here, which measure on these devices
    options = NodeOptions(
        home=settings.home(),
        pool=pool,
        name=name,
        cluster=cluster,
        address=address,
        allocation=os.environ.get(settings.ALLOCATION, ""),
        serves_flows=flows,
        drain_s=drain,
    )
    if not node.serve_node(options, notice=notice):
        raise typer.Exit(1)


def _wait_for_pool() -> settings.PoolAddress:
    """Returns the pool that this home belongs to, once it is named: machines start in any order."""
    has_notified = False
    while (pool := settings.pool()) is None:
        if not has_notified:
            where = f"{settings.pool_file(settings.home())} is not there yet"
            how = "`ringmaster up` in this home writes it; RINGMASTER_DATABASE and its servers name a pool elsewhere"
            notice(f"waiting for a pool: {where} ({how})")
            has_notified = True
        time.sleep(LOOK_EVERY_S)
    return pool


def submit(
    jobs_file: Annotated[Path, typer.Argument(metavar="JOBS.yaml", help="Batch file with the jobs to add.")],
    batch: Annotated[str, typer.Option(help="Batch to which the jobs belong, whether it runs already or not.")],
    wait: Annotated[bool, typer.Option("--wait", help="Follow the jobs here to their end, as `run` does.")] = False,
    checkpoint_every: CheckpointEvery = None,
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="Skip the tiny step of each job here, where its data is not.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Add jobs to what the pool trains; they are measured and join the plan that all batches share."""
    from ringmaster.flows.pool.batch_requests import ANSWER_PATIENCE_S, in_time, open_database, pool_address
    from ringmaster.tasks.batch import load_batch
    from ringmaster.tasks.batch.references import NAME_REMEDY, is_name

    pool = pool_address()
    if not is_name(batch):
        raise InputError([f"--batch {batch!r} is not a valid name. To fix: {NAME_REMEDY}"])
    jobs = replace(load_batch(settings.located(jobs_file)), name=batch)
    if not unchecked:
        from ringmaster.flows.reports.technique_report import check_jobs

        check_jobs(jobs)
    if wait:
        with training(jobs, is_verbose=False) as end:
            from ringmaster.flows.train_batch import train_batch

            end.result = train_batch(jobs, name=batch, checkpoint_every_s=checkpoint_every)
        raise typer.Exit(show_result(end.result, as_json=as_json))
    from ringmaster.flows.batch.batch_input import batch_in_file
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
        where = "its flow run begins once a controller leads (`ringmaster pool controller`) and Prefect answers"
    else:
        where = f"its flow run: {pool.prefect_api.removesuffix('/api')}/runs/flow-run/{run}"
    follow = f"`ringmaster status {batch}` and `ringmaster watch` follow it"
    error_console().print(where, follow, sep="\n", soft_wrap=True)
    if as_json:
        print_json({"batch": batch, "jobs": [job.name for job in jobs.jobs], "flow_run": run})


@jobs_app.command()
def cancel(batch: BatchName, jobs: Jobs = None, as_json: AsJson = False) -> None:
    """End a batch, or some of its jobs, for good; those that run write a checkpoint first."""
    _request("cancel", batch, jobs, as_json=as_json)


@jobs_app.command()
def pause(batch: BatchName, jobs: Jobs = None, as_json: AsJson = False) -> None:
    """Have a batch, or some of its jobs, stand still until `resume`; those that run write a checkpoint first."""
    _request("pause", batch, jobs, as_json=as_json)


@jobs_app.command()
def resume(batch: BatchName, jobs: Jobs = None, as_json: AsJson = False) -> None:
    """Have the paused jobs of a batch, or some of them, go on from their checkpoints."""
    _request("resume", batch, jobs, as_json=as_json)


@jobs_app.command()
def set_priority(
    batch: BatchName,
    priority: Annotated[float, typer.Argument(metavar="N", help="Weight of an end; 1 is usual, 2 counts twice.")],
    jobs: Jobs = None,
    as_json: AsJson = False,
) -> None:
    """Say how much a batch, or some of its jobs, matters beside all others: the plan is made anew."""
    from ringmaster.tasks.pool.requests import MOST_PRIORITY

    if not 0 < priority <= MOST_PRIORITY:
        valid = f"must be a number above 0 and at most {MOST_PRIORITY:.0f}, got {priority:g}"
        raise InputError([f"a priority {valid}. To fix: 1 is usual, 2 counts twice"])
    _request("set-priority", batch, jobs, as_json=as_json, priority=priority)


def _request(kind: str, batch: str, jobs: list[str] | None, *, as_json: bool, **more: Any) -> None:
    """Sends the controller a request, and prints its answers; exit 1 where none has answered yet."""
    from ringmaster.flows.pool.batch_requests import ask_about, open_database, pool_address
    from ringmaster.tasks.pool.requests import RequestKind

    with open_database(pool_address()) as database:
        answers = ask_about(database, RequestKind(kind), batch=batch, jobs=jobs or (), **more)
    if as_json:
        print_json([vars(answer) for answer in answers])
    else:
        for answer in answers:
            error_console().print(f"{answer.batch}: {answer.message}")
    raise typer.Exit(0 if all(answer.is_done for answer in answers) else 1)

"""Commands of a pool: its processes, and requests that add, change, cancel, pause and resume jobs."""

import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urljoin

import typer

from ringmaster.errors import InputError, raise_faults
from ringmaster.features import modules
from ringmaster.flows import settings
from ringmaster.flows.batch.run_options import RunOptions
from ringmaster.flows.commands.parameters import internal
from ringmaster.flows.commands.running import CheckpointEvery, PlannerSeed, show_result, train_and_show
from ringmaster.flows.completion import batch_names, job_names
from ringmaster.flows.interrupts import Interrupts
from ringmaster.flows.output import (
    LOG_FORMAT,
    AsJson,
    LogFormat,
    ProcessRole,
    announce,
    error_console,
    log_to_stderr,
    notice,
    print_lines,
    print_outcome,
    print_result,
)
from ringmaster.flows.output import log_format as format_of_environment
from ringmaster.flows.resident_processes import resident_processes
from ringmaster.flows.services import server_answers
from ringmaster.tasks.execution.engine_registry import BUILTIN, LOCAL, WORKERS
from ringmaster.tasks.pool.engines import ALLOCATION, default_of, engine_flags, engine_options

pool_app = typer.Typer(no_args_is_help=True, help="The processes of a pool: its controller, and a worker on each node.")
jobs_app = typer.Typer(
    no_args_is_help=True,
    help="Change, cancel, pause and resume jobs of a batch that runs, here or on a pool, or add jobs like them.",
)

LOOK_EVERY_S = 1.0  # for a pool that is not there yet
NO_DEVICES = "none"
LONGEST_DRAIN_S = 25.0  # of the 30 s that a spot notice gives

BatchName = Annotated[
    str,
    typer.Argument(
        metavar="BATCH", help="Name of a batch, or the id that `ringmaster status` shows.", autocompletion=batch_names
    ),
]
Yes = Annotated[
    bool, typer.Option("--yes", help="Do not ask for confirmation where a change makes the size of a step jump.")
]
Jobs = Annotated[
    list[str] | None,
    typer.Argument(metavar="[JOB]...", help="Names of its jobs; default: all jobs.", autocompletion=job_names),
]


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
    server_answers.timeout_s.set(None)
    settings.choose_engine(engine)
    pool = pool_address()
    settings.prepare_environment(settings.home())
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
    untrusted: Annotated[
        bool, typer.Option("--untrusted", help="Train only jobs with `allow_untrusted`; trusted nodes verify samples.")
    ] = False,
) -> None:
    """Serve this machine's devices as a node of the pool, until SIGTERM or Ctrl-C: jobs then write a checkpoint."""
    from ringmaster.flows.pool.own_node import NodeOptions, cluster_of, node_name

    log_to_stderr(ProcessRole.NODE)
    server_answers.timeout_s.set(None)
    if devices == NO_DEVICES and not flows:
        raise InputError(["--devices none serves nothing. To fix: add --flows, or leave out --devices"])
    name = node_name(name)
    cluster = cluster_of(devices) if devices != NO_DEVICES else None
    if cluster is not None and untrusted:
        cluster = cluster.untrusted()
    pool = _wait_for_pool()
    settings.prepare_environment(settings.home())
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
        allocation=os.environ.get(ALLOCATION, ""),
        serves_flows=flows,
        drain_s=drain,
    )
    if not node.serve_until_stopped(options, notice=notice):
        raise typer.Exit(1)


@pool_app.command()
def calibrate(
    devices: Annotated[str, typer.Option(help="The devices as `pool worker` serves them.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Store the bits that this trusted machine computes, without which no untrusted node of its kind may serve."""
    from ringmaster.flows.pool.batch_requests import open_database
    from ringmaster.flows.pool.own_node import calibration_of, cluster_of
    from ringmaster.tasks.pool.nodes import NodeRegistry

    cluster = cluster_of(devices)
    bits = calibration_of(cluster)
    with open_database(_wait_for_pool()) as database:
        NodeRegistry(database).set_reference(cluster.device_kind(), bits)
    kind = cluster.device_kind()
    line = f"untrusted nodes with {kind} may serve if they compute {bits}"
    print_outcome({"device_kind": kind, "bits": bits}, [line], as_json=as_json)


def _wait_for_pool() -> settings.PoolAddress:
    """Returns the pool that this home belongs to, once it runs: machines start in any order."""
    is_told = False
    while (fault := settings.pool_fault()) is not None or (pool := settings.checked_pool()) is None:
        if not is_told:
            where = f"{settings.pool_file(settings.home())} is not there yet"
            how = "`ringmaster up` in this home writes it; RINGMASTER_DATABASE and its servers name a pool elsewhere"
            notice(f"waiting for a pool: {fault or f'{where} ({how})'}")
            is_told = True
        time.sleep(LOOK_EVERY_S)
    return pool


def submit(
    context: typer.Context,
    jobs_file: Annotated[Path, typer.Argument(metavar="JOBS.yaml", help="Batch file with the jobs to add.")],
    batch: Annotated[str, typer.Option(help="Batch to which the jobs belong, whether it runs already or not.")],
    wait: Annotated[bool, typer.Option("--wait", help="Follow the jobs here until they end, as `run` does.")] = False,
    checkpoint_every: CheckpointEvery = None,
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="Skip the tiny step of each job here, where its data is not.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Add jobs to what the pool trains; they are measured and join the plan that all batches share."""
    from ringmaster.flows.pool.batch_requests import open_database, pool_address, submit_batch
    from ringmaster.tasks.batch import load_batch
    from ringmaster.tasks.batch.references import NAME_REMEDY
    from ringmaster.techniques.job_features import is_name

    pool = pool_address()
    if not is_name(batch):
        raise InputError([f"--batch {batch!r} is not a valid name. To fix: {NAME_REMEDY}"])
    jobs = replace(load_batch(settings.resolve_path(jobs_file)), name=batch)
    if not unchecked:
        from ringmaster.flows.batch.job_checks import check_jobs

        check_jobs(jobs)
    if wait:
        options, interrupts = RunOptions(checkpoint_every_s=checkpoint_every), context.ensure_object(Interrupts)
        raise typer.Exit(show_result(train_and_show(jobs, options, interrupts=interrupts), as_json=as_json))
    with open_database(pool) as database:
        run = submit_batch(
            database, jobs, checkpoint_every_s=checkpoint_every, notice=lambda text: error_console().print(text)
        )
    page = f"its flow run: {pool.prefect_api.removesuffix('/api')}/runs/flow-run/{run}"
    later = "its flow run begins once a controller leads (`ringmaster pool controller`) and Prefect answers"
    follow = f"`ringmaster status {batch}` and `ringmaster watch` follow it"
    result = {"batch": batch, "jobs": [job.name for job in jobs.jobs], "flow_run": run}
    print_outcome(result, [page if run else later, follow], as_json=as_json)


@jobs_app.command()
def cancel(batch: BatchName, jobs: Jobs = None, as_json: AsJson = False) -> None:
    """End a batch, or some of its jobs, for good; those that run write a checkpoint first."""
    _request("cancel", batch, jobs, as_json=as_json)


@jobs_app.command()
def pause(batch: BatchName, jobs: Jobs = None, as_json: AsJson = False) -> None:
    """Pause a batch, or some of its jobs, until `jobs resume`; those that run write a checkpoint first."""
    _request("pause", batch, jobs, as_json=as_json)


@jobs_app.command()
def resume(batch: BatchName, jobs: Jobs = None, as_json: AsJson = False) -> None:
    """Continue the paused jobs of a batch, or some of them, from their checkpoints."""
    _request("resume", batch, jobs, as_json=as_json)


@jobs_app.command("set")
def set_of_jobs(
    batch: BatchName,
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[JOB]... KEY=VALUE...",
            help="Jobs, by default all, and what is set of them: steps, weight, deadline (seconds from the batch's "
            "start) or priority (1 is usual, 2 counts twice).",
            autocompletion=job_names,
        ),
    ],
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Change the steps, weight, deadline or priority of jobs that run or wait: the plan is made again."""
    from ringmaster.tasks.control.job_changes import setting_faults

    settings_of_jobs, jobs = (
        values_of(word for word in words if "=" in word),
        [word for word in words if "=" not in word],
    )
    raise_faults(setting_faults(settings_of_jobs))
    if "steps" in settings_of_jobs and not yes:
        from ringmaster.flows.pool.batch_requests import ask_about, database_of
        from ringmaster.tasks.control.requests import RequestKind

        with database_of(batch) as database:
            answers = ask_about(
                database, RequestKind.SET, batch=batch, jobs=jobs, settings=settings_of_jobs, is_dry=True
            )
        if jumps := [answer.message for answer in answers if "learning rate jumps" in answer.message]:
            consent("; ".join(jumps), is_given=False)
    _request("set", batch, jobs, as_json=as_json, settings=settings_of_jobs)


def consent(what: str, *, is_given: bool) -> None:
    """Prints how the size of a step jumps, and asks for confirmation. Raises InputError where nobody can answer."""
    if not (is_given or sys.stdin.isatty()):
        raise InputError([f"{what}, which may harm the training. To fix: add --yes if it is meant"])
    error_console().print(what, style="yellow", soft_wrap=True)
    if not is_given:
        typer.confirm("Go on?", err=True, abort=True)


def values_of(words: Iterable[str]) -> dict[str, Any]:
    """Returns settings written as KEY=VALUE, with values as in batch files. Raises InputError with all faults."""
    from ringmaster.tasks.batch import document

    values: dict[str, Any] = {}
    faults = []
    for word in words:
        key, _, text = word.partition("=")
        value = document.read(f"value: {text}")
        if not key or not text.strip() or value.data is None or value.findings or len(value.data) != 1:
            faults.append(f"{word!r} is not KEY=VALUE. To fix: write it like optimizer.lr=1e-4")
        elif key in values:
            faults.append(f"{key} is given twice. To fix: give it once")
        else:
            values[key] = value.data["value"]
    raise_faults(faults)
    return values


def _request(kind: str, batch: str, jobs: list[str] | None, *, as_json: bool, **more: Any) -> None:
    """Sends a request to what executes the batch, and prints its answers; exit 1 where none has answered yet."""
    from ringmaster.flows.pool.batch_requests import ask_about, database_of
    from ringmaster.tasks.control.requests import RequestKind

    with database_of(batch) as database:
        answers = ask_about(database, RequestKind(kind), batch=batch, jobs=jobs or (), **more)
    values = [{key: getattr(answer, key) for key in ("batch", "is_done", "message")} for answer in answers]
    lines = [] if as_json else [f"{answer.batch}: {answer.message}" for answer in answers]
    print_outcome(values, lines, as_json=as_json)
    raise typer.Exit(0 if all(answer.is_done for answer in answers) else 1)


def with_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of all built-in engines to a command, of which Typer reads the signature."""
    signature = inspect.signature(command, eval_str=True)
    own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    parameters = {each.name: each.replace(kind=each.KEYWORD_ONLY) for each in own}
    for name, flag in engine_flags().items():
        metadata, is_common = flag.field.metadata, set(flag.engines) >= BUILTIN.keys() - {LOCAL}
        panel = "Lent nodes" if is_common else f"Only with --engine {' or '.join(flag.engines)}"
        option = typer.Option(
            metadata["flag"],
            help=metadata["description"],
            min=metadata["least"],
            max=metadata["most"],
            rich_help_panel=panel,
        )
        parameters[name] = inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default_of(flag.field) or None,
            annotation=Annotated[flag.type | None, option],
        )
    command.__signature__ = signature.replace(parameters=[*parameters.values()])  # type: ignore[attr-defined]
    return command


@with_engine_options
@internal("when_up")
def up(
    context: typer.Context,
    database: Annotated[
        str | None,
        typer.Option(
            help="postgresql://USER@HOST:PORT/NAME, with the password in ~/.pgpass, where databases NAME, NAME_prefect "
            "and NAME_mlflow are made where they are missing; without it, SQLite files, for this machine alone."
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address of this machine for browsers and nodes; default: others do not reach it.")
    ] = "127.0.0.1",
    port_prefect: Annotated[int, typer.Option(help="Port of the Prefect server.", min=1, max=65535)] = 4200,
    port_mlflow: Annotated[int, typer.Option(help="Port of the MLflow server.", min=1, max=65535)] = 5000,
    port_metrics: Annotated[int, typer.Option(help="Port of the metrics for Prometheus.", min=1, max=65535)] = 9464,
    password_file: Annotated[
        Path | None,
        typer.Option(
            help="File of one line, the password of all servers, which only you may read; default: the last password, "
            "or a new one."
        ),
    ] = None,
    worker: Annotated[
        bool | None,
        typer.Option(help="Serve this machine's devices; default: only where no engine lends nodes."),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=f"Engine that lends further nodes: {', '.join(list(BUILTIN)[2:])}; default: workers started by hand.",
        ),
    ] = WORKERS,
    notify: Annotated[
        str | None,
        typer.Option(
            help="Target of alarms: the URL of a webhook, or TYPE/NAME of a notification block of Prefect, such as "
            f"slack-webhook/on-call; default: {settings.NOTIFY}."
        ),
    ] = None,
    log_format: Annotated[
        LogFormat | None,
        typer.Option(help=f"Format of all logs: text, or json, one object a line; default: {LOG_FORMAT}, or text."),
    ] = None,
    wait: Annotated[
        bool,
        typer.Option("--wait", help="Stay until SIGTERM or Ctrl-C, and then end the pool, as a batch job needs it."),
    ] = False,
    as_json: AsJson = False,
    when_up: Sequence[Callable[[], object]] = (),
    **engine_values: Any,
) -> None:
    """Start a pool on this machine: Prefect, MLflow, the controller, and this machine as a node; `down` ends it."""
    from ringmaster.feature_check import refuse_faulty_features
    from ringmaster.flows.services import service_definitions, service_files, up_and_down

    home = settings.home()
    if up_and_down.is_up(home):
        up_and_down.print_states(home)
        _print_ignored(context)
        _show_pool(home, when_up, waits=wait, as_json=as_json)
        return
    refuse_faulty_features()
    chosen = engine_options(engine, engine_values)
    options = service_definitions.PoolOptions(
        home=home,
        databases=service_definitions.databases(database, home=home),
        host=host,
        port_prefect=port_prefect,
        port_mlflow=port_mlflow,
        port_metrics=port_metrics,
        password=service_files.choose_password(home / "pool", given=password_file),
        worker=not chosen.lends_nodes if worker is None else worker,
        engine=chosen,
        notify=notify or "",
        log_format=log_format or format_of_environment(),
    )
    resident_processes().end(home)  # its server of Prefect would have the same database
    announce("starting Prefect, MLflow and the controller, usually 15 to 25 s")
    with up_and_down.sigterm_as_interrupt() if wait else nullcontext():
        if not up_and_down.start(options, database_server=database):
            raise typer.Exit(1)
        _show_pool(home, when_up, waits=wait, as_json=as_json)


def _show_pool(home: Path, when_up: Sequence[Callable[[], object]], *, waits: bool, as_json: bool) -> None:
    """Does what options of features ask for, and prints a running pool's address; waits for its end if requested."""
    from ringmaster.flows.services import up_and_down

    for call in when_up:
        call()
    _print_address(home, as_json)
    if waits:
        raise typer.Exit(0 if up_and_down.stay(home) else 1)


def down(as_json: AsJson = False) -> None:
    """End this machine's pool in order, jobs after checkpoints, and what a command has left for the next one."""
    from ringmaster.flows.services import up_and_down

    print_lines(error_console(), filter(None, [resident_processes().end(settings.home())]))
    is_down = up_and_down.stop(settings.home())
    print_outcome({"is_down": is_down}, as_json=as_json)
    raise typer.Exit(0 if is_down else 1)


def _print_ignored(context: typer.Context) -> None:
    """Names the options that were given to an `up` of a pool that is up already."""
    given = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name in inspect.signature(up).parameters.keys() - {"wait", "as_json"}
        and (source := context.get_parameter_source(parameter.name or "")) is not None
        and source.name == "COMMANDLINE"
    ]
    if given:
        error_console().print(
            f"the pool was up already, with the options of its start: {', '.join(given)} without effect. To fix: "
            "`ringmaster down`, then `ringmaster up` with all options; jobs continue from their checkpoints",
            soft_wrap=True,
        )


def _print_address(home: Path, as_json: bool) -> None:
    """Where a browser finds the pool, and what lets it in; the password itself stays out of terminals and logs."""
    from ringmaster.flows.services.service_files import password_file
    from ringmaster.model_lineage.model_pages import home_page

    file = settings.pool_file(home)
    if not file.exists():
        raise InputError([f"the pool of {home} is still starting, or ending. To fix: wait for that `ringmaster up`"])
    address = settings.PoolAddress(**json.loads(file.read_text()))
    urls = {"prefect": address.prefect_api.removesuffix("/api"), "mlflow": address.mlflow_uri}
    if address.metrics_url:  # release 0.2 has none
        urls |= {"metrics": address.metrics_url}
        pages = {name: path for module in modules("routes") for name, path in getattr(module, "PAGES", {}).items()}
        urls |= {name: urljoin(address.metrics_url, path) for name, path in pages.items()}
    kept = password_file(home / "pool")
    result = {**urls, "work_pool": address.work_pool, "home": str(home), "password_file": str(kept)}
    pages = urls | {"mlflow": home_page(address.mlflow_uri)}
    print_result(result, [f"{name:8} {url}" for name, url in pages.items()], as_json=as_json)
    how = f"only you may read: `cat {kept}`" if kept.exists() else "this pool was started with"
    error_console().print(
        f"All require a password, the one that {how}",
        f"  Prefect's page requires one line: {address.username}:PASSWORD",
        f"  MLflow's page and the metrics require a user, {address.username}, and PASSWORD",
        sep="\n",
        soft_wrap=True,
    )

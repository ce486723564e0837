"""Commands that start and end a pool's servers and a node on this machine, or collect what a bug report needs."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from ringmaster.errors import InputError
from ringmaster.flows import settings
from ringmaster.flows.output import AsJson, announce, error_console, output_console, print_json, styled
from ringmaster.flows.process.process_log import LOG_FORMAT, LogFormat
from ringmaster.flows.process.process_log import log_format as format_of_environment

WORKERS = "workers"  # as in `ringmaster.tasks.execution.engine`, which imports the planner
DEFAULT_IDLE_S = 300.0  # as in `ringmaster.tasks.pool.controller.elasticity`, likewise


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
            help="Engine that lends further nodes: slurm, ray or work-pool; default: people start workers.",
        ),
    ] = WORKERS,
    max_nodes: Annotated[int, typer.Option(help="Maximum number of nodes that the engine lends at a time.", min=1)] = 1,
    idle: Annotated[
        float, typer.Option(help="Seconds without work after which a lent node is given back.", min=0.0)
    ] = (DEFAULT_IDLE_S),
    node_price: Annotated[
        float | None,
        typer.Option(
            help="Price of a lent node for an hour: nodes are requested while each gains more than it costs.", min=0
        ),
    ] = None,
    hour_worth: Annotated[float | None, typer.Option(help="Value of finishing one hour earlier.", min=0)] = None,
    budget: Annotated[
        float | None, typer.Option(help="Maximum cost of lent nodes until all jobs have ended.", min=0)
    ] = None,
    node_devices: Annotated[
        str, typer.Option(help="Devices of a lent node: auto (the GPUs, or else CPU slots), cpu:N, gpu:N, gpu:all.")
    ] = "auto",
    address: Annotated[
        str,
        typer.Option(
            help="Address of a Ray cluster, for example 10.0.0.5:6379; default: a new one on this machine alone."
        ),
    ] = "",
    port_ray: Annotated[
        int, typer.Option(help="Port of a Ray cluster of this machine alone.", min=1, max=65535)
    ] = 6379,
    partition: Annotated[str, typer.Option(help="Partition of Slurm, which lends the nodes.")] = "",
    time: Annotated[str, typer.Option(help="Time limit of a Slurm job, for example 8h, 30m or 1-12:00:00.")] = "",
    gres: Annotated[str, typer.Option(help="Value of sbatch --gres, for example gpu:8.")] = "",
    sbatch: Annotated[
        list[str] | None, typer.Option(help="Further option of sbatch, for example --account=ml; may be repeated.")
    ] = None,
    work_pool: Annotated[
        str, typer.Option(help="Work pool in Prefect whose worker starts the nodes, with --engine work-pool.")
    ] = "",
    work_pool_type: Annotated[
        str, typer.Option(help="Type of that work pool if it is missing, such as kubernetes.")
    ] = "process",
    work_pool_template: Annotated[
        Path | None,
        typer.Option(help="File with the base job template of the engine's work pool; default: what it has."),
    ] = None,
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
) -> None:
    """Start a pool on this machine: Prefect, MLflow, the controller, and this machine as a node; `down` ends it."""
    from ringmaster.flows.services import databases as pool_databases
    from ringmaster.flows.services import service_definitions, service_files, up_and_down
    from ringmaster.flows.services import up_and_down as foreground
    from ringmaster.flows.services.engine_options import EngineOptions

    home = settings.home()
    if up_and_down.is_up(home):
        up_and_down.print_states(home)
        _print_ignored(context)
        _print_address(home, as_json)
        if wait:
            raise typer.Exit(0 if foreground.stay(home) else 1)
        return
    engine_options = EngineOptions(
        name=engine,
        max_nodes=max_nodes,
        idle_s=idle,
        node_price=node_price,
        hour_worth=hour_worth,
        budget=budget,
        devices=node_devices,
        work_pool=work_pool,
        work_pool_type=work_pool_type,
        work_pool_template=work_pool_template,
        address=address,
        partition=partition,
        time=time,
        gres=gres,
        sbatch_options=tuple(sbatch or ()),
    )
    options = service_definitions.PoolOptions(
        home=home,
        databases=pool_databases.databases(database, home=home),
        host=host,
        port_prefect=port_prefect,
        port_mlflow=port_mlflow,
        port_metrics=port_metrics,
        port_ray=port_ray,
        password=service_files.choose_password(home / "pool", given=password_file),
        worker=not engine_options.lends_nodes if worker is None else worker,
        engine=engine_options,
        notify=notify or "",
        log_format=log_format or format_of_environment(),
    )
    announce("starting Prefect, MLflow and the controller, usually 15 to 25 s")
    with foreground.sigterm_as_interrupt() if wait else nullcontext():
        if not up_and_down.start(options, database_server=database):
            raise typer.Exit(1)
        _print_address(home, as_json)
        if wait:
            raise typer.Exit(0 if foreground.stay(home) else 1)


def down() -> None:
    """End the pool of this machine in order: jobs write their checkpoints, then the controller, then the servers."""
    from ringmaster.flows.services import up_and_down

    raise typer.Exit(0 if up_and_down.stop(settings.home()) else 1)


def _print_ignored(context: typer.Context) -> None:
    """Names the options that were given to an `up` of a pool that is up already."""
    given = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name not in ("wait", "as_json")
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

    file = settings.pool_file(home)
    if not file.exists():
        raise InputError([f"the pool of {home} is still starting, or ending. To fix: wait for that `ringmaster up`"])
    address = settings.PoolAddress(**json.loads(file.read_text()))
    urls = {"prefect": address.prefect_api.removesuffix("/api"), "mlflow": address.mlflow_uri}
    if address.metrics_url:  # a pool that an earlier release started has none
        urls["metrics"] = address.metrics_url
    kept = password_file(home / "pool")
    if as_json:
        print_json({**urls, "work_pool": address.work_pool, "home": str(home), "password_file": str(kept)})
    else:
        for name, url in urls.items():
            output_console().print(f"{name:8} {url}", soft_wrap=True)
    console = error_console()
    if not address.password:
        what = "this pool was started by an earlier release, without a password: any web page can run programs here"
        console.print(styled(f"{what}.", "red"), "To fix: `ringmaster down`, then `ringmaster up`")
        return
    how = f"only you may read: `cat {kept}`" if kept.exists() else "this pool was started with"
    console.print(
        f"All ask for a password, the one that {how}",
        f"  Prefect's page asks for one line: {address.username}:PASSWORD",
        f"  MLflow's page and the metrics ask for a user, {address.username}, and PASSWORD",
        sep="\n",
        soft_wrap=True,
    )


def diagnose(
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="File to write, a tar.gz; default: one named by the time."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Collect versions, settings, states and logs for a bug report, without secrets; servers may be down."""
    from ringmaster.flows.diagnosis.diagnose import default_file
    from ringmaster.flows.diagnosis.diagnose import diagnose as collected

    file = (output or default_file()).absolute()
    if not file.parent.is_dir() or file.is_dir():
        raise InputError([f"-o {file} cannot be written. To fix: name a file in a folder that is there"])
    announce("collecting versions, settings, states and logs")
    bundle = collected(settings.home())
    try:
        bundle.write(file)
    except OSError as error:
        raise InputError([f"-o {file} cannot be written: {error.strerror}"]) from error
    console = error_console()
    for part in bundle.parts:
        console.print(f"{len(part.text.encode()):>9,} bytes  {part.name}")
    for failure in bundle.failures:
        console.print(f"without {failure.part}: {failure.error}", soft_wrap=True)
    hint = (
        "passwords, tokens and the values of unknown variables are left out; names, paths and messages are not: read it"
    )
    console.print(f"{hint} before you send it", soft_wrap=True)
    if as_json:
        failures = {failure.part: failure.error for failure in bundle.failures}
        print_json({"file": str(file), "parts": [part.name for part in bundle.parts], "failures": failures})
    else:
        output_console().print(str(file), soft_wrap=True)

"""The processes that a pool needs on the machine of its servers, with the command and environment of each.

And its three databases (its own, Prefect's, MLflow's), as SQLite files or on one PostgreSQL server.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shlex
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from ringmaster.codec import to_json
from ringmaster.errors import InputError
from ringmaster.extras import missing_extra
from ringmaster.flows import settings
from ringmaster.flows.output import LOG_FORMAT, LogFormat, ProcessRole
from ringmaster.flows.services.pool_processes import MLFLOW, PREFECT
from ringmaster.flows.services.service_files import SHORTEST_PASSWORD
from ringmaster.flows.services.serving import ALLOWED_HOSTS, hosts_of, in_url, is_wildcard, names_of
from ringmaster.model_lineage import QUIET_ENVIRONMENT
from ringmaster.model_lineage.mlflow_calls import tensors_uri
from ringmaster.model_lineage.sqlite_files import sqlite_url
from ringmaster.tasks.planning.node_prices import NodePrices
from ringmaster.tasks.pool.engines import CONTROLLER, EngineOptions, Service

if TYPE_CHECKING:
    import psycopg

METRICS, DEPLOYMENTS = "metrics", "deployments"
WORKER, FLOWS = "worker", "flows"
SERVERS = (PREFECT, MLFLOW, METRICS)  # those that listen on a port
MLFLOW_SERVER = "ringmaster.model_lineage.mlflow_server"
# Prefect's services look every 5 to 15 s by default, which takes most of the time of an idle server. What they do may
# wait: they mark late runs, workers that are offline and pauses that are over, plan the runs of new schedules, free the
# slots of dead runs, and find flow runs that have been silent for minutes.
PREFECT_INTERVALS = {
    "PREFECT_SERVER_SERVICES_LATE_RUNS_LOOP_SECONDS": "30",
    "PREFECT_SERVER_SERVICES_PAUSE_EXPIRATIONS_LOOP_SECONDS": "30",
    "PREFECT_SERVER_SERVICES_FOREMAN_LOOP_SECONDS": "30",
    "PREFECT_SERVER_SERVICES_REPOSSESSOR_LOOP_SECONDS": "30",
    "PREFECT_SERVER_SERVICES_CLEANUP_RECONCILER_LOOP_SECONDS": "30",
    "PREFECT_SERVER_SERVICES_SCHEDULER_RECENT_DEPLOYMENTS_LOOP_SECONDS": "15",
    "PREFECT_SERVER_EVENTS_PROACTIVE_GRANULARITY": "PT15S",
}
DRAIN_S = 300.0  # time for the jobs of this machine's worker to write their checkpoints before it ends


@dataclass(frozen=True, kw_only=True)
class PoolOptions:
    """The options of a pool that a person chooses.

    home: RINGMASTER_HOME of the pool.
    databases: addresses of its databases.
    password: password of the servers.
    host: address of this machine on which the servers listen.
    port_prefect, port_mlflow, port_metrics: ports of the servers.
    worker: whether this machine is a node too.
    engine: what lends further nodes.
    notify: target of alarms, see `ringmaster.flows.deployments`; where it is empty, the environment's.
    log_format: format of the logs of all processes.
    """

    home: Path
    databases: PoolDatabases
    password: str = field(repr=False)
    host: str = "127.0.0.1"
    port_prefect: int = 4200
    port_mlflow: int = 5000
    port_metrics: int = 9464
    worker: bool = True
    engine: EngineOptions = field(default_factory=EngineOptions)
    notify: str = field(default="", repr=False)  # a webhook's address is a secret
    log_format: LogFormat = LogFormat.TEXT

    @property
    def folder(self) -> Path:
        """The folder of the services' files."""
        return self.home / "pool"

    def address(self) -> settings.PoolAddress:
        """Returns the address by which this machine and others reach the pool."""
        host = in_url(socket.gethostname() if is_wildcard(self.host) else self.host)
        return settings.PoolAddress(
            database=self.databases.pool,
            prefect_api=f"http://{host}:{self.port_prefect}/api",
            mlflow_uri=f"http://{host}:{self.port_mlflow}",
            metrics_url=f"http://{host}:{self.port_metrics}/metrics",
            password=self.password,
        )


def faults(options: PoolOptions) -> list[str]:
    """Returns the faults of the options, found before anything starts."""
    result = options.engine.faults(has_server=options.databases.prefect is not None)
    if fault := missing_extra("pool", feature="`ringmaster up`"):
        result.append(fault)
    try:
        settings.most_flow_runs()  # by the environment of the workers, which would end over and over
    except InputError as error:
        result.extend(error.faults)
    if len(options.password) < SHORTEST_PASSWORD:
        result.append(f"the password has {len(options.password)} characters, and MLflow wants {SHORTEST_PASSWORD}")
    ports = {name: getattr(options, f"port_{name}") for name in SERVERS}
    pairs = [(one, other) for one, other in combinations(SERVERS, 2) if ports[one] == ports[other]]
    result += [f"--port-{one} and --port-{other} are both {ports[one]}" for one, other in pairs]
    listening = [("127.0.0.1", port, name) for name, port in options.engine.ports().items()]
    listening += [] if pairs else [(options.host, ports[name], name) for name in SERVERS]
    return result + [fault for each in listening if (fault := port_fault(*each))]


def port_fault(host: str, port: int, name: str) -> str | None:
    """Returns why a server cannot listen on a port, or None."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
            trial.listen()
    except socket.gaierror as error:
        return f"--host {host} is not a valid address: {error.strerror}"
    except OSError as error:
        remedy = f"choose another by --port-{name}, or see by `ss -ltnp` who has it"
        return f"port {port} of {host} cannot be used for {name}: {error.strerror}. To fix: {remedy}"
    return None


def compose(options: PoolOptions) -> tuple[Service, ...]:
    """Returns the services in the order in which they start; they end in the reverse order."""
    address = options.address()
    member: dict[str, str | None] = {
        **base_environment(options.home),
        **address.environment(),
        "RINGMASTER_HOME": str(options.home),
        LOG_FORMAT: options.log_format.value,
    }
    python, is_json = (sys.executable, "-m"), options.log_format is LogFormat.JSON
    mlflow_log = shlex.quote(str(logging_file(options.folder, ProcessRole.MLFLOW)))
    deployment = options.engine.deployment()
    nodes = () if deployment is None else ("--nodes", json.dumps(to_json(deployment)))
    local = in_url("127.0.0.1" if options.host == "0.0.0.0" else "::1" if options.host == "::" else options.host)  # noqa: S104 - nothing listens here
    services = [
        Service(
            name=PREFECT,
            command=(*python, "ringmaster.flows.services.prefect_server", *_listen(options.host, options.port_prefect)),
            environment={**member, **_prefect_environment(options, address)},
            # Unlike `health`, it needs the database: after failures of SQLite under load, all connections may hang.
            ready_url=f"http://{local}:{options.port_prefect}/api/ready",
        ),
        Service(
            name=MLFLOW,
            command=(
                *(*python, MLFLOW_SERVER, "--workers", "1", *_listen(options.host, options.port_mlflow)),
                *(("--uvicorn-opts", f"--log-config {mlflow_log}") if is_json else ()),
                *("--app-name", "basic-auth"),
            ),
            environment={**member, **_mlflow_environment(options)},
            ready_url=f"http://{local}:{options.port_mlflow}/health",
        ),
        Service(
            name=METRICS,
            command=(*python, "ringmaster.flows.services.metrics_server", *_listen(options.host, options.port_metrics)),
            environment={**member, ALLOWED_HOSTS: ",".join(_names(options))},
            ready_url=f"http://{local}:{options.port_metrics}/health",
        ),
        Service(
            name=DEPLOYMENTS,
            command=(*python, "ringmaster.flows.deployments", *nodes),
            environment={**member, **({settings.NOTIFY: options.notify} if options.notify else {})},
            once=True,
        ),
        Service(
            name=CONTROLLER,
            command=(*python, "ringmaster.flows.entry", "pool", "controller"),
            environment={**member, **engine_environment(options.engine, home=options.home)},
            says_ready=True,
            group=False,
            grace_s=60.0,
        ),
    ]
    engine_services = options.engine.services(options.home)
    own = [replace(each, environment={**member, **each.environment}) for each in engine_services]
    services[-1:-1] = [each for each in own if not each.after]
    if options.worker:
        services.append(
            Service(
                name=WORKER,
                command=(*python, "ringmaster.flows.entry", "pool", "worker", "--flows", "--drain", f"{DRAIN_S:.0f}"),
                environment=member,
                after=(CONTROLLER,),
                says_ready=True,
                group=False,
                grace_s=DRAIN_S + 30,
            )
        )
    elif options.engine.lends_nodes:
        services.append(
            Service(
                name=FLOWS,
                command=(*python, "ringmaster.flows.entry", "pool", "worker", "--flows", "--devices", "none"),
                environment=member,
                after=(CONTROLLER,),
                says_ready=True,
            )
        )
    return (*services, *(each for each in own if each.after))


def engine_environment(engine: EngineOptions, *, home: Path) -> dict[str, str]:
    """Returns the environment variables by which a controller learns of its engine. home: of the pool."""
    if not engine.lends_nodes:
        return {}
    result = {
        settings.ENGINE: engine.name,
        settings.MAX_NODES: str(engine.max_nodes),
        settings.NODE_IDLE_S: f"{engine.idle_s:g}",
    }
    if engine.node_price is not None:
        budget = math.inf if engine.budget is None else engine.budget
        prices = NodePrices(per_node_hour=engine.node_price, per_hour_earlier=engine.hour_worth or 0.0, budget=budget)
        result[settings.NODE_PRICES] = prices.to_text()
    return {**result, **engine.environment(home)}


def base_environment(home: Path) -> dict[str, str]:
    """Returns the variables of every process: no telemetry, no pickled results, no imports from the working folder."""
    return {
        **QUIET_ENVIRONMENT,
        **settings.JSON_RESULTS,
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PREFECT_HOME": str(home / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _listen(host: str, port: int) -> tuple[str, ...]:
    return ("--host", host, "--port", str(port))


def logging_file(folder: Path, role: ProcessRole) -> Path:
    """Returns the file that configures the JSON log of MLflow's or Prefect's server.

    Without it, Prefect configures its own log again whenever a part of it requests that.

    folder: the folder of the services' files.
    """
    return folder / f"{role}-logging.json"


def _prefect_environment(options: PoolOptions, address: settings.PoolAddress) -> Mapping[str, str | None]:
    logs = {"PREFECT_LOGGING_SETTINGS_PATH": str(logging_file(options.folder, ProcessRole.PREFECT))}
    return {
        **(logs if options.log_format is LogFormat.JSON else {}),
        "PREFECT_UI_API_URL": "/api",  # of the server, by whichever of its names the page was opened
        "PREFECT_SERVER_API_AUTH_STRING": f"{address.username}:{options.password}",
        ALLOWED_HOSTS: ",".join(_names(options)),
        "PREFECT_API_DATABASE_CONNECTION_URL": options.databases.prefect,
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        **PREFECT_INTERVALS,
    }


def _mlflow_environment(options: PoolOptions) -> Mapping[str, str | None]:
    return {
        "MLFLOW_TRACKING_URI": None,  # this process is the server
        **({"MLFLOW_CONFIGURE_LOGGING": "false"} if options.log_format is LogFormat.JSON else {}),
        # A variable, as every user of the machine can read a process's arguments.
        "MLFLOW_BACKEND_STORE_URI": options.databases.mlflow,
        # A URI: MLflow would take a percent sign in a path for the beginning of a quoted character.
        "MLFLOW_ARTIFACTS_DESTINATION": tensors_uri(options.home / "mlartifacts"),
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_AUTH_CONFIG_PATH": str(options.folder / "mlflow-auth.ini"),
        "MLFLOW_FLASK_SERVER_SECRET_KEY": secrets.token_hex(32),
        # By default MLflow accepts any name with the prefix of a private address, such as 10.evil.example.
        "MLFLOW_SERVER_ALLOWED_HOSTS": ",".join(
            pattern
            for name in map(in_url, _names(options))
            for pattern in (name, f"{name.replace('[', '[[]')}:*")  # with any port; a bracket is special in patterns
        ),
    }


def _names(options: PoolOptions) -> tuple[str, ...]:
    return names_of(options.host, further=hosts_of(os.environ.get(ALLOWED_HOSTS, "")))


DEFAULT_NAME = "ringmaster"
MAINTENANCE = ("postgres", "template1")  # every server has them


@dataclass(frozen=True, kw_only=True)
class PoolDatabases:
    """The URLs of a pool's databases, each with the driver that its reader needs.

    pool: URL of the pool's own database.
    prefect: URL of Prefect's database; None for the SQLite file in Prefect's own home.
    mlflow: URL of MLflow's database.
    """

    pool: str = field(repr=False)
    prefect: str | None = field(repr=False)
    mlflow: str = field(repr=False)


def databases(url: str | None, *, home: Path) -> PoolDatabases:
    """Returns the URLs of the databases, and makes none. Raises InputError where `url` is not a PostgreSQL server."""
    if url is None:
        return PoolDatabases(
            pool=sqlite_url(home / "pool" / "pool.db"), prefect=None, mlflow=sqlite_url(home / "mlflow.db")
        )
    server = _parsed(url)
    # asyncpg has another name for sslmode.
    query = {("ssl" if key == "sslmode" else key): value for key, value in server.query.items()}
    prefect = _named(server, "_prefect").set(drivername="postgresql+asyncpg", query=query)
    return PoolDatabases(
        pool=_text(_named(server)),
        prefect=_text(prefect),
        mlflow=_text(_named(server, "_mlflow").set(drivername="postgresql+psycopg")),
    )


def make_databases(url: str) -> list[str]:
    """Makes the missing databases on the server of `url`; returns their names. Raises InputError with the remedy."""
    import psycopg
    from psycopg import sql

    server = _parsed(url)
    wanted = [_named(server, suffix).database or "" for suffix in ("", "_prefect", "_mlflow")]
    with _connected(server) as connection:
        there = {name for (name,) in connection.execute("SELECT datname FROM pg_database").fetchall()}
        missing = [name for name in wanted if name not in there]
        for name in missing:
            try:
                connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
            except psycopg.errors.DuplicateDatabase:
                continue  # another machine has just made it
            except psycopg.errors.InsufficientPrivilege as error:
                commands = "".join(f'\n  CREATE DATABASE "{each}" OWNER "{server.username}";' for each in missing)
                raise InputError(
                    [f"{server.username} may not make databases on {_shown(server)}. To fix: have it done:{commands}"]
                ) from error
    return missing


def _connected(server: URL) -> psycopg.Connection[tuple[str]]:
    """Connects to any database of the server: the named one may not exist yet, and others may refuse this user."""
    import psycopg

    lines: list[str] = []
    for name in (_named(server).database, *MAINTENANCE):
        address = _text(server.set(database=name))
        try:
            return psycopg.connect(address, autocommit=True, connect_timeout=10)
        except psycopg.OperationalError as error:
            lines.append(str(error).strip())
    raise InputError([f"the PostgreSQL server {_shown(server)} cannot be used: {lines[-1]}"])


def _parsed(url: str) -> URL:
    try:
        server = make_url(url)
    except ArgumentError:
        server = None
    if server is None or server.drivername != "postgresql" or not server.host:
        raise InputError(
            [
                "--database is not the URL of a PostgreSQL server. To fix: postgresql://USER@HOST:PORT/NAME, with "
                "the password in ~/.pgpass"
            ]
        )
    return server


def _named(server: URL, suffix: str = "") -> URL:
    """Returns the URL with the name of one of our databases: the name that the user has given, or `ringmaster`."""
    name = server.database if server.database not in (None, "", *MAINTENANCE) else DEFAULT_NAME
    return server.set(database=f"{name}{suffix}")


def _text(url: URL) -> str:
    return url.render_as_string(hide_password=False)


def _shown(server: URL) -> str:
    return f"{server.host}:{server.port or 5432}"

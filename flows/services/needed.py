"""Which processes a pool needs on the machine that holds its servers, and what each is told."""

from __future__ import annotations

import ipaddress
import secrets
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flows.faults import InputError
from flows.services.databases import PoolDatabases
from flows.services.files import Service, write_secret
from flows.settings import JSON_RESULTS, NOTIFY, PoolAddress
from model_lineage import QUIET_ENVIRONMENT

PREFECT, MLFLOW, DEPLOYMENTS, EXECUTOR, WORKER = "prefect", "mlflow", "deployments", "executor", "worker"
SHORTEST_PASSWORD = 12  # what MLflow takes
DRAIN_S = 300.0  # for the jobs of this machine's worker to write their checkpoints before it ends


@dataclass(frozen=True, kw_only=True)
class PoolOptions:
    """What a person chooses. host: of this machine, on which the servers listen. worker: whether it is a node too.

    notify: where alarms go, see `flows.pool.automations`; what the environment says where it is empty.
    """

    home: Path
    databases: PoolDatabases
    host: str = "127.0.0.1"
    port_prefect: int = 4200
    port_mlflow: int = 5000
    password: str = field(default="", repr=False)
    worker: bool = True
    notify: str = field(default="", repr=False)  # a webhook's address is a secret

    @property
    def folder(self) -> Path:
        """Of the services' files."""
        return self.home / "pool"

    def address(self) -> PoolAddress:
        """By which this machine and others reach the pool."""
        host = in_url(socket.gethostname() if is_wildcard(self.host) else self.host)
        return PoolAddress(
            database=self.databases.pool,
            prefect_api=f"http://{host}:{self.port_prefect}/api",
            mlflow_uri=f"http://{host}:{self.port_mlflow}",
            password=self.password,
        )


def faults(options: PoolOptions) -> list[str]:
    """What is wrong with the choice, found before anything starts."""
    found = []
    if not (options.password or is_loopback(options.host)):
        found.append(
            f"--host {options.host} lets other machines in, who could run what they like through it. "
            "To fix: put a password into a file that only you may read, and name it by --password-file"
        )
    if options.password and len(options.password) < SHORTEST_PASSWORD:
        found.append(f"the password has {len(options.password)} characters, and MLflow wants {SHORTEST_PASSWORD}")
    if options.port_prefect == options.port_mlflow:
        found.append(f"--port-prefect and --port-mlflow are both {options.port_mlflow}")
    else:
        taken = (port_fault(options.host, getattr(options, f"port_{name}"), name) for name in (PREFECT, MLFLOW))
        found.extend(fault for fault in taken if fault)
    return found


def port_fault(host: str, port: int, name: str) -> str | None:
    """Why a server cannot listen there, or None."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
            trial.listen()
    except socket.gaierror as error:
        return f"--host {host} is no address: {error.strerror}"
    except OSError as error:
        remedy = f"choose another by --port-{name}, or see by `ss -ltnp` who has it"
        return f"port {port} of {host} cannot be used for {name}: {error.strerror}. To fix: {remedy}"
    return None


def read_password(file: Path) -> str:
    """The one line of a password file. Raises InputError where others may read it, or it is no such file."""
    try:
        if file.stat().st_mode & 0o077:
            raise InputError([f"others than you may read {file}. To fix: chmod 600 {file}"])
        lines = file.read_text().splitlines()
    except OSError as error:
        raise InputError([f"the password file {file} cannot be read: {error.strerror}"]) from error
    if len(lines) != 1 or not lines[0].strip():
        raise InputError([f"{file} is to hold one line, the password; it has {len(lines)} lines"])
    return lines[0].strip()


def compose(options: PoolOptions) -> tuple[Service, ...]:
    """The services in the order in which they start; they end in the opposite one."""
    address = options.address()
    member: dict[str, str | None] = {
        **base_environment(options.home),
        **address.environment(),
        "RINGMASTER_HOME": str(options.home),
    }
    python = (sys.executable, "-m")
    local = in_url("127.0.0.1" if options.host == "0.0.0.0" else "::1" if options.host == "::" else options.host)
    services = [
        Service(
            name=PREFECT,
            command=(*python, "prefect", "server", "start", *_listen(options.host, options.port_prefect)),
            environment={**member, **_prefect_environment(options, address)},
            ready_url=f"http://{local}:{options.port_prefect}/api/health",
        ),
        Service(
            name=MLFLOW,
            command=(
                *(*python, "mlflow", "server", "--workers", "1", *_listen(options.host, options.port_mlflow)),
                *(("--app-name", "basic-auth") if options.password else ()),
            ),
            environment={**member, **_mlflow_environment(options, address)},
            ready_url=f"http://{local}:{options.port_mlflow}/health",
        ),
        Service(
            name=DEPLOYMENTS,
            command=(*python, "flows.deployments"),
            environment={**member, **({NOTIFY: options.notify} if options.notify else {})},
            after=(PREFECT,),
            once=True,
        ),
        Service(
            name=EXECUTOR,
            command=(*python, "flows.cli", "executor"),
            environment=member,
            after=(PREFECT, MLFLOW, DEPLOYMENTS),
            says_ready=True,
            group=False,
            grace_s=60.0,
        ),
    ]
    if options.worker:
        worker = Service(
            name=WORKER,
            command=(*python, "flows.cli", "worker", "--flows", "--drain", f"{DRAIN_S:.0f}"),
            environment=member,
            after=(EXECUTOR,),
            says_ready=True,
            group=False,
            grace_s=DRAIN_S + 30,
        )
        services.append(worker)
    return tuple(services)


def write_user(options: PoolOptions) -> None:
    """Tells MLflow who may enter. Raises InputError where its users were made with another password."""
    if not options.password:
        return
    users, file = options.folder / "mlflow-users.db", options.folder / "mlflow-auth.ini"
    # Read by configparser, to which a % is special.
    line = f"admin_password = {options.password.replace('%', '%%')}"
    if users.exists() and file.exists() and line not in file.read_text().splitlines():
        raise InputError(
            [
                "MLflow's users were made with another password. To fix: give that one, or remove "
                f"{users}: it is made anew, and users that were added by hand must be added again"
            ]
        )
    text = [
        "[mlflow]",
        "default_permission = READ",
        f"database_uri = sqlite:///{users}",
        f"admin_username = {options.address().username}",
        line,
        # By design it takes a processor tenths of a second to check a password: once it was right, it is for a while.
        "auth_cache_ttl_seconds = 60",
        "authorization_function = mlflow.server.auth:authenticate_request_basic_auth",
    ]
    write_secret(file, "\n".join(text) + "\n")


def base_environment(home: Path) -> dict[str, str]:
    """What holds for every process: nothing phones home, no result is a pickle, no stray file is imported."""
    return {
        **QUIET_ENVIRONMENT,
        **JSON_RESULTS,
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PREFECT_HOME": str(home / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
    }


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine reaches what listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_wildcard(host: str) -> bool:
    """Whether it means all addresses of this machine."""
    return host in ("0.0.0.0", "::")


def in_url(host: str) -> str:
    """As it stands in a URL: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def _listen(host: str, port: int) -> tuple[str, ...]:
    return ("--host", host, "--port", str(port))


def _prefect_environment(options: PoolOptions, address: PoolAddress) -> Mapping[str, str | None]:
    origins = [address.prefect_api.removesuffix("/api")]
    if is_loopback(options.host):
        origins.append(f"http://localhost:{options.port_prefect}")
    return {
        "PREFECT_UI_API_URL": address.prefect_api,
        # As shipped, any page that a browser shows may use the API; this leaves its own.
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": ",".join(origins),
        "PREFECT_SERVER_API_AUTH_STRING": f"{address.username}:{options.password}" if options.password else None,
        "PREFECT_API_DATABASE_CONNECTION_URL": options.databases.prefect,
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    }


def _mlflow_environment(options: PoolOptions, address: PoolAddress) -> Mapping[str, str | None]:
    environment: dict[str, str | None] = {
        "MLFLOW_TRACKING_URI": None,  # it is the server
        # In the environment, not among the arguments, which everybody on the machine may read.
        "MLFLOW_BACKEND_STORE_URI": options.databases.mlflow,
        "MLFLOW_ARTIFACTS_DESTINATION": str(options.home / "mlartifacts"),
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    if options.password:
        environment["MLFLOW_AUTH_CONFIG_PATH"] = str(options.folder / "mlflow-auth.ini")
        environment["MLFLOW_FLASK_SERVER_SECRET_KEY"] = secrets.token_hex(32)
    if not is_loopback(options.host):
        origin = address.mlflow_uri
        host = origin.removeprefix("http://")
        environment["MLFLOW_SERVER_ALLOWED_HOSTS"] = ",".join(
            [host, host.rpartition(":")[0], "localhost:*", "127.0.0.1:*"]
        )
        environment["MLFLOW_SERVER_CORS_ALLOWED_ORIGINS"] = origin
    return environment

"""Paths and settings: RINGMASTER_HOME, examples, the pool's address, and the environment of a process."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ringmaster.compat.jsonschema import import_without_iris
from ringmaster.compat.prefect import SETTINGS_FILES
from ringmaster.errors import InputError, LedgerError, input_errors
from ringmaster.flows.file_permissions import keep_to_owner
from ringmaster.flows.output import notice
from ringmaster.flows.proxies import bypass_proxies, report_bypass
from ringmaster.flows.services.pool_processes import MLFLOW, PoolProcesses
from ringmaster.flows.services.server_answers import check_answer
from ringmaster.model_lineage import QUIET_ENVIRONMENT
from ringmaster.model_lineage.sqlite_files import sqlite_url, unfit_characters
from ringmaster.tasks.execution.engine_registry import ENGINES
from ringmaster.tasks.pool.engines import DEFAULT_IDLE_S
from ringmaster.techniques.processes.caches import own_caches
from ringmaster.text import enumerated, message_of

if TYPE_CHECKING:
    from ringmaster.model_lineage.ledger.ledger import Ledger
    from ringmaster.model_lineage.mlflow_calls import OutageRetry
    from ringmaster.tasks.planning.node_prices import NodePrices
    from ringmaster.tasks.pool.node_scaler import ElasticityOptions


JSON_RESULTS = {
    # A parent flow reads its child's result only where that is stored. It must not be a pickle.
    "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "true",
    "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
}


OWN_NODE = "RINGMASTER_NODE"
"""Environment variable that names the node whose worker started a process. By default a node has its machine's name."""

NOTIFY = "RINGMASTER_NOTIFY"
"""Environment variable for the target of a pool's alarms: a webhook's URL, or TYPE/NAME of a Prefect notification
block.
"""

ENGINE = "RINGMASTER_ENGINE"
"""Environment variable for the name of the engine that runs segments."""

MAX_NODES, NODE_IDLE_S = "RINGMASTER_MAX_NODES", "RINGMASTER_NODE_IDLE_S"
NODE_PRICES = "RINGMASTER_NODE_PRICES"
"""Environment variables for the most nodes that an engine lends, and the seconds after which an idle one is given back.
"""

MAX_FLOW_RUNS = "RINGMASTER_MOST_FLOW_RUNS"
"""Environment variable for the most batches, sweeps and retraining runs that have a process on a machine at a time."""

PLAIN_RUNS = "RINGMASTER_PLAIN_RUNS"
"""Environment variable for the number of runs of a batch whose folders keep plain weights; unset, all do."""

FLOW_RUN_BYTES = 400_000_000  # of a batch's process and of the ranks of its trials, beyond what processes share
FLOW_RUNS_SHARE = 0.1  # of a machine's memory, by default: the rest is the jobs'
MIN_FLOW_RUNS = 2

# The MLflow writer waits on its own for a server that is away, and can be stopped. MLflow's own retries take minutes.
MLFLOW_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}


@dataclass(frozen=True, kw_only=True)
class PoolAddress:
    """The address of the pool that this machine belongs to.

    database: URL of the pool's database, `sqlite:///FILE` or `postgresql://...`.
    prefect_api: URL of Prefect's API, which ends in `/api`.
    mlflow_uri: URL of the MLflow server.
    work_pool: name of Prefect's work pool, in which the nodes have their queues.
    username, password: credentials for all servers, used where the password is not empty.
    metrics_url: URL of the pool's metrics; empty where it is not known.
    """

    database: str = field(repr=False)  # may hold a password
    prefect_api: str
    mlflow_uri: str
    work_pool: str = "ringmaster"
    username: str = "ringmaster"
    password: str = field(default="", repr=False)
    metrics_url: str = ""

    def bypass_proxies(self) -> None:
        """Exempts the pool's servers from the proxies of this process and its children, as is loopback."""
        hosts = [urlsplit(url).hostname for url in (self.prefect_api, self.mlflow_uri, self.metrics_url)]
        bypass_proxies(filter(None, hosts))

    def environment(self) -> dict[str, str]:
        """Returns the environment variables of a process that belongs to the pool, for it and for its Prefect and
        MLflow clients.
        """
        names = {
            "RINGMASTER_DATABASE": self.database,
            "PREFECT_API_URL": self.prefect_api,
            "MLFLOW_TRACKING_URI": self.mlflow_uri,
            **JSON_RESULTS,
        }
        if self.password:
            names["PREFECT_API_AUTH_STRING"] = f"{self.username}:{self.password}"
            names["MLFLOW_TRACKING_USERNAME"] = self.username
            names["MLFLOW_TRACKING_PASSWORD"] = self.password
        return names


POOL_VARIABLES = {
    "database": "RINGMASTER_DATABASE",
    "prefect_api": "PREFECT_API_URL",
    "mlflow_uri": "MLFLOW_TRACKING_URI",
    "username": "MLFLOW_TRACKING_USERNAME",
    "password": "MLFLOW_TRACKING_PASSWORD",
}
PARTS_OF_POOL = ("database", "prefect_api", "mlflow_uri")  # without which there is no pool


def home() -> Path:
    """Returns the folder that holds all written files: RINGMASTER_HOME, or `.ringmaster` in the working directory.

    Raises InputError where the folder has a name that cannot be used.
    """
    folder = Path(os.environ.get("RINGMASTER_HOME") or ".ringmaster")
    if folder.parts[:1] == ("~",):  # no shell has expanded it, as in a file of variables
        folder = folder.expanduser()
    if characters := unfit_characters(folder.absolute()):
        raise InputError([f"RINGMASTER_HOME={str(folder)!a} has {characters} in its path. To fix: use another folder"])
    return folder.absolute()


def pool_file(folder: Path) -> Path:
    """Returns the file in which `ringmaster up` stores the pool's address while the pool of a home is up."""
    return folder / "pool.json"


def recorded_pool() -> PoolAddress | None:
    """Returns the pool that this machine belongs to, whether or not it runs: from the environment, else from the file
    that `ringmaster up` wrote.

    The environment may name a whole pool (RINGMASTER_DATABASE, PREFECT_API_URL, MLFLOW_TRACKING_URI). Where the home
    has a pool, the environment may also replace parts of its address. Returns None where neither the environment nor
    the home names a pool, and where the file is a copy of another home's.

    Raises InputError where a part is missing.
    """
    fields = _pool_fields(home())
    if fields and PoolProcesses(home() / "pool").original() is not None:
        fields = {}
    if not (fields or os.environ.get("RINGMASTER_DATABASE")):
        return None
    fields |= {key: os.environ[variable] for key, variable in POOL_VARIABLES.items() if os.environ.get(variable)}
    missing = [POOL_VARIABLES[key] for key in PARTS_OF_POOL if key not in fields]
    if missing:
        names = " and ".join(missing)
        raise InputError([f"RINGMASTER_DATABASE names a pool; {names} must also be set"])
    address = PoolAddress(**fields)
    address.bypass_proxies()
    return address


def pool_fault() -> str | None:
    """Returns why the pool of the home is not used: it has ended, is that of another home, or is not up yet.

    Returns None where that pool runs, where nothing is known of its processes, and where the environment names a whole
    pool, which may be elsewhere.
    """
    processes = _processes_to_check()
    return _pool_starting() if processes is None else processes.fault()


def _pool_starting() -> str | None:
    """Returns that a pool of the home is being started, whose address `ringmaster up` writes once all of it is up."""
    return None if _is_pool_named() else PoolProcesses(home() / "pool").starting()


def processes_behind(url: str, folder: Path) -> PoolProcesses | None:
    """Returns the processes of the pool of a home that has a server at `url`; None where it has none there."""
    fields = _pool_fields(folder)
    is_its = url in (fields.get("prefect_api"), fields.get("mlflow_uri"))
    return PoolProcesses(folder / "pool") if is_its else None


def pool_lacks() -> list[str]:
    """Returns what a pool that runs, or may run, lacks, a sentence each."""
    processes = _processes_to_check()
    return [] if processes is None else processes.lacks()


def checked_pool() -> PoolAddress | None:
    """Returns the pool that this machine belongs to, unless it is known that it does not run; else None.

    It reports, once a process, why the pool that the home names is not used, and what is missing without
    its supervisor.

    Raises InputError where a part of the address is missing, and where the pool has ended and its records are not in
    files of the home. Raises PoolUnreachable where none of its servers answers a command, and their processes cannot be
    seen from here.
    """
    address, processes = recorded_pool(), _processes_to_check()
    if processes is not None and (fault := processes.fault()) is not None:
        if address is not None and not address.database.startswith("sqlite:"):
            raise InputError([fault])
        _warn(fault)
        return None
    if processes is None or processes.elsewhere():
        if address is not None:
            _check_servers(address.prefect_api, address.mlflow_uri)
        elif (starting := pool_fault()) is not None:
            _warn(starting)
        return address
    for lack in () if processes.is_supervised() else processes.lacks():
        _warn(lack)
    return address


@cache
def _check_servers(*urls: str) -> None:
    """Raises PoolUnreachable where none of the servers of a pool answers that runs elsewhere, if at all. Asks once."""
    check_answer({name: f"{url}/health" for name, url in zip(("Prefect", "MLflow"), urls, strict=True)}, about=_owner)


def check_prefect(url: str) -> None:
    """Raises PoolUnreachable where Prefect's server of a pool that runs elsewhere, if at all, does not answer."""
    processes = _processes_to_check()
    if processes is None or processes.elsewhere():
        check_answer({"Prefect": f"{url}/health"}, about=_owner)


def _owner() -> str:
    """Returns whose servers a pool has that runs elsewhere, and what to do where they do not answer."""
    processes = _processes_to_check()
    if processes is None:
        variables = ", ".join(variable for variable in POOL_VARIABLES.values() if os.environ.get(variable))
        return f"{variables} name them. To fix: see that they run and that this machine reaches them, or unset these"
    return (
        f"the pool of {home()} was started {processes.elsewhere()}. To fix: `ringmaster status` and `ringmaster up` "
        "there; PREFECT_API_URL and MLFLOW_TRACKING_URI give other addresses of its servers; if it is gone for good, "
        "`ringmaster down` here makes this a home without a pool"
    )


def _processes_to_check() -> PoolProcesses | None:
    """Returns the processes of the pool that the home's file names; None where there is no such file, and where the
    environment names a whole pool instead.
    """
    return None if _is_pool_named() or not pool_file(home()).exists() else PoolProcesses(home() / "pool")


def _is_pool_named() -> bool:
    """Returns whether the environment names a whole pool."""
    return all(os.environ.get(POOL_VARIABLES[key]) for key in PARTS_OF_POOL)


@cache
def _warn(text: str) -> None:
    """Reports it once."""
    notice(text)


def _pool_fields(folder: Path) -> dict[str, Any]:
    """Returns what `ringmaster up` has written of the pool of a home; nothing where none is up.

    Only the owner of a pool may read it. Raises OSError for others, unless their environment names the pool.
    """
    try:
        fields: dict[str, Any] = json.loads(pool_file(folder).read_text())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except PermissionError:
        if not os.environ.get("RINGMASTER_DATABASE"):
            raise
        return {}
    return fields


def choose_engine(name: str) -> None:
    """Makes an engine that of this process and its children; an empty name leaves the choice as it is.

    Raises InputError, with the known names, where the engine that is chosen now is unknown.
    """
    if name:
        os.environ[ENGINE] = name
    if chosen := os.environ.get(ENGINE):
        with input_errors():
            ENGINES.path(chosen)


def engine(*, default: str) -> str:
    """Returns the name of the engine that runs segments: RINGMASTER_ENGINE, or the usual one of the process."""
    return os.environ.get(ENGINE) or default


def elasticity() -> ElasticityOptions | None:
    """Returns the limits of the nodes that an engine lends, or None where no number of nodes is set.

    Raises InputError where the environment holds no numbers.
    """
    num_nodes = os.environ.get(MAX_NODES)
    if not num_nodes:
        return None
    from ringmaster.tasks.pool.node_scaler import ElasticityOptions

    idle_s = os.environ.get(NODE_IDLE_S) or str(DEFAULT_IDLE_S)
    prices = _node_prices()
    got = f"{MAX_NODES}={num_nodes} and {NODE_IDLE_S}={idle_s}"
    with input_errors(about=f"{got} must be an integer and a number of seconds, for example 4 and 300: "):
        return ElasticityOptions(max_nodes=int(num_nodes), idle_s=float(idle_s), prices=prices)


def most_flow_runs() -> int:
    """Returns how many batches may have a process on this machine at a time; the others wait in order without one.

    This is RINGMASTER_MOST_FLOW_RUNS, or as many as fit into FLOW_RUNS_SHARE of the memory. Raises InputError where the
    variable is not a positive number.
    """
    from ringmaster.tasks.cluster import memory_bytes

    if not (given := os.environ.get(MAX_FLOW_RUNS)):
        return max(int(FLOW_RUNS_SHARE * memory_bytes() / FLOW_RUN_BYTES), MIN_FLOW_RUNS)
    if not (given.isdecimal() and len(given) < 10 and int(given) > 0):
        raise InputError(
            [f"{MAX_FLOW_RUNS}={given[:50]} is not a valid number of flow runs. To fix: a number such as 8"]
        )
    return int(given)


def _node_prices() -> NodePrices | None:
    from ringmaster.tasks.planning.node_prices import NodePrices

    value = os.environ.get(NODE_PRICES)
    if not value:
        return None
    about = f"{NODE_PRICES}={value} is not the price of a node's hour, the worth of an hour, and a budget: "
    with input_errors(about=about, remedy="as in 2.5,40,300, or 2.5,40,inf for no budget"):
        return NodePrices.from_text(value)


def tracking_uri(folder: Path) -> str:
    """Returns MLflow's tracking URI: MLFLOW_TRACKING_URI, the server of the pool, or a SQLite file in `folder`."""
    if value := os.environ.get("MLFLOW_TRACKING_URI"):
        return value
    address = checked_pool()
    return address.mlflow_uri if address else sqlite_url(folder / "mlflow.db")


def ledger(folder: Path, *, waiting: OutageRetry | None = None) -> Ledger:
    """Returns the records of a home, or of the pool to which it belongs; no connection is open yet.

    The weights of models go to the home's tensor store, also those of a pool whose servers run in this home. Raises
    LedgerError on a tracking URI that no ledger can have, and where the pool's MLflow does not run and is not waited
    for; PoolUnreachable where a command gets no answer of an MLflow whose process cannot be seen.
    """
    from ringmaster.model_lineage import Ledger
    from ringmaster.model_lineage.signatures import SigningKeys

    uri = tracking_uri(folder)
    if uri == sqlite_url(folder / "mlflow.db"):
        follow_move(folder)
    processes = processes_behind(uri, folder)
    if processes is not None and waiting is None and (fault := processes.service_fault(MLFLOW)):
        remedy = "try again in a minute, or see by `ringmaster status` what the pool lacks"
        raise LedgerError(f"the pool's MLflow does not answer: {fault}. To fix: {remedy}", code="AWAY", may_pass=True)
    if uri.startswith("http") and (processes is None or processes.elsewhere()):
        check_answer({"MLflow": f"{uri}/health"}, about=_owner)
    return Ledger(
        uri,
        artifact_root=artifacts(folder),
        tensors=tensors(folder),
        is_served_here=processes is not None or not uri.startswith("http"),
        keys=SigningKeys(folder / "keys"),
        waiting=waiting,
    )


def follow_move(folder: Path) -> None:
    """Makes the records of a home that was copied or moved name its new place. Raises LedgerError where it cannot."""
    from ringmaster.model_lineage.moved_home import rebase

    for before in rebase(folder, ledger=folder / "mlflow.db", artifacts=artifacts(folder)):
        notice(f"this home was {before} before: its records name {folder} now")


def artifacts(folder: Path) -> Path:
    """Returns the folder of MLflow's files in a home."""
    return folder / "mlartifacts"


def tensors(folder: Path) -> Path:
    """Returns the folder of the recorded models' tensors: RINGMASTER_TENSORS, or `tensors` in `folder`."""
    return Path(os.environ.get("RINGMASTER_TENSORS") or folder / "tensors").absolute()


def num_plain_runs() -> int | None:
    """Returns how many of the newest runs of a batch keep plain weights in their folders, in addition to the tensor
    store.

    This is RINGMASTER_PLAIN_RUNS, by default None: all of them. Raises InputError where that is not a number.
    """
    given = os.environ.get(PLAIN_RUNS)
    if not given:
        return None
    if not given.isdecimal():
        raise InputError([f"{PLAIN_RUNS}={given} must be a number of runs, 0 or more"])
    return int(given)


def checkpoint_root() -> str | None:
    """Returns RINGMASTER_CHECKPOINTS, a folder or an fsspec URL, or None: then checkpoints go to the folder of each
    run.
    """
    root = os.environ.get("RINGMASTER_CHECKPOINTS")
    return str(Path(root).absolute()) if root and "://" not in root else root or None


def check_checkpoint_root(root: str | None) -> None:
    """Raises InputError, with the cause and a remedy, where a root of checkpoints cannot be written and read."""
    if root is not None:
        from ringmaster.techniques.checkpoints.storage import check_root

        with input_errors(about="RINGMASTER_CHECKPOINTS: "):
            check_root(root)


MIN_FREE_BYTES = 32 << 20
"""The databases and the models of four tiny jobs take 22 MB."""


def check_folders(folder: Path) -> None:
    """Raises InputError, with all faults, where the home or the temporary folder cannot be written, or is full."""
    faults = []
    for name in ("RINGMASTER_HOME", "TMPDIR"):
        remedy = f"To fix: make room, or name another folder in {name}"
        place = folder
        try:
            place = folder if name == "RINGMASTER_HOME" else Path(tempfile.gettempdir())
            place.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=place).close()
            free_bytes = shutil.disk_usage(place).free
        except OSError as error:
            faults.append(f"{name}: nothing can be written in {place}: {error.strerror or error}. {remedy}")
            continue
        if free_bytes < MIN_FREE_BYTES:
            wanted = f"at least {MIN_FREE_BYTES >> 20} are needed"
            faults.append(f"{name}: {place} has {free_bytes >> 20} MiB free, and {wanted}. {remedy}")
    if faults:
        raise InputError(faults)


def _prefect_places() -> list[str]:
    """Returns the files and variables with settings that the user has made for Prefect."""
    texts = {name: Path(name).read_text(errors="replace") for name in SETTINGS_FILES if os.access(name, os.R_OK)}
    places = [name for name, text in texts.items() if "prefect" in f"{name} {text}".lower()]
    return places + [name for name in os.environ if name.startswith("PREFECT_")]


def _check_prefect_settings(places: Sequence[str]) -> None:
    """Raises InputError where Prefect cannot read its settings, of which the user has made some in these places."""
    try:
        from prefect.settings import get_current_settings

        get_current_settings()
    except Exception as error:  # Prefect's validators raise whatever a value of another type makes them raise
        raise InputError(
            [
                f"Prefect cannot read its settings: {message_of(error)}. "
                f"To fix: correct or remove them in {enumerated(places)}"
            ]
        ) from error


def prepare_environment(folder: Path) -> None:
    """Prepares the environment of a run that starts its own servers. Call it before prefect and mlflow are imported.

    Variables that the user has set keep their values: with PREFECT_API_URL, for example, the run reports to that
    server. Where a pool is up, the run uses the pool's servers. From here on, only the owner can read the files that
    this process writes.

    Raises InputError where the home or the temporary folder cannot be written or is full, or where a cache of compiled
    code is another user's, or where Prefect's settings are wrong.
    """
    check_folders(folder)
    keep_to_owner(folder)
    report_bypass()
    address, places = checked_pool(), _prefect_places()
    defaults = {
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # Prefect's UI shows a run's log; the terminal shows our own progress view.
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
        "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",  # Prefect must not start a server without a password
        # Prefect's server starts in the working folder too, and must not import the modules that lie there.
        "PYTHONSAFEPATH": "1",
        **QUIET_ENVIRONMENT,
        **MLFLOW_PATIENCE,
        "DO_NOT_TRACK": "true",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PREFECT_RESULTS_DEFAULT_SERIALIZER": JSON_RESULTS["PREFECT_RESULTS_DEFAULT_SERIALIZER"],
        **(address.environment() if address else {}),
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    os.environ.update(own_caches(folder))
    # Prefect's server does not create its folder. Without the folder it waits for its database in vain.
    Path(os.environ["PREFECT_HOME"]).mkdir(parents=True, exist_ok=True)
    import_without_iris()
    if places:  # else Prefect is imported later, while its server starts
        _check_prefect_settings(places)


EXAMPLES = Path(__file__).absolute().parents[1] / "examples"


def resolve_path(path: str | Path) -> Path:
    """Returns the path, or the package's own file for `examples/...` where the working directory has no such file."""
    path = Path(path)
    if path.parts[:1] == (EXAMPLES.name,) and not path.exists():
        return EXAMPLES.parent / path
    return path


def enter_folder_of_home() -> dict[str, str]:
    """A pull step for Prefect: changes to the folder that holds RINGMASTER_HOME before a flow run.

    Relative paths in forms start there, as they do for commands in that folder. The step does not enter the package's
    folder, which Prefect would put on the import path.
    """
    folder = home().parent
    os.chdir(folder)
    return {"directory": str(folder)}

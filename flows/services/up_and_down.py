"""Starts and stops a pool's services, and reports the progress on the terminal; `up --wait` stays until their end."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from http import HTTPStatus
from pathlib import Path

from rich.console import Console
from sqlalchemy import select

from ringmaster.codec import to_json
from ringmaster.errors import InputError
from ringmaster.flows import settings
from ringmaster.flows.interrupts import signal_handler
from ringmaster.flows.output import LOG_FORMAT, LogFormat, ProcessRole, announce, error_console, logging_config, styled
from ringmaster.flows.pool.own_node import WORKER as NODE_HOLDER
from ringmaster.flows.services.first_processes import check_prefect_database
from ringmaster.flows.services.pool_processes import ServiceState, ServiceStatus
from ringmaster.flows.services.server_answers import open_directly
from ringmaster.flows.services.service_definitions import (
    WORKER,
    PoolOptions,
    compose,
    faults,
    logging_file,
    make_databases,
)
from ringmaster.flows.services.service_files import ServiceFiles, keep_password
from ringmaster.flows.settings import PoolAddress
from ringmaster.model_lineage.ledger.connection import database_fault
from ringmaster.model_lineage.tensors import TensorStore
from ringmaster.tasks.cluster import Cluster
from ringmaster.tasks.execution.leases import leases_of
from ringmaster.tasks.pool.engines import CONTROLLER, Service
from ringmaster.tasks.pool.nodes import NodeRegistry
from ringmaster.tasks.process_identity import KILL_TIMEOUT_S, ProcessId, write_secret
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.schema import EXECUTOR
from ringmaster.techniques.processes.stopped import is_stopped

LOOK_EVERY_S = 0.2
REPORT_EVERY_S = 10.0  # interval of reports on what is waited for, while no further service comes up
LONGEST_LINE = 12  # lines of a log that are shown
ANSWER_TIMEOUT_S = 300.0  # timeout of a server that is up and still has to open its database
DEADLINE_S = 900.0  # until all services must be up; each server has a shorter deadline of its own


def files_of(home: Path) -> ServiceFiles:
    """Returns the files of the services of a home's pool."""
    return ServiceFiles(home / "pool")


def is_up(home: Path) -> bool:
    """Returns whether a supervisor runs the services of this home, an `up` has seen all of them up, and they are.

    The node may wait for its devices, for as long as it takes.
    """
    files = files_of(home)
    states = files.states(by=files.supervisor())
    are_up = all(state.fault() is None or (state.name == WORKER and state.lives()) for state in states)
    return files.is_supervised() and settings.pool_file(home).exists() and bool(states) and are_up


def start(options: PoolOptions, *, database_server: str | None) -> bool:
    """Starts all services of a pool; returns whether they are up. On failure it ends what it started, unless the pool
    was up before.

    It continues what an interrupted `up` has begun, for example one whose terminal was closed.
    Raises InputError where the options are invalid, or where another `up` is running; then nothing was started.
    """
    files = files_of(options.home)
    if files.runs_elsewhere():
        remedy = "use it there, or another RINGMASTER_HOME here"
        raise InputError([f"the pool of {options.home} runs already, {files.elsewhere()}. To fix: {remedy}"])
    if not (files.supervisor() or _living(files)):
        result, can_ask = faults(options), not options.engine.faults(has_server=True)
        if result := [*result, *(options.engine.queried_faults(options.home) if can_ask else ())]:
            raise InputError(result)
    files.make()
    with files.alone("up") as alone:
        if not alone:
            what = f"the pool of {options.home} is being started by another `ringmaster up`, {files.starter()}"
            raise InputError([f"{what}. To fix: wait for it; `ringmaster status` shows how far it is"])
        return _start_alone(options, files, database_server)


def _start_alone(options: PoolOptions, files: ServiceFiles, database_server: str | None) -> bool:
    console = error_console()
    _end_stopped(files, console)
    supervisor = files.supervisor()
    was_up = files.fault() is None and settings.pool_file(options.home).exists()
    if supervisor is not None:
        console.print("going on with what another `ringmaster up` began, with the options of that")
    elif survivors := _living(files):
        names = ", ".join(state.name for state in survivors)
        console.print(f"taking over what runs already, with the options that it has: {names}")
    else:
        _prepare(options, files, database_server, console)
    address = files.address()
    address.bypass_proxies()
    members = Members(Database(address.database, timeout_s=30))
    try:
        restarts = {state.name: state.num_restarts for state in files.states()}
        supervisor = supervisor or _supervise(files)
        try:
            is_there = _follow(files, supervisor, members, restarts)
        except KeyboardInterrupt:
            is_there = False
        if is_there and is_let_in(address):
            write_secret(settings.pool_file(options.home), json.dumps(to_json(address), indent=1) + "\n")
            return True
        if was_up:  # batches run in it: ending them would gain nothing
            console.print("what runs continues, and what does not is tried again: see the logs")
            return False
        console.print("ending what was started")
        stop(options.home)
    finally:
        members.close()
    return False


def is_let_in(address: PoolAddress) -> bool:
    """Returns whether MLflow accepts the password: it stores its users, which may have been made with another one."""
    request = urllib.request.Request(f"{address.mlflow_uri}/api/2.0/mlflow/experiments/get?experiment_id=0")  # noqa: S310 - our own server
    if address.password:
        credentials = base64.b64encode(f"{address.username}:{address.password}".encode()).decode()
        request.add_header("Authorization", f"Basic {credentials}")
    try:
        with open_directly(request, timeout_s=ANSWER_TIMEOUT_S):
            return True
    except urllib.error.HTTPError as error:
        if error.code != HTTPStatus.UNAUTHORIZED:
            return True  # it answers, and any other status is not about the password
    except OSError as error:
        error_console().print(styled("MLflow did not confirm the password:", "red"), str(error))
        return False
    error_console().print(
        styled(f"MLflow does not let {address.username} in with this password.", "red"),
        "To fix: give the one that its users were made with; docs/operations.md says how to change it",
    )
    return False


def stop(home: Path) -> bool:
    """Ends the services in order; returns whether all have ended. Those of a home that was copied to this one stay."""
    files, console = files_of(home), error_console()
    if original := files.original():
        settings.pool_file(home).unlink(missing_ok=True)
        how = f"`RINGMASTER_HOME={original} ringmaster down` ends that one"
        console.print(f"{home} has no pool: it is a copy of {original}, whose pool stays. {how}", soft_wrap=True)
        return True
    if files.runs_elsewhere():
        where = files.elsewhere()
        console.print(f"the pool of {home} runs {where}. To fix: `ringmaster down` there ends it", soft_wrap=True)
        return False
    _end_stopped(files, console)
    supervisor = files.supervisor()
    if supervisor is not None:
        _end(supervisor, files, console)
    for state, service in reversed(_survivors(files)):  # services of a supervisor that was killed
        console.print(f"ending {state.name}")
        if state.process is not None:
            state.process.end(grace_s=service.grace_s, group=service.group)
    left = _survivors(files)
    if not left:
        settings.pool_file(home).unlink(missing_ok=True)
        console.print("the pool is down")
    for state, _ in left:
        console.print(f"{state.name} (process {state.pid}) has not ended", style="red")
    return not left


def print_states(home: Path) -> None:
    """Prints the state of each service."""
    console = error_console()
    for state in files_of(home).states():
        console.print(_line(state))


def _prepare(options: PoolOptions, files: ServiceFiles, database_server: str | None, console: Console) -> None:
    if database_server is not None:
        for name in make_databases(database_server):
            console.print(f"made database {name}")
    for folder in ("prefect", "mlartifacts"):
        (options.home / folder).mkdir(parents=True, exist_ok=True)
    TensorStore(settings.tensors(options.home)).add_artifacts(settings.artifacts(options.home))
    settings.follow_move(options.home)
    if database_server is None:
        check_prefect_database(options.home / "prefect" / "prefect.db")
        if fault := database_fault(options.home / "mlflow.db"):
            raise InputError([fault])
    settings.pool_file(options.home).unlink(missing_ok=True)  # of a pool that ended without `down`, or of a copied home
    address = options.address()
    keep_password(files.folder, username=address.username, password=address.password)
    if options.log_format is LogFormat.JSON:
        for role in (ProcessRole.MLFLOW, ProcessRole.PREFECT):
            logging_file(files.folder, role).write_text(json.dumps(logging_config(role), indent=1))
    files.write_services(compose(options), address=address)


def _supervise(files: ServiceFiles) -> ProcessId:
    """Starts the supervisor, detached from this terminal. Its log has the format of the services' logs."""
    formats = [service.environment.get(LOG_FORMAT) for service in files.services()]
    log_format = next((each for each in formats if each), LogFormat.TEXT)
    with files.log("supervisor").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "ringmaster.flows.services.supervisor", str(files.folder)],
            cwd=files.folder,
            env={**os.environ, "PYTHONSAFEPATH": "1", LOG_FORMAT: log_format},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    process.returncode = 0  # it is to outlive this process: Popen must not wait for it
    supervisor = ProcessId.of(process.pid) or ProcessId(process.pid, "")
    files.write_supervisor(supervisor)
    return supervisor


def _follow(files: ServiceFiles, supervisor: ProcessId, members: Members, restarts: dict[str, int]) -> bool:
    """Prints a line for each service that is up; returns True once all are.

    A node whose devices another run holds is not waited for: it serves once that run has ended, which may take hours.

    restarts: number of earlier restarts of each service.
    """
    console, began_s = error_console(), time.monotonic()
    reported_s, reported_holders = began_s, ""
    names = [service.name for service in files.services()]
    here: dict[str, Callable[[], str | None]] = {CONTROLLER: members.leader, WORKER: members.node}
    done: set[str] = set()
    while time.monotonic() - began_s < DEADLINE_S:
        states = files.states(by=supervisor)
        for state in states:
            if state.name in done:
                continue
            if state.num_restarts > restarts.get(state.name, 0):
                _print_log(files, state, console)
                return False
            text = here[state.name]() if state.status == ServiceStatus.UP and state.name in here else ""
            if state.status in (ServiceStatus.UP, ServiceStatus.DONE) and text is not None:
                done.add(state.name)
                reported_s = time.monotonic()
                console.print(f"{state.name:12} up after {reported_s - began_s:5.1f} s {text}")
        if done == set(names):
            return True
        holders = _holders(files.folder.parent) if WORKER in set(names) - done else ""
        if holders not in ("", reported_holders):
            reported_holders = holders
            console.print(
                f"{WORKER:12} waits for this machine's devices, which {holders} holds, and serves them once they are "
                "free. To fix: let that run end, or end it by Ctrl-C in its terminal or SIGTERM to its process: its "
                "jobs write checkpoints, and `ringmaster run FILE --resume` continues with them",
                soft_wrap=True,
            )
        if holders and done == set(names) - {WORKER}:
            return True
        if time.monotonic() - reported_s >= REPORT_EVERY_S:
            reported_s = time.monotonic()
            for line in _awaited(files, [state for state in states if state.name not in done], reported_s - began_s):
                console.print(line, soft_wrap=True)
        if supervisor.wait(LOOK_EVERY_S):
            console.print(f"the supervisor has ended, see {files.log('supervisor')}", style="red")
            return False
    missing = ", ".join(name for name in names if name not in done)
    console.print(styled(f"not up after {DEADLINE_S:.0f} s:", "red"), f"{missing}; see {files.folder}/*.log")
    return False


def _holders(home: Path) -> str:
    """Returns which runs hold devices of this machine, with their processes; empty where only nodes do."""
    holders = leases_of(home, Cluster(nodes=())).processes()
    return " and ".join(f"{name} (process {pid})" for name, pid in holders.items() if not name.startswith(NODE_HOLDER))


def _awaited(files: ServiceFiles, states: Sequence[ServiceState], waited_s: float) -> Iterator[str]:
    """Yields a line for each service that has been started and is not up: what it lacks, and where its log is."""
    urls = {service.name: service.ready_url for service in files.services()}
    for state in states:
        if state.process is not None:
            url = urls.get(state.name)
            lack = state.message or (f"no answer from {url} yet" if url else "it has not ended yet")
            where = files.log(state.name)
            yield f"{state.name:12} is waited for since {waited_s:.0f} s (process {state.pid}): {lack}; log: {where}"


def _end(supervisor: ProcessId, files: ServiceFiles, console: Console) -> None:
    timeout_s = 60 + sum(2 * service.grace_s for service in files.services())
    supervisor.signal(signal.SIGTERM)
    deadline_s = time.monotonic() + timeout_s
    shown: dict[str, str] = {}
    while time.monotonic() < deadline_s:
        ended = supervisor.wait(LOOK_EVERY_S)
        # In the order in which they end: several may have ended since the last check.
        for state in reversed(files.states()):
            if state.status != shown.get(state.name):
                shown[state.name] = state.status
                if state.status not in (ServiceStatus.UP, ServiceStatus.DONE):
                    console.print(_line(state))
        if ended:
            return


def _end_stopped(files: ServiceFiles, console: Console) -> None:
    """Kills a supervisor that is stopped: it restarts nothing and obeys nothing. Its services continue."""
    supervisor = files.supervisor()
    if supervisor is not None and is_stopped(supervisor.pid):
        console.print(f"the supervisor (process {supervisor.pid}) was stopped (SIGSTOP): it is killed")
        supervisor.signal(signal.SIGKILL)
        supervisor.wait(KILL_TIMEOUT_S)


def _living(files: ServiceFiles) -> list[ServiceState]:
    """Returns the services that run."""
    return [state for state in files.states() if state.lives()]


def _survivors(files: ServiceFiles) -> list[tuple[ServiceState, Service]]:
    services = {service.name: service for service in files.services()} if files.states() else {}
    return [
        (state, services[state.name])
        for state in files.states()
        if state.lives() and state.status != ServiceStatus.ENDED
    ]


def _line(state: ServiceState) -> str:
    process = f" process {state.pid}" if state.pid is not None else ""
    restarts = f", started again {state.num_restarts} times" if state.num_restarts else ""
    message = f" ({state.message})" if state.message else ""
    return f"{state.name:12} {state.status}{process}{restarts}{message}"


def _print_log(files: ServiceFiles, state: ServiceState, console: Console) -> None:
    lines = files.log(state.name).read_text(errors="replace").splitlines()[-LONGEST_LINE:]
    console.print(styled(f"{state.name} did not start:", "red"), state.message)
    console.print(*lines, sep="\n")
    console.print(f"The whole of it: {files.log(state.name)}")


class Members:
    """The controller and nodes that have begun to serve in `database` since this object was made."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._nodes = NodeRegistry(database)
        self._executor_before = self._executor()
        self._nodes_before = {(node.incarnation, node.beats) for node in self._nodes.all()}

    def leader(self) -> str | None:
        """Returns a message once a new controller leads and has sent a heartbeat; None before."""
        executor = self._executor()
        return None if executor in (None, self._executor_before) else "a controller leads"

    def node(self) -> str | None:
        """Returns a message that names a node once one has registered or sent a heartbeat; None before."""
        for node in self._nodes.all():
            if (node.incarnation, node.beats) not in self._nodes_before:
                return f"node {node.name}: {len(node.devices)} devices of kind {node.devices[0].kind}"
        return None

    def close(self) -> None:
        """Closes the connections."""
        self._database.close()

    def _executor(self) -> tuple[str, int] | None:
        query = select(EXECUTOR.c.owner, EXECUTOR.c.beats)
        row = self._database.read(lambda connection: connection.execute(query).one_or_none())
        return (row.owner, row.beats) if row is not None and row.owner else None


WATCH_EVERY_S = 3600.0  # the end of the supervisor is noticed at once; another one may follow it


def sigterm_as_interrupt() -> AbstractContextManager[None]:
    """Within the context, SIGTERM has the effect of Ctrl-C. For the main thread."""
    return signal_handler(signal.default_int_handler, [signal.SIGTERM])


def stay(home: Path) -> bool:
    """Returns once the pool of a home has ended; returns whether it has ended in order.

    Ctrl-C ends it, as `ringmaster down` does. Where its supervisor dies, the services continue without one.
    """
    try:
        with sigterm_as_interrupt():
            announce("the pool is up; SIGTERM or Ctrl-C ends it")
            while (supervisor := files_of(home).supervisor()) is not None:
                supervisor.wait(WATCH_EVERY_S)
    except KeyboardInterrupt:
        return stop(home)
    if not any(state.lives() for state in files_of(home).states()):
        return stop(home)  # it was ended in order, for example by `ringmaster down`
    error_console().print(
        f"the supervisor has died, see {files_of(home).log('supervisor')}. To fix: `ringmaster up` starts "
        "another one, which takes over what runs",
        style="red",
    )
    return False

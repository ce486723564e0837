"""How a command finds the daemon of its home, uses what it keeps, leaves its servers to one, and has it end.

Importing this is cheap, and so is a command without a daemon: it comes here before it imports anything slow.
"""

from __future__ import annotations

import json
import math
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringmaster.errors import InputError
from ringmaster.features.daemon.environment import STAY, environment_digest, is_known
from ringmaster.flows.resident_processes import ResidentProcesses

if TYPE_CHECKING:
    from ringmaster.flows.services.first_processes import KeptServers, ServerProcess
    from ringmaster.techniques.processes.forkserver_client import ForkServer

DEFAULT_STAY_S = 600.0
ANSWER_TIMEOUT_S = 10.0
END_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class KeptProcesses:
    """What a daemon keeps for commands.

    fork_server: the socket of the server that forks ranks.
    commands: the socket of the server that forks commands; empty while it is loading.
    prefect_api, prefect_user: URL and USER:PASSWORD of Prefect's server; empty where the environment names another one.
    """

    fork_server: str
    commands: str = ""
    prefect_api: str = ""
    prefect_user: str = ""


@dataclass(frozen=True, kw_only=True)
class DaemonRecord:
    """The daemon of a home, as its file has it. socket: where it answers."""

    pid: int
    born: str
    socket: str


def stay_seconds() -> float:
    """Returns how long processes stay after this command: RINGMASTER_STAY_S, or 600; 0 without a terminal and in CI.

    Raises InputError where the variable is no number of seconds.
    """
    text = os.environ.get(STAY, "")
    try:
        seconds = float(text or DEFAULT_STAY_S)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise InputError([f"{STAY}={text} must be a number of seconds, such as 600, or 0"])
    has_terminal = sys.stderr is not None and sys.stderr.isatty()
    return seconds if has_terminal and os.environ.get("CI", "").lower() in ("", "0", "false") else 0.0


def home_of_environment() -> Path:
    """Returns the home of this process, as `settings.home` does, without its checks."""
    return Path(os.environ.get("RINGMASTER_HOME") or ".ringmaster").expanduser().absolute()


def record_file(home: Path) -> Path:
    """Returns the file that names the daemon of a home."""
    return home / "daemon.json"


def daemon_of(home: Path) -> DaemonRecord | None:
    """Returns this user's daemon of a home that runs on this machine; None without one.

    Others with whom the user shares the home may write a file there, and would get the command's environment.
    """
    from ringmaster.codec import from_json
    from ringmaster.tasks.process_identity import ProcessId

    try:
        with record_file(home).open() as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                return None
            record = from_json(DaemonRecord, json.load(file))
    except (OSError, ValueError):
        return None
    return record if ProcessId(record.pid, record.born).lives() else None


class DaemonUse:
    """The use of a daemon's processes by this command, which lasts until `close`, or until the command ends."""

    def __init__(self, processes: KeptProcesses, connection: socket.socket) -> None:
        self.processes, self._connection = processes, connection

    def close(self) -> None:
        """Ends the use."""
        self._connection.close()


def take(home: Path) -> DaemonUse | None:
    """Returns the processes that the daemon of a home keeps; None without one, and where they do not fit this command.

    A daemon whose processes do not fit ends, once no other command uses them.
    """
    from ringmaster.codec import from_json

    stay_s = stay_seconds()
    record = daemon_of(home) if stay_s and is_known() else None
    if record is None:
        return None
    request = {"request": "take", "digest": environment_digest(), "stay_s": stay_s}
    connection, answer = _ask(record, request)
    if connection is None or "kept" not in answer:
        if connection is not None:
            connection.close()
        return None
    return DaemonUse(from_json(KeptProcesses, answer["kept"]), connection)


def _ask(record: DaemonRecord, request: Mapping[str, Any]) -> tuple[socket.socket | None, dict[str, Any]]:
    """Sends a request to a daemon; returns the connection and the answer, empty where it gives none in time."""
    from ringmaster.techniques.processes.channel import address_of

    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(ANSWER_TIMEOUT_S)
    try:
        with address_of(Path(record.socket)) as address:
            connection.connect(address)
        connection.sendall(json.dumps(request).encode() + b"\n")
        with connection.makefile("rb") as lines:
            answer: dict[str, Any] = json.loads(lines.readline() or b"{}")
    except (OSError, ValueError):
        connection.close()
        return None, {}
    connection.settimeout(None)
    return connection, answer


class DaemonProcesses(ResidentProcesses):
    """The processes that the daemon of a home keeps."""

    def forward(self, arguments: Sequence[str]) -> int | None:
        """Runs a command in a process of the daemon's, if there is one; returns its exit status, None without one."""
        environment_digest()  # before anything changes the environment
        if not record_file(home_of_environment()).exists():
            return None
        from ringmaster.features.daemon.forwarding import forward

        return forward(arguments)

    def stays(self) -> bool:
        """Returns whether the servers of this command stay after it. Raises InputError on a wrong RINGMASTER_STAY_S."""
        return stay_seconds() > 0

    @contextmanager
    def use(self, home: Path) -> Iterator[KeptServers | None]:
        """Yields the servers that the daemon of a home keeps; None without one, and where they do not fit."""
        if (use := take(home)) is None:
            yield None
            return
        from ringmaster.flows.services.first_processes import KeptServers

        kept = use.processes
        with closing(use):
            yield KeptServers(
                fork_server=kept.fork_server, prefect_api=kept.prefect_api, prefect_user=kept.prefect_user
            )

    def hand_over(self, home: Path, *, fork_server: ForkServer, prefect: ServerProcess | None) -> None:
        """Leaves the servers of this command to a new daemon, where they are to stay and no daemon keeps others."""
        if stay_seconds() and is_known() and daemon_of(home) is None:
            from ringmaster.features.daemon.handover import start_daemon

            start_daemon(home, stay_s=stay_seconds(), fork_server=fork_server, prefect=prefect)

    def end(self, home: Path) -> str:
        """Has the daemon of a home end, and waits for that; returns what happened, in a sentence, or nothing.

        Where commands use it, it ends after them.
        """
        if (record := daemon_of(home)) is None:
            return ""
        connection, answer = _ask(record, {"request": "end"})
        if connection is not None:
            connection.close()
        from ringmaster.tasks.process_identity import ProcessId

        process = ProcessId(record.pid, record.born)
        if answer.get("num_users"):
            return "what stays ready for the next command ends after the command that uses it"
        if not answer and not process.wait(END_TIMEOUT_S):  # one that is ending answers no more
            process.end(grace_s=END_TIMEOUT_S)
        return "" if not process.wait(END_TIMEOUT_S) else "what stayed ready for the next command has ended"

    def status(self, home: Path) -> str:
        """Returns what stays ready for the next command, and for how long; empty where nothing does."""
        if (record := daemon_of(home)) is None:
            return ""
        connection, answer = _ask(record, {"request": "status"})
        if connection is not None:
            connection.close()
        if not answer:
            keeper = f"process {record.pid} keeps what the next command needs, and does not answer"
            return f"{keeper}; `ringmaster down` ends it"
        until = "a command uses it" if answer["num_users"] else f"for {answer['left_s']:.0f} s more ({STAY})"
        kept = f"{', '.join(answer['names'])}, {answer['memory_bytes'] / 1e6:.0f} MB"
        return f"ready for the next command: {kept}; {until}; `ringmaster down` ends it"


RESIDENT_PROCESSES = (DaemonProcesses(),)

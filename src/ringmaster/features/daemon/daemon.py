"""The daemon of a home: keeps a fork server and Prefect's server after a command, and loads what commands import.

`python -m ringmaster.features.daemon.daemon`, started by a command of a terminal as it ends. It reads its order on
stdin, inherits the descriptors whose ends would end the servers, and answers the commands of its user on a socket in a
folder of its own. It ends after a time without commands, by `ringmaster down`, when one of the servers has ended, when
memory is short, when its home is gone or has another daemon, and when a command comes whose environment differs.

It waits for events in one thread. A child of it imports what commands import, and forks each command.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from ringmaster.codec import from_json, to_json
from ringmaster.errors import ChannelClosed, ForkServerError
from ringmaster.features.daemon.resident import DaemonRecord, KeptProcesses, record_file
from ringmaster.flows.file_permissions import set_umask
from ringmaster.tasks.background_worker import in_a_thread
from ringmaster.tasks.process_identity import ProcessId, write_secret
from ringmaster.techniques.processes.channel import address_of
from ringmaster.techniques.processes.forkserver_client import (
    ForkServer,
    ForkServerClient,
    RunningForkServer,
    ScratchFolder,
)
from ringmaster.techniques.processes.loaded_files import CHANGED, TARGET
from ringmaster.techniques.processes.stopped import is_stopped

COMMAND_IMPORTS = (
    "ringmaster.features.daemon.loaded:load",
    "ringmaster.features.daemon.forwarded:main",
)
CHECK_EVERY_S = 5.0  # the memory, and the file that names this daemon
CHECKED_FOR_S = 1.0  # a forwarded command asks again at once
REQUEST_TIMEOUT_S = 2.0
END_TIMEOUT_S = 5.0
MIN_AVAILABLE_SHARE = 0.1  # of the memory, below which nothing stays that no command uses


@dataclass(frozen=True, kw_only=True)
class KeptServer:
    """A server that another process has started. stdin: the descriptor whose end ends it."""

    process: ProcessId
    stdin: int

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> KeptServer:
        """Returns the server with the `pid` and the `stdin` of an order. Raises ProcessLookupError if it has ended."""
        if (process := ProcessId.of(fields["pid"])) is None:
            raise ProcessLookupError(fields["pid"])
        return cls(process=process, stdin=fields["stdin"])

    def end(self) -> None:
        """Ends the server."""
        os.close(self.stdin)
        self.process.end(grace_s=END_TIMEOUT_S)


class Daemon:
    """What a command has left, until nobody needs it any more. order: as `handover.start_daemon` writes it."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        self._home, self._digest = Path(order["home"]), order["digest"]
        self._stay_s: float = order["stay_s"]
        running = from_json(RunningForkServer, order["fork_server"])
        prefect = order["prefect"]
        self._servers = {"fork server": KeptServer.of(order["fork_server"])}
        if prefect is not None:
            self._servers["Prefect's server"] = KeptServer.of(prefect)
        self._inherited = Path(running.folder)
        self._kept = KeptProcesses(
            fork_server=running.socket,
            prefect_api=prefect["api"] if prefect else "",
            prefect_user=prefect["user"] if prefect else "",
        )
        self._folder = ScratchFolder()
        self._commands = ForkServer(base=COMMAND_IMPORTS)
        self._users: set[socket.socket] = set()
        self._is_ending = False
        self._left_s = time.monotonic()  # when the last command ended
        self._checked_s = -math.inf  # when the loaded files were found unchanged
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._socket = self._folder.path / "daemon"
        self._me = ProcessId.of(os.getpid())

    def run(self) -> None:
        """Answers commands until this daemon is to end, and ends what it keeps."""
        try:
            self._open()
            while not (self._is_ending and not self._users):
                for key, _ in self._selector.select(self._wait_s()):
                    self._handle(key)
                if not self._users and (self._idle_s() >= self._stay_s or self._must_end()):
                    self._is_ending = True
        finally:
            self._close()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Loads what commands import, and lets commands find this daemon. Raises OSError where the disk is full."""
        assert self._me is not None
        for name, server in self._servers.items():
            if (descriptor := server.process.open()) is None:
                raise ProcessLookupError(name)
            self._selector.register(descriptor, selectors.EVENT_READ, name)
        with address_of(self._socket) as address:
            self._listener.bind(address)
        self._listener.listen(16)
        self._selector.register(self._listener, selectors.EVENT_READ, self._listener)
        in_a_thread("command server", self._load)
        record = DaemonRecord(pid=self._me.pid, born=self._me.born, socket=str(self._socket))
        write_secret(record_file(self._home), json.dumps(to_json(record)))

    def _load(self) -> None:
        with suppress(ForkServerError):  # commands then import by themselves
            self._commands.start()
            self._kept = replace(self._kept, commands=str(self._commands.socket_path))

    def _idle_s(self) -> float:
        return time.monotonic() - self._left_s

    def _wait_s(self) -> float:
        return CHECK_EVERY_S if self._users else max(0.0, min(CHECK_EVERY_S, self._stay_s - self._idle_s()))

    def _must_end(self) -> bool:
        """Returns whether memory is short, or this is not the daemon of its home any more."""
        memory = psutil.virtual_memory()
        if memory.available < MIN_AVAILABLE_SHARE * memory.total:
            return True
        return not self._is_named()

    def _is_named(self) -> bool:
        with suppress(OSError, ValueError):
            record = from_json(DaemonRecord, json.loads(record_file(self._home).read_text()))
            return ProcessId(record.pid, record.born) == self._me
        return False

    def _handle(self, key: selectors.SelectorKey) -> None:
        if key.data is self._listener:
            self._answer(self._listener.accept()[0])
        elif isinstance(key.data, str):  # a server has ended
            self._selector.unregister(key.fileobj)
            self._is_ending = True
        elif not key.data.recv(4096):  # a command has ended
            self._selector.unregister(key.data)
            self._users.discard(key.data)
            key.data.close()
            self._left_s = time.monotonic()

    def _answer(self, connection: socket.socket) -> None:
        """Answers the request of one command, which must come at once."""
        connection.settimeout(REQUEST_TIMEOUT_S)
        try:
            with connection.makefile("rb") as lines:
                request = json.loads(lines.readline() or b"{}")
            answer = self._answer_to(request)
            connection.sendall(json.dumps(answer).encode() + b"\n")
        except (OSError, ValueError):
            connection.close()
            return
        if "kept" in answer:
            self._stay_s = request["stay_s"]
            self._users.add(connection)
            self._selector.register(connection, selectors.EVENT_READ, connection)
        else:
            connection.close()

    def _answer_to(self, request: Mapping[str, Any]) -> dict[str, Any]:
        match request.get("request"):
            case "take":
                if self._is_ending or not self._fits(request["digest"]):
                    self._is_ending = True
                    return {"refused": True}
                return {"kept": to_json(self._kept)}
            case "end":
                self._is_ending = True
                return {"num_users": len(self._users)}
            case "status":
                return self._status()
        return {}

    def _fits(self, digest: str) -> bool:
        """Returns whether the servers fit a command: environment, loaded files, and whether they run at all."""
        if digest != self._digest or any(is_stopped(server.process.pid) for server in self._servers.values()):
            return False
        if time.monotonic() - self._checked_s < CHECKED_FOR_S:
            return True
        sockets = filter(None, (self._kept.fork_server, self._kept.commands))
        has_changed = any(_has_changed(Path(each)) for each in sockets)
        self._checked_s = time.monotonic()
        return not has_changed

    def _status(self) -> dict[str, Any]:
        pids = [server.process.pid for server in self._servers.values()]
        memory_bytes = 0
        for pid in (os.getpid(), *pids, *(child.pid for child in psutil.Process().children())):
            with suppress(psutil.Error):
                memory_bytes += psutil.Process(pid).memory_info().rss
        names = [*self._servers, *(["command server"] if self._kept.commands else [])]
        left_s = max(0.0, self._stay_s - self._idle_s())
        return {"num_users": len(self._users), "left_s": left_s, "memory_bytes": memory_bytes, "names": names}

    def _close(self) -> None:
        if self._is_named():
            with suppress(OSError):
                record_file(self._home).unlink()
        self._listener.close()
        self._commands.close()
        for server in self._servers.values():
            server.end()
        shutil.rmtree(self._inherited, ignore_errors=True)
        self._folder.close()


def _has_changed(server: Path) -> bool:
    """Returns whether a file that a fork server has loaded was changed since, or whether the server does not answer."""
    try:
        channel = ForkServerClient(server).spawn(target=TARGET, argument=None, log=Path(os.devnull))
    except OSError:
        return True
    try:
        while CHANGED not in (message := channel.receive()):
            pass
        return bool(message[CHANGED])
    except ChannelClosed:
        return True
    finally:
        channel.close()


def main() -> None:
    """Keeps what the order on stdin names."""
    set_umask()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    daemon = Daemon(json.load(sys.stdin))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    daemon.run()


if __name__ == "__main__":
    main()

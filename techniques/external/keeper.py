"""Ends every process that a command started, when the command or its worker ends.

A keeper process stands between a worker and its command. It has its own session, so that no signal to the worker's
process group ends it. It is a subreaper (prctl(2)): it becomes the parent of the processes that the command leaves
behind. This matters because torchrun, for example, puts its workers into sessions of their own, which no signal to a
process group reaches. When the command ends, or the worker ends in any way, the keeper kills all that is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ringmaster.errors import ChannelClosed
from ringmaster.techniques.processes.channel import Channel

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)
_LIBC = ctypes.CDLL(None)


class Kept:
    """A running command, as seen from the worker.

    status: its exit status once it has ended, negative for a signal; None before.
    """

    def __init__(self, words: Sequence[str], *, environment: Mapping[str, str], folder: Path) -> None:
        ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            _keep(theirs, words, environment=environment, folder=folder)
        theirs.close()
        self.channel = Channel(ours)
        self.status: int | None = None

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the command's process group."""
        with contextlib.suppress(ChannelClosed):  # it has ended: `hear` will read its status
            self.channel.send({"signal": int(number)})

    def hear(self) -> None:
        """Processes the messages of the keeper. Raises ValueError where the command cannot be started."""
        while self.status is None and (message := self._message()) is not None:
            if "fault" in message:
                raise ValueError(message["fault"])
            self.status = message["status"]

    def _message(self) -> Mapping[str, Any] | None:
        try:
            return self.channel.poll()
        except ChannelClosed:
            return {"status": -signal.SIGKILL}  # the keeper itself was killed

    def close(self) -> None:
        """Ends the command and all processes that it started; returns when they have ended."""
        self.channel.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def processes(self) -> list[int]:
        """Returns the pids of the command and of all processes that it started."""
        return _descendants(self.pid)


def _keep(connection: socket.socket, words: Sequence[str], *, environment: Mapping[str, str], folder: Path) -> NoReturn:
    """Runs the keeper, in a fork of the worker."""
    try:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        os.closerange(3, connection.fileno())
        os.closerange(connection.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
        channel = Channel(connection)
        try:
            command = subprocess.Popen(
                words, env=environment, cwd=folder, stdin=subprocess.DEVNULL, preexec_fn=_begin, start_new_session=True
            )
        except OSError as error:
            channel.send({"fault": f"the command {words[0]!r} cannot be started: {error}"})
        else:
            status = _watch(channel, command.pid)
            _kill_descendants()
            channel.send({"status": status})
    except ChannelClosed:
        _kill_descendants()
    finally:
        os._exit(0)


def _begin() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # if the keeper itself is killed


def _watch(channel: Channel, pid: int) -> int:
    """Forwards signals until the command has ended; returns its status. Raises ChannelClosed when the worker ends."""
    wake, wake_writer = os.pipe()
    for end in (wake, wake_writer):
        os.set_blocking(end, False)
        os.set_inheritable(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
    with selectors.DefaultSelector() as selector:
        selector.register(wake, selectors.EVENT_READ)
        selector.register(channel, selectors.EVENT_READ)
        while (status := _reap(pid)) is None:
            selector.select()
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 4096)
            while (message := channel.poll()) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, message["signal"])
    return status


def _reap(pid: int) -> int | None:
    """Reaps all ended children; returns the command's exit status if it is among them."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == pid:
                return os.waitstatus_to_exitcode(ended[1])
    return None


def _kill_descendants() -> None:
    """Kills children, and then their children, which become this process's own as the former end."""
    with contextlib.suppress(ChildProcessError):
        while True:
            for pid in _children(os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)


def _descendants(pid: int) -> list[int]:
    children = _children(pid)
    return children + [grandchild for child in children for grandchild in _descendants(child)]


def _children(pid: int) -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _parent(entry) == pid]


def _parent(process: Path) -> int | None:
    try:
        # The name may contain any character, even brackets; state and parent follow it.
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return None

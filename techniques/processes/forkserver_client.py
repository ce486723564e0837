"""Clients of the fork server: one starts and ends it, others request worker processes of it."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ringmaster.errors import ChannelClosed, ForkServerError
from ringmaster.techniques.job import Job
from ringmaster.techniques.processes.channel import Channel, address_of
from ringmaster.techniques.processes.forkserver import TICK, seconds_since_boot
from ringmaster.techniques.processes.order import GangOrder, rank_argument
from ringmaster.techniques.processes.rank_environment import first_in_path, linked_package, rank_environment
from ringmaster.techniques.processes.stopped import StoppedProcesses
from ringmaster.text import shortened

PREFIX = "ringmaster-"
OWNER = "owner"


class ScratchFolder:
    """A folder of this process, until `close`; the folders of killed processes of this user are removed first."""

    def __init__(self, *, prefix: str = PREFIX) -> None:
        assert prefix.startswith(PREFIX), "stale folders are found by this prefix"
        remove_stale()
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        # The file has another name until it is locked, so that no process sees an owner's file without its lock.
        unlocked = self.path / f".{OWNER}"
        self._lock = unlocked.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unlocked.rename(self.path / OWNER)

    @property
    def descriptor(self) -> int:
        """The descriptor of the lock: the folder stays for as long as any process holds it open."""
        return self._lock.fileno()

    def close(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def remove_stale() -> None:
    """Removes the folders that killed processes of this user have left."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # removed meanwhile, or in use, for which flock raises
            stat_of = folder.lstat()
            if stat.S_ISDIR(stat_of.st_mode) and stat_of.st_uid == os.geteuid():
                _remove_if_stale(folder)


def _remove_if_stale(folder: Path) -> None:
    handle = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(handle)


WORKER = "ringmaster.techniques.processes.worker:main"
# Imports of every worker. Optimizers import torch._dynamo at their first step, which takes seconds if not preloaded.
PRELOAD = (
    "torch.distributed:init_process_group",
    "torch.distributed.fsdp:fully_shard",
    "torch.distributed.tensor:DTensor",
    "torch._dynamo:disable",
    "ringmaster.techniques.processes.preloaded:fill_caches",
    WORKER,
)
START_TIMEOUT_S = 300.0
IDLE_AFTER_S = 600.0  # without workers, after which a server that starts when it is needed ends, for its memory


class ForkServerClient:
    """A client of a fork server that another process owns, such as the one of this machine's node.

    The workers of this client end when it does, and with the server. socket_path: the server's socket.
    """

    def __init__(self, socket_path: Path) -> None:
        self._socket_path = socket_path
        self._of_pythons: dict[str, ForkServer] = {}
        self._changing = threading.Lock()

    @property
    def socket_path(self) -> Path:
        """The server's socket."""
        return self._socket_path

    def start(self) -> Self:
        """Makes a server that waits for its first client start to import torch."""
        with contextlib.suppress(OSError):
            self._connect().close()
        return self

    def spawn(self, *, target: str, argument: Any, log: Path) -> Channel:
        """Starts a process that calls `target(channel, argument)`; returns the channel to it.

        The process writes its output to the file `log`. Raises OSError where the server has ended for good.
        """
        channel = Channel(self._connect())
        with contextlib.suppress(ChannelClosed):  # a closed fence refuses the child: receiving raises ChannelClosed
            channel.send({"target": target, "argument": argument, "log": str(log), **self._child_context()})
        return channel

    def start_rank(self, order: GangOrder, *, rank: int, log: Path) -> Channel:
        """Starts one rank of an order; returns the channel to it. The rank's output is appended to the file `log`.

        The rank reports {"event": "started", "pid": N} first, and then the events of `worker`. After its end, the
        server adds {"event": "exit", "status": N, "fenced": false} and closes the channel. N is negative for a signal,
        as in `subprocess`; "fenced": whether a fence (`forkserver.Fence`) ended the rank.

        The rank and the processes that it has started are killed when the other end of its channel is closed or hung
        up. They therefore end with the process that started the rank, however that ends.

        Raises OSError or ForkServerError where no process can be started.
        """
        server = self.server_for(order.job, cache_dir=order.cache_dir)
        return server.spawn(target=WORKER, argument=rank_argument(order, rank=rank), log=log)

    def server_for(self, job: Job, *, cache_dir: str) -> ForkServerClient:
        """Returns the server that forks the processes of a job: this one, or that of the job's own Python.

        There is one for each Python, which starts with its first process, and ends when it is idle, or with this
        process. What a command starts runs in the job's Python; its worker does not.

        Raises InterpreterError where there is no such Python.
        """
        python = job.interpreter(cache_dir)
        if python is None or job.is_black_box:
            return self
        with self._changing:
            if python not in self._of_pythons:
                self._of_pythons[python] = self._server_of(python)
            return self._of_pythons[python]

    def _server_of(self, python: str) -> ForkServer:
        return ForkServer(python=python)

    def close(self) -> None:
        """Ends the servers of other Pythons; the server itself is another process's."""
        with self._changing:
            while self._of_pythons:
                self._of_pythons.popitem()[1].close()

    def _child_context(self) -> dict[str, Any]:
        """Returns what a child is to have that the server has not."""
        return {}

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        try:
            with address_of(self._socket_path) as address:
                connection.connect(address)
        except OSError:  # the server has just ended
            connection.close()
            raise
        return connection


@dataclass(frozen=True, kw_only=True)
class RunningForkServer:
    """A fork server that its owner hands over to another process, which inherits the two descriptors.

    pid: its process.
    socket: the socket by which it is requested to fork.
    folder: the folder for temporary files.
    stdin: the descriptor whose end ends the server.
    lock: the descriptor of the lock that keeps the folder.
    """

    pid: int
    socket: str
    folder: str
    stdin: int
    lock: int


class KeptForkServer(ForkServerClient):
    """A client of a fork server that an earlier command has started: its children get what this process has now."""

    def _child_context(self) -> dict[str, Any]:
        return {"folder": str(Path.cwd()), "environment": rank_environment()}


class ForkServer(ForkServerClient):
    """A fork server that this process owns: it and all its workers end when this process does.

    fence_after_s: seconds after the last `tick` when its workers end; none is started until another tick. None for no
        fence.
    base: the imports of every worker, which come before `preload`; PRELOAD by default.
    kept: the socket of a server of another process, which is used for as long as it runs; its workers get the working
        folder and the environment of this process.
    python: another Python, whose server ends when it has no workers for a while, for its memory; None for this one.

    `start` and `spawn` raise ForkServerError, with the end of the server's log, where the server cannot start.
    """

    def __init__(
        self,
        *,
        preload: Sequence[str] = (),
        log: Path | None = None,
        fence_after_s: float | None = None,
        base: Sequence[str] | None = None,
        kept: Path | None = None,
        python: str | None = None,
    ) -> None:
        self._folder = ScratchFolder()
        super().__init__(self._folder.path / "forkserver")
        self._log = log or self._folder.path / "log"
        self._preload = tuple(dict.fromkeys([*(PRELOAD if base is None else base), *preload]))
        self._kept = None if kept is None else KeptForkServer(kept)
        self._fence_after_s = fence_after_s
        self._python = python
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._starting: subprocess.Popen[bytes] | None = None
        self._is_closed = self._is_handed_over = False
        self._listener: socket.socket | None = None  # of a server that starts when it is needed

    def start(self) -> Self:
        """Starts the server where it is not running; returns when it is ready to fork."""
        with self._lock:
            if self._kept is None and (self._process is None or self._process.poll() is not None):
                self._hang_up()
                self._process = self._launch()
        return self

    def start_when_needed(self, *, link: Path) -> None:
        """Has the server start once it is connected to, and end after a while without workers.

        link: a link to the server's socket, by which other processes of this machine find it.
        """
        self._listener = self._listen()
        link.unlink(missing_ok=True)
        link.symlink_to(self._socket_path)
        threading.Thread(target=self._keep, args=(self._listener,), name="forkserver", daemon=True).start()

    def spawn(self, *, target: str, argument: Any, log: Path) -> Channel:
        """Starts a process, and the server where it is not running. See `ForkServerClient.spawn`."""
        if (kept := self._kept) is not None:
            try:
                return kept.spawn(target=target, argument=argument, log=log)
            except OSError:  # it has ended
                self._kept = None
        self.start()
        try:
            return super().spawn(target=target, argument=argument, log=log)
        except OSError:
            if self._python is None:
                raise
        self.start()  # it was idle for so long that it has just ended
        return super().spawn(target=target, argument=argument, log=log)

    def _server_of(self, python: str) -> ForkServer:
        return ForkServer(python=python, fence_after_s=self._fence_after_s)

    def tick(self, heard_s: float | None = None) -> None:
        """Reports to the server that its workers may continue. Never waits: a server that is starting needs no tick.

        `heard_s` is the moment at which this process was known to own its devices, by `seconds_since_boot`; now by
        default.
        """
        for server in [*self._of_pythons.values()]:
            server.tick(heard_s)
        process = self._process
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # the server has ended; the next `spawn` starts it again
                os.write(process.stdin.fileno(), TICK.pack(seconds_since_boot() if heard_s is None else heard_s))

    def hand_over(self) -> RunningForkServer | None:
        """Gives up the server, so that it runs on without this process; None where there is none that is ready.

        The caller has another process inherit the descriptors before this one ends.
        """
        if not self._lock.acquire(blocking=False):  # it is starting
            return None
        try:
            process = self._process
            if self._kept is not None or process is None or process.poll() is not None or process.stdin is None:
                return None
            self._process, self._is_closed, self._is_handed_over = None, True, True
            return RunningForkServer(
                pid=process.pid,
                socket=str(self._socket_path),
                folder=str(self._folder.path),
                stdin=process.stdin.fileno(),
                lock=self._folder.descriptor,
            )
        finally:
            self._lock.release()

    def close(self) -> None:
        """Ends the server and all its workers; a server that is still starting is killed."""
        super().close()
        if (starting := self._starting) is not None:
            starting.kill()
        with self._lock:
            if self._is_handed_over:
                return
            self._is_closed = True
            if self._listener is not None:
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for a connection
                self._listener.close()
                self._listener = None
            self._hang_up()
            self._folder.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _listen(self) -> socket.socket:
        self._socket_path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        with address_of(self._socket_path) as address:
            listener.bind(address)
        listener.listen(64)
        return listener

    def _keep(self, listener: socket.socket) -> None:
        """Starts the server whenever it does not run and a connection waits."""
        waiting = select.poll()
        waiting.register(listener, select.POLLIN)
        while waiting.poll() and not self._is_closed:
            try:
                process = self.start()._process
            except ForkServerError as error:  # its log has more; the next connection is another try
                sys.stderr.write(f"{error}\n")
                with contextlib.suppress(OSError, ValueError):  # it is closed meanwhile
                    while select.select([listener], [], [], 0)[0]:
                        listener.accept()[0].close()
            else:
                assert process is not None
                process.wait()

    def _hang_up(self) -> None:
        """Closes the server's standard input, which ends it, and waits for its end."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _environment(self) -> dict[str, str]:
        if self._python is None:
            return rank_environment()
        import_root = linked_package(self._folder.path)
        return rank_environment(import_root=import_root) | {"PATH": first_in_path(self._python)}

    def _launch(self) -> subprocess.Popen[bytes]:
        # -P: a file in the working folder with the name of a library must not be imported instead of the library.
        command = [
            self._python or sys.executable,
            "-P",
            "-m",
            "ringmaster.techniques.processes.forkserver",
        ]
        listener = self._listener or self._listen()
        idle_after_s = math.inf if self._listener is None and self._python is None else IDLE_AFTER_S
        command += [str(listener.fileno()), str(self._fence_after_s or math.inf), str(idle_after_s), *self._preload]
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                # Some libraries create files of fixed names in the temporary folder, which other users share.
                env={**self._environment(), "TMPDIR": str(self._folder.path)},
                preexec_fn=_restore_signals,
                pass_fds=[listener.fileno()],
            )
        if self._listener is None:
            listener.close()  # so that nobody can connect once the server has ended
        assert process.stdin is not None and process.stdout is not None
        self._starting = process
        killer = threading.Timer(START_TIMEOUT_S, process.kill)
        killer.start()
        line = process.stdout.readline()
        is_late = killer.finished.is_set()
        killer.cancel()
        self._starting = None
        process.stdout.close()
        threading.Thread(target=_end_if_stopped, args=(process,), name="stopped", daemon=True).start()
        if line != b"ready\n":
            process.kill()
            process.wait()
            process.stdin.close()
            lines = self._log.read_text(errors="replace").split("\n")  # `_launch` has made it
            end = shortened(next(filter(str.strip, reversed(lines)), "nothing"), 500)
            late = f" within {START_TIMEOUT_S:g} s" if is_late else ""
            remedy = (
                "try again once this machine is less busy" if is_late else "resolve the error in its log, and try again"
            )
            raise ForkServerError(
                f"the fork server, which starts all processes that train, did not start{late}; its log {self._log} "
                f"ends with: {end}. To fix: {remedy}"
            )
        return process


def _end_if_stopped(process: subprocess.Popen[bytes]) -> None:
    """Kills a server that stays stopped: it starts nothing, and does not report the ends of its workers."""
    stopped = StoppedProcesses()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=stopped.look_every_s)
            return
        if stopped.among([process.pid]):
            sys.stderr.write(f"the fork server was stopped for {stopped.after_s:.0f} s: killed as hung\n")
            process.kill()


def _restore_signals() -> None:
    """Starts a new session, so that Ctrl-C at a terminal reaches only the owner, which then stops its gangs."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

"""Fork server: imports torch once, then forks worker processes on request, each in a tenth of a second.

Run as `python -m ringmaster.techniques.processes.forkserver LISTENER FENCE_AFTER_S IDLE_AFTER_S [DOTTED ...]`.
The server preloads the dotted names, accepts connections to the Unix socket whose descriptor it inherits, and forks a
child for each connection. The connection is the
child's channel to the process that requested it: JSON lines in both directions. The first line names the function to
run: {"target": "package.module:function", "argument": ..., "log": FILE}. Where another process than the owner requests
it, "folder" and "environment" are the child's working folder and environment variables.

No process is left behind. A child and its whole process group are killed when the other end of its channel closes. All
children are killed, and the server ends, when the server's standard input closes, that is when its owner ends for any
reason. The last line reports a child's exit status as {"event": "exit", "status": N, "fenced": false}; N is negative
for a signal, as in `subprocess`.

SIGTERM ends neither the server nor a child that starts: it may be sent to all processes of a machine's job.

All children are also killed FENCE_AFTER_S seconds ("inf" for never) after the last tick that the owner has written to
the standard input. No child is started until another tick arrives: see `Fence`. The server ends after IDLE_AFTER_S
seconds ("inf" for never) without children; its owner keeps the socket, so that no connection is lost.

Python's own fork server pickles what it runs and imports the caller's __main__ again. The one here does neither, and
processes that did not start it can share its socket.
"""

import contextlib
import ctypes
import gc
import json
import math
import os
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable

from ringmaster.errors import ChannelClosed
from ringmaster.registry import resolve
from ringmaster.techniques.processes.channel import HANG_UP, TELL_S, Channel
from ringmaster.techniques.processes.gang_events import RankExited, RankStarted, event_to_json
from ringmaster.techniques.processes.loaded_files import note_loaded

TICK = struct.Struct("d")
"""The format of a tick: a moment, by `seconds_since_boot`."""


def seconds_since_boot() -> float:
    """Returns seconds on a clock that all processes of a machine share.

    The clock also runs while the machine is suspended, as others may take over its devices meanwhile.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Fence:
    """Decides whether more than `after_s` seconds have passed since the owner was known to own its devices."""

    def __init__(self, after_s: float, *, clock: Callable[[], float] = seconds_since_boot) -> None:
        self._after_s, self._clock = after_s, clock
        self._heard_s = clock()

    def tick(self, ticks: bytes) -> None:
        """Reads the ticks that the owner has sent."""
        for (moment_s,) in TICK.iter_unpack(ticks):
            self._heard_s = max(self._heard_s, moment_s)

    def is_closed(self) -> bool:
        """Returns whether no process of the owner may run any more."""
        return self._clock() - self._heard_s >= self._after_s

    def wait_ms(self) -> int | None:
        """Returns how long to wait for the owner before checking again, in milliseconds; None for no limit.

        The limit is one second, as `poll` does not count the time while the machine is suspended. A closed fence needs
        no further checks until a tick arrives.
        """
        left_s = self._heard_s + self._after_s - self._clock()
        return None if math.isinf(left_s) or left_s <= 0 else math.ceil(1000 * min(left_s, 1.0))


PR_SET_PDEATHSIG = 1  # prctl(2)
_LIBC = ctypes.CDLL(None)


def serve(listener: socket.socket, *, fence_after_s: float, idle_after_s: float, preload: tuple[str, ...]) -> None:
    """Imports the names in `preload`, then forks a child for each connection until standard input closes."""
    # A scheduler may send SIGTERM to every process of a job, and the owner then stops its ranks at a checkpoint: the
    # server must outlive it, and so must a child until it has a handler of its own. Programs that a child starts do not
    # inherit a handler, unlike SIG_IGN.
    signal.signal(signal.SIGTERM, lambda *_: None)
    ready = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print at their import belongs to the log
    for name in preload:
        resolve(name)
    note_loaded()
    gc.collect()
    gc.freeze()  # the garbage collector must not write to pages that the children share
    os.write(ready, b"ready\n")
    os.close(ready)
    _Server(listener, Fence(fence_after_s), idle_after_s=idle_after_s).run()


class _Server:
    def __init__(self, listener: socket.socket, fence: Fence, *, idle_after_s: float) -> None:
        self.listener, self.fence, self.idle_after_s = listener, fence, idle_after_s
        self.busy_s = time.monotonic()  # when there was a child last
        self.fenced: set[int] = set()
        self.children: dict[int, socket.socket] = {}
        self.poll = select.poll()
        self.wake, wake_writer = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(wake_writer, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        # The owner handles interrupts and SIGTERM, and closes this server's standard input when it ends.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.owner = sys.stdin.fileno()
        for fd in (self.listener.fileno(), self.wake, self.owner):
            self.poll.register(fd, select.POLLIN)

    def run(self) -> None:
        while self.children or time.monotonic() - self.busy_s < self.idle_after_s:
            events = self.poll.poll(self.wait_ms())
            # Ticks of the owner are read first, as they may keep the fence open.
            for fd, event in sorted(events, key=lambda pair: pair[0] != self.owner):
                if fd == self.owner:
                    if not (ticks := os.read(self.owner, 512 * TICK.size)):
                        self.end_all()
                        return
                    self.fence.tick(ticks)
                elif fd == self.wake:
                    os.read(self.wake, 4096)
                    self.reap()
                elif fd == self.listener.fileno():
                    self.fork(self.listener.accept()[0])
                elif event & HANG_UP:
                    self.hang_up(fd)
            if self.fence.is_closed() and not self.fenced.issuperset(self.children):
                print("nothing was heard of the owner: its processes are ended", file=sys.stderr, flush=True)
                self.fenced.update(self.children)
                self.end_all()
            if self.children:
                self.busy_s = time.monotonic()

    def wait_ms(self) -> int | None:
        idle_ms = None if self.children or math.isinf(self.idle_after_s) else math.ceil(1000 * self.idle_after_s)
        return min((ms for ms in (self.fence.wait_ms(), idle_ms) if ms is not None), default=None)

    def fork(self, connection: socket.socket) -> None:
        if self.fence.is_closed():
            connection.close()
            return
        try:
            pid = os.fork()
        except OSError as error:  # the limit of processes or memory is reached: running gangs must continue
            print(f"no process can be started: {error}", file=sys.stderr, flush=True)
            connection.close()
            return
        if pid == 0:
            _child(connection, inherited=[self.listener, *self.children.values()])
        self.children[pid] = connection
        self.poll.register(connection.fileno(), HANG_UP)

    def hang_up(self, fd: int) -> None:
        for pid, connection in self.children.items():  # no match where the child was reaped in the same round
            if connection.fileno() == fd:
                self.poll.unregister(fd)
                os.kill(pid, signal.SIGKILL)  # the child may not have its own process group yet
                _kill_group(pid)

    def reap(self) -> None:
        while self.children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            connection = self.children.pop(pid)
            with contextlib.suppress(KeyError):
                self.poll.unregister(connection.fileno())
            _kill_group(pid)  # processes that the child started
            with contextlib.suppress(OSError):
                status = os.waitstatus_to_exitcode(status)
                line = event_to_json(RankExited(status=status, fenced=pid in self.fenced))
                connection.settimeout(TELL_S)  # a frozen owner reads nothing, and must not block the fence
                connection.sendall(json.dumps(line).encode() + b"\n")
            connection.close()
            self.fenced.discard(pid)

    def end_all(self) -> None:
        for pid in self.children:
            os.kill(pid, signal.SIGKILL)  # the child may not have its own process group yet
            _kill_group(pid)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _child(connection: socket.socket, *, inherited: list[socket.socket]) -> None:
    """Runs what the connection requests, then ends the process; never returns into the server's loop."""
    status = 1
    try:
        os.setsid()
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a killed server cannot kill its children
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        for other in inherited:
            other.close()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        channel = Channel(connection)
        try:
            request = channel.receive()
        except ChannelClosed:  # a client has only made the server start
            os._exit(0)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if "environment" in request:
            own = {"TMPDIR": os.environ["TMPDIR"]} if "TMPDIR" in os.environ else {}
            os.environ.clear()
            os.environ.update(request["environment"] | own)
        os.chdir(request.get("folder", "."))
        channel.send(event_to_json(RankStarted(pid=os.getpid())))
        status = resolve(request["target"])(channel, request["argument"])
    except BaseException:  # noqa: BLE001 - the outermost frame of the process: every exception goes to the log
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status or 0)


if __name__ == "__main__":
    serve(
        socket.socket(fileno=int(sys.argv[1])),
        fence_after_s=float(sys.argv[2]),
        idle_after_s=float(sys.argv[3]),
        preload=tuple(sys.argv[4:]),
    )
    sys.stderr.flush()
    os._exit(0)  # the interpreter would spend half a second on torch's modules, for which the owner waits

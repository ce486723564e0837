"""The owner's side of the fork server: starts it, asks it for worker processes, ends it."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ringmaster.techniques.engine.channel import Channel, ChannelClosed
from ringmaster.techniques.engine.fence import TICK, seconds_since_boot
from ringmaster.techniques.engine.scratch import ScratchFolder

# What every worker imports. Optimizers pull in torch._dynamo at their first step: seconds, unless it is there already.
PRELOAD = (
    "torch.distributed:init_process_group",
    "torch.distributed.fsdp:fully_shard",
    "torch.distributed.tensor:DTensor",
    "torch._dynamo:disable",
    "transformers:PreTrainedModel",
    "ringmaster.techniques.engine.worker:main",
)
START_TIMEOUT_S = 300.0


class ForkServer:
    """A fork server that this process owns: it and all its workers end when this process does.

    fence_after_s: its workers also end when the last `tick` is so many seconds old, and none is started until another
    comes. Raises RuntimeError, with the end of the server's log, where it cannot start.
    """

    def __init__(
        self, *, preload: Sequence[str] = (), log: Path | None = None, fence_after_s: float | None = None
    ) -> None:
        self._folder = ScratchFolder()
        self._socket_path = self._folder.path / "forkserver"
        self._log = log or self._folder.path / "log"
        self._preload = tuple(dict.fromkeys([*PRELOAD, *preload]))
        self._fence_after_s = fence_after_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._starting: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        """Starts the server where it is not running; returns when it is ready to fork."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._socket_path.unlink(missing_ok=True)
                self._hang_up()
                self._process = self._launch()
        return self

    def spawn(self, *, target: str, argument: Any, log: Path) -> Channel:
        """A new process that calls `target(channel, argument)`; its output goes to the file `log`."""
        self.start()
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(self._socket_path))
        except OSError:  # the server has just ended
            connection.close()
            raise
        channel = Channel(connection)
        with contextlib.suppress(ChannelClosed):  # refused, behind the fence: whoever reads the channel hears so
            channel.send({"target": target, "argument": argument, "log": str(log)})
        return channel

    def tick(self, heard_s: float | None = None) -> None:
        """Tells the server that its workers may go on. Never waits: a server that is being started needs no tick.

        heard_s: when this process was known to be in its place, by `seconds_since_boot`; now where it is left out.
        """
        process = self._process
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # it has ended; the next `spawn` starts it anew
                os.write(process.stdin.fileno(), TICK.pack(seconds_since_boot() if heard_s is None else heard_s))

    def close(self) -> None:
        """Ends the server and every worker that it started; one that is being started is not waited for."""
        if (starting := self._starting) is not None:
            starting.kill()
        with self._lock:
            self._hang_up()
            self._folder.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _hang_up(self) -> None:
        """Closes the pipe that tells a server that it is wanted, and waits for its end, which may have come before."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _launch(self) -> subprocess.Popen[bytes]:
        # -P: a file in the working folder that is called like a library must not be imported in its place.
        command = [sys.executable, "-P", "-m", "ringmaster.techniques.engine.forkserver", str(self._socket_path)]
        command += [str(self._fence_after_s or math.inf), *self._preload]
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_environment(),
                preexec_fn=_restore_signals,
            )
        assert process.stdin is not None and process.stdout is not None
        self._starting = process
        killer = threading.Timer(START_TIMEOUT_S, process.kill)
        killer.start()
        line = process.stdout.readline()
        killer.cancel()
        self._starting = None
        process.stdout.close()
        if line != b"ready\n":
            process.kill()
            process.wait()
            process.stdin.close()
            with contextlib.suppress(OSError):
                tail = self._log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"the fork server did not start; the end of {self._log}:\n{tail}")
        return process


def _environment() -> dict[str, str]:
    """Ours, with our packages found where they are now, one thread until a worker knows its cores, and no telemetry."""
    source = str(Path(__file__).absolute().parents[3])
    paths = [source, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "OMP_NUM_THREADS": "1",
        # Else MKL adds in another order, on AMD's CPUs, where a result begins elsewhere in memory: a job that is
        # resumed, or trained in a group, would not end in the same bits.
        "MKL_CBWR": os.environ.get("MKL_CBWR", "AUTO"),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "DO_NOT_TRACK": "true",
        # Trace output of numerics or of NCCL would be the user's to ask for; a gang on one machine talks over loopback.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }


def _restore_signals() -> None:
    """A new session, so that Ctrl-C at a terminal reaches the owner alone, which then stops its gangs in order."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

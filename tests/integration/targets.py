"""Targets that the fork server's tests run in worker processes."""

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path


def echo(channel, argument):
    channel.send({"event": "echo", "argument": argument, "command": channel.receive()["command"]})
    return 0


def fail(channel, argument):
    raise RuntimeError("as it should")


def die(channel, argument):
    os.kill(os.getpid(), signal.SIGKILL)


def flood(channel, argument):
    """Fills its channel, which nobody reads, and exits."""
    connection = socket.socket(fileno=os.dup(channel.fileno()))
    for size in (4096, 1):
        with contextlib.suppress(BlockingIOError):
            while True:
                connection.send(b" " * size, socket.MSG_DONTWAIT)
    return 0


def linger(channel, argument):
    """Starts a child process and waits forever, as a hung rank does."""
    child = subprocess.Popen(["sleep", "600"])
    channel.send({"event": "lingering", "pids": [os.getpid(), child.pid]})
    while True:
        time.sleep(600)


def write_to_caches(channel, argument):
    """Uses what libraries would place in the temporary folder, and tells where torch stores code that it compiles."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir

    tempfile.mkstemp()
    (Path(tempfile.gettempdir()) / "of-a-fixed-name").touch()
    channel.send({"event": "folders", "code": [cache_dir(), triton_cache_dir(0)], "temporary": tempfile.gettempdir()})
    return 0

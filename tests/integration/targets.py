"""Targets that the fork server's tests run in worker processes."""

import contextlib
import os
import signal
import socket
import subprocess
import time


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

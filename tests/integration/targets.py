"""What the fork server's tests run in worker processes."""

import os
import signal
import subprocess
import time


def echo(channel, argument):
    channel.send({"event": "echo", "argument": argument, "command": channel.receive()["command"]})
    return 0


def fail(channel, argument):
    raise RuntimeError("as it should")


def die(channel, argument):
    os.kill(os.getpid(), signal.SIGKILL)


def linger(channel, argument):
    """Starts a child of its own and waits for ever, as a hung rank does."""
    child = subprocess.Popen(["sleep", "600"])
    channel.send({"event": "lingering", "pids": [os.getpid(), child.pid]})
    while True:
        time.sleep(600)

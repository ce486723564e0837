"""A Ray cluster of this machine alone: `python -m ringmaster.features.ray.head --port N --home FOLDER`.

It listens on loopback alone and requires a token, as whoever reaches a Ray cluster can run programs on it. SIGTERM ends
it; this process ends once the nodes on it have left their pool in order.
"""

import argparse
import os
import secrets
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from ringmaster.features.ray.agent_parent import end_with
from ringmaster.features.ray.ray_engine import HOST, LEAVE_S, PREFIX, head_environment, token_file
from ringmaster.tasks.pool.engines import ALLOCATION
from ringmaster.tasks.process_identity import say_ready
from ringmaster.techniques.processes.forkserver_client import ScratchFolder

STORE_BYTES = 100_000_000  # Ray's object store, which no node uses; the least is 75 MB
LOOK_EVERY_S = 0.2
HOME = "RINGMASTER_HOME"


def command(*, port: int, folder: Path) -> Sequence[str]:
    """Returns the command that runs the cluster until SIGTERM. folder: with a short path, as Ray puts sockets there."""
    ray = Path(sysconfig.get_path("scripts"), "ray")
    options = {
        "node-ip-address": HOST,
        "port": str(port),
        "temp-dir": str(folder),
        "object-store-memory": str(STORE_BYTES),
        "include-dashboard": "false",
        # Any free ports, so that `port` may be one of those that Ray's workers have by default.
        "min-worker-port": "0",
        "max-worker-port": "0",
        "dashboard-agent-listen-port": "0",
    }
    named = [f"--{name}={value}" for name, value in options.items()]
    return (sys.executable, str(ray), "start", "--head", "--block", "--disable-usage-stats", *named)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the cluster; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--home", type=Path, required=True)
    requested = parser.parse_args(arguments)
    make_token(token_file(requested.home))
    own_pid = os.getpid()
    with ScratchFolder() as folder:
        cluster = subprocess.Popen(
            command(port=requested.port, folder=folder.path),
            env={**os.environ, **head_environment(requested.home, port=requested.port)},
            preexec_fn=lambda: end_with(own_pid),
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: cluster.terminate())
        if _answers_or_ends(cluster, port=requested.port):
            say_ready()
        status = cluster.wait()
        for left in processes_with(str(folder.path)):  # `ray start` was killed: its processes would keep the port
            with suppress(psutil.NoSuchProcess):
                left.kill()
        psutil.wait_procs(nodes_of(requested.home), timeout=LEAVE_S)
    return status


def _answers_or_ends(cluster: subprocess.Popen[bytes], *, port: int) -> bool:
    """Waits until the cluster answers; returns False where it has ended instead."""
    while cluster.poll() is None:
        try:
            with socket.create_connection((HOST, port), timeout=LOOK_EVERY_S):
                return True
        except OSError:
            with suppress(subprocess.TimeoutExpired):
                cluster.wait(LOOK_EVERY_S)
    return False


def make_token(file: Path) -> None:
    """Makes a token that only the owner can read, where there is none."""
    if not file.exists():
        file.touch(mode=0o600)
        file.write_text(secrets.token_hex(32))


def processes_with(text: str) -> list[psutil.Process]:
    """Returns the other processes of this machine whose command line contains a text."""
    processes = psutil.process_iter(["cmdline"])
    return [each for each in processes if each.pid != os.getpid() and text in " ".join(each.info["cmdline"] or ())]


def nodes_of(home: Path) -> list[psutil.Process]:
    """Returns the processes of the nodes that Ray lends to a home's pool on this machine."""
    processes = {each: each.info["environ"] or {} for each in psutil.process_iter(["environ"])}
    return [
        each
        for each, variables in processes.items()
        if variables.get(ALLOCATION, "").startswith(PREFIX) and variables.get(HOME) == str(home)
    ]


if __name__ == "__main__":
    sys.exit(main())

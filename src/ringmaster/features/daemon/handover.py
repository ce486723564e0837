"""How a command that ends leaves its fork server and Prefect's server to a daemon, instead of ending them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from ringmaster.codec import to_json
from ringmaster.features.daemon.environment import environment_digest
from ringmaster.flows.services.first_processes import ServerProcess
from ringmaster.techniques.processes.forkserver_client import ForkServer
from ringmaster.techniques.processes.rank_environment import IMPORT_ROOT

MODULE = "ringmaster.features.daemon.daemon"


def start_daemon(home: Path, *, stay_s: float, fork_server: ForkServer, prefect: ServerProcess | None) -> None:
    """Leaves the servers of this command to a new daemon. Where the fork server does not run, the caller ends both."""
    if (running := fork_server.hand_over()) is None:
        return
    order: dict[str, Any] = {
        "home": str(home),
        "digest": environment_digest(),
        "stay_s": stay_s,
        "fork_server": to_json(running),
        "prefect": None,
    }
    descriptors = [running.stdin, running.lock]
    if prefect is not None and prefect.process is not None and prefect.process.stdin is not None:
        stdin = prefect.process.stdin.fileno()
        order["prefect"] = {"pid": prefect.process.pid, "stdin": stdin, "api": prefect.api, "user": prefect.user}
        descriptors.append(stdin)
        prefect.let_go()
    paths = [str(IMPORT_ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    daemon = subprocess.Popen(
        [sys.executable, "-P", "-m", MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=descriptors,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))},
    )
    with suppress(BrokenPipeError):  # it has ended, and with it what was left to it
        assert daemon.stdin is not None
        daemon.stdin.write(json.dumps(order).encode())
        daemon.stdin.close()

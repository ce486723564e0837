"""Launcher that starts each rank as a Python process of its own. A rank takes seconds to start, as it imports torch."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

from ringmaster.techniques.processes.channel import HANG_UP, TELL_S, Channel
from ringmaster.techniques.processes.launcher import rank_argument, rank_environment
from ringmaster.techniques.processes.order import GangOrder

RANK = "ringmaster.techniques.processes.rank"


class ProcessLauncher:
    """Starts ranks by the command `python -m ringmaster.techniques.processes.rank`.

    The command's order is stored in the gang's folder, and can be run again by hand. The rank inherits its end of the
    channel. There is no fence: a rank outlives a process that is frozen, but not one that ends.
    """

    def start_rank(self, order: GangOrder, *, rank: int, log: Path) -> Channel:
        """Starts one rank of an order; returns the channel to it. Raises OSError where no process can be started."""
        stored = Path(order.folder) / f"rank-{rank}.json"
        stored.write_text(json.dumps(rank_argument(order, rank=rank)))
        ours, theirs = socket.socketpair()
        # -P: a file in the working folder with the name of a library must not be imported instead of the library.
        command = [sys.executable, "-P", "-m", RANK, str(stored), "--channel", str(theirs.fileno())]
        try:
            with log.open("ab") as output:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=rank_environment(),
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C at a terminal reaches only the supervisor, which stops its gangs
                )
        except OSError:
            ours.close()
            theirs.close()
            raise
        threading.Thread(target=_watch, args=(process, theirs), name=f"rank-{rank}", daemon=True).start()
        return Channel(ours)


def _watch(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    """Waits for the end of a rank, kills it where its supervisor hangs up, and reports its exit status."""
    with connection:
        poll = select.poll()
        ended = os.pidfd_open(process.pid)
        poll.register(connection, HANG_UP)
        poll.register(ended, select.POLLIN)
        poll.poll()
        os.close(ended)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # processes that the rank started, too
        line = {"event": "exit", "status": process.wait(), "fenced": False}
        with contextlib.suppress(OSError):
            connection.settimeout(TELL_S)
            connection.sendall(json.dumps(line).encode() + b"\n")

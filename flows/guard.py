"""Ends this process's helpers when it ends, also when it is killed.

Prefect's embedded server is a child of ours that it ends at a normal exit only. A guard, a process of a few kilobytes
of Python, holds the other end of a pipe from us: when the pipe closes, it ends the server.
"""

from __future__ import annotations

import os
import subprocess
import sys

import psutil

EMBEDDED_SERVER = "prefect.server.api.server:create_app"

GUARD = """
import os, signal, sys
sys.stdin.read()
for pid in map(int, sys.argv[1:]):
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        pass
"""


def guard_embedded_server() -> None:
    """Sees to it that Prefect's embedded server, where this process has started one, does not outlive it."""
    children = psutil.Process(os.getpid()).children()
    servers = [str(child.pid) for child in children if EMBEDDED_SERVER in " ".join(_command(child))]
    if servers:
        # Its pipe is kept open by this process for as long as it lives: nobody closes it, and nobody waits for it.
        guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", GUARD, *servers], stdin=subprocess.PIPE, start_new_session=True
        )
        _guards.append(guard)


_guards: list[subprocess.Popen[bytes]] = []


def _command(process: psutil.Process) -> list[str]:
    try:
        found: list[str] = process.cmdline()
    except psutil.Error:  # it has ended meanwhile
        return []
    return found

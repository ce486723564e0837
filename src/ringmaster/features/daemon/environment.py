"""What two commands must have in common so that the second may use processes that the first has left, as a digest.

What it covers was read once, at the start of those processes: interpreter, installed distributions, environment
variables, limits, settings of Prefect in the working folder. Whatever a later command has of its own, such as its
working folder, it brings along.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys
from functools import cache
from pathlib import Path
from typing import Any

from ringmaster.compat.prefect import SETTINGS_FILES

STAY = "RINGMASTER_STAY_S"
OF_TERMINALS = frozenset(
    {
        *("_", "SHLVL", "PWD", "OLDPWD", "COLUMNS", "LINES", "TERM", "COLORTERM", "DISPLAY", "WAYLAND_DISPLAY"),
        *("WINDOWID", "XDG_SESSION_ID", "XDG_VTNR", "DBUS_SESSION_BUS_ADDRESS", "GPG_AGENT_INFO", "TMUX", "TMUX_PANE"),
        *("STY", "SSH_AUTH_SOCK", "SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY", "SSH_AGENT_PID"),
    }
)
"""Environment variables in which the terminals of one person differ, and which no import reads."""
OWN = frozenset({STAY, "RINGMASTER_HOME", "RINGMASTER_ENGINE"})  # read by each command anew
DISTRIBUTIONS = (".dist-info", ".egg-info", ".egg-link", ".pth")
SITES = ("site-packages", "dist-packages")
LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_CPU)


@cache
def environment_digest() -> str:
    """Returns the digest for this process. The first call must come before anything changes the environment."""
    return digest_of(os.environ.copy(), folder=Path.cwd(), path=sys.path)


def is_known() -> bool:
    """Returns whether the digest was taken in time: a program that calls a command as a function does not take it."""
    return environment_digest.cache_info().currsize > 0


def digest_of(environment: dict[str, str], *, folder: Path, path: list[str]) -> str:
    """Returns the digest of an environment, for a working folder and an import path, in this process."""
    variables = {
        name: value
        for name, value in environment.items()
        if name not in OF_TERMINALS | OWN and not name.startswith(("TERM_", "VTE_", "KITTY_", "WT_", "ITERM_"))
    }
    sources = [str(folder / each) for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each]
    parts: list[Any] = [
        [sys.executable, sys.version, sys.flags.optimize],
        sorted(variables.items()),
        sources,
        sorted(_distributions(path)),
        [_state(folder / name) for name in SETTINGS_FILES],
        [os.geteuid(), os.getegid(), sorted(os.getgroups()), sorted(os.sched_getaffinity(0)), os.nice(0)],
        [resource.getrlimit(limit) for limit in LIMITS],
    ]
    return hashlib.sha256(json.dumps(parts).encode(errors="surrogateescape")).hexdigest()


def _distributions(path: list[str]) -> set[str]:
    """Returns the names of what is installed, with the versions, as the folders of the import path have them."""
    # A forked command and one of its own have different first entries, which hold no distributions.
    folders = [folder for folder in map(Path, path) if folder.name in SITES and folder.is_dir()]
    return {each.name for folder in folders for each in folder.iterdir() if each.name.endswith(DISTRIBUTIONS)}


def _state(file: Path) -> list[int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return [status.st_ino, status.st_size, status.st_mtime_ns]

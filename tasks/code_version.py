"""Which code a batch runs with: the commit of the folder of its file, where that is kept in git."""

from __future__ import annotations

import subprocess
from importlib import metadata
from pathlib import Path

GIT_TAKES_AT_MOST_S = 10.0


def code_version(folder: Path | None) -> str:
    """ "git COMMIT" (with "+changes" where tracked files differ from it), else "ringmaster VERSION".

    folder: of the batch file, where its factories are looked for; None where there is none.
    """
    commit = None if folder is None else _git(folder, "rev-parse", "HEAD")
    if folder is None or not commit:
        return f"ringmaster {metadata.version('ringmaster')}"
    changes = "+changes" if _git(folder, "status", "--porcelain", "--untracked-files=no") else ""
    return f"git {commit}{changes}"


def _git(folder: Path, *words: str) -> str:
    """What git says; nothing where it is not there, or the folder is not its."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            check=False,
            timeout=GIT_TAKES_AT_MOST_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""

"""The version of the code that a batch runs with: the git commit of its batch file's folder."""

from __future__ import annotations

import subprocess
from importlib import metadata
from pathlib import Path

GIT_TAKES_AT_MOST_S = 10.0


def code_version(folder: Path | None) -> str:
    """Returns "git COMMIT" (with "+changes" if tracked files differ from it), or else "ringmaster VERSION".

    folder: the folder of the batch file, where its factories are looked up; None if there is no such folder.
    """
    commit = None if folder is None else _git(folder, "rev-parse", "HEAD")
    if folder is None or not commit:
        return f"ringmaster {metadata.version('ringmaster')}"
    changes = "+changes" if _git(folder, "status", "--porcelain", "--untracked-files=no") else ""
    return f"git {commit}{changes}"


def _git(folder: Path, *words: str) -> str:
    """Returns git's output; an empty text if git is not installed or the folder is in no repository."""
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

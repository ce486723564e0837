"""Who may read the files of a home: the owner alone or, with RINGMASTER_UMASK, the users of a group too."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

from ringmaster.errors import InputError
from ringmaster.flows.output import error_console

UMASK = "RINGMASTER_UMASK"
"""Environment variable for the umask, in octal: 077 by default, 007 for storage that the users of a group share."""

OWNER_ALONE = 0o077
# Files that mark a folder as a home. RINGMASTER_HOME may name another folder, such as /tmp, which stays as it is.
MARKS = ("batches", "cache", "machines", "mlflow.db", "nodes", "pool", "prefect", "tensors")


def keep_to_owner(home: Path) -> None:
    """Sets the umask of this process and its children, and closes the home to other users.

    Raises InputError if RINGMASTER_UMASK is not a umask.
    """
    set_umask()
    if home.is_dir() and home.stat().st_uid == os.geteuid() and _is_home(home):
        _close(home)


def set_umask() -> None:
    """Sets the umask of this process and its children. Raises InputError if RINGMASTER_UMASK is not a umask."""
    os.umask(_umask())


def _close(home: Path) -> None:
    before = stat.S_IMODE(home.stat().st_mode)
    wanted = before & ~_umask()
    if os.environ.get(UMASK):  # a group may get access that it lacked before
        wanted |= 0o777 & ~_umask()
    if wanted == before:
        return
    try:
        home.chmod(wanted)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        return
    who = "only you" if not wanted & 0o077 else f"only who {UMASK} lets in"
    error_console().print(
        f"{home}: {who} may look into it from now on ({wanted:04o}, was {before:04o})", soft_wrap=True
    )


def _is_home(folder: Path) -> bool:
    return not folder.stat().st_mode & stat.S_ISVTX and (
        any((folder / name).exists() for name in MARKS) or not any(folder.iterdir())
    )


def _umask() -> int:
    value = os.environ.get(UMASK, "")
    if not value:
        return OWNER_ALONE
    if not re.fullmatch("0?0[0-7]{2}", value):
        raise InputError(
            [f"{UMASK} {value!r} is not a valid umask. To fix: 077 for the owner alone, 007 to let the group write"]
        )
    return int(value, 8)

"""Scratch folders in the system's temporary folder, which are removed after their owner ends.

The owner holds a lock on a file in the folder (flock, which the kernel releases when the process ends for any reason).
A folder is therefore stale where another process gets that lock; the next owner removes it. A folder without such a
file has an unknown owner, and is left alone.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

PREFIX = "ringmaster-"
OWNER = "owner"


class ScratchFolder:
    """A folder of this process, until `close`; the folders of killed processes of this user are removed first."""

    def __init__(self, *, prefix: str = PREFIX) -> None:
        assert prefix.startswith(PREFIX), "stale folders are found by this prefix"
        remove_stale()
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        # The file has another name until it is locked, so that no process sees an owner's file without its lock.
        unlocked = self.path / f".{OWNER}"
        self._lock = unlocked.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unlocked.rename(self.path / OWNER)

    def close(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def remove_stale() -> None:
    """Removes the folders that killed processes of this user have left."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # removed meanwhile, or in use, for which flock raises
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
                _remove_if_stale(folder)


def _remove_if_stale(folder: Path) -> None:
    handle = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(handle)

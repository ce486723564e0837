"""Folders in the system's temporary folder that end with their owner: one that a kill has left is removed by the next.

Who makes one holds a lock on a file in it (flock, which the kernel lets go when the process ends, however it ends). A
folder is therefore stale where somebody else gets that lock. Without such a file nothing is known of its owner: it is
left alone.
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
    """A folder of this process's, until `close`; what killed processes of this user have left is removed first."""

    def __init__(self, *, prefix: str = PREFIX) -> None:
        assert prefix.startswith(PREFIX), "who looks for stale folders knows them by this"
        remove_stale()
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        # Under another name until it is locked: nobody sees the file of an owner that does not hold it.
        unlocked = self.path / f".{OWNER}"
        self._lock = unlocked.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unlocked.rename(self.path / OWNER)

    def close(self) -> None:
        """Removes it."""
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
        with suppress(OSError):  # it has gone meanwhile, or is in use: flock says so
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

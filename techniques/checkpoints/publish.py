"""Atomic publication of folders: written to a temporary folder, synced, then renamed."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def publish(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder, which replaces `folder` at the end; after an exception it does not.

    Only one writer may run at a time. An existing `folder` is replaced; for a moment in between, `folder` does not
    exist. A fault of the disk is raised as OSError, also where safetensors wraps it in an exception of its own.
    """
    from safetensors import SafetensorError

    aside = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)  # left by a writer that died
    aside.mkdir(parents=True)
    try:
        yield aside
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), str(error), str(folder)) from error
    for path in [*sorted(aside.rglob("*")), aside]:
        _sync(path)
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
    _sync(folder.parent)


def _sync(path: Path) -> None:
    """Syncs a file or folder, so that a power cut cannot undo its writing."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

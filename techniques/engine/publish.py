"""Folders that appear whole or not at all: written aside, synced, then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def publish(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` to write into, which takes its place at the end; after an exception it does not.

    One writer at a time. A folder that was there before is replaced; between the two there is, for a moment,
    none.
    """
    aside = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)  # left by a writer that died
    aside.mkdir(parents=True)
    yield aside
    for path in [*sorted(aside.rglob("*")), aside]:
        _sync(path)
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
    _sync(folder.parent)


def _sync(path: Path) -> None:
    """Until a power cut cannot undo it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

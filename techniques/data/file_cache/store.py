"""The folders in which what was prepared from single files is kept, for all processes of a machine."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ringmaster.codec import digest
from ringmaster.techniques.checkpoints.checkpoint import publish
from ringmaster.techniques.data.prepared import locked
from ringmaster.techniques.data.windows import DAY_S

# Incremented whenever the same file would be kept in another way than before.
FORMAT = 3
DAYS_KEPT = 14
# Where a tokenizer was loaded from, in its tokenizer_config.json.
PLACES = frozenset({"name_or_path", "is_local", "local_files_only"})


class FileStore:
    """The folders `tokens/KEY` of a cache. settings: a JSON value of what their content depends on besides the file."""

    def __init__(self, cache_dir: Path, *, settings: Any) -> None:
        self._folder = cache_dir.absolute() / "tokens"
        self._settings = settings

    def folder_of(self, key: Any, write: Callable[[Path], object]) -> Path:
        """Returns the folder of a key, a JSON value. It is written by `write` if it is not kept."""
        folder = self._folder / digest({"format": FORMAT, "settings": self._settings, "key": key})
        if not folder.exists():
            with locked(folder.with_suffix(".lock")):
                if not folder.exists():
                    with publish(folder) as aside:
                        write(aside)
        os.utime(folder)
        return folder

    def remove_unused(self) -> None:
        """Removes what no preparation has asked for in `DAYS_KEPT`."""
        oldest_s = time.time() - DAYS_KEPT * DAY_S
        for folder in self._folder.iterdir() if self._folder.exists() else ():
            if folder.is_dir() and folder.suffix != ".tmp" and folder.stat().st_mtime < oldest_s:
                shutil.rmtree(folder, ignore_errors=True)
                folder.with_suffix(".lock").unlink(missing_ok=True)


def content_of(tokenizer: Path) -> str:
    """Returns a digest of a tokenizer that was saved, which does not depend on where it was loaded from."""
    sha = hashlib.sha256()
    for path in sorted(tokenizer.rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            if path.name == "tokenizer_config.json":
                said = json.loads(content)
                content = json.dumps({key: said[key] for key in sorted(said) if key not in PLACES}).encode()
            sha.update(f"{path.name} {len(content)} ".encode() + content)
    return sha.hexdigest()

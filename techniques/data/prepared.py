"""The cache in which data is prepared once for all processes of a machine."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringmaster.codec import digest, from_json, to_json
from ringmaster.techniques.checkpoints.checkpoint import publish
from ringmaster.techniques.data_source import PreparedData

# Incremented whenever the same files would be prepared into other samples than before, or refused.
FORMAT = 2


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """How the samples of a data source are prepared.

    name: a name for people.
    location: the path or URI.
    state: a JSON value that changes as soon as the files do, and is cheap to obtain.
    write: prepares the samples into a folder and returns their description; called at most once for each state.
    """

    name: str
    location: str
    state: Any
    write: Callable[[Path], PreparedData]


def prepare_once(source: Preparation, *, settings: Any, cache_dir: Path) -> PreparedData:
    """Returns `source` prepared under `settings` (a value): from the cache where it is there, or else written now.

    It is safe across processes. One process writes into a temporary folder, under a lock that ends with the process.
    The others wait until the folder is renamed.
    """
    key = digest({"format": FORMAT, "settings": settings, "source": source.location, "state": source.state})
    folder = cache_dir.absolute() / "data" / f"{_slug(source.name)}-{key}"
    if not folder.exists():
        with locked(folder.with_name(f"{folder.name}.lock")):
            if not folder.exists():
                _write(source, folder)
    return read_prepared(folder)


def read_prepared(folder: Path) -> PreparedData:
    """Reads the description of the data in `folder`."""
    prepared = from_json(PreparedData, json.loads((folder / "prepared.json").read_text()))
    return dataclasses.replace(prepared, folder=str(folder))


def stamp(path: Path) -> tuple[int, int]:
    """Returns size in bytes and time of the last change in ns, a cheap way to detect that a file has changed."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def _write(source: Preparation, folder: Path) -> None:
    with publish(folder) as aside:
        prepared = dataclasses.replace(source.write(aside), name=source.name, source=source.location)
        (aside / "prepared.json").write_text(json.dumps(to_json(prepared), indent=1))


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock of a file, which ends with the process at the latest."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-.")[-60:] or "data"

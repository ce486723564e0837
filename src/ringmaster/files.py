"""Files that are written whole or not at all, and values in them."""

import json
import os
import shutil
import uuid
from collections.abc import Callable
from contextlib import suppress
from hashlib import file_digest
from pathlib import Path
from typing import Any, TypeVar

from ringmaster.codec import from_json, to_json

T = TypeVar("T")


def write_atomically(path: Path, *parts: Any, mode: int = 0o666) -> None:
    """Writes a file that is synced before it gets its name: a reader sees the old content or the new.

    Args:
        path: the file. Its folder is made; an existing file is replaced.
        parts: bytes, or objects that have the buffer interface, written one after another.
        mode: permissions of the file, of which the process's umask is taken away.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{uuid.uuid4().hex}")
    try:
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        with suppress(FileNotFoundError):
            aside.unlink()
        raise


def write_value(value: Any, file: Path) -> None:
    """Writes a value as JSON, for `read_value`."""
    write_atomically(file, json.dumps(to_json(value)).encode())


def read_value(cls: type[T], file: Path) -> T | None:
    """Returns the value in a file; None where there is none, or one that cannot be read, as of another release."""
    try:
        return from_json(cls, json.loads(file.read_text()))
    except (OSError, ValueError):
        return None


def kept_value(cls: type[T], file: Path, make: Callable[[], T]) -> T:
    """Returns the value in a file, or else what `make` returns, which is then kept there."""
    if (value := read_value(cls, file)) is None:
        value = make()
        write_value(value, file)
    return value


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Makes a file available under another name: as a link, or as a copy on another disk or of another user's file."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def sha256_of(file: Path) -> str:
    """Returns the SHA-256 of a file's content, in hexadecimal."""
    with file.open("rb") as stream:
        return file_digest(stream, "sha256").hexdigest()

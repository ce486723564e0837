"""Files that are written whole or not at all, values in them, and checked access to files that a person names.

A name that a person or another file gives can be any text and lead to anything.
"""

import errno
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
from ringmaster.errors import InputError

T = TypeVar("T")

MAX_NAME_BYTES, MAX_PATH_BYTES = 255, 4000
"""The longest file name and the longest path that Linux's file systems accept; a glob adds to the path."""
MAX_BYTES = 4_000_000
"""The size limit of a file that is read as YAML; parsing that much takes half a minute."""
FULL = (errno.ENOSPC, errno.EDQUOT)
STORAGE_ERRORS = (*FULL, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM)
"""The numbers of errors of a disk, or of the rights on it, which are not a fault of a program."""


WRITE_PATIENCE = "RINGMASTER_WRITE_PATIENCE_S"
"""Environment variable for the seconds for which a run waits for a disk or store that takes nothing."""


def write_patience_s() -> float:
    """Returns the seconds for which a run waits for a disk or store that takes nothing, until it fails."""
    return float(os.environ.get(WRITE_PATIENCE, 1800.0))


def storage_fault(error: OSError) -> str | None:
    """Returns the disk or the right that an error is about, with a remedy; None for an error of another kind."""
    if error.errno not in STORAGE_ERRORS:
        return None
    where = os.fspath(error.filename) if isinstance(error.filename, (str, os.PathLike)) else ""
    if error.errno in (errno.EACCES, errno.EPERM):
        return missing_right(Path(where)) if where else f"{error}. To fix: let this user access it"
    reason = os.strerror(error.errno)
    remedy = "free space there" if error.errno in FULL else "make it writable"
    return f"{where or 'a disk'} cannot be written: {reason}. To fix: {remedy}, or choose another folder"


def missing_right(path: Path) -> str:
    """Returns which right this user lacks to read a path or, if it can be read, to write it; with a remedy."""
    there, right = path, "w"
    for folder in reversed(path.absolute().parents):
        if not os.access(folder, os.X_OK):
            there, right = folder, "x"
            break
    else:
        if path.exists() and not os.access(path, os.R_OK):
            right = "r"
        else:
            there = path if path.exists() and not os.access(path, os.W_OK) else path.parent
    act = {"x": "entered", "r": "read", "w": "written"}[right]
    return f"{there} cannot be {act}: this user lacks the right {right}. To fix: let its owner give it, as by a group"


def check_new(place: Path, *, kind: str = "folder") -> None:
    """Raises InputError where a new file or folder cannot be made, as it exists, or a folder above it is a file."""
    if os.path.lexists(place):
        raise InputError([f"{place} is there already. To fix: name a new {kind}"])
    above = next(folder for folder in place.absolute().parents if os.path.lexists(folder))
    if not above.is_dir():
        raise InputError([f"{place} cannot be made: {above} is not a folder. To fix: name a place in a folder"])


def folders_in(folder: Path) -> list[Path]:
    """Returns the folders in a folder; none where there is none.

    Raises OSError where it cannot be read, which `Path.glob` passes over.
    """
    try:
        with os.scandir(folder) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


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


def text_of(path: Path, *, max_bytes: int = MAX_BYTES) -> str:
    """Returns the text of a file, of which at most `max_bytes` are read.

    Raises OSError if the file is larger or cannot be read, and UnicodeDecodeError if it is not UTF-8.
    """
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes / 1e6:g} MB")
    return content.decode("utf-8")


def path_in(folder: Path, name: str) -> Path:
    """Returns the path of `name` relative to `folder`. Raises ValueError if no file can have such a path."""
    sizes = [len(part.encode("utf-8", "replace")) for part in name.split("/")]
    if "\0" in name or max(sizes) > MAX_NAME_BYTES or sum(sizes) + len(sizes) > MAX_PATH_BYTES:
        raise ValueError("is not a path that a file can have")
    try:
        return folder / Path(name).expanduser()
    except RuntimeError as error:  # "~user" of a user without a home folder
        raise ValueError("begins with a user who has no folder on this machine") from error


def is_file(folder: Path, name: str) -> bool:
    """Returns whether `name`, relative to `folder`, is a plain file: no folder, no device, and no named pipe."""
    try:
        return path_in(folder, name).is_file()
    except (OSError, ValueError):
        return False

"""The files that define an environment: a lock, and the local packages that it names.

They are kept in the home by their digest. So a job has the environment of the lock as its batch read it, however the
lock changes afterwards.
"""

import re
import shutil
import tomllib
import uuid
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ringmaster.codec import digest
from ringmaster.files import sha256_of, text_of
from ringmaster.findings import as_list, as_mapping

UV_LOCK, PROJECT, PYTHON_VERSION = "uv.lock", "pyproject.toml", ".python-version"
MAX_FILES, MAX_ALL_BYTES = 2000, 64 * 2**20
"""The most files of the local packages of a lock, and their most bytes."""
MAX_SENT_BYTES = 16 * 2**20
"""The most bytes of the files of a lock that nodes get from the database of a pool."""
MADE = frozenset(
    {".git", ".venv", "venv", "__pycache__", "build", "dist", ".mypy_cache", ".pytest_cache", ".ruff_cache"}
)
"""Folders in a package that are no part of it."""
LOCAL_FILE = re.compile(r"(?:\./)?[\w./+-]+\.(?:whl|tar\.gz|zip|txt)(?![\w.])")
PINNED = re.compile(r"==|@|^-|^\.{0,2}/|\.(whl|tar\.gz|zip)\b")


def files_of(lock: Path) -> list[Path]:
    """Returns the files that define the environment of a lock, all of them in its folder.

    Raises ValueError, with a remedy, where it is no lock, or names a package elsewhere on this machine.
    """
    name, folder = lock.name, lock.parent
    if name != UV_LOCK and lock.suffix not in (".toml", ".txt"):
        raise ValueError(
            f"{name} is no lock. To fix: name a uv.lock, a pylock.toml or a requirements.txt with versions"
        )
    try:
        text = text_of(lock, max_bytes=MAX_ALL_BYTES)
        if lock.suffix == ".txt":
            return [lock, *_existing(folder, _local_names(text, lock.name))]
        content = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{lock} cannot be read: {error}. To fix: make it again") from error
    if name != UV_LOCK:
        return [lock, *_existing(folder, _paths_in(content.get("packages")))]
    if not (folder / PROJECT).is_file():
        raise ValueError(f"{lock} has no {PROJECT} beside it. To fix: copy the one that it was made from")
    sources = (as_mapping(as_mapping(package).get("source")) for package in as_list(content.get("package")))
    names = [str(source[kind]) for source in sources for kind in ("path", "directory", "editable") if kind in source]
    return [lock, folder / PROJECT, *_existing(folder, [each for each in names if each != "."])]


def _local_names(text: str, name: str) -> Iterator[str]:
    """Yields the files that lines of a requirements file name. Raises ValueError where a line pins no version."""
    lines = [line.partition(" #")[0].strip() for line in text.replace("\\\n", " ").splitlines()]
    for line in lines:
        if line and not line.startswith("#"):
            if not PINNED.search(line):
                what = f"{name} gives no version of {line!r}"
                raise ValueError(f"{what}. To fix: `uv pip compile {name} -o locked.txt`, and name that file")
            yield from (match[0] for match in LOCAL_FILE.finditer(line) if "://" not in line.split(match[0])[0])


def _paths_in(packages: Any) -> Iterator[str]:
    """Yields the paths of local packages of a pylock.toml."""
    for package in map(as_mapping, as_list(packages)):
        for part in (*(package.get(key) for key in ("archive", "sdist", "directory")), *as_list(package.get("wheels"))):
            if (path := as_mapping(part).get("path")) is not None:
                yield str(path)


def _existing(folder: Path, names: Iterable[str]) -> Iterator[Path]:
    """Yields the files of local packages. Raises ValueError where one is outside the folder, or they are too many."""
    num_files = num_bytes = 0
    for name in dict.fromkeys(names):
        place = folder / name
        if not place.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"the lock names {name}, outside its folder. To fix: put it below {folder}")
        if not place.exists():
            raise ValueError(f"the lock names {name}, which is not there. To fix: put it into {folder}, or lock again")
        for file in [place] if place.is_file() else sorted(place.rglob("*")):
            if file.is_file() and not MADE.intersection(file.relative_to(folder).parts):
                num_files, num_bytes = num_files + 1, num_bytes + file.stat().st_size
                if num_files > MAX_FILES or num_bytes > MAX_ALL_BYTES:
                    limits = f"more than {MAX_FILES:,} files or {MAX_ALL_BYTES / 2**20:g} MB"
                    raise ValueError(f"the local packages of the lock have {limits}. To fix: build wheels of them")
                yield file


def kept_lock(key: str, lock: str, *, root: Path) -> Path:
    """Returns the file of a lock among those that are kept under a digest; the others are in its folder."""
    return root / key / "source" / lock


def kept(lock: Path, *, python: str, root: Path) -> str:
    """Keeps the files that define the environment of a lock, and returns their digest.

    python: the Python that uv is asked for, such as "3.11".
    root: the folder of all environments.

    Raises ValueError as `files_of` does.
    """
    files = {file.relative_to(lock.parent).as_posix(): file for file in files_of(lock)}
    digests = {name: sha256_of(file) for name, file in files.items()}
    key = digest([lock.name, python, digests], length=32)
    target = kept_lock(key, lock.name, root=root).parent
    if not target.is_dir():
        contents = {name: file.read_bytes() for name, file in files.items()}
        _write({**contents, PYTHON_VERSION: f"{python}\n".encode()}, target)
    return key


def _write(files: Mapping[str, bytes], target: Path) -> None:
    """Writes the files of a folder, all of them or none."""
    aside = target.with_name(f"source-{uuid.uuid4().hex}")
    for name, content in files.items():
        (aside / name).parent.mkdir(parents=True, exist_ok=True)
        (aside / name).write_bytes(content)
    with suppress(OSError):  # another process has written them meanwhile
        aside.rename(target)
    shutil.rmtree(aside, ignore_errors=True)


def packed(key: str, lock: str, *, root: Path) -> dict[str, str] | None:
    """Returns the kept files of a lock as texts, for `unpack` elsewhere; None where they are too large, or not here."""
    folder = kept_lock(key, lock, root=root).parent
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    if not 0 < sum(path.stat().st_size for path in files.values()) <= MAX_SENT_BYTES:
        return None
    return {name: b64encode(zlib.compress(path.read_bytes())).decode() for name, path in files.items()}


def unpack(files: Mapping[str, str], key: str, lock: str, *, root: Path) -> None:
    """Keeps the files of a lock that another machine has packed."""
    contents = {name: zlib.decompress(b64decode(text)) for name, text in files.items()}
    _write(contents, kept_lock(key, lock, root=root).parent)

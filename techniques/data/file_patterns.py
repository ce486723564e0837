"""Files that match a pattern, local or at any URL that fsspec reads (s3, gcs, https, memory, ...)."""

import hashlib
import io
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, takewhile
from operator import truediv
from pathlib import Path
from typing import Any, BinaryIO, cast

from ringmaster.codec import digest
from ringmaster.techniques.checkpoints.checkpoint import publish_once
from ringmaster.techniques.checkpoints.storage import explained, is_url, open_store, store_errors

# Metadata keys of stores that depend on a file's content alone: one of them is enough.
CHECKSUMS = ("ETag", "etag", "checksum", "md5Hash", "content_md5", "Content-MD5", "Digest", "blob_id", "sha")
# Those that change when a file is written. Some can be set, so that all of them count.
TIMES = ("mtime", "LastModified", "last_modified", "Last-Modified", "modificationTime", "modify", "created", "ino")
# Within one tick of its clock, a system gives all changes of a file the same time: at most 1/100 s on Linux, and two
# seconds where times are stored in seconds.
TICK_NS, COARSE_TICK_NS = 20_000_000, 2_000_000_000


# What systems leave in folders, in lower case; names that begin with a point are left out, too.
LITTER = frozenset({"__macosx", "thumbs.db", "ehthumbs.db", "desktop.ini", "$recycle.bin", "@eadir"})


@dataclass(frozen=True, kw_only=True)
class MatchedFiles:
    """The files that match a pattern.

    root: the folder or URL above all wildcards.
    names: the paths of the files relative to root, in order.
    stamps: for a URL, what changes with the content of each file, as its store has listed it, by name.
    """

    root: str
    names: tuple[str, ...]
    stamps: Mapping[str, list[str]] = field(default_factory=dict)

    def path(self, name: str) -> str:
        """Returns the whole path or URL of a file."""
        return f"{self.root.rstrip('/')}/{name}"

    def state(self) -> list[Any]:
        """Returns a JSON value that changes as soon as a file does, and is cheap to obtain."""
        if not is_url(self.root):
            return [(name, *stamp(Path(self.root, name))) for name in self.names]
        return [(name, self.stamps[name]) for name in self.names]


@dataclass(frozen=True, kw_only=True)
class FileRange:
    """Some lines of a local file: its bytes from `start` up to `stop`, without it, and the number of the first line."""

    start: int
    stop: int
    first_line: int


def matching(pattern: str) -> MatchedFiles:
    """Returns the files that match a pattern; `**` represents any folders, and links to folders are followed.

    What is hidden (`.ipynb_checkpoints`), and what systems leave in folders (`__MACOSX`, `Thumbs.db`), is left out
    unless the pattern names it.

    Raises ValueError where there is none, where one is a link to nothing or has a name that is not UTF-8, or where the
    store cannot be read.
    """
    if is_url(pattern):
        return _remote(pattern)
    parts = Path(pattern).parts
    # A folder that is there is itself, whatever signs its name has, and so is a file.
    above = accumulate(map(Path, parts[:-1]), truediv)
    fixed = list(takewhile(lambda path: not any(sign in path.name for sign in "*?[") or path.is_dir(), above))
    root, rest = (fixed or [Path()])[-1], parts[len(fixed) :]
    try:
        matched = [Path(pattern)] if Path(pattern).is_file() else _matching_below(root, rest)
        names = {path.relative_to(root).as_posix(): path for path in matched}
    except ValueError as error:
        raise ValueError(f"path {pattern!r} is not a glob: {error}. To fix: write ** between two / alone") from error
    result = {name: names[name] for name in sorted(names) if _is_meant(name, rest)}
    if broken := next((path for path in result.values() if path.is_symlink() and not path.exists()), None):
        raise ValueError(f"{broken} is a link to a file that does not exist. To fix: bring back the file, or remove it")
    files = tuple(name for name, path in result.items() if path.is_file())
    # Bytes that are no UTF-8 are decoded as halves of surrogate pairs.
    if odd := next((name for name in files if re.search("[\ud800-\udfff]", name)), None):
        raise ValueError(f"{root / odd} has a name that is not UTF-8. To fix: rename the file, or its folder")
    if not files:
        is_folder = Path(pattern).is_dir()
        hint = f"name its files, e.g. {pattern}/*.jsonl" if is_folder else "check the glob, and where it starts"
        raise ValueError(f"path {pattern!r} matches no file (from {Path.cwd()}). To fix: {hint}")
    return MatchedFiles(root=str(root), names=files)


def _matching_below(folder: Path, parts: Sequence[str]) -> Iterator[Path]:
    """Yields what matches a pattern below a folder, some of it several times."""
    if "**" not in parts:
        yield from folder.glob(str(Path(*parts)))
        return
    place = parts.index("**")
    for base in folder.glob(str(Path(*parts[:place]))) if place else (folder,):
        for each in _folders(base, above=frozenset()):
            yield from _matching_below(each, parts[place + 1 :] or ("*",))


def _folders(folder: Path, *, above: frozenset[Path]) -> Iterator[Path]:
    """Yields a folder and those below it; a link to a parent folder is not followed."""
    real = folder.resolve()
    if real in above or not folder.is_dir():
        return
    yield folder
    for each in folder.iterdir():
        if each.is_dir():
            yield from _folders(each, above=above | {real})


def stamp(path: Path) -> tuple[int, ...]:
    """Returns what changes as soon as a local file does, without reading it.

    That is its size in bytes, the times of the last change of its content and of its inode in ns, and its inode. Copies
    and archives set the time of the content, but nobody can set the time of the inode. The device is left out: network
    file systems have another after each mount.

    A file that was changed within a tick of the clock is waited for, as its next change could have the same time.
    """
    stat = path.stat()
    tick_ns = TICK_NS if stat.st_ctime_ns % 10**9 else COARSE_TICK_NS
    if 0 <= (age_ns := time.time_ns() - stat.st_ctime_ns) < tick_ns:
        time.sleep((tick_ns - age_ns) / 1e9)
        stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def folder_state(folder: Path, *, is_deep: bool = True) -> list[Any]:
    """Returns the names of the files in a folder, and in those below it where it `is_deep`, with their stamps."""
    files = sorted(path for path in (folder.rglob("*") if is_deep else folder.iterdir()) if path.is_file())
    return [(path.relative_to(folder).as_posix(), *stamp(path)) for path in files]


def is_litter(name: str) -> bool:
    """Returns whether a file or folder is hidden, or is one that systems leave in folders."""
    return name.startswith(".") or name.lower() in LITTER


def _is_meant(name: str, pattern: Sequence[str]) -> bool:
    """Whether a file is one that people put into a folder, or the pattern names it."""
    names_hidden = any(part.startswith(".") for part in pattern)
    return names_hidden or not any(is_litter(part) and part not in pattern for part in name.split("/"))


@contextmanager
def opened(path: str, lines: FileRange | None = None) -> Iterator[BinaryIO]:
    """Opens a file, or a part of a local one, to read bytes. Raises ValueError where it cannot be read."""
    try:
        if is_url(path):
            store, inner = _store(path)
            with store_errors():
                stream = store.open(inner, "rb")
            with stream:
                yield cast(BinaryIO, stream)
        else:
            if Path(path).exists() and not Path(path).is_file():  # a named pipe would be waited for
                raise OSError("it is a folder or a device")
            with Path(path).open("rb") as file:
                file.seek(0 if lines is None else lines.start)
                yield file if lines is None else io.BytesIO(file.read(lines.stop - lines.start))
    except OSError as error:
        why = explained(error, path) if is_url(path) else f"{error}. To fix: check the file"
        raise ValueError(f"{path} cannot be read: {why}") from error


def local_copies(pattern: str, *, cache_dir: Path) -> str:
    """Returns a local pattern for the same files; a file at a URL is copied once for each state of it.

    The files of a pattern are links to these copies, so that a new file costs one copy.
    """
    if not is_url(pattern):
        return pattern
    result = matching(pattern)
    states = result.state()
    folder = cache_dir.absolute() / "files" / digest([pattern, states])

    def link_copies(aside: Path) -> None:
        for name, state in states:
            copy = folder.parent / "each" / digest([result.path(name), state])
            publish_once(copy, partial(_copy, result.path(name)))
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            (aside / name).hardlink_to(copy / "copy")

    publish_once(folder, link_copies)
    return str(folder / result.names[0]) if len(result.names) == 1 else str(folder / "**" / "*")


def _copy(url: str, folder: Path) -> None:
    """Copies the file at a URL into a folder."""
    with opened(url) as source, store_errors(), (folder / "copy").open("wb") as copy:
        shutil.copyfileobj(source, copy, 1 << 20)


def _remote(pattern: str) -> MatchedFiles:
    store, inner = _store(pattern)
    store.invalidate_cache()  # another process may have written since
    try:
        with store_errors():
            if any(sign in inner for sign in "*?["):
                infos = store.glob(inner, detail=True)
            else:
                infos = {inner: store.info(inner)} if store.exists(inner) else {}
    except OSError as error:
        raise ValueError(f"{pattern} cannot be read: {explained(error, pattern)}") from error
    inside = _above_wildcards(inner)
    files = {
        path.removeprefix(inside).lstrip("/"): infos[path] for path in sorted(infos) if infos[path]["type"] == "file"
    }
    rest = inner.removeprefix(inside).lstrip("/").split("/")
    result = {name: info for name, info in files.items() if _is_meant(name, rest)}
    if not result:
        raise ValueError(f"{pattern} matches no file{_why_none(store, inner)}. To fix: check the URL")
    # The root is taken from the URL, as the path in the store may lack the host.
    root = _above_wildcards(pattern)
    stamps = {name: _remote_stamp(info, f"{root.rstrip('/')}/{name}") for name, info in result.items()}
    return MatchedFiles(root=root, names=tuple(result), stamps=stamps)


def _why_none(store: Any, path: str) -> str:
    """Why nothing matches, where the store says it, such as that there is no such bucket."""
    try:
        with store_errors():
            store.ls(_above_wildcards(path))
    except OSError as error:
        return f": {error}" if error.__cause__ is not None else ""
    return ""


def _above_wildcards(path: str) -> str:
    """The folder above the file, or above the first part with a wildcard."""
    return "/".join(takewhile(lambda part: not any(sign in part for sign in "*?["), path.split("/")[:-1]))


def _store(url: str) -> tuple[Any, str]:
    """The store of a URL, and the path in it. Raises ValueError where the library for its protocol is missing."""
    try:
        return open_store(url)
    except ValueError as error:
        raise ValueError(f"{url} cannot be read: {error}") from error


def _remote_stamp(info: Mapping[str, Any], url: str) -> list[str]:
    """What a store lists of a file that changes with its content; the digest of the content where it lists nothing."""
    if url.startswith(("file://", "local://")):
        return list(map(str, stamp(Path(info["name"]))))
    size = str(info.get("size"))
    if checksum := next((str(info[key]) for key in CHECKSUMS if info.get(key) is not None), None):
        return [size, checksum]
    if times := [str(info[key]) for key in TIMES if info.get(key) is not None]:
        return [size, *times]
    sha = hashlib.sha256()
    with opened(url) as stream:
        while block := stream.read(1 << 20):
            sha.update(block)
    return [size, sha.hexdigest()]

"""SQLite files: their URLs, and the faults for which none of their users could explain itself.

SQLAlchemy, and with it MLflow, Prefect and our own tables, takes what follows `sqlite:///` literally as a path, up to a
question mark. Nothing is quoted there, so a path with a question mark has no URL.
"""

import fcntl
import os
import shlex
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unicodedata import category
from urllib.parse import quote

import psutil

UNFIT = ("Cc", "Cs", "Zl", "Zp")  # control characters, bytes that are no UTF-8, separators of lines
PREFIX = "sqlite:///"
TIMEOUT_S = 10.0  # for the lock of a database, which other processes hold for milliseconds
CHECKED_BYTES = 1 << 26  # a larger database is not read as a whole before each run


def sqlite_url(file: Path) -> str:
    """Returns the URL of a SQLite file. Raises ValueError where it can have none."""
    if faults := unfit_characters(file):
        raise ValueError(f"{str(file)!r} has {faults}, so that no URL can name it. To fix: choose another folder")
    return f"{PREFIX}{file.absolute()}"


def unfit_characters(path: Path) -> str:
    """Returns the characters of a path that a URL of SQLite, a log or JSON cannot hold, as text; empty if it has none.

    Those are question marks, control characters, and bytes that are no UTF-8.
    """
    return ", ".join(ascii(each) for each in dict.fromkeys(str(path)) if each == "?" or category(each) in UNFIT)


def path_of(url: str) -> str:
    """Returns the path in a URL of SQLite; empty if it names none."""
    return url.partition(":///")[2].partition("?")[0]


MIN_FREE_BYTES = 1 << 18  # on the disk of a database, which less of it stops
SHARED_MEMORY_BYTES = 32 << 10  # the least of the file next to a database with a write-ahead log


def is_writable(file: Path) -> bool:
    """Returns whether this user may read and write a database, and make the files that SQLite creates next to it."""
    return os.access(file, os.R_OK | os.W_OK) and os.access(file.parent, os.W_OK)


def is_disk_full(file: Path) -> bool:
    """Returns whether the disk of a file, or folder, has too little room for a database."""
    return shutil.disk_usage(file).free < MIN_FREE_BYTES


def read_only(file: Path, **options: Any) -> sqlite3.Connection:
    """Opens a database to read it, for which the right to read its files is enough.

    A database with a write-ahead log has a file of shared memory next to it while any process has it open.
    Where it is missing and cannot be made (the folder cannot be written, or its disk is full), nobody writes: the log
    is then read without locks, and a database without a log as it is.

    Raises OSError where the file cannot be read, sqlite3.Error where it is not a database or is locked.
    """
    file.open("rb").close()
    uri, log = f"file:{quote(str(file.absolute()))}?mode=ro", Path(f"{file}-wal")
    try:
        return _checked(uri, "PRAGMA schema_version", **options)
    except sqlite3.OperationalError as error:
        if "locked" in str(error) or _is_shared(file) or Path(f"{file}-journal").exists():
            raise
    if log.exists() and log.stat().st_size:
        return _checked(f"{uri}&vfs=unix-none", "PRAGMA locking_mode=EXCLUSIVE", "PRAGMA schema_version", **options)
    return _checked(f"{uri}&immutable=1", "PRAGMA schema_version", **options)


def _is_shared(file: Path) -> bool:
    """Returns whether a process has a database with a write-ahead log open, by its file of shared memory.

    On a full disk, SQLite makes that file and fails to give it its least size. The file stays, and nobody uses it.
    """
    try:
        return Path(f"{file}-shm").stat().st_size >= SHARED_MEMORY_BYTES
    except FileNotFoundError:
        return False


def _checked(uri: str, *statements: str, **options: Any) -> sqlite3.Connection:
    """Opens a database, and executes statements of which one reads it: SQLite itself opens it no earlier."""
    connection: sqlite3.Connection = sqlite3.connect(uri, uri=True, **{"timeout": TIMEOUT_S, **options})
    try:
        for statement in statements:
            connection.execute(statement).fetchall()
    except BaseException:
        connection.close()
        raise
    return connection


def fault_of(file: Path, *, contents: str, versions: str = "", writes: bool = True) -> str | None:
    """Returns why a database cannot be used, with a remedy; None if it can, or if it does not exist yet.

    contents: what the database holds, which is missing once it is moved away.
    versions: the folder with the migrations of its tables, as "PACKAGE:PATH" of an installed package; a database of a
        later release has a version that is not among them.
    writes: whether it is to be written, too.

    Raises OSError where it cannot be read.
    """
    if file.is_symlink() and not file.exists():
        return f"{file} is a link to a file that does not exist. To fix: remove the link, or put the file back"
    if not file.exists():
        above = next(each for each in file.absolute().parents if each.exists())
        if not writes or os.access(above, os.W_OK | os.X_OK):
            return None
        remedy = "To fix: chmod u+rwX, or choose another place"
        return f"{file} cannot be made: {above} cannot be written by this user. {remedy}"
    every = f"{shlex.quote(str(file))}*"  # its journal, too, which would be applied to the next database
    moved = f"move it away, and {contents} with it: mkdir -p damaged && mv --backup=numbered {every} damaged/"
    if not file.is_file():
        return f"{file} is not a file. To fix: remove it, or choose another place"
    if writes and not is_writable(file):
        return f"{file}, or its folder, cannot be written by this user. To fix: chmod u+rwX, or choose another place"
    try:
        result = _versions_in(file, writes=writes)
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            return f"{file} is locked by another process{_holders(file)}. To fix: wait for that process, or end it"
        return f"{file} cannot be used: {error}. To fix: free space, give this user access, or choose another place"
    except sqlite3.DatabaseError as error:
        return f"{file} is damaged, or is not a SQLite database ({error}). To fix: put back a copy, or {moved}"
    if not versions or result == []:
        return None
    package = versions.partition(":")[0]
    if result is None:
        return f"{file} holds other tables than those of {package}. To fix: choose another place, or {moved}"
    if any(version in file.name for file in migration_files(versions) for version in result):
        return None
    return (
        f"{file} was written by another release of {package}, whose version {', '.join(result)} of the tables is not "
        f"known to the installed one. To fix: install that release, or {moved}"
    )


def migration_files(versions: str) -> list[Path]:
    """Returns the migrations in a folder that is named "PACKAGE:PATH"; none where the package is not installed."""
    package, _, folder = versions.partition(":")
    spec = find_spec(package)
    places = (spec.submodule_search_locations or ()) if spec is not None else ()
    return sorted(file for place in places for file in Path(place, folder).glob("*.py"))


@contextmanager
def exclusive_lock(folder: Path) -> Iterator[None]:
    """Context manager that admits one process at a time; the lock ends with the process that holds it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _versions_in(file: Path, *, writes: bool) -> list[str] | None:
    """Returns the versions of the tables, none for an empty database; None where there are other tables only."""
    with closing(
        sqlite3.connect(file, timeout=TIMEOUT_S, isolation_level=None)
        if writes
        else read_only(file, isolation_level=None)
    ) as connection:
        # An immediate one fails where the file cannot be written, or is locked.
        connection.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
        if file.stat().st_size <= CHECKED_BYTES:
            (answer,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            if answer != "ok":
                raise sqlite3.DatabaseError(" ".join(answer.split()))
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        is_known = "alembic_version" in tables
        result = [version for (version,) in connection.execute("SELECT * FROM alembic_version")] if is_known else None
        connection.execute("ROLLBACK")
    return result if tables else []


def _holders(file: Path) -> str:
    """Returns the processes of this user and machine that have a file open, as text."""
    path, holders = str(file.resolve()), []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or is another user's
            if process.pid != os.getpid() and any(each.path == path for each in process.open_files()):
                holders.append(f"process {process.pid}, {process.name()}")
    return f" ({', '.join(holders)})" if holders else ", perhaps of another machine"

"""A home that was copied or moved: the paths in its databases are made those of the folder where it is now.

MLflow stores the place of each experiment, run and model as an absolute URI, and the databases of runs name folders of
the home. Without a change, a copy would write into the home that it was copied from.
"""

import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ringmaster.compat.mlflow import LOCATIONS, TAGS, experiment_locations
from ringmaster.errors import LedgerError
from ringmaster.model_lineage import sqlite_files


def rebase(home: Path, *, ledger: Path, artifacts: Path) -> tuple[Path, ...]:
    """Makes the paths in the databases of a home those below `home`, and returns the folders where it was before.

    It does nothing where the home has not moved, or may only be read by this user. Files that are only where the home
    was stay recorded there: an earlier release wrote those of a copy into the original.

    ledger: MLflow's database. artifacts: the folder of MLflow's files in the home.

    Raises LedgerError where the home has moved, and its databases cannot be written.
    """
    if not ledger.is_file() or not sqlite_files.is_writable(ledger):
        return ()
    try:
        with closing(sqlite3.connect(ledger, timeout=sqlite_files.TIMEOUT_S)) as connection:
            earlier = tuple(_earlier_homes(connection, home, artifacts=artifacts))
    except sqlite3.Error:  # the next command that opens a damaged database reports what is wrong with it
        return ()
    try:
        for before in earlier:
            # The ledger last: it shows that the home has moved, also when this continues after a kill.
            for file in _databases(home):
                _rebase_texts(file, before, home)
            _rebase_ledger(ledger, before, home)
    except sqlite3.Error as error:
        raise LedgerError(
            f"{home} was copied or moved, and {ledger} cannot be changed to name its new place: {error}. To fix: end "
            "what uses it, give this user access, or move the home back"
        ) from error
    return earlier


def _earlier_homes(connection: sqlite3.Connection, home: Path, *, artifacts: Path) -> Iterator[Path]:
    """Yields the other folders in which experiments of the home have their files."""
    below = artifacts.relative_to(home)
    places = (
        (_path_of(location), below / name)
        for location, name in experiment_locations(connection)
        if location is not None and urlsplit(location).scheme in ("tensors", "file")
    )
    ends = ((path, end) for path, end in places if path.parts[-len(end.parts) :] == end.parts)
    for before in dict.fromkeys(path.parents[len(end.parts) - 1] for path, end in ends):
        # Another path to the same folder, such as a link or a mount, is not a move.
        if before != home and not (before.is_dir() and home.samefile(before)):
            yield before


def _path_of(location: str) -> Path:
    return Path(unquote(urlsplit(location).path))


def _databases(home: Path) -> Iterator[Path]:
    """Yields the databases of a home that name its folders in JSON texts."""
    for pattern in ("batches/*/*/journal.db", "pool/pool.db", "nights.db", "promotions.db"):
        yield from home.glob(pattern)


def _rebase_ledger(file: Path, before: Path, home: Path) -> None:
    with closing(sqlite3.connect(file, timeout=sqlite_files.TIMEOUT_S)) as connection, connection:
        for table, columns in LOCATIONS.items():
            for column in columns:
                known = connection.execute(f"SELECT DISTINCT {column} FROM {table} WHERE {column} IS NOT NULL")
                moved = [(new, old) for (old,) in known.fetchall() if (new := _moved(old, before, home)) is not None]
                connection.executemany(f"UPDATE {table} SET {column} = ? WHERE {column} = ?", moved)
        _replace_texts(connection, TAGS.items(), before, home)


def _moved(location: str, before: Path, home: Path) -> str | None:
    """Returns the URI of files below `before` that are below `home` now; None for others."""
    path = _path_of(location)
    if urlsplit(location).scheme not in ("tensors", "file") or not path.is_relative_to(before):
        return None
    new = home / path.relative_to(before)
    if path.exists() and not new.exists():
        return None
    head, old = location.split(":", 1)[0], urlsplit(location).path
    slashes = location[len(head) + 1 : len(location) - len(old)]  # `tensors:/a` or `tensors:///a`
    return f"{head}:{slashes}{new.as_uri().removeprefix('file://')}"


def _rebase_texts(file: Path, before: Path, home: Path) -> None:
    with closing(sqlite3.connect(file, timeout=sqlite_files.TIMEOUT_S)) as connection, connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        columns = [(table, row[1]) for table in tables for row in connection.execute(f'PRAGMA table_info("{table}")')]
        _replace_texts(connection, columns, before, home)


def _replace_texts(
    connection: sqlite3.Connection, columns: Iterable[tuple[str, str]], before: Path, home: Path
) -> None:
    """Replaces paths below a folder in texts: those that are one, and those in quotes in JSON."""
    for table, column in columns:
        cell = f'"{table}"."{column}"'
        for old, new in {(f"{before}/", f"{home}/"), (_escaped(before), _escaped(home))}:
            in_json = f'UPDATE "{table}" SET "{column}" = replace({cell}, \'"\' || ?, \'"\' || ?)'
            connection.execute(f"{in_json} WHERE typeof({cell}) = 'text' AND instr({cell}, '\"' || ?)", (old, new, old))
            whole = f'UPDATE "{table}" SET "{column}" = ? || substr({cell}, length(?) + 1)'
            is_path = f"typeof({cell}) = 'text' AND substr({cell}, 1, length(?)) = ?"
            connection.execute(f"{whole} WHERE {is_path}", (new, old, old, old))


def _escaped(folder: Path) -> str:
    """Returns a path as JSON writes it."""
    return json.dumps(f"{folder}/")[1:-1]

"""New SQLite databases of Prefect and MLflow, as copies of one that was migrated once.

Both make a database in dozens of migrations, which take one to four seconds of a processor. The first one that the
installed release makes is therefore kept, before it has any rows of its own, beside the compiled modules of this
package: whoever may write there may change the code, too. Where nobody may, each database is made by migrations.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from ringmaster.files import write_atomically
from ringmaster.model_lineage.sqlite_files import migration_files

FOLDER = Path(__file__).parent / "__pycache__"
DIGEST_BYTES = hashlib.sha256().digest_size


def create_from_template(
    file: Path, *, migrations: str, make: Callable[[], None], emptied: tuple[str, ...] = ()
) -> None:
    """Creates a database at `file`, where there is none: from the template of the installed release, if it has one.

    Args:
        file: The database.
        migrations: The folder with the migrations of its tables, as "PACKAGE:PATH" of an installed package. A template
            is of the package's version and of the content of that folder.
        make: Makes the database at `file` by migrations; a template is then made of it.
        emptied: Tables whose rows are not kept in the template.
    """
    template = FOLDER / _name(migrations)
    if (content := _content(template)) is not None:
        write_atomically(file, content)
        return
    make()
    with suppress(OSError, sqlite3.Error):  # this user may not write there, or the disk is full
        content = _copy(file, emptied=emptied)
        write_atomically(template, hashlib.sha256(content).digest(), content)


def _name(migrations: str) -> str:
    package = migrations.partition(":")[0]
    digest = hashlib.sha256()
    for file in migration_files(migrations):
        digest.update(file.read_bytes())
    return f"{package}-{version(package)}-{digest.hexdigest()[:16]}.db-template"


def _content(template: Path) -> bytes | None:
    """Returns the database in a template; None if there is none, or if it is damaged."""
    try:
        content = template.read_bytes()
    except OSError:
        return None
    digest, database = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    return database if hashlib.sha256(database).digest() == digest else None


def _copy(file: Path, *, emptied: tuple[str, ...]) -> bytes:
    """Returns a database as the content of one file, without its log."""
    with TemporaryDirectory() as folder:
        draft = Path(folder) / file.name
        with closing(sqlite3.connect(file)) as source, closing(sqlite3.connect(draft)) as copy:
            source.backup(copy)
            with copy:
                for table in emptied:
                    copy.execute(f"DELETE FROM {table}")  # noqa: S608 - our own names
            copy.execute("PRAGMA journal_mode = DELETE")
        return draft.read_bytes()

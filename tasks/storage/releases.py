"""Checks that all processes of a pool run one release of Ringmaster, as another release may misread its tables."""

from importlib.metadata import version

from sqlalchemy import Connection, delete, insert, inspect, select, text, update

from ringmaster.errors import ReleaseMismatch
from ringmaster.tasks.storage.schema import ABOUT, NODES

TABLES = "2"
"""The version of the tables' form, incremented by every change of a table's columns.

Databases of an earlier version are brought to this one by `UPGRADES`; those of a later version are not opened.
"""

UPGRADES = {"1": ("ALTER TABLE nodes ADD COLUMN allocation TEXT NOT NULL DEFAULT ''",)}
"""By version, the statements that bring its tables to the next version."""

_TABLES, _RELEASE = "tables", "release"


def own_release() -> str:
    """Returns the release of this process."""
    return version("ringmaster")


def check_tables(connection: Connection) -> None:
    """Stores the form of the tables in a new database, and brings those of an earlier release to this release's form.

    Raises ReleaseMismatch if the tables have the form of a later release.
    """
    text = _said(connection, _TABLES)
    if text is None:
        text = TABLES if _has_allocations(connection) else "1"  # a new database, or one from before the form was stored
        connection.execute(insert(ABOUT).values(key=_TABLES, value=text))
    if text in UPGRADES:
        _upgrade(connection, text)
    elif text != TABLES:
        made_by = f" and was led by Ringmaster {release}" if (release := _said(connection, _RELEASE)) else ""
        raise ReleaseMismatch(
            [
                f"this database has tables of form {text}{made_by}; Ringmaster {own_release()} has form {TABLES}. "
                "To fix: install one release on all machines, or give the pool a new database; CHANGELOG.md says when "
                "the form changes"
            ]
        )


def _upgrade(connection: Connection, form: str) -> None:
    while form in UPGRADES:
        for statement in UPGRADES[form]:
            connection.execute(text(statement))
        form = str(int(form) + 1)
    connection.execute(update(ABOUT).where(ABOUT.c.key == _TABLES).values(value=form))


def _has_allocations(connection: Connection) -> bool:
    return NODES.c.allocation.name in {column["name"] for column in inspect(connection).get_columns(NODES.name)}


def note_release(connection: Connection) -> None:
    """Records that an executor of this release leads the pool from now on."""
    connection.execute(delete(ABOUT).where(ABOUT.c.key == _RELEASE))
    connection.execute(insert(ABOUT).values(key=_RELEASE, value=own_release()))


def check_release(connection: Connection) -> None:
    """Raises ReleaseMismatch if the executor that last led the pool is of another release than this process."""
    result = _said(connection, _RELEASE)
    if result is not None and result != own_release():
        raise ReleaseMismatch(
            [
                f"the pool's controller is of Ringmaster {result}, and this machine has {own_release()}: they would "
                "misread each other. To fix: install one release on all machines, and start the executor first"
            ]
        )


def _said(connection: Connection, key: str) -> str | None:
    value = connection.execute(select(ABOUT.c.value).where(ABOUT.c.key == key)).scalar()
    return None if value is None else str(value)

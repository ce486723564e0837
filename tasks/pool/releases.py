"""Which release of Ringmaster a pool is of: what another one hands over, or keeps in its tables, may be misread."""

from __future__ import annotations

from importlib.metadata import version

from sqlalchemy import Connection, delete, insert, select

from ringmaster.tasks.pool.faults import OtherRelease
from ringmaster.tasks.pool.schema import ABOUT

TABLES = "1"
"""Raised by every change of a table's columns; databases of another number are not opened."""

_TABLES, _RELEASE = "tables", "release"


def own_release() -> str:
    """The release that this process is of."""
    return version("ringmaster")


def check_tables(connection: Connection) -> None:
    """Notes the form of our tables in a new database. Raises OtherRelease where it has tables of another form."""
    found = _said(connection, _TABLES)
    if found is None:  # a new database, or one from before its form was noted, which is this one
        connection.execute(insert(ABOUT).values(key=_TABLES, value=TABLES))
    elif found != TABLES:
        made_by = f" and was led by Ringmaster {release}" if (release := _said(connection, _RELEASE)) else ""
        raise OtherRelease(
            f"this database has tables of form {found}{made_by}; Ringmaster {own_release()} has form {TABLES}. "
            "To fix: install one release on all machines, or give the pool a new database; CHANGELOG.md says when "
            "the form changes"
        )


def note_release(connection: Connection) -> None:
    """Says that an executor of this release leads the pool from now on."""
    connection.execute(delete(ABOUT).where(ABOUT.c.key == _RELEASE))
    connection.execute(insert(ABOUT).values(key=_RELEASE, value=own_release()))


def check_release(connection: Connection) -> None:
    """Raises OtherRelease where the executor that led the pool last is of another release than this process."""
    found = _said(connection, _RELEASE)
    if found is not None and found != own_release():
        raise OtherRelease(
            f"the pool's executor is of Ringmaster {found}, and this machine has {own_release()}: they would misread "
            "each other. To fix: install one release on all machines, and start the executor first"
        )


def _said(connection: Connection, key: str) -> str | None:
    value = connection.execute(select(ABOUT.c.value).where(ABOUT.c.key == key)).scalar()
    return None if value is None else str(value)

"""The three databases of a pool (its own, Prefect's, MLflow's), as SQLite files or on one PostgreSQL server."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from prefect.settings import get_current_settings
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from ringmaster.errors import InputError
from ringmaster.model_lineage.sqlite_files import path_of, sqlite_url

if TYPE_CHECKING:
    import psycopg

DEFAULT_NAME = "ringmaster"
MAINTENANCE = ("postgres", "template1")  # every server has them


@dataclass(frozen=True, kw_only=True)
class PoolDatabases:
    """The URLs of a pool's databases, each with the driver that its reader needs.

    pool: URL of the pool's own database.
    prefect: URL of Prefect's database; None for the SQLite file in Prefect's own home.
    mlflow: URL of MLflow's database.
    """

    pool: str = field(repr=False)
    prefect: str | None = field(repr=False)
    mlflow: str = field(repr=False)


def prefect_database() -> Path | None:
    """Returns the SQLite file of a Prefect server that this process is or starts; None for another database."""
    secret = get_current_settings().server.database.connection_url
    url = "" if secret is None else secret.get_secret_value()
    file = path_of(url) if url.startswith("sqlite") else ""
    return Path(file).absolute() if file and ":memory:" not in file else None


def databases(url: str | None, *, home: Path) -> PoolDatabases:
    """Returns the URLs of the databases, and makes none. Raises InputError where `url` is no PostgreSQL server."""
    if url is None:
        return PoolDatabases(
            pool=sqlite_url(home / "pool" / "pool.db"), prefect=None, mlflow=sqlite_url(home / "mlflow.db")
        )
    server = _parsed(url)
    # asyncpg has another name for sslmode.
    query = {("ssl" if key == "sslmode" else key): value for key, value in server.query.items()}
    prefect = _named(server, "_prefect").set(drivername="postgresql+asyncpg", query=query)
    return PoolDatabases(
        pool=_text(_named(server)),
        prefect=_text(prefect),
        mlflow=_text(_named(server, "_mlflow").set(drivername="postgresql+psycopg")),
    )


def make_databases(url: str) -> list[str]:
    """Makes the missing databases on the server of `url`; returns their names. Raises InputError with the remedy."""
    import psycopg
    from psycopg import sql

    server = _parsed(url)
    wanted = [_named(server, suffix).database or "" for suffix in ("", "_prefect", "_mlflow")]
    with _connected(server) as connection:
        there = {name for (name,) in connection.execute("SELECT datname FROM pg_database").fetchall()}
        missing = [name for name in wanted if name not in there]
        for name in missing:
            try:
                connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
            except psycopg.errors.DuplicateDatabase:
                continue  # another machine has just made it
            except psycopg.errors.InsufficientPrivilege as error:
                commands = "".join(f'\n  CREATE DATABASE "{each}" OWNER "{server.username}";' for each in missing)
                raise InputError(
                    [f"{server.username} may not make databases on {_shown(server)}. To fix: have it done:{commands}"]
                ) from error
    return missing


def _connected(server: URL) -> psycopg.Connection[tuple[str]]:
    """Connects to any database of the server: the named one may not exist yet, and others may refuse this user."""
    import psycopg

    lines: list[str] = []
    for name in (_named(server).database, *MAINTENANCE):
        address = _text(server.set(database=name))
        try:
            return psycopg.connect(address, autocommit=True, connect_timeout=10)
        except psycopg.OperationalError as error:
            lines.append(str(error).strip())
    raise InputError([f"the PostgreSQL server {_shown(server)} cannot be used: {lines[-1]}"])


def _parsed(url: str) -> URL:
    try:
        server = make_url(url)
    except ArgumentError:
        server = None
    if server is None or server.drivername != "postgresql" or not server.host:
        raise InputError(
            [
                "--database is not the URL of a PostgreSQL server. To fix: postgresql://USER@HOST:PORT/NAME, with "
                "the password in ~/.pgpass"
            ]
        )
    return server


def _named(server: URL, suffix: str = "") -> URL:
    """Returns the URL with the name of one of our databases: the name that the user has given, or `ringmaster`."""
    name = server.database if server.database not in (None, "", *MAINTENANCE) else DEFAULT_NAME
    return server.set(database=f"{name}{suffix}")


def _text(url: URL) -> str:
    return url.render_as_string(hide_password=False)


def _shown(server: URL) -> str:
    return f"{server.host}:{server.port or 5432}"

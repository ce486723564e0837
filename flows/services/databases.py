"""The three databases of a pool: its own, Prefect's and MLflow's; SQLite files, or made on one PostgreSQL server."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import psycopg
from psycopg import sql
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from ringmaster.flows.faults import InputError

DEFAULT_NAME = "ringmaster"
MAINTENANCE = ("postgres", "template1")  # databases that every server has


@dataclass(frozen=True, kw_only=True)
class PoolDatabases:
    """The addresses, each with the driver that its reader wants. prefect is None for the file in Prefect's own home."""

    pool: str = field(repr=False)
    prefect: str | None = field(repr=False)
    mlflow: str = field(repr=False)


def databases(url: str | None, *, home: Path) -> PoolDatabases:
    """Where the databases are, without making any. Raises InputError where `url` is no PostgreSQL server's."""
    if url is None:
        return PoolDatabases(
            pool=f"sqlite:///{home / 'pool' / 'pool.db'}", prefect=None, mlflow=f"sqlite:///{home / 'mlflow.db'}"
        )
    server = _parsed(url)
    # asyncpg knows sslmode by another name.
    query = {("ssl" if key == "sslmode" else key): value for key, value in server.query.items()}
    prefect = _named(server, "_prefect").set(drivername="postgresql+asyncpg", query=query)
    return PoolDatabases(
        pool=_text(_named(server)),
        prefect=_text(prefect),
        mlflow=_text(_named(server, "_mlflow").set(drivername="postgresql+psycopg")),
    )


def make_databases(url: str) -> list[str]:
    """Makes those that are missing on the server of `url`; returns their names. Raises InputError with the remedy."""
    server = _parsed(url)
    wanted = [_named(server, suffix).database or "" for suffix in ("", "_prefect", "_mlflow")]
    with _connected(server) as connection:
        there = {name for (name,) in connection.execute("SELECT datname FROM pg_database").fetchall()}
        missing = [name for name in wanted if name not in there]
        for name in missing:
            try:
                connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
            except psycopg.errors.DuplicateDatabase:
                continue  # another machine was quicker
            except psycopg.errors.InsufficientPrivilege as error:
                commands = "".join(f'\n  CREATE DATABASE "{each}" OWNER "{server.username}";' for each in missing)
                raise InputError(
                    [f"{server.username} may not make databases on {_shown(server)}. To fix: have it done:{commands}"]
                ) from error
    return missing


def _connected(server: URL) -> psycopg.Connection[tuple[str]]:
    """To any database that is there: the named one may be missing still, and the others may be closed to this user."""
    said: list[str] = []
    for name in (_named(server).database, *MAINTENANCE):
        address = _text(server.set(database=name))
        try:
            return psycopg.connect(address, autocommit=True, connect_timeout=10)
        except psycopg.OperationalError as error:
            said.append(str(error).strip())
    raise InputError([f"the PostgreSQL server {_shown(server)} cannot be used: {said[-1]}"])


def _parsed(url: str) -> URL:
    try:
        server = make_url(url)
    except ArgumentError:
        server = None
    if server is None or server.drivername != "postgresql" or not server.host:
        raise InputError(
            ["--database is no PostgreSQL server. To fix: write postgresql://USER:PASSWORD@HOST:PORT/NAME"]
        )
    return server


def _named(server: URL, suffix: str = "") -> URL:
    """The same with the name of one of ours: the one that the user has given, or `ringmaster`."""
    name = server.database if server.database not in (None, "", *MAINTENANCE) else DEFAULT_NAME
    return server.set(database=f"{name}{suffix}")


def _text(url: URL) -> str:
    return url.render_as_string(hide_password=False)


def _shown(server: URL) -> str:
    return f"{server.host}:{server.port or 5432}"

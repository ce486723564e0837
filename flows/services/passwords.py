"""The password of a pool's servers: given by a person or generated, and stored in a file that its owner alone reads."""

from __future__ import annotations

import secrets
from pathlib import Path

from ringmaster.errors import InputError
from ringmaster.flows.services.files import write_secret
from ringmaster.model_lineage.sqlite_files import sqlite_url

SHORTEST_PASSWORD = 12  # MLflow's minimum
# MLflow hashes the password in each request, which takes a quarter of a second, unless it caches who was authenticated.
REMEMBERED_S = 60


def password_file(folder: Path) -> Path:
    """Returns the file that stores the password of a home's servers. folder: the folder of the home's services."""
    return folder / "password"


def choose_password(folder: Path, *, given: Path | None) -> str:
    """Returns the password in the file `given`, else the stored one, else a new one. Raises InputError where a file is
    unfit.

    It writes nothing: `keep_password` stores the password once all other options are known to be valid.
    """
    if given is not None:
        return read_password(given)
    kept = password_file(folder)
    return read_password(kept) if kept.exists() else secrets.token_urlsafe(24)


def read_password(file: Path) -> str:
    """Returns the one line of a password file. Raises InputError if others can read the file, or if it is invalid."""
    try:
        if file.stat().st_mode & 0o077:
            raise InputError([f"others than you may read {file}. To fix: chmod 600 {file}"])
        lines = file.read_text().splitlines()
    except OSError as error:
        raise InputError([f"the password file {file} cannot be read: {error.strerror}"]) from error
    if len(lines) != 1 or not lines[0].strip():
        raise InputError([f"{file} is to hold one line, the password; it has {len(lines)} lines"])
    return lines[0].strip()


def keep_password(folder: Path, *, username: str, password: str) -> None:
    """Stores the password for later starts and for people, and writes MLflow's authentication file.

    Raises InputError where MLflow's users were made with another password.
    """
    users, file = folder / "mlflow-users.db", folder / "mlflow-auth.ini"
    # MLflow reads the file with configparser, where % has a special meaning.
    line = f"admin_password = {password.replace('%', '%%')}"
    database = sqlite_url(users).replace("%", "%%")
    if users.exists() and file.exists() and line not in file.read_text().splitlines():
        raise InputError(
            [
                "MLflow's users were made with another password. To fix: give that one by --password-file, or remove "
                f"{users}: it is made anew, and users that were added by hand must be added again"
            ]
        )
    text = [
        "[mlflow]",
        "default_permission = READ",
        f"database_uri = {database}",
        f"admin_username = {username}",
        line,
        "authorization_function = mlflow.server.auth:authenticate_request_basic_auth",
        f"auth_cache_ttl_seconds = {REMEMBERED_S}",
    ]
    write_secret(file, "\n".join(text) + "\n")
    write_secret(password_file(folder), f"{password}\n")

"""A PostgreSQL server for the tests, from the installed package, with its own folder and port."""

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import psycopg
import pytest

from tests.ports import free_port

TIMEOUT_S = 300
STOP_SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}


class PostgresServer:
    """A server that can be stopped and restarted, at the same address and with the same data.

    address: the address on which it listens. networks: further networks that may connect, such as "10.77.0.0/24".
    """

    def __init__(self, *, address: str = "127.0.0.1", networks: tuple[str, ...] = ()) -> None:
        self.programs = programs()
        self.address = address
        self.password = secrets.token_urlsafe(12)
        self.folder = Path(tempfile.mkdtemp(prefix="postgresql-"))
        # PostgreSQL does not run as root; Debian's package creates a user for it.
        self._user = {"user": "postgres", "group": "postgres", "extra_groups": []} if os.geteuid() == 0 else {}
        if self._user:
            shutil.chown(self.folder, "postgres", "postgres")
        self.port = free_port(address)
        self._process: subprocess.Popen[bytes] | None = None
        self._make(networks)

    def start(self) -> None:
        """Starts the server; returns when it answers."""
        command = [self.programs / "postgres", "-D", self.folder / "data"]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
                **self._user,
            )
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:
            try:
                psycopg.connect(self.url("postgres"), connect_timeout=5).close()
                return
            except psycopg.OperationalError as error:
                try:
                    code = self._process.wait(timeout=0.1)
                except subprocess.TimeoutExpired:
                    if time.monotonic() < deadline_s:
                        continue
                    raise AssertionError(f"PostgreSQL does not answer: {error}") from error
                raise AssertionError(f"PostgreSQL ended with {code}: {self._log()}") from error

    def stop(self, how: str = "fast") -> None:
        """Stops the server. fast: ends all connections; immediate: as in a crash; smart: waits for clients."""
        if self._process is not None:
            self._process.send_signal(STOP_SIGNALS[how])
            self._process.wait(timeout=TIMEOUT_S)
            self._process = None

    def restart(self, how: str = "fast") -> None:
        self.stop(how)
        self.start()

    def close(self) -> None:
        self.stop("immediate")
        shutil.rmtree(self.folder)

    def url(self, database: str) -> str:
        return f"postgresql://postgres:{self.password}@{self.address}:{self.port}/{database}"

    def create(self, database: str, *, template: str = "template1") -> str:
        """Creates a database, an empty one or a copy of another one; returns its address."""
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{database}" TEMPLATE "{template}"')
        return self.url(database)

    def drop(self, database: str) -> None:
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f'DROP DATABASE "{database}" WITH (FORCE)')

    def _make(self, networks: tuple[str, ...]) -> None:
        secret = self.folder / "password"
        secret.write_text(self.password)
        secret.chmod(0o644)  # for initdb's user, who alone can read the folder
        data = self.folder / "data"
        command = [self.programs / "initdb", "-D", data, "-U", "postgres", "--pwfile", secret, "--auth=scram-sha-256"]
        command += ["--no-locale", "--encoding=UTF8", "--no-sync"]
        done = subprocess.run(command, cwd="/", capture_output=True, text=True, **self._user)
        assert done.returncode == 0, done.stdout + done.stderr
        settings = {
            "listen_addresses": self.address,
            "port": self.port,
            "unix_socket_directories": self.folder,
            "max_connections": 200,
            # The tests end the server, never the machine.
            "fsync": "off",
        }
        with (data / "postgresql.conf").open("a") as file:
            file.writelines(f"{name} = '{value}'\n" for name, value in settings.items())
        with (data / "pg_hba.conf").open("a") as file:
            file.writelines(f"host all all {network} scram-sha-256\n" for network in networks)

    def _log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-3000:]


def programs() -> Path:
    """Returns the program folder of the newest installed PostgreSQL; skips the test where there is none."""
    found = shutil.which("initdb")
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if not (found or folders):
        pytest.skip("PostgreSQL is not installed (on Debian and Ubuntu: apt install postgresql)")
    return folders[-1].parent if folders else Path(str(found)).resolve().parent

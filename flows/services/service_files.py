"""The files in a home's `pool` folder: definitions, states, process ids, logs and the password of the services."""

import fcntl
import json
import os
import secrets
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ringmaster.codec import from_json, to_json
from ringmaster.errors import InputError
from ringmaster.flows.services.pool_processes import PoolProcesses, ServiceState, SupervisorRecord
from ringmaster.flows.settings import PoolAddress
from ringmaster.model_lineage.sqlite_files import sqlite_url
from ringmaster.tasks.pool.engines import Service
from ringmaster.tasks.process_identity import ProcessId, write_secret


def reap(pid: int, *, group: bool = False) -> int | None:
    """Returns the exit status of a child that has ended, or None where the process was not a child of ours.

    group: whether to kill the rest of the process group that it led. A child that has ended keeps its pid, which is its
        group's id too, until it is reaped: no other process can be hit.
    """
    if group:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return None


class ServiceFiles(PoolProcesses):
    """The files of a pool's services in `folder`, which only their owner can read, as they hold passwords."""

    def make(self) -> None:
        """Makes the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)

    def log(self, name: str) -> Path:
        """Returns the file of a service's output."""
        return self.folder / f"{name}.log"

    def ready(self, name: str) -> Path:
        """Returns the file in which a service reports that it is ready."""
        return self.folder / f"{name}.ready"

    def is_ready(self, name: str, process: ProcessId) -> bool:
        """Returns whether that process has reported that it is ready."""
        value = self._content_of(self.ready(name).name)
        return bool(value) and from_json(ProcessId, value) == process

    def write_services(self, services: Sequence[Service], *, address: PoolAddress) -> None:
        """Writes the definitions of the services and the pool's address, and clears the states of the processes."""
        write_secret(self.folder / "state.json", json.dumps({"services": []}))
        fields = {"address": to_json(address), "services": to_json(services)}
        write_secret(self.folder / "services.json", json.dumps(fields, indent=1))

    def services(self) -> tuple[Service, ...]:
        """Returns the definitions of the services."""
        return tuple(from_json(Service, each) for each in self._content_of("services.json")["services"])

    def address(self) -> PoolAddress:
        """Returns the address of the pool."""
        return from_json(PoolAddress, self._content_of("services.json")["address"])

    def write_states(self, states: Sequence[ServiceState]) -> None:
        """Writes the states of the services, and this process as their supervisor."""
        me = ProcessId.of(os.getpid())
        write_secret(self.folder / "state.json", json.dumps({"by": to_json(me), "services": to_json(states)}))

    def write_supervisor(self, process: ProcessId) -> None:
        """Writes which process supervises the services, as soon as it was started."""
        record = SupervisorRecord.of(process, home=self.folder.parent)
        write_secret(self.folder / "supervisor.json", json.dumps(to_json(record)))

    @contextmanager
    def alone(self, name: str = "supervisor") -> Iterator[bool]:
        """Takes the lock `name`; yields whether this process got it. Child processes do not inherit the lock.

        Meanwhile, the file of the lock names its holder.
        """
        with (self.folder / f"{name}.lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                file.truncate(0)
                file.write(json.dumps(to_json(ProcessId.of(os.getpid()))))
                file.flush()
                try:
                    yield True
                finally:
                    file.truncate(0)


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
    """Stores the password for later starts and for users, and writes MLflow's authentication file.

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
                f"{users}: it is made again, and users that were added by hand must be added again"
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

"""The files in a home's `pool` folder: definitions, states, process ids and logs of the services."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from ringmaster.codec import from_json, to_json
from ringmaster.flows.services.process_ids import ProcessId
from ringmaster.flows.settings import PoolAddress

READY_FILE = "RINGMASTER_READY_FILE"
"""Environment variable that names the file in which a service with `says_ready` reports that it is ready."""


class ServiceStatus(StrEnum):
    """The states of a service."""

    WAITING = "waiting"
    STARTING = "starting"
    UP = "up"
    DONE = "done"
    ENDING = "ending"
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True)
class Service:
    """A process that a pool needs.

    name: name of the service.
    command: its command line.
    environment: changes to the environment that it inherits; None removes a variable.
    after: services that must be up before.
    ready_url: URL that answers once the service is up; None where there is none.
    says_ready: whether the service reports by `say_ready` that it is up, however long that takes.
    once: whether the service ends on its own, with exit status 0.
    group: whether its children end with it.
    patience_s: seconds within which the service must be up.
    grace_s: seconds within which it must end after SIGTERM.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str | None]
    after: tuple[str, ...] = ()
    ready_url: str | None = None
    says_ready: bool = False
    once: bool = False
    group: bool = True
    patience_s: float = 400.0
    grace_s: float = 60.0


@dataclass(frozen=True, kw_only=True)
class ServiceState:
    """The state of a service.

    name: name of the service.
    status: waiting (for others, or for its restart), starting, up, done (with `once`), ending or ended.
    pid, born: identity of its process, as in ProcessId; `pid` is None where it has none.
    num_restarts: number of restarts.
    message: reason of the last failure, or what the service still lacks.
    """

    name: str
    status: str
    pid: int | None
    born: str
    num_restarts: int
    message: str

    @property
    def process(self) -> ProcessId | None:
        """The process that provides the service, or provided it last."""
        return ProcessId(self.pid, self.born) if self.pid is not None else None

    def lives(self) -> bool:
        """Returns whether that process still runs."""
        return self.process is not None and self.process.lives()


class ServiceFiles:
    """The files of a pool's services in `folder`, which only their owner can read, as they hold passwords."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

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
        said = self._said(self.ready(name).name)
        return bool(said) and from_json(ProcessId, said) == process

    def write_services(self, services: Sequence[Service], *, address: PoolAddress) -> None:
        """Writes the definitions of the services and the pool's address, and clears the states of the processes."""
        write_secret(self.folder / "state.json", json.dumps({"services": []}))
        said = {"address": to_json(address), "services": to_json(services)}
        write_secret(self.folder / "services.json", json.dumps(said, indent=1))

    def services(self) -> tuple[Service, ...]:
        """Returns the definitions of the services."""
        return tuple(from_json(Service, each) for each in self._said("services.json")["services"])

    def address(self) -> PoolAddress:
        """Returns the address of the pool."""
        return from_json(PoolAddress, self._said("services.json")["address"])

    def write_states(self, states: Sequence[ServiceState]) -> None:
        """Writes the states of the services, and this process as their supervisor."""
        me = ProcessId.of(os.getpid())
        write_secret(self.folder / "state.json", json.dumps({"by": to_json(me), "services": to_json(states)}))

    def states(self, *, by: ProcessId | None = None) -> tuple[ServiceState, ...]:
        """Returns the states of the services in the order in which they start; none if `by` is another supervisor."""
        said = self._said("state.json")
        if by is not None and said.get("by") != to_json(by):
            return ()
        return tuple(from_json(ServiceState, each) for each in said.get("services", ()))

    def write_supervisor(self, process: ProcessId) -> None:
        """Writes which process supervises the services, as soon as it was started."""
        write_secret(self.folder / "supervisor.json", json.dumps(to_json(process)))

    def supervisor(self) -> ProcessId | None:
        """Returns the process that supervises the services; None where it has ended."""
        said = self._said("supervisor.json")
        process = from_json(ProcessId, said) if said else None
        return process if process is not None and process.lives() else None

    @contextmanager
    def alone(self, name: str = "supervisor") -> Iterator[bool]:
        """Takes the lock `name`; yields whether this process got it. Child processes do not inherit the lock."""
        with (self.folder / f"{name}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True

    def _said(self, name: str) -> dict[str, Any]:
        try:
            said: dict[str, Any] = json.loads((self.folder / name).read_text())
        except FileNotFoundError:
            return {}
        return said


def say_ready() -> None:
    """Reports to the supervisor of this process that it is ready: it leads, or serves."""
    file, me = os.environ.pop(READY_FILE, None), ProcessId.of(os.getpid())
    if file is not None and me is not None:
        write_secret(Path(file), json.dumps(to_json(me)))


def write_secret(file: Path, text: str) -> None:
    """Atomically writes a file that only its owner can read."""
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as opened:
        opened.write(text)
    aside.replace(file)

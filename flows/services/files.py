"""What a home's `pool` folder holds: which services there are, how they stand, what they print."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringmaster.flows.services.process_ids import ProcessId
from ringmaster.flows.settings import PoolAddress
from ringmaster.techniques.values import from_json, to_json

READY_FILE = "RINGMASTER_READY_FILE"
"""Names, to a service that says so, the file in which it says that it does its work."""

WAITING, STARTING, UP, DONE = "waiting", "starting", "up", "done"
ENDING, ENDED = "ending", "ended"


@dataclass(frozen=True, kw_only=True)
class Service:
    """A process that a pool needs.

    environment: what is changed in the one that it inherits; None takes a variable away. after: services that must be
    up before. ready_url: what answers once it is up; None where nothing does. says_ready: it is up once it has said so
    (`say_ready`), however long that takes. once: it ends by itself, with 0. group: its children end with it.
    patience_s: for being up. grace_s: for ending after SIGTERM.
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
    """How a service stands: waiting (for others, or to be started again), starting, up, done (once), ending, ended."""

    name: str
    status: str
    pid: int | None
    born: str
    num_restarts: int
    message: str

    @property
    def process(self) -> ProcessId | None:
        """The process that provides it, or did."""
        return ProcessId(self.pid, self.born) if self.pid is not None else None

    def lives(self) -> bool:
        """Whether that process still runs."""
        return self.process is not None and self.process.lives()


class ServiceFiles:
    """The files of a pool's services in `folder`, which only their owner may read: they hold passwords."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make(self) -> None:
        """Makes the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)

    def log(self, name: str) -> Path:
        """Where a service's output goes."""
        return self.folder / f"{name}.log"

    def ready(self, name: str) -> Path:
        """Where a service says that it does its work."""
        return self.folder / f"{name}.ready"

    def is_ready(self, name: str, process: ProcessId) -> bool:
        """Whether that process has said so."""
        said = self._said(self.ready(name).name)
        return bool(said) and from_json(ProcessId, said) == process

    def write_services(self, services: Sequence[Service], *, address: PoolAddress) -> None:
        """Says which services there are to be, and how they are reached; nothing is known of their processes."""
        write_secret(self.folder / "state.json", json.dumps({"services": []}))
        said = {"address": to_json(address), "services": to_json(services)}
        write_secret(self.folder / "services.json", json.dumps(said, indent=1))

    def services(self) -> tuple[Service, ...]:
        """Which services there are to be."""
        return tuple(from_json(Service, each) for each in self._said("services.json")["services"])

    def address(self) -> PoolAddress:
        """How they are reached."""
        return from_json(PoolAddress, self._said("services.json")["address"])

    def write_states(self, states: Sequence[ServiceState]) -> None:
        """Says how the services stand; this process is the one that keeps them running."""
        me = ProcessId.of(os.getpid())
        write_secret(self.folder / "state.json", json.dumps({"by": to_json(me), "services": to_json(states)}))

    def states(self, *, by: ProcessId | None = None) -> tuple[ServiceState, ...]:
        """How the services stand, in the order in which they start; nothing yet, where not `by` a given supervisor."""
        said = self._said("state.json")
        if by is not None and said.get("by") != to_json(by):
            return ()
        return tuple(from_json(ServiceState, each) for each in said.get("services", ()))

    def write_supervisor(self, process: ProcessId) -> None:
        """Says which process keeps the services running, from the moment on in which it was started."""
        write_secret(self.folder / "supervisor.json", json.dumps(to_json(process)))

    def supervisor(self) -> ProcessId | None:
        """The process that keeps the services running; None where it has ended."""
        said = self._said("supervisor.json")
        process = from_json(ProcessId, said) if said else None
        return process if process is not None and process.lives() else None

    @contextmanager
    def alone(self, name: str = "supervisor") -> Iterator[bool]:
        """Whether this process is the only one inside of what has that name; its children do not count."""
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
    """Has whoever keeps this process running know that it does its work from now on: it leads, or serves."""
    file, me = os.environ.pop(READY_FILE, None), ProcessId.of(os.getpid())
    if file is not None and me is not None:
        write_secret(Path(file), json.dumps(to_json(me)))


def write_secret(file: Path, text: str) -> None:
    """Writes a file that only its owner may read; whoever reads finds all of it, or what was there before."""
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as opened:
        opened.write(text)
    aside.replace(file)

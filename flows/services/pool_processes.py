"""Which processes provide the pool of a home: from the files in its `pool` folder, and the processes of this machine.

A power cut or `kill -9` leaves those files behind, and a copy of a home has those of the original. So whoever reads the
address of a pool checks here first whether that pool runs, and whether it is this home's.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from ringmaster.codec import from_json, to_json
from ringmaster.flows.services.server_answers import answers
from ringmaster.tasks.process_identity import ProcessId, boot_id, pid_namespace
from ringmaster.techniques.processes.stopped import is_stopped

PREFECT, MLFLOW = "prefect", "mlflow"
"""The names of the services that commands query."""


class ServiceStatus(StrEnum):
    """The states of a service."""

    WAITING = "waiting"
    STARTING = "starting"
    UP = "up"
    DONE = "done"
    ENDING = "ending"
    ENDED = "ended"


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

    def fault(self) -> str | None:
        """Returns why the service cannot be used now; None where it can, or where it had to run once only."""
        if self.status == ServiceStatus.DONE:
            return None
        if not self.lives():
            process = f" (process {self.pid})" if self.pid is not None else ""
            return f"{self.name}{process} has ended{f': {self.message}' if self.message else ''}"
        if self.process is not None and is_stopped(self.process.pid):
            return f"{self.name} (process {self.pid}) is stopped (SIGSTOP)"
        if self.status != ServiceStatus.UP:
            return f"{self.name} (process {self.pid}) is {self.status}{f': {self.message}' if self.message else ''}"
        return None


@dataclass(frozen=True, kw_only=True)
class SupervisorRecord:
    """The process that supervises the services of a pool, and where it was started. Earlier releases wrote no place.

    pid, born: its identity, as in ProcessId.
    home: the home of the pool.
    host: name of the machine.
    namespace: PID namespace, outside of which the pid is another process's.
    """

    pid: int
    born: str
    home: str = ""
    host: str = ""
    namespace: str = ""

    @classmethod
    def of(cls, process: ProcessId, *, home: Path) -> SupervisorRecord:
        """Returns the record of a process of this machine that supervises the pool of a home."""
        place = {"home": str(home), "host": platform.node(), "namespace": pid_namespace()}
        return cls(pid=process.pid, born=process.born, **place)

    @property
    def process(self) -> ProcessId:
        """Its identity."""
        return ProcessId(self.pid, self.born)

    def is_in_container(self) -> bool:
        """Returns whether it was started in another container of this machine, in this boot."""
        return self.born.partition(":")[0] == boot_id() and self.namespace not in ("", pid_namespace())

    def is_elsewhere(self) -> bool:
        """Returns whether it was started on another machine or in another container: it cannot be seen from here."""
        # On a machine of the same name, this machine was started again.
        is_of_boot = self.born.partition(":")[0] == boot_id()
        return self.is_in_container() or (not is_of_boot and self.host not in ("", platform.node()))


class PoolProcesses:
    """The processes of the pool of a home. folder: the folder `pool` of the home."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def supervisor(self) -> ProcessId | None:
        """Returns the process that supervises the services; None where it has ended, or is that of another home."""
        record = self._supervisor_record()
        return record.process if record is not None and not self.original() and record.process.lives() else None

    def states(self, *, by: ProcessId | None = None) -> tuple[ServiceState, ...]:
        """Returns the states of the services in the order in which they start.

        There are none of a home that is a copy, nor where `by` is another supervisor than the one that wrote them.
        """
        value = self._content_of("state.json")
        if self.original() or (by is not None and value.get("by") != to_json(by)):
            return ()
        return tuple(from_json(ServiceState, each) for each in value.get("services", ()))

    def original(self) -> Path | None:
        """Returns the home from which this home was copied together with the files of its pool; None if it was not."""
        record, home = self._supervisor_record(), self.folder.parent
        if record is None or not record.home:
            return None
        original = Path(record.home)
        # A home that was moved, or that has another path on another machine, is the same home.
        return original if original.is_dir() and not original.samefile(home) else None

    def elsewhere(self) -> str | None:
        """Returns where the pool was started, if its processes cannot be seen from here; None if they can."""
        record = self._supervisor_record()
        if record is None or not record.is_elsewhere() or self.original():
            return None
        return f"{'in a container' if record.is_in_container() else 'on a machine'} named {record.host or '(unknown)'}"

    def runs_elsewhere(self) -> bool:
        """Returns whether the pool was started elsewhere and is known to run there: by a lock, or an answer."""
        return self.elsewhere() is not None and (self._is_locked() or self._answers())

    def _answers(self) -> bool:
        address = self._content_of("services.json").get("address", {})
        return any(answers(f"{address[key]}/health") for key in ("prefect_api", "mlflow_uri") if address.get(key))

    def _is_locked(self) -> bool:
        """Returns whether a supervisor holds its lock, which is seen from all containers of a machine."""
        try:
            descriptor = os.open(self.folder / "supervisor.lock", os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def fault(self) -> str | None:
        """Returns why the pool is not to be used: it has ended, or is that of another home. None also if unknown."""
        record, home = self._supervisor_record(), self.folder.parent
        if record is None:
            return None
        if original := self.original():
            return (
                f"{home} is a copy of {original}, whose pool it does not use. To fix: RINGMASTER_HOME={original} names "
                f"that pool; `ringmaster up` starts one of {home}, and `ringmaster down` makes it a home without one"
            )
        if record.is_elsewhere():
            if not record.is_in_container() or self.runs_elsewhere():
                return None
        elif record.process.lives() or any(state.lives() for state in self.states()):
            return None
        names = [state.name for state in self.states() if state.status != ServiceStatus.DONE]
        return (
            f"the pool of {home} is not running: it ended without `ringmaster down`, as in a power cut (dead: "
            f"{', '.join(['supervisor', *names])}). To fix: `ringmaster up`, with the options that it had, continues "
            "with its batches"
        )

    def starting(self) -> str | None:
        """Returns that the pool is being started, by whom and how far; None where nothing starts it."""
        supervisor = self.supervisor()
        starter = self.starter() or (f"its supervisor, process {supervisor.pid}" if supervisor is not None else "")
        if not starter:
            return None
        states = self.states(by=supervisor) if supervisor is not None else ()
        there = ", ".join(state.name for state in states if state.fault() is None) or "nothing"
        missing = "; ".join(fault for state in states if (fault := state.fault()))
        lack = f"; not yet: {missing}" if missing else ""
        return (
            f"the pool of {self.folder.parent} is being started by {starter}. Up: {there}{lack}. To fix: wait until "
            "`ringmaster up` prints its addresses"
        )

    def starter(self) -> str:
        """Returns which `ringmaster up` starts the pool; empty where none does."""
        value = self._content_of("up.lock")
        process = from_json(ProcessId, value) if value else None
        return f"process {process.pid}" if process is not None and process.lives() else ""

    def lacks(self) -> list[str]:
        """Returns what a pool that runs, or may run, lacks, a sentence each; nothing where that is not known."""
        record = self._supervisor_record()
        if record is None or self.fault():
            return []
        if place := self.elsewhere():
            unseen = f"the pool was started {place}: its processes cannot be seen from here"
            return [] if self._answers() else [f"{unseen}, and its servers do not answer here"]
        faults = [fault for state in self.states() if (fault := state.fault())]
        if self.is_supervised():
            return [f"{fault}; the supervisor starts it again" for fault in faults]
        what = f"the supervisor (process {record.pid}) {'is stopped' if record.process.lives() else 'has ended'}"
        return [
            f"{'; '.join([what, *faults])}: nothing starts again what ends. To fix: `ringmaster up`, which takes over "
            "what runs"
        ]

    def is_supervised(self) -> bool:
        """Returns whether a supervisor starts services again that end."""
        supervisor = self.supervisor()
        return supervisor is not None and not is_stopped(supervisor.pid)

    def service_fault(self, name: str) -> str | None:
        """Returns why a service of the pool cannot be used now; None where it can, or where that is not known."""
        record = self._supervisor_record()
        if record is None or record.is_elsewhere():
            return None
        return next((state.fault() for state in self.states() if state.name == name), None)

    def _supervisor_record(self) -> SupervisorRecord | None:
        value = self._content_of("supervisor.json")
        return from_json(SupervisorRecord, value) if value else None

    def _content_of(self, name: str) -> dict[str, Any]:
        try:
            text = (self.folder / name).read_text()
        except FileNotFoundError:
            return {}
        fields: dict[str, Any] = json.loads(text) if text else {}
        return fields

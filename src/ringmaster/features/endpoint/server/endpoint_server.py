"""The server of an endpoint, from its file to its end: keys, port, processes, and the end of clients that are gone."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ringmaster.errors import InputError
from ringmaster.features.endpoint.server.compute_link import (
    CallFailed,
    ComputeLink,
    ComputeProcessDied,
    ComputeSettings,
)
from ringmaster.features.endpoint.server.endpoint_file import BaseEntry, EndpointFile, ServeEntry
from ringmaster.features.endpoint.server.endpoint_service import EndpointService
from ringmaster.features.endpoint.server.replicas import ComputeDevice, link_on
from ringmaster.features.endpoint.server.scheduler import BaseScheduler
from ringmaster.features.endpoint.server.server_app import EndpointApp
from ringmaster.features.endpoint.server.store import EndpointStore
from ringmaster.files import write_atomically
from ringmaster.flows.output import ProcessRole
from ringmaster.flows.services.serving import LOOPBACK, checked, in_url, names_of, server_of

if TYPE_CHECKING:
    import uvicorn

logger = logging.getLogger(__name__)

FOLDER = "endpoints"
STORE_FILE, SERVER_FILE, KEYS_FILE, PORT_FILE = "endpoint.sqlite", "server.json", "keys.json", "port"
BASE_FILE = "base.json"
POOL_FILE = "endpoint.yaml"
"""The file of an endpoint that runs on a pool, in its folder, which the nodes share."""
LOCK_FILE = "server.lock"
KEY_PREFIX = "tml-"  # without it, the client refuses a key
LOOK_EVERY_S = 0.5
GRACE_S = 2.0  # for connections that wait for answers, when the server ends


@dataclass(frozen=True, kw_only=True)
class ServedEndpoint:
    """An endpoint that answers. keys: of its owners, by name."""

    url: str
    keys: dict[str, str]

    @property
    def key(self) -> str:
        """The key of the first owner."""
        return next(iter(self.keys.values()))


def endpoint_folder(home: Path, name: str) -> Path:
    """Returns the folder of an endpoint in a home."""
    return home / FOLDER / name


def open_store(folder: Path) -> EndpointStore:
    """Opens what an endpoint remembers, in its folder."""
    return EndpointStore(folder / STORE_FILE, is_shared=(folder / POOL_FILE).exists())


def served_devices(serve: ServeEntry) -> list[ComputeDevice]:
    """Returns the devices of this machine that a file asks for: its GPUs, or shares of its cores where it has none.

    Raises InputError where it has fewer.
    """
    from ringmaster.tasks.cluster import gpus

    cores = sorted(os.sched_getaffinity(0))
    on_gpus = (serve.device or "cuda") != "cpu" and (serve.device is not None or bool(gpus()))
    most = len(gpus()) if on_gpus else len(cores)
    if serve.devices == 1:
        return [ComputeDevice(name=(serve.device or "cuda:0") if on_gpus else "cpu")]
    if serve.devices > most:
        what = "GPUs" if on_gpus else "cores"
        raise InputError([f"devices: {serve.devices} are asked for, and this machine has {most} {what}"])
    if on_gpus:
        return [ComputeDevice(name=f"cuda:{i}") for i in range(serve.devices)]
    size = len(cores) // serve.devices
    return [ComputeDevice(name="cpu", cores=tuple(cores[i * size : (i + 1) * size])) for i in range(serve.devices)]


def kept_keys(folder: Path, owners: list[str]) -> dict[str, str]:
    """Returns the keys of the owners, which are drawn once: clients go on with theirs when the server starts again."""
    file = folder / KEYS_FILE
    known: dict[str, str] = json.loads(file.read_text()) if file.exists() else {}
    keys = {owner: known.get(owner) or KEY_PREFIX + secrets.token_urlsafe(24) for owner in owners}
    if any(owner not in known for owner in owners):
        write_atomically(file, json.dumps(known | keys).encode(), mode=0o600)
    return keys


def bound_socket(folder: Path, wanted: int | None, *, host: str = LOOPBACK[0]) -> socket.socket:
    """Returns a socket of an address: on the port that is wanted, else on that of the last server, else on any."""
    file = folder / PORT_FILE
    kept = int(file.read_text()) if file.exists() else 0
    # With the protocol named, asyncio sends without delay (TCP_NODELAY): else each answer takes 40 ms more.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, wanted or kept))
    except OSError as error:
        if wanted is not None:
            listener.close()
            raise InputError(
                [f"port {wanted} of {host} cannot be used: {error.strerror}. To fix: another `port`"]
            ) from error
        listener.bind((host, 0))
    write_atomically(file, str(listener.getsockname()[1]).encode())
    return listener


def base_folder(folder: Path, base: str) -> Path:
    """Returns the folder of a base, with the states of its clients, in that of an endpoint."""
    return folder / "bases" / base.replace("/", "--")


def check_base(folder: Path, base: BaseEntry) -> None:
    """Raises InputError where a folder has the clients of another base."""
    file = folder / BASE_FILE
    if not file.exists():
        return
    known = {"dtype": "fp32", **json.loads(file.read_text())}
    if known != _fields(base):
        raise InputError(
            [
                f"the base {base.name} is {base.from_pretrained} in {base.dtype}, and the clients in {folder} are of "
                f"the base {known['name']}, {known['from_pretrained']} in {known['dtype']}. To fix: serve that, or "
                "give the other base another name"
            ]
        )


def note_base(folder: Path, base: BaseEntry) -> None:
    """Notes of which base the clients in a folder are. Raises InputError where it has those of another."""
    check_base(folder, base)
    write_atomically(folder / BASE_FILE, json.dumps(_fields(base)).encode())


def _fields(base: BaseEntry) -> dict[str, str]:
    return {"name": base.name, "from_pretrained": base.from_pretrained, "dtype": base.dtype}


@contextmanager
def alone(folder: Path, name: str) -> Iterator[None]:
    """Raises InputError where another process serves the same endpoint."""
    with (folder / LOCK_FILE).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                [f"the endpoint {name} is served already. To fix: end that, or rename this one"]
            ) from error
        yield


class EndpointServer:
    """Serves an endpoint until it is told to end, or nobody has asked for anything for `idle_s`.

    devices: on which each base has a replica.
    link_of: makes the link to the process of a base.
    record: starts to record the clients that have ended, and returns at once: whether it has started.
    host: the address on which it listens.
    """

    def __init__(
        self,
        entry: EndpointFile,
        *,
        home: Path,
        devices: Sequence[ComputeDevice],
        link_of: Callable[[ComputeSettings], ComputeLink] = ComputeLink,
        record: Callable[[], bool] = lambda: True,
        host: str = LOOPBACK[0],
    ) -> None:
        self._host = host
        self._entry, self._folder, self._devices = entry, endpoint_folder(home, entry.name), devices
        self._link_of, self._record = link_of, record
        self._end = threading.Event()
        self._schedulers: dict[str, BaseScheduler] = {}

    @property
    def keys_file(self) -> Path:
        """The file with the keys, which only its owner may read."""
        return self._folder / KEYS_FILE

    def end(self) -> None:
        """Makes `run` return, from any thread but a signal's handler; also while a base is being loaded."""
        self._end.set()
        for scheduler in [*self._schedulers.values()]:
            scheduler.end_start()

    def run(self, announce: Callable[[ServedEndpoint], None]) -> bool:
        """Serves; returns whether the endpoint ended by itself, as it was idle.

        Raises InputError where it cannot be served.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        with alone(self._folder, self._entry.name):
            for base in self._entry.serve.bases:
                check_base(base_folder(self._folder, base.name), base)
            keys = kept_keys(self._folder, self._entry.serve.owners)
            listener = bound_socket(self._folder, self._entry.serve.port, host=self._host)
            url = f"http://{in_url(self._host)}:{listener.getsockname()[1]}"
            store = self.store = open_store(self._folder)
            store.drop_ended()
            service = EndpointService(self._entry.serve, store)
            self._schedulers.update(self._schedulers_of(service))
            server = server_of(
                checked(EndpointApp(service, keys=keys).app, names_of(self._host)),
                role=ProcessRole.METRICS,
                host=self._host,
                port=0,
                log_level="warning",
            )
            server.config.timeout_graceful_shutdown = int(GRACE_S)
            try:
                service.start(self._schedulers)
                if not self._wait_for_bases():
                    return False
                for base in self._entry.serve.bases:
                    note_base(base_folder(self._folder, base.name), base)
                with serving(server, listener, service):
                    write_atomically(
                        self._folder / SERVER_FILE,
                        json.dumps({"url": url, "pid": os.getpid(), "began_s": time.time()}).encode(),
                    )
                    announce(ServedEndpoint(url=url, keys=keys))
                    return self._look(service, server)
            finally:
                for scheduler in self._schedulers.values():
                    scheduler.end()
                store.close()
                listener.close()
                with suppress(FileNotFoundError):
                    (self._folder / SERVER_FILE).unlink()

    def _schedulers_of(self, service: EndpointService) -> dict[str, BaseScheduler]:
        serve = self._entry.serve
        limits = {"max_adapters": serve.max_adapters, "max_rank": serve.max_rank, "seq_len": serve.seq_len}
        result = {}
        for base in serve.bases:
            settings = [
                ComputeSettings(
                    base=base.from_pretrained,
                    limits=limits,
                    folder=base_folder(self._folder, base.name),
                    device=device.name,
                    cores=device.cores,
                    precision=base.dtype,
                )
                for device in self._devices
            ]
            link = link_on(settings, self._link_of)
            result[base.name] = BaseScheduler(base.name, store=service.store, link=link, on_answer=service.on_answer)
        return result

    def _wait_for_bases(self) -> bool:
        """Returns whether all bases are loaded: False where the endpoint has to end before."""
        for name, scheduler in self._schedulers.items():
            try:
                if not self._end.is_set():
                    scheduler.call(lambda link: link.call("clients"))
            except (CallFailed, ComputeProcessDied) as error:
                if not self._end.is_set():
                    raise InputError([f"the base {name} cannot be served: {error}"]) from error
        return not self._end.is_set()

    def _look(self, service: EndpointService, server: uvicorn.Server) -> bool:
        """Ends clients that are gone, and the endpoint once nobody asks; returns whether it was idle."""
        known = set[str]()  # clients that have ended, whose recording was begun
        while not self._end.wait(LOOK_EVERY_S):
            for session in service.on_loop(service.expired_sessions):
                service.on_loop(partial(service.finish_session, session))
            service.store.drop_expired()
            ended = {client.id for client in service.store.clients(where="is_ended AND NOT is_recorded")}
            if ended - known and self._record():
                known |= ended
            if server.should_exit or not all(each.is_alive for each in service.schedulers.values()):
                raise RuntimeError("a thread of the endpoint has ended")
            waits = any(scheduler.num_waiting() for scheduler in service.schedulers.values())
            if not waits and time.monotonic() - service.active_s > self._entry.serve.idle_s:
                self._end_all(service)
                return True
        return False

    def _end_all(self, service: EndpointService) -> None:
        """Ends all sessions, so that every client's state is a checkpoint."""
        for session in service.store.open_sessions():
            service.on_loop(partial(service.finish_session, session))
        for scheduler in service.schedulers.values():
            while scheduler.num_waiting() and scheduler.fault is None:
                scheduler.call(lambda link: None)


@contextmanager
def serving(server: uvicorn.Server, listener: socket.socket, service: EndpointService) -> Iterator[None]:
    """Serves inside the context, in a thread: signals are then the caller's."""
    started = threading.Event()

    async def run() -> None:
        service.attach(asyncio.get_running_loop())
        started.set()
        await server.serve(sockets=[listener])

    thread = threading.Thread(target=lambda: asyncio.run(run()), name="http", daemon=True)
    thread.start()
    started.wait()
    while not server.started and thread.is_alive():
        thread.join(0.01)
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()

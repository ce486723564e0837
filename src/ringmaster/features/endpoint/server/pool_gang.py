"""An endpoint as the rank of a gang: the server runs in the rank, on the address of its node, and computes beside it.

Whatever ends the rank ends the processes that compute: they are in its process group. What was answered is in the
endpoint's folder, on storage that the nodes share, from which the next gang continues.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from select import select
from typing import ClassVar

from ringmaster.errors import InputError
from ringmaster.features.endpoint.server.compute_link import ComputeLink, RecordingProcess
from ringmaster.features.endpoint.server.endpoint_file import load_endpoint_file
from ringmaster.features.endpoint.server.endpoint_server import LOCK_FILE, POOL_FILE, EndpointServer, endpoint_folder
from ringmaster.features.endpoint.server.replicas import ComputeDevice
from ringmaster.flows.services.serving import LOOPBACK
from ringmaster.techniques.processes.gang_events import JobReady, JobResult, OutcomeStatus
from ringmaster.techniques.processes.order import GangOrder, Slot
from ringmaster.techniques.processes.reporter import STOP, Reporter

HOME = "home"
"""The argument of an endpoint's job: the home, on storage that the nodes share."""
LOAD_TIMEOUT_S = 3600.0  # in which a base of the hub is downloaded
SERVE_TIMEOUT_S = 60.0
BEAT_S = 0.5


class GangLink(ComputeLink):
    """A process that is killed with the rank."""

    own_session: ClassVar[bool] = False


class ServerThread:
    """A server on a thread of its own; the thread of the rank hears its commands.

    Attributes:
        answers: Set once the endpoint answers.
        is_idle: Whether it has ended by itself.
        fault: Why it has ended.
    """

    def __init__(self, server: EndpointServer) -> None:
        self._server = server
        self.answers = threading.Event()
        self.is_idle = False
        self.fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="endpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.is_idle = self._server.run(lambda _: self.answers.set())
        except BaseException as error:  # noqa: BLE001 - raised by the thread of the rank
            self.fault = error

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._thread.is_alive()

    def end(self) -> None:
        """Makes it end, with all clients' states on disk."""
        self._server.end()


def serve(order: GangOrder, reporter: Reporter) -> JobResult:
    """Serves the endpoint of an order until it is idle, or the rank is told to stop; returns the result of the segment.

    Its only step is its life. Raises InputError where it cannot be served.
    """
    reporter.phase("loading the bases", timeout_s=LOAD_TIMEOUT_S)
    _take_cores(order)
    home = Path(order.job.model.kwargs[HOME])
    os.environ["RINGMASTER_HOME"] = str(home)  # for the process that records
    file = endpoint_folder(home, order.job.name) / POOL_FILE
    recording = RecordingProcess(file, own_session=False)
    _wait_for_lock(file.with_name(LOCK_FILE), reporter)
    server = EndpointServer(
        load_endpoint_file(file),
        home=home,
        devices=devices_of(order.slots),
        link_of=GangLink,
        record=recording.start,
        host=own_address(),
    )
    thread, startup_s = ServerThread(server), 0.0
    while thread.is_alive:
        select([reporter], [], [], BEAT_S)
        reporter.beat()
        if thread.answers.is_set() and not startup_s:
            startup_s = time.monotonic() - order.ordered_at_s
            reporter.phase("serving", timeout_s=SERVE_TIMEOUT_S)
            reporter.send(JobReady(step=0, startup_s=startup_s))
        if reporter.has_command(STOP):
            thread.end()
    if isinstance(thread.fault, InputError):
        return JobResult(status=OutcomeStatus.INVALID, message="; ".join(map(str, thread.fault.faults)))
    if thread.fault is not None:
        raise thread.fault
    if not thread.is_idle:
        return JobResult(status=OutcomeStatus.PREEMPTED, first_step=0, step=0, startup_s=startup_s)
    with beating(reporter):
        recording.wait()
        recording.start()  # clients that have ended since
        recording.wait()
    return JobResult(status=OutcomeStatus.DONE, first_step=0, step=1, startup_s=startup_s, metrics={})


@contextmanager
def beating(reporter: Reporter) -> Iterator[None]:
    """Reports inside the context that the rank is alive."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(BEAT_S):
            reporter.beat()

    thread = threading.Thread(target=beat, name="beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def devices_of(slots: Sequence[Slot]) -> list[ComputeDevice]:
    """Returns the devices of a gang: its GPUs are those that the rank sees, in their order."""
    return [
        ComputeDevice(name=f"cuda:{i}") if slot.kind == "gpu" else ComputeDevice(name="cpu", cores=slot.cores)
        for i, slot in enumerate(slots)
    ]


def own_address() -> str:
    """Returns the address at which other machines reach this node."""
    from ringmaster.flows.pool.own_node import own_node

    with own_node() as node:
        return LOOPBACK[0] if node is None else node.record.address


def _take_cores(order: GangOrder) -> None:
    """Binds this process, and those that it starts, to the cores of the gang, with a thread for each."""
    if cores := {core for slot in order.slots for core in slot.cores}:
        os.sched_setaffinity(0, cores)
        os.environ["OMP_NUM_THREADS"] = str(len(cores))


def _wait_for_lock(file: Path, reporter: Reporter) -> None:
    """Waits until nobody serves the endpoint: a file server notices the end of a machine some time after the pool."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                reporter.beat()
                select([reporter], [], [], BEAT_S)
            else:
                return

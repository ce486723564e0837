"""Loans of a pool's idle devices, on which batches are profiled, and the need for nodes to profile on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from ringmaster.tasks.control.request_handler import OTHER_VERSION
from ringmaster.tasks.control.requests import Request, RequestKind, Requests, RequestStatus
from ringmaster.tasks.execution.dispatch import DeviceId
from ringmaster.tasks.execution.engine import EngineNode
from ringmaster.tasks.execution.executor import Executor
from ringmaster.tasks.pool.nodes import BLIND_S, LOAN, PoolLeases, SilenceClock, is_loan
from ringmaster.tasks.profiling.trials import DevicesWanted
from ringmaster.tasks.storage.database import Database


class SilenceMonitor:
    """Detects requests that are no longer renewed.

    silent_s: the time without a renewal after which a request counts as silent.
    blind_s: see `SilenceClock`.
    """

    def __init__(self, *, clock: Callable[[], float], silent_s: float, blind_s: float) -> None:
        self.silent_s, self._silences = silent_s, SilenceClock(clock, blind_s=blind_s)

    def among(self, requests: Sequence[Request], *, states: Mapping[int, Any] | None = None) -> set[int]:
        """Returns the numbers of the silent requests. A request without `beats` holds until it is withdrawn.

        states: by request number, another value whose change is a sign of life too.
        """
        silences_s = self._silences.silences_s(
            {request.id: (request.content.get("beats"), (states or {}).get(request.id)) for request in requests}
        )
        renewed = [request.id for request in requests if "beats" in request.content]
        return {number for number in renewed if silences_s[number] >= self.silent_s}


class DeviceLoans:
    """Lends idle devices of a pool, and takes them back. Must be called from the executor's thread.

    is_busy: returns whether any batch is active, whose jobs may need the devices.
    clock: monotonic seconds.
    silent_s: the time without a renewal after which the holder of a loan counts as dead.
    """

    def __init__(
        self,
        database: Database,
        *,
        executor: Executor,
        is_busy: Callable[[], bool],
        clock: Callable[[], float],
        silent_s: float,
    ) -> None:
        self._executor, self._is_busy = executor, is_busy
        self._silences = SilenceMonitor(clock=clock, silent_s=silent_s, blind_s=BLIND_S)
        self._node_silences = SilenceMonitor(clock=clock, silent_s=silent_s, blind_s=BLIND_S)
        self._requests, self._leases = Requests(database), PoolLeases(database)
        self._loans: dict[int, Request] = {}

    def is_node_awaited(self) -> bool:
        """Returns whether a batch needs a node; ends the requests that are not renewed."""
        waiting = self._requests.open(RequestKind.NODE)
        silent = self._node_silences.among(waiting)
        for number in silent:
            self._requests.answer(number, status=RequestStatus.WITHDRAWN)
        return len(waiting) > len(silent)

    def take_loans(self, current: Sequence[Request], *, there: Mapping[str, EngineNode]) -> None:
        """Takes in the requests for devices; ends those whose node is gone or that are not renewed.

        Refuses new ones of a node that leaves. Those that were granted before end with their trials.
        """
        loans = {}
        lend = [each for each in current if each.kind == RequestKind.LEND]
        requested = sorted(lend, key=lambda each: each.status == RequestStatus.OPEN)
        silent = self._silences.among(requested)
        for request in requested:
            node, is_open = request.content.get("node", ""), request.status == RequestStatus.OPEN
            if (fault := _loan_fault(request)) is not None:
                self._requests.refuse(request, fault)
            elif node not in there:
                self._requests.refuse(request, f"there is no node {node!r}. There is: {', '.join(there) or 'none'}")
            elif is_open and there[node].is_leaving:
                self._requests.refuse(request, f"node {node} is leaving the pool")
            elif request.id in silent:
                answer = {"message": f"nobody has renewed it for {self._silences.silent_s:.0f} s"}
                self._requests.answer(request.id, status=RequestStatus.WITHDRAWN, answer=answer)
            else:
                loans[request.id] = request
        if any(number not in loans for number in self._loans):
            self.release_unneeded_devices()
        self._loans = loans

    def grant(self, there: Mapping[str, EngineNode]) -> None:
        """Lends idle devices, oldest request first; has devices vacated for requests that press."""
        asking = {number: loan for number, loan in self._loans.items() if loan.status == RequestStatus.OPEN}
        busy, vacated = {*self._leases.held()} if asking else set(), set[DeviceId]()
        awaited = self._executor.awaited() if asking else ()
        busy |= {lease_name(there[name], device) for name, device in awaited if name in there}
        for number, loan in asking.items():
            node, wanted = there[loan.content["node"]], _wanted(loan)
            usable = [device for device in range(len(node.devices)) if device not in node.faults]
            idle = [device for device in usable if lease_name(node, device) not in busy]
            lent = wanted.of(idle, are_others_at_work=self._is_busy())
            names = [lease_name(node, device) for device in lent]
            if names and self._leases.take(names, holder=LOAN.format(number)):
                self._requests.answer(number, status=RequestStatus.GRANTED, answer={"devices": names})
                busy |= {*names}
            elif wanted.presses:
                vacated |= {(node.name, device) for device in usable[: wanted.least]}
        self._executor.vacate(vacated)

    def lends(self, node: str) -> bool:
        """Returns whether devices of a node are lent."""
        return any(loan.content.get("node") == node for loan in self._granted())

    def _granted(self) -> Sequence[Request]:
        return self._requests.open(RequestKind.LEND, status=RequestStatus.GRANTED)

    def release_unneeded_devices(self) -> None:
        """Ends the leases of requests that are not granted any more."""
        holders = {LOAN.format(request.id) for request in self._granted()}
        stale = [d for d, who in self._leases.held().items() if is_loan(who) and who not in holders]
        if stale:
            self._leases.give_back(stale)


def lease_name(node: EngineNode, device: int) -> str:
    """Returns the name of a node's device in leases."""
    return f"{node.name}:{node.devices[device].kind}:{device}"


def _wanted(loan: Request) -> DevicesWanted:
    known = {field.name for field in fields(DevicesWanted)}
    return DevicesWanted(**{key: value for key, value in loan.content.items() if key in known})


def _loan_fault(loan: Request) -> str | None:
    """Returns what is wrong with the form of a request for devices, or None."""
    try:
        wanted = _wanted(loan)
    except TypeError as error:
        return f"the executor cannot read it: {error}. {OTHER_VERSION}"
    if type(wanted.least) is not int or type(wanted.most) is not int or not 0 < wanted.least <= wanted.most:
        return f"it is for {wanted.least!r:.50} to {wanted.most!r:.50} devices. {OTHER_VERSION}"
    return None if isinstance(loan.content.get("node"), str) else f"it names no node. {OTHER_VERSION}"

"""The gangs that run on a node: started, steered, and ended where others decide it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from ringmaster.tasks.execution.orders import CANCELLED
from ringmaster.tasks.pool.mail import KILL, Share
from ringmaster.techniques.engine.gang import CRASHED, PREEMPTED, Event, Gang, Outcome
from ringmaster.techniques.engine.order import GangOrder
from ringmaster.techniques.engine.processes import ForkServer
from ringmaster.techniques.engine.reporter import STOP

MOST_REMEMBERED = 1000  # segments whose commands are kept for the case that the gang is still to start


class RunningGang(Protocol):
    """What is needed of a gang."""

    def send(self, command: str) -> None:
        """Tells every rank something."""

    def kill(self) -> None:
        """Ends every rank at once."""

    def wait(self, on_event: Callable[[Event], None]) -> Outcome:
        """Passes on what rank 0 says until all ranks have ended, and says how."""


StartGang = Callable[[ForkServer, GangOrder, int], RunningGang]


def start_gang(server: ForkServer, order: GangOrder, num_ranks: int) -> RunningGang:
    """A real gang."""
    return Gang(server, order, num_ranks=num_ranks)


@dataclass(kw_only=True)
class _Run:
    """A share under way. gang: None before it has started. overruled: what its end means where others decided it."""

    share: Share
    gang: RunningGang | None = None
    is_cancelled: bool = False
    overruled: Outcome | None = None

    def tell(self, command: str) -> None:
        """Gives a command to a gang that has started; one that has not gets it when it does."""
        if self.gang is None:
            return
        if command == KILL:
            self.gang.kill()
        else:
            self.gang.send(command)


class Gangs:
    """The shares that run from one fork server, by segment. Safe between threads."""

    def __init__(self, server: ForkServer, *, start_gang: StartGang = start_gang) -> None:
        self._server, self._start_gang = server, start_gang
        self._changed = threading.Condition()
        self._runs: dict[int, _Run] = {}
        self._told: dict[int, list[str]] = {}  # by segment, the commands so far
        self._is_stopping = False

    @property
    def shares(self) -> Mapping[int, Share]:
        """Those under way."""
        with self._changed:
            return {segment: run.share for segment, run in self._runs.items()}

    def admit(self, segment: int, share: Share) -> None:
        """A share is under way from now on; `run` follows."""
        with self._changed:
            self._runs[segment] = _Run(share=share)

    def dismiss(self, segment: int) -> None:
        """A share has ended, and so has all that its end asks for."""
        with self._changed:
            del self._runs[segment]
            self._changed.notify_all()

    def run(self, segment: int, on_event: Callable[[Event], None]) -> Outcome:
        """Runs the gang of a share that was admitted to its end; its devices are free then."""
        with self._changed:
            run = self._runs[segment]
        share = run.share
        order = replace(
            share.order,
            first_rank=share.first_rank,
            num_ranks_in_all=share.num_ranks_in_all,
            meeting=share.meeting,
            ordered_at_s=time.monotonic(),  # of this machine's clock
        )
        try:
            gang = self._start_gang(self._server, order, share.num_ranks)
        except (OSError, RuntimeError) as error:
            return run.overruled or Outcome(status=CRASHED, message=f"the gang could not be started: {error}")
        with self._changed:
            run.gang = gang
            for command in [*self._told.get(segment, ()), *[STOP] * self._is_stopping]:
                run.tell(command)
            if run.overruled is not None:
                gang.kill()
        outcome = gang.wait(on_event)
        if run.overruled is not None and outcome.status == CRASHED:
            return run.overruled
        if run.is_cancelled and outcome.status == PREEMPTED:
            return replace(outcome, status=CANCELLED, message="its run was cancelled")
        return outcome

    def tell(self, segment: int, command: str) -> None:
        """Gives a command to the gang of a segment, also where it is still to start, or runs elsewhere only."""
        with self._changed:
            self._told.setdefault(segment, []).append(command)
            if len(self._told) > MOST_REMEMBERED:
                del self._told[next(iter(self._told))]
            if run := self._runs.get(segment):
                run.tell(command)

    def cancel(self, segment: int) -> None:
        """Tells a gang to stop at a checkpoint; its outcome is "cancelled", unless it was done before."""
        with self._changed:
            if run := self._runs.get(segment):
                run.is_cancelled = True
        self.tell(segment, STOP)

    def stop_all(self) -> None:
        """Tells every gang, and those still to start, to checkpoint and end."""
        with self._changed:
            self._is_stopping = True
            for run in self._runs.values():
                run.tell(STOP)

    def end_all(self, outcome: Outcome) -> None:
        """Kills whatever runs; that is its outcome then."""
        with self._changed:
            for run in self._runs.values():
                run.overruled = outcome
                run.tell(KILL)

    def join(self, *, within_s: float) -> bool:
        """Waits until all shares are dismissed, that long at most; returns whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._runs, timeout=within_s)

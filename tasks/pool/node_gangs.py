"""The gangs that run on a node: starts, steers and ends them."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ringmaster.errors import NodeAlreadyServed
from ringmaster.tasks.execution.engine import FileLeases
from ringmaster.tasks.storage.message_store import KILL, GangShare
from ringmaster.techniques.processes.events import Event, Outcome, OutcomeStatus
from ringmaster.techniques.processes.gang import Gang
from ringmaster.techniques.processes.order import Launcher
from ringmaster.techniques.processes.reporter import STOP

LOOK_EVERY_S = 1.0
WORKER = "worker "

MOST_REMEMBERED = 1000  # segments whose commands are stored for gangs that have not started yet
StartGang = Callable[..., Gang]  # with the arguments of `Gang`


def hold_devices(
    leases: FileLeases,
    devices: Sequence[str],
    *,
    worker: str,
    may_share: bool,
    notice: Callable[[str], None],
    wait: Callable[[float], object],
) -> None:
    """Leases `devices` to the worker with that name until this process ends; waits while others have any of them.

    may_share: whether devices that other workers have may be used too, without a lease; for the CPU slots of a machine
        that runs several nodes.
    wait: sleeps that many seconds.

    Raises NodeAlreadyServed.
    """
    reported = ""
    while not leases.take(devices, holder=WORKER + worker):
        holders = {holder for device, holder in leases.held().items() if device in devices}
        if WORKER + worker in holders:
            raise NodeAlreadyServed(
                f"worker {worker} serves this machine already. To fix: end it, or choose another --name"
            )
        if may_share and holders and all(holder.startswith(WORKER) for holder in holders):
            notice(f"devices are shared with {', '.join(sorted(holders))}")
            return
        if (waited_for := ", ".join(sorted(holders))) not in ("", reported):
            reported = waited_for
            notice(f"waiting for devices that are held by {waited_for}")
        wait(LOOK_EVERY_S)


@dataclass(kw_only=True)
class _ShareRun:
    """A share that was taken and has not ended.

    gang: None before it has started.
    overruled: the outcome that replaces the gang's own if the gang is killed by a decision of the pool.
    """

    share: GangShare
    gang: Gang | None = None
    overruled: Outcome | None = None

    def send(self, command: str) -> None:
        """Sends a command to the gang. A gang that has not started receives the stored commands at its start."""
        if self.gang is None:
            return
        if command == KILL:
            self.gang.kill()
        else:
            self.gang.send(command)


class Gangs:
    """The shares that run from one launcher, by segment. Safe between threads."""

    def __init__(self, launcher: Launcher, *, start_gang: StartGang = Gang) -> None:
        self._launcher, self._start_gang = launcher, start_gang
        self._changed = threading.Condition()
        self._runs: dict[int, _ShareRun] = {}
        self._commands: dict[int, list[str]] = {}  # by segment, the commands so far
        self._is_stopping = False

    @property
    def shares(self) -> Mapping[int, GangShare]:
        """The shares that were admitted and not dismissed."""
        with self._changed:
            return {segment: run.share for segment, run in self._runs.items()}

    def admit(self, segment: int, share: GangShare) -> None:
        """Adds a share; a call of `run` follows."""
        with self._changed:
            self._runs[segment] = _ShareRun(share=share)

    def dismiss(self, segment: int) -> None:
        """Removes a share that has ended and whose outcome has been handled."""
        with self._changed:
            del self._runs[segment]
            self._changed.notify_all()

    def run(self, segment: int, on_event: Callable[[Event], None]) -> Outcome:
        """Runs the gang of an admitted share to its end, after which its devices are free."""
        with self._changed:
            run = self._runs[segment]
        share = run.share
        order = replace(share.order, ordered_at_s=time.monotonic())  # by this machine's clock
        try:
            gang = self._start_gang(self._launcher, order, num_ranks=share.num_ranks)
        except (OSError, RuntimeError) as error:
            return run.overruled or Outcome(
                status=OutcomeStatus.CRASHED, message=f"the gang could not be started: {error}"
            )
        with self._changed:
            run.gang = gang
            for command in [*self._commands.get(segment, ()), *[STOP] * self._is_stopping]:
                run.send(command)
            if run.overruled is not None:
                gang.kill()
        outcome = gang.wait(on_event)
        if run.overruled is not None and outcome.status == OutcomeStatus.CRASHED:
            return run.overruled
        return outcome

    def send(self, segment: int, command: str) -> None:
        """Sends a command to the gang of a segment, even if it has not started, or runs only on other nodes."""
        with self._changed:
            self._commands.setdefault(segment, []).append(command)
            if len(self._commands) > MOST_REMEMBERED:
                del self._commands[next(iter(self._commands))]
            if run := self._runs.get(segment):
                run.send(command)

    def stop_all(self) -> None:
        """Commands every gang, including those that have not started, to write a checkpoint and end."""
        with self._changed:
            self._is_stopping = True
            for run in self._runs.values():
                run.send(STOP)

    def end_all(self, outcome: Outcome) -> None:
        """Kills all gangs; `outcome` becomes the outcome of each."""
        with self._changed:
            for run in self._runs.values():
                run.overruled = outcome
                run.send(KILL)

    def join(self, *, within_s: float) -> bool:
        """Waits at most `within_s` until all shares are dismissed; returns whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._runs, timeout=within_s)

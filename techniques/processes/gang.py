"""A gang of worker processes that are started, supervised and ended together."""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ringmaster.errors import ChannelClosed
from ringmaster.techniques.processes.channel import Channel
from ringmaster.techniques.processes.forkserver_client import ForkServerClient
from ringmaster.techniques.processes.gang_events import (
    Event,
    JobResult,
    Outcome,
    OutcomeStatus,
    PhaseStarted,
    RankExited,
    RankFailed,
    RankResult,
    RankStarted,
    RefusedEvent,
    event_or_refusal,
)
from ringmaster.techniques.processes.order import GangOrder, rendezvous
from ringmaster.techniques.processes.stopped import StoppedProcesses

# A rank reports how long its current phase may stay silent; this is the timeout before its first report.
FIRST_TIMEOUT_S = 120.0
LAST_WORDS_S = 1.0  # time for the peers of a failed rank to report their own failures
KILL_TIMEOUT_S = 10.0  # time for killed ranks to end and free their devices

SUPERVISION = (RankStarted, RankFailed, RankExited, RefusedEvent)  # events that only `wait` reads


class Gang:
    """The running ranks of one order, which are started at once; `wait` supervises them.

    Other threads may call `send` and `kill`.

    server: forks the ranks.
    num_ranks: ranks on this machine. In an order over several machines, each machine supervises its own ranks, and only
        the `wait` on the machine of rank 0 passes on events.
    """

    def __init__(self, server: ForkServerClient, order: GangOrder, *, num_ranks: int) -> None:
        self._stopped = StoppedProcesses()
        self._folder = Path(order.folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        rendezvous(order).unlink(missing_ok=True)  # left by an earlier try of the same order, whose ranks have ended
        self._ranks: list[_Rank] = []
        try:
            for rank in range(order.first_rank, order.first_rank + num_ranks):
                self._ranks.append(_Rank(rank, server.start_rank(order, rank=rank, log=self.log(rank))))
        except (OSError, RuntimeError):
            for started in self._ranks:
                started.channel.close()  # ends it, as it would wait for the others
            raise

    def log(self, rank: int) -> Path:
        """Returns the file with the output of a rank."""
        return self._folder / f"rank-{rank}.log"

    @property
    def pids(self) -> tuple[int | None, ...]:
        """The process id of each rank; None for a rank that has not reported its start yet."""
        return tuple(rank.pid for rank in self._ranks)

    def send(self, command: str) -> None:
        """Sends a command to every living rank: "stop" (checkpoint at the next step and end) or a trial's "measure"."""
        for rank in self._ranks:
            rank.send_command(command)

    def kill(self) -> None:
        """Kills every rank at once; `wait` then returns."""
        for rank in self._ranks:
            rank.channel.hang_up()

    def wait(self, on_event: Callable[[Event], None]) -> Outcome:
        """Passes on rank 0's events until all ranks have ended; returns the outcome.

        If a rank fails or hangs, or a process of its session is stopped, the other ranks are killed. When `wait`
        returns, no rank runs any more and the devices are free. The outcome is the first cause among the failures that
        the ranks reported: for example, an out-of-memory error explains the errors of its peers.
        """
        with selectors.DefaultSelector() as selector:
            for rank in self._ranks:
                selector.register(rank.channel, selectors.EVENT_READ, rank)
            try:
                outcome = self._supervise(selector, on_event)
            finally:
                self.kill()
                self._drain(selector, until=lambda: not self._alive(), seconds=KILL_TIMEOUT_S)
                for rank in self._ranks:
                    rank.channel.close()
        return outcome

    def _alive(self) -> list[_Rank]:
        return [rank for rank in self._ranks if rank.alive]

    def _supervise(self, selector: selectors.BaseSelector, on_event: Callable[[Event], None]) -> Outcome:
        while alive := self._alive():
            timeout_s = min(rank.left_s() for rank in alive)
            self._handle_events(selector, on_event, seconds=min(timeout_s, self._stopped.look_every_s))
            if any(rank.has_failed() for rank in self._ranks):
                # A rank's failure often makes others fail; their reports help to find the cause.
                self._drain(selector, until=lambda: all(r.has_failed() for r in self._ranks), seconds=LAST_WORDS_S)
                failed = [rank for rank in self._ranks if rank.has_failed()]
                first_cause = min(failed, key=_Rank.precedence)
                return first_cause.verdict(self.log(first_cause.index))
            if silent := [rank for rank in self._alive() if rank.left_s() <= 0]:
                why = f"sent no event for {silent[0].timeout_s:.0f} s"
                return _killed_as_hung(silent, why, was_killed=False)
            if self._stopped.is_due():  # each rank leads a session
                hung = self._stopped.among(rank.pid for rank in self._alive() if rank.pid is not None)
                if stopped := [rank for rank in self._alive() if rank.pid in hung]:
                    why = f"was stopped (SIGSTOP) for {self._stopped.after_s:.0f} s"
                    return _killed_as_hung(stopped, why, was_killed=True)
        return Outcome.of(self._ranks[0].result)

    def _handle_events(
        self, selector: selectors.BaseSelector, on_event: Callable[[Event], None], *, seconds: float
    ) -> None:
        for key, _ in selector.select(timeout=max(seconds, 0.0)):
            rank: _Rank = key.data
            for event in rank.take():
                if rank.index == 0 and not isinstance(event, SUPERVISION):
                    on_event(event)
            if not rank.alive:
                selector.unregister(rank.channel)

    def _drain(self, selector: selectors.BaseSelector, *, until: Callable[[], bool], seconds: float) -> None:
        deadline_s = time.monotonic() + seconds
        while not until() and selector.get_map() and (left_s := deadline_s - time.monotonic()) > 0:
            self._handle_events(selector, lambda _: None, seconds=left_s)


def _killed_as_hung(ranks: list[_Rank], why: str, *, was_killed: bool) -> Outcome:
    who = ", ".join(str(rank.index) for rank in ranks)
    message = f"rank {who} {why} while {ranks[0].phase}: killed as hung"
    return Outcome(status=OutcomeStatus.CRASHED, message=message, was_killed=was_killed)


class _Rank:
    """One worker process, as its gang sees it."""

    def __init__(self, index: int, channel: Channel) -> None:
        self.index = index
        self.channel = channel
        self.alive = True
        self._num_kills_before = num_out_of_memory_kills()
        self.pid: int | None = None
        self.exit_status: int | None = None
        self.is_fenced = False
        self.failure: RankFailed | None = None
        self.result = JobResult()
        self.phase = "starting"
        self.timeout_s = FIRST_TIMEOUT_S
        self._heard_s = time.monotonic()

    def left_s(self) -> float:
        return self._heard_s + self.timeout_s - time.monotonic()

    def take(self) -> list[Event]:
        """Returns the events that have arrived, and updates the rank's state from them."""
        events: list[Event] = []
        try:
            while (content := self.channel.poll()) is not None:
                events.append(event := event_or_refusal(content))
                self._heard_s = time.monotonic()
                match event:
                    case RankStarted():
                        self.pid = event.pid
                    case PhaseStarted():
                        self.phase, self.timeout_s = event.phase, event.timeout_s
                    case RankFailed():
                        self.failure = event
                    case RefusedEvent():  # another try would end the same way
                        self.failure = self.failure or RankFailed(kind=OutcomeStatus.INVALID, message=event.message)
                    case RankResult():
                        self.result = event.result
                    case RankExited():
                        self.exit_status, self.is_fenced, self.alive = event.status, event.fenced, False
        except ChannelClosed:
            self.alive = False
        return events

    def send_command(self, command: str) -> None:
        if self.alive:
            with suppress(ChannelClosed):  # the rank has ended, and `wait` is about to read its exit status
                self.channel.send({"command": command})

    def has_failed(self) -> bool:
        return self.failure is not None or not (self.alive or (self.exit_status == 0 and self.result.status))

    def precedence(self) -> int:
        """Returns the order of this failure among those of all ranks; the lowest one explains the others.

        The death of a rank without a report explains crashes of its peers.
        """
        causes = (OutcomeStatus.LOST, OutcomeStatus.OUT_OF_MEMORY, OutcomeStatus.INVALID, None, OutcomeStatus.CRASHED)
        cause = self.failure.kind if self.failure is not None else None
        return causes.index(OutcomeStatus.LOST if self.is_fenced else cause)

    def verdict(self, log: Path) -> Outcome:
        if self.is_fenced:
            message = f"rank {self.index} was ended: nothing had been heard of this machine's worker for too long"
            return Outcome(status=OutcomeStatus.LOST, message=message, was_killed=True)
        if self.failure is not None:
            message, is_of_code = f"rank {self.index}: {self.failure.message}", self.failure.is_of_code
            return Outcome(status=self.failure.kind, message=message, is_of_code=is_of_code)
        if self.exit_status == -signal.SIGKILL and num_out_of_memory_kills() > self._num_kills_before:
            message = f"rank {self.index} was killed by the kernel for want of memory while {self.phase}"
            return Outcome(status=OutcomeStatus.OUT_OF_MEMORY, message=message)
        how = "vanished" if self.exit_status is None else f"ended with status {self.exit_status}"
        if self.exit_status is not None and self.exit_status < 0:
            how = f"was killed by {signal.Signals(-self.exit_status).name}"
        message = f"rank {self.index} {how} while {self.phase}; its output: {log}"
        return Outcome(status=OutcomeStatus.CRASHED, message=message, was_killed=was_killed(self.exit_status))


def was_killed(exit_status: int | None) -> bool:
    """Returns whether a process that ended without a message was ended from outside.

    The status is None where the launcher ended with the process.
    """
    return exit_status is None or exit_status in (-signal.SIGKILL, -signal.SIGTERM)


def num_out_of_memory_kills() -> int:
    """Returns how many processes the kernel has killed for lack of memory since boot; 0 where that is unknown."""
    try:
        counters = Path("/proc/vmstat").read_text().split()
    except OSError:
        return 0
    return int(counters[counters.index("oom_kill") + 1]) if "oom_kill" in counters else 0

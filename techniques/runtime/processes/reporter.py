"""Events that a rank sends to its supervisor, and commands that it receives."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from typing import Protocol

from ringmaster.techniques.runtime.processes.channel import Channel
from ringmaster.techniques.runtime.processes.events import Beat, Event, JobEvent, PhaseStarted, event_to_json

BEAT_EVERY_S = 0.25

STOP, MEASURE = "stop", "measure"
UNTIL, LEAVE = "until ", "leave "


def until(last_step: int) -> str:
    """Returns the command to continue up to a later step than ordered."""
    return f"{UNTIL}{last_step}"


def leave(job: str) -> str:
    """Returns the command that a job of a group checkpoints and ends, while the other jobs continue."""
    return f"{LEAVE}{job}"


class EventSender(Protocol):
    """Receiver of a rank's reports."""

    def beat(self) -> None:
        """Reports that the rank is alive."""

    def send(self, event: JobEvent) -> None:
        """Sends one event about a job."""


class Reporter:
    """Sends events (phases, beats, progress), and receives commands over the channel; SIGTERM means stop."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._said_s = 0.0
        self._commands: set[str] = set()
        signal.signal(signal.SIGTERM, lambda *_: self._commands.add(STOP))

    def fileno(self) -> int:
        """Returns the channel's file descriptor, for selectors; it is readable when a command has arrived."""
        return self._channel.fileno()

    def phase(self, name: str, *, patience_s: float) -> None:
        """Starts a phase in which this rank may be silent for `patience_s` seconds before it counts as hung."""
        self.send(PhaseStarted(phase=name, patience_s=patience_s))

    def beat(self) -> None:
        """Reports that the rank is alive, a few times a second at most."""
        if time.monotonic() - self._said_s >= BEAT_EVERY_S:
            self.send(Beat())

    def send(self, event: Event) -> None:
        """Sends one event."""
        self._said_s = time.monotonic()
        self._channel.send(event_to_json(event))

    def about(self, job: str) -> EventSender:
        """Returns a reporter for one of several jobs, which adds the job's name to each event."""
        return _JobReporter(self, job)

    def told(self, command: str) -> bool:
        """Returns whether this rank has received the command so far."""
        self._listen()
        return command in self._commands

    def told_until(self) -> int:
        """Returns the latest step up to which this rank was commanded to continue; 0 without such a command."""
        self._listen()
        return max((int(c.removeprefix(UNTIL)) for c in self._commands if c.startswith(UNTIL)), default=0)

    def told_to_leave(self) -> set[str]:
        """Returns the jobs of a group that were commanded to leave it."""
        self._listen()
        return {command.removeprefix(LEAVE) for command in self._commands if command.startswith(LEAVE)}

    def _listen(self) -> None:
        while (message := self._channel.poll()) is not None:
            self._commands.add(message["command"])


class _JobReporter:
    def __init__(self, reporter: Reporter, job: str) -> None:
        self._reporter, self._job = reporter, job

    def beat(self) -> None:
        self._reporter.beat()

    def send(self, event: JobEvent) -> None:
        self._reporter.send(replace(event, job=self._job))

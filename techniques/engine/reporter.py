"""What a rank says to its supervisor while it works, and what it is told."""

from __future__ import annotations

import signal
import time
from typing import Any, Protocol

from ringmaster.techniques.engine.channel import Channel

BEAT_EVERY_S = 0.25

STOP, MEASURE = "stop", "measure"
UNTIL, LEAVE = "until ", "leave "


def until(last_step: int) -> str:
    """The command to go on up to a later step than was ordered."""
    return f"{UNTIL}{last_step}"


def leave(job: str) -> str:
    """The command that a job of a group checkpoints and is trained no further, while the others go on."""
    return f"{LEAVE}{job}"


class Teller(Protocol):
    """Whom a rank tells how it gets on."""

    def beat(self) -> None:
        """Says that the rank is alive."""

    def send(self, event: str, **details: Any) -> None:
        """Sends one event."""


class Reporter:
    """Events go out (phases, beats, progress); commands come in over the channel, or as SIGTERM, which means stop."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._said_s = 0.0
        self._commands: set[str] = set()
        signal.signal(signal.SIGTERM, lambda *_: self._commands.add(STOP))

    def fileno(self) -> int:
        """The channel's file descriptor, for selectors: it can be read when a command comes."""
        return self._channel.fileno()

    def phase(self, name: str, *, patience_s: float) -> None:
        """From now on this rank may be silent for `patience_s` before it is taken for hung."""
        self.send("phase", phase=name, patience_s=patience_s)

    def beat(self) -> None:
        """Says that the rank is alive, a few times a second at most."""
        if time.monotonic() - self._said_s >= BEAT_EVERY_S:
            self.send("beat")

    def send(self, event: str, **details: Any) -> None:
        """Sends one event."""
        self._said_s = time.monotonic()
        self._channel.send({"event": event, **details})

    def about(self, job: str) -> Teller:
        """The same for what is said of one of several jobs: each event has its name."""
        return _JobReporter(self, job)

    def told(self, command: str) -> bool:
        """Whether the command has been given to this rank, now or before."""
        self._listen()
        return command in self._commands

    def told_until(self) -> int:
        """The latest step up to which this rank was told to go on, 0 where it was not."""
        self._listen()
        return max((int(c.removeprefix(UNTIL)) for c in self._commands if c.startswith(UNTIL)), default=0)

    def told_to_leave(self) -> set[str]:
        """The jobs of a group that are to be trained no further."""
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

    def send(self, event: str, **details: Any) -> None:
        self._reporter.send(event, job=self._job, **details)

"""Events that a rank sends to its supervisor, and commands that it receives."""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from ringmaster.techniques.metric import metrics_text
from ringmaster.techniques.processes import gang_events
from ringmaster.techniques.processes.channel import Channel, woken_by
from ringmaster.text import printable

BEAT_EVERY_S = 0.25
LOG_EVERY_S = 10.0  # between the lines about steps in a rank's log

STOP, MEASURE = "stop", "measure"
UNTIL, LEAVE = "until ", "leave "
WAITING_TIMEOUT_S = 3600.0  # for a trial that is done and waits for its neighbours


def until_command(last_step: int) -> str:
    """Returns the command to continue up to a later step than ordered."""
    return f"{UNTIL}{last_step}"


def leave_command(job: str) -> str:
    """Returns the command that a job of a group checkpoints and ends, while the other jobs continue."""
    return f"{LEAVE}{job}"


class RankLog:
    """Prints what a rank reports as lines of its log, which `ringmaster logs` shows.

    clock: monotonic seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        self._logger = logging.Logger("rank", logging.INFO)
        self._logger.addHandler(handler)
        self._phase = ""
        self._steps_s = -LOG_EVERY_S
        self._unprinted: dict[str | None, gang_events.Steps] = {}  # by job: the newest report, where it has no line yet

    def note(self, event: gang_events.Event) -> None:
        """Prints a line about the event, if it is worth one."""
        if isinstance(event, gang_events.Steps):
            self._unprinted[event.job] = event
            if self._clock() - self._steps_s >= LOG_EVERY_S:
                self._print_steps()
        elif isinstance(event, gang_events.PhaseStarted):
            if event.phase != self._phase:  # else it continues, with another timeout
                self._print_steps()
                self._phase = event.phase
                self._print(event.phase)
        elif (line := _log_line(event)) is not None:
            self._print_steps()
            self._print(line)

    def _print_steps(self) -> None:
        if self._unprinted:
            self._steps_s = self._clock()
        while self._unprinted:
            job, steps = self._unprinted.popitem()
            seconds, rates = sum(steps.seconds), ""
            for number, what in ((steps.num_samples, "samples/s"), (steps.num_tokens, "tokens/s")):
                rates += f", {number / seconds:.4g} {what}" if number and seconds else ""
            loss = f", loss {steps.losses[-1]:.4g}" if steps.losses else ""
            self._print(f"{_of(job)}step {steps.step}{loss}{rates}")

    def _print(self, line: str) -> None:
        self._logger.info("%s", printable(line))


def _log_line(event: gang_events.Event) -> str | None:
    match event:
        case gang_events.JobReady(step=step):
            return f"{_of(event.job)}continues from step {step}" if step else f"{_of(event.job)}begins"
        case gang_events.EvaluationReported(step=step, metrics=metrics, num_rows=num_rows, note=note):
            text = ", ".join(filter(None, [metrics_text(metrics, num_rows=num_rows), note]))
            return f"{_of(event.job)}evaluated at step {step}: {text}" if event.part is None or note else None
        case gang_events.CheckpointSaved(step=step):
            return f"{_of(event.job)}saved a checkpoint of step {step}"
        case gang_events.CheckpointFailed(message=message) | gang_events.KernelsRefused(message=message):
            return f"{_of(event.job)}{message}"
        case gang_events.JobOfGroupEnded(outcome=result) | gang_events.RankResult(result=result) if (
            result.step is not None
        ):
            job = event.job if isinstance(event, gang_events.JobOfGroupEnded) else None
            ended = f"{_of(job)}{result.status} at step {result.step}"
            text = metrics_text(result.metrics or {}, num_rows=result.num_rows)
            return f"{ended}: {text}" if text else ended
    return None


def _of(job: str | None) -> str:
    return "" if job is None else f"{job}: "


class Reporter:
    """Sends events (phases, beats, progress), and receives commands over the channel; SIGTERM means stop.

    log: prints the events into the rank's log; None for a rank without lines of its own.
    has_stepped: whether steps were done, in this process or before the checkpoint from which it continues.
    """

    has_stepped = False

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.log: RankLog | None = None
        self._last_sent_s = 0.0
        self._commands: set[str] = set()
        signal.signal(signal.SIGTERM, lambda *_: self._commands.add(STOP))

    def fileno(self) -> int:
        """Returns the channel's file descriptor, for selectors; it is readable when a command has arrived."""
        return self._channel.fileno()

    def phase(self, name: str, *, timeout_s: float) -> None:
        """Starts a phase in which this rank may be silent for `timeout_s` seconds before it counts as hung."""
        self.send(gang_events.PhaseStarted(phase=name, timeout_s=timeout_s))

    def beat(self) -> None:
        """Reports that the rank is alive, a few times a second at most."""
        if time.monotonic() - self._last_sent_s >= BEAT_EVERY_S:
            self.send(gang_events.Beat())

    def send(self, event: gang_events.Event) -> None:
        """Sends one event."""
        self._last_sent_s = time.monotonic()
        if isinstance(event, (gang_events.Steps, gang_events.JobReady)):
            self.has_stepped = self.has_stepped or event.step > 0
        self._channel.send(gang_events.event_to_json(event))
        if self.log is not None:
            self.log.note(event)

    def about(self, job: str) -> Reporter:
        """Returns a reporter for one of several jobs, which adds the job's name to each event about a job."""
        return _JobReporter(self, job)

    def has_command(self, command: str) -> bool:
        """Returns whether this rank has received the command so far."""
        self._listen()
        return command in self._commands

    def commanded_until(self) -> int:
        """Returns the latest step up to which this rank was commanded to continue; 0 without such a command."""
        return max(map(int, self.commanded(UNTIL)), default=0)

    def commanded_to_leave(self) -> set[str]:
        """Returns the jobs of a group that were commanded to leave it."""
        return self.commanded(LEAVE)

    def commanded(self, head: str) -> set[str]:
        """Returns what comes after `head` in the commands that begin with it."""
        self._listen()
        return {command.removeprefix(head) for command in self._commands if command.startswith(head)}

    def _listen(self) -> None:
        while (message := self._channel.poll()) is not None:
            self._commands.add(message["command"])


class _JobReporter(Reporter):
    """A reporter for one of several jobs; it sends through that of the rank, which counts all beats together."""

    def __init__(self, reporter: Reporter, job: str) -> None:
        self._reporter, self._job = reporter, job

    def beat(self) -> None:
        self._reporter.beat()

    def send(self, event: gang_events.Event) -> None:
        self._reporter.send(replace(event, job=self._job) if isinstance(event, gang_events.JobEvent) else event)


def wait_for_stop(reporter: Reporter) -> None:
    """Waits until the rank receives the command to stop."""
    with woken_by(reporter) as wait:
        while not reporter.has_command(STOP):
            wait()

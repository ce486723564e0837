"""Ctrl-C and SIGTERM while a command trains: the first stops it in order, and says so at once; the second kills it.

A signal's handler in Python runs once the main thread comes back from what it does, which may be a solver's code or an
import that takes seconds. The answer therefore comes from a thread, which reads the signals from a pipe into which the
interpreter writes them as they come (`signal.set_wakeup_fd`).
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

STOPPING = "stopping: writing checkpoints; press again to kill"
SIGNALS = (signal.SIGINT, signal.SIGTERM)
TRAINING = ("run", "sweep", "retrain", "profile", "submit")  # commands that are stopped in order
RESUMED = ("run", "sweep")  # of which `--resume` goes on with what was interrupted; the others go on as they are

Say = Callable[[str], None]
"""Shows a line to a person, from any thread."""


def say_on_stderr(line: str) -> None:
    """Writes a line where people read, past whatever holds Python's own streams."""
    with suppress(OSError):  # nobody reads
        os.write(2, f"{line}\n".encode())


def kill_everything() -> None:
    """Kills every process that this one has started."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()


class Interrupts:
    """What was asked for by signals, and what follows. go_on: the command that goes on after it.

    end: ends this process at once, with an exit status.
    """

    def __init__(
        self,
        *,
        go_on: str = "",
        say: Say = say_on_stderr,
        kill: Callable[[], None] = kill_everything,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self.asked: int | None = None  # the first signal
        self.say = say
        self._go_on, self._kill, self._end = go_on, kill, end
        self._stop: Callable[[], None] | None = None

    @property
    def exit_code(self) -> int:
        """What a shell expects of a process that a signal has ended: 130 for Ctrl-C."""
        assert self.asked is not None, "nobody has asked"
        return 128 + self.asked

    def say_how_to_go_on(self) -> None:
        """Tells the command that resumes."""
        if self._go_on:
            self.say(f"to go on: {self._go_on}")

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Answers signals while it is open; to be opened by the main thread."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        thread = threading.Thread(target=self._answer, args=(theirs,), name="interrupts", daemon=True)
        thread.start()
        pipe_before = signal.set_wakeup_fd(ours.fileno(), warn_on_full_buffer=False)
        handlers = {number: signal.signal(number, self._act) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(pipe_before)
            ours.close()
            thread.join()
            theirs.close()

    @contextmanager
    def stopping(self, stop: Callable[[], None]) -> Iterator[None]:
        """While it is open, the first signal has `stop` called, by a thread of its own, and nothing is raised."""
        self.check()
        self._stop = stop
        # Ours again: a flow run of Prefect has put its own handler of SIGTERM in their place.
        handlers = {number: signal.signal(number, self._act) for number in SIGNALS}
        try:
            yield
        finally:
            self._stop = None
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def check(self) -> None:
        """Ends the command where that was asked for, and something on the way has swallowed it."""
        if self.asked is not None:
            raise SystemExit(self.exit_code)

    def _act(self, number: int, frame: FrameType | None) -> None:
        """The handler, in the main thread; a second signal is the answering thread's."""
        is_first = self.asked is None
        self.asked = self.asked or number
        if self._stop is None:
            raise SystemExit(self.exit_code)  # no KeyboardInterrupt, of which others make something of their own
        if is_first:
            # Not here: a handler may interrupt the very thread that holds a lock which it would need.
            threading.Thread(target=self._stop, name="stop", daemon=True).start()

    def _answer(self, pipe: socket.socket) -> None:
        """Reads signals until the pipe is closed; says that the first was heard, kills at the second."""
        num_asked = 0
        while numbers := pipe.recv(64):
            for number in numbers:
                num_asked += number in SIGNALS
                if number in SIGNALS and num_asked == 1:
                    self.say(STOPPING)
                elif number in SIGNALS and num_asked == 2:
                    self._kill()
                    say_on_stderr("killed")
                    self.say = say_on_stderr  # a view may be held by a thread that does not run any more
                    self.say_how_to_go_on()
                    self._end(128 + number)


_current: list[Interrupts] = []  # the one that answers, if any does


def current() -> Interrupts | None:
    """Who answers signals in this process; None where nobody does."""
    return _current[-1] if _current else None


@contextmanager
def answered(interrupts: Interrupts) -> Iterator[None]:
    """Has signals answered while it is open; in the main thread only, which alone may change handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _current.append(interrupts)
    try:
        with interrupts.heard():
            yield
    finally:
        _current.remove(interrupts)


@contextmanager
def stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """While it is open, Ctrl-C or SIGTERM has `stop` called, which is to end in order what runs within."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if (interrupts := current()) is not None:
        with interrupts.stopping(stop):
            yield
        return
    interrupts = Interrupts()  # a program of the user's has called the flow
    with answered(interrupts), interrupts.stopping(stop):
        yield


@contextmanager
def said_by(say: Say) -> Iterator[None]:
    """While it is open, answers are shown so."""
    interrupts = current()
    if interrupts is None:
        yield
        return
    before, interrupts.say = interrupts.say, say
    try:
        yield
    finally:
        interrupts.say = before


@contextmanager
def command(arguments: Sequence[str]) -> Iterator[None]:
    """Answers signals for a command of `ringmaster` that trains, from its start to its end; other commands' are theirs.

    arguments: of the command line, from the command's name on. One that was stopped ends with the command that goes on,
    and with 130 after Ctrl-C; one that had come to its end all the same with its own exit code.
    """
    if current() is not None or not set(TRAINING) & set(arguments[:1]):
        yield
        return
    interrupts = Interrupts(go_on=command_that_goes_on(arguments))
    try:
        with answered(interrupts):
            yield
    except SystemExit as end:
        if interrupts.asked is None or not end.code:
            raise
        interrupts.say_how_to_go_on()  # after the answer, which is said by the time that nobody listens any more
        raise SystemExit(interrupts.exit_code) from None


def command_that_goes_on(arguments: Sequence[str]) -> str:
    """The command line that goes on with what a command was stopped in, with all of its options."""
    name, *others = arguments
    is_resumable = name in RESUMED and not {"--resume", "--dry-run", "--help"} & set(others)
    return shlex.join(["ringmaster", name, *others, *(["--resume"] if is_resumable else [])])

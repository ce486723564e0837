"""Signals that end a process: of a command that trains, of a pool's long-lived processes, and of child processes.

During training, the first Ctrl-C or SIGTERM stops the command in order, the second kills it. A terminal that is closed
stops it in order, too, unless `nohup` has started it.

A signal's handler in Python runs once the main thread returns to the interpreter. A solver's code or an import may
delay that by seconds. The answer to the user therefore comes from a thread. It reads the signals from a pipe, into
which the interpreter writes them as they come (`signal.set_wakeup_fd`).
"""

import atexit
import os
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import FrameType
from typing import Any

from ringmaster.compat.python import call_before_threads_end
from ringmaster.text import printable

STOPPING = "stopping: writing checkpoints; press again to kill"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A new command that trains joins each of these lists that describes it.
TRAINING_COMMANDS = ("run", "sweep", "retrain", "profile", "submit")  # stop in order
RESUMABLE_COMMANDS = ("run", "sweep")  # continue with `--resume`; the others when they are run again
FORWARDED_COMMANDS = ("run", "sweep", "retrain")  # may run in a process that an earlier command has left
EXIT_TIMEOUT_S = 60.0  # after a command, for what libraries do when the process ends

Say = Callable[[str], None]
"""Shows a line to the user; it may be called from any thread."""


def say_on_stderr(line: str) -> None:
    """Writes a line to stderr's file descriptor, past locks and redirections of Python's streams."""
    with suppress(OSError):  # nobody reads
        os.write(2, f"{printable(line)}\n".encode())


def replace_closed_streams() -> None:
    """Makes stdout and stderr lead nowhere where their terminal is closed: a write would end the orderly stop."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def kill_everything() -> None:
    """Kills all child processes of this process, recursively."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()


def _end_at_once(status: int) -> None:
    """Ends this process and its children, past exit handlers."""
    kill_everything()
    with suppress(OSError):  # nobody reads
        sys.stdout.flush()
    os._exit(status)


def _kill_at_signals(status: int) -> None:
    """Makes Ctrl-C and SIGTERM kill this process and its children; to be called when it is about to end.

    What runs while an interpreter ends, such as the wait for Prefect's server, would show a traceback. The exit status
    stays that of the work, which is done.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: _end_at_once(status))


class Interrupts:
    """The signals that this process has received, and the reaction to them.

    go_on: the command that continues an interrupted command; empty if there is none.
    say: shows a line to the user.
    kill: kills all child processes.
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
        self.first_signal: int | None = None
        self._is_installed = False
        self.say = say
        self._go_on, self._kill, self._end = go_on, kill, end
        self._stop: Callable[[], None] | None = None

    @property
    def exit_code(self) -> int:
        """The exit status of a process that a signal has ended, by the convention of shells: 130 for Ctrl-C."""
        return 128 + (self.first_signal or 0)

    def say_how_to_go_on(self) -> None:
        """Shows the command that resumes."""
        if self._go_on:
            self.say(f"to continue: {self._go_on}")

    @property
    def is_of_command(self) -> bool:
        """Whether a command handles signals, and this thread is its main one."""
        return self._is_installed and _is_main_thread()

    @contextmanager
    def of_command(self) -> Iterator[None]:
        """Handles the signals of a command inside the context; does nothing outside the main thread."""
        if not _is_main_thread():
            yield
            return
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        thread = threading.Thread(target=self._answer, args=(theirs,), name="interrupts", daemon=True)
        thread.start()
        pipe_before = signal.set_wakeup_fd(ours.fileno(), warn_on_full_buffer=False)
        self._is_installed = True
        try:
            with self._installed():
                yield
        finally:
            self._is_installed = False
            signal.set_wakeup_fd(pipe_before)
            ours.close()
            thread.join()
            theirs.close()

    @contextmanager
    def stopped_by(self, stop: Callable[[], None]) -> Iterator[None]:
        """Inside the context, the first signal calls `stop`, which must end the enclosed work in order.

        It is called in a thread of its own, and no exception is raised. In a user's program, which handles no signals
        itself, they are handled for as long. Does nothing outside the main thread.
        """
        if not _is_main_thread():
            yield
            return
        with nullcontext() if self._is_installed else self.of_command():
            self.check()
            self._stop = stop
            try:
                with self._installed():
                    yield
            finally:
                self._stop = None

    def handled_again(self) -> AbstractContextManager[None]:
        """Installs a command's handlers again inside the context; does nothing in a user's program or in a thread."""
        if not self.is_of_command:
            return nullcontext()
        self.check()  # before a batch is opened: an import may have swallowed the exception
        return self._installed()

    @contextmanager
    def shown_by(self, say: Say) -> Iterator[None]:
        """Inside the context, `say` shows the answers to signals."""
        before, self.say = self.say, say
        try:
            yield
        finally:
            self.say = before

    def _installed(self) -> AbstractContextManager[None]:
        """Installs the handlers inside the context, also where other code has replaced them.

        A flow run of Prefect installs its own handler for SIGTERM, which at its end sends the signal again: the answer
        to one signal would be the answer to two.
        """
        is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        return signal_handler(self._act, SIGNALS[:-1] if is_ignored else SIGNALS)

    def check(self) -> None:
        """Ends the command if a signal requested that and other code has swallowed the exception."""
        if self.first_signal is not None:
            raise SystemExit(self.exit_code)

    def _act(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal in the main thread; the answering thread handles the second one."""
        is_first = self.first_signal is None
        self.first_signal = self.first_signal or number
        replace_closed_streams()  # here too: this thread may print before the answering thread gets to it
        if self._stop is None:
            raise SystemExit(self.exit_code)  # no KeyboardInterrupt, as some libraries catch it
        if is_first:
            # In a thread: a handler may interrupt the very thread that holds a lock which `stop` needs.
            threading.Thread(target=self._stop, name="stop", daemon=True).start()

    def _answer(self, pipe: socket.socket) -> None:
        """Reads signals until the pipe is closed; acknowledges the first, and kills at the second."""
        # Only in the main thread does a signal end what waits there. One for a stopped process goes to any thread.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        num_signals = 0
        while numbers := pipe.recv(64):
            for number in numbers:
                if number not in SIGNALS or (number == signal.SIGHUP and num_signals):
                    continue  # the system and the shell both send SIGHUP
                num_signals += 1
                if num_signals == 1:
                    replace_closed_streams()
                    self.say(STOPPING)
                elif num_signals == 2:
                    self._kill()
                    say_on_stderr("killed")
                    self.say = say_on_stderr  # a thread that no longer runs may hold the view's lock
                    self.say_how_to_go_on()
                    self._end(128 + number)


@contextmanager
def signal_handler(handler: Callable[[int, FrameType | None], Any], numbers: Iterable[int]) -> Iterator[None]:
    """Handles the signals with these numbers by `handler` inside the context; the main thread must enter it."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def command(arguments: Sequence[str]) -> Iterator[Interrupts]:
    """Handles signals for a command of `ringmaster` that trains; other commands keep Python's handlers.

    arguments: the command line from the command's name on.

    Yields what handles them, for the flow that the command calls.

    A command that was stopped shows the command that continues, and exits with 130 after Ctrl-C. A command that
    finished all the same exits with its own status.
    """
    if not set(TRAINING_COMMANDS) & set(arguments[:1]):
        yield Interrupts()
        return
    interrupts = Interrupts(go_on=command_that_goes_on(arguments))
    try:
        with interrupts.of_command():
            yield interrupts
    except SystemExit as end:
        if interrupts.first_signal is None or not end.code:
            raise
        interrupts.say_how_to_go_on()  # after the answer, which has been shown by the time that `of_command` ends
        raise SystemExit(interrupts.exit_code) from None


@contextmanager
def ending_in_time(*, timeout_s: float = EXIT_TIMEOUT_S) -> Iterator[None]:
    """Ends the process within `timeout_s` seconds once it is about to end after the context, with the same status.

    Prefect sends its last logs and events at the end of the process, and waits without limit for a server that does not
    answer. Ctrl-C and SIGTERM then end the process at once, also with the same status.
    """
    status: Any = 1
    try:
        yield
        status = 0
    except SystemExit as end:
        status = end.code or 0
        raise
    finally:
        status = status if isinstance(status, int) else 1
        thread = threading.Thread(target=_end_later, args=(timeout_s, status), name="end", daemon=True)
        atexit.register(_kill_at_signals, status)  # last, and so called first
        call_before_threads_end(thread.start)


def _end_later(timeout_s: float, status: int) -> None:
    threading.Event().wait(timeout_s)
    _end_at_once(status)


def command_that_goes_on(arguments: Sequence[str]) -> str:
    """Returns the command line, with all options, that continues an interrupted command."""
    name, *others = arguments
    is_resumable = name in RESUMABLE_COMMANDS and not {"--resume", "--dry-run", "--help"} & set(others)
    return shlex.join(["ringmaster", name, *others, *(["--resume"] if is_resumable else [])])


END_TIMEOUT_S = 10.0  # time for the process to end in order


def end_with_parent() -> None:
    """Ends this process by SIGTERM once its stdin ends: a pipe that the parent process holds open."""
    threading.Thread(target=_end_with_stdin, name="stdin", daemon=True).start()


def _end_with_stdin() -> None:
    while os.read(sys.stdin.fileno(), 4096):  # unbuffered: a buffer's lock would abort the interpreter at its end
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(END_TIMEOUT_S)
    os._exit(1)


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextmanager
def stop_signals(*acts: Callable[[], object]) -> Iterator[list[Callable[[], object]]]:
    """Handles the signals inside the context, even if the parent process had them ignored.

    Yields the functions that the first signal calls, `acts` at first. While there is none, nothing has begun, and a
    signal just ends the process. Of later signals only a second Ctrl-C does, as a person insists; a service manager
    that loses patience kills the process anyway.
    """
    on_stop = [*acts]
    is_stopping = False

    def stop(number: int, _: FrameType | None) -> None:
        nonlocal is_stopping
        if not on_stop or (is_stopping and number == signal.SIGINT):
            raise SystemExit(128 + number if is_stopping else 0)
        acts_now, is_stopping = [] if is_stopping else [*on_stop], True
        for act in acts_now:
            act()

    with signal_handler(stop, STOP_SIGNALS):
        yield on_stop

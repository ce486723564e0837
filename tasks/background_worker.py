"""Background threads: of one call, of a context, and one that repeats an action on request."""

import atexit
import contextvars
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

logger = logging.getLogger(__name__)

TIMEOUT_S = 10.0  # how long `close` waits for a pending request

T = TypeVar("T")


def in_a_thread(name: str, run: Callable[[], T]) -> Future[T]:
    """Runs a function on a daemon thread, for which the process does not wait at its end."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(run())
        except BaseException as error:  # noqa: BLE001 - the caller of `result` gets it
            future.set_exception(error)

    threading.Thread(target=work, name=name, daemon=True).start()
    return future


@contextmanager
def background_thread(
    work: Callable[[threading.Event], object], *, name: str, timeout_s: float | None = None
) -> Iterator[None]:
    """Runs `work` on a thread while the context is open. `work` returns once the event that it is given is set.

    timeout_s: how long the end of the context waits for the thread; None for as long as it takes.
    """
    over = threading.Event()
    thread = threading.Thread(target=work, args=(over,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout_s)


def keep_calling(
    action: Callable[[], None],
    until: threading.Event,
    *,
    call: Callable[[Callable[[], None]], None],
    every_s: float,
    is_due: Callable[[], bool] = lambda: True,
) -> None:
    """Has another thread call an action again and again; returns once `until` is set.

    call: has the other thread call a function, such as `Executor.call`. The action is not passed on again before it is
        done.
    is_due: whether to call the action now; is called every `every_s` seconds.
    """
    is_done = threading.Event()
    is_done.set()

    def act() -> None:
        try:
            action()
        finally:
            is_done.set()

    while not until.wait(every_s):
        if is_done.is_set() and is_due():
            is_done.clear()
            call(act)


class CoalescingWorker:
    """Calls `act` on a thread of its own after each request. Requests that arrive during a call share the next one.

    The thread runs in the context (`contextvars`) in which this object was made, such as that of a Prefect flow run. At
    the end of the process an `atexit` handler completes a pending request if `close` was not called. If `act` raises,
    the error is logged, and it is called no more.
    """

    def __init__(self, act: Callable[[], None], *, name: str) -> None:
        self._act = act
        self._changed = threading.Condition()
        self._is_due = self._is_closing = False
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=lambda: context.run(self._work), name=name, daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def ask(self) -> None:
        """Requests a call of `act` and returns at once."""
        with self._changed:
            self._is_due = True
            self._changed.notify()

    def close(self, *, timeout_s: float = TIMEOUT_S) -> None:
        """Completes a pending request and ends the thread. Waits for at most `timeout_s` seconds."""
        atexit.unregister(self.close)
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(timeout=timeout_s)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_due or self._is_closing)
                if not self._is_due:
                    return
                self._is_due = False
            try:
                self._act()
            except Exception:
                logger.exception("the %s ends here: it is updated no more", threading.current_thread().name)
                return

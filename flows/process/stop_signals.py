"""Signals to end in the long-lived processes of a pool: the first one ends the process in order."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextmanager
def stop_signals(*acts: Callable[[], object]) -> Iterator[list[Callable[[], object]]]:
    """Handles the signals inside the context, even if the parent process had them ignored.

    Yields the functions that the first signal calls, `acts` at first. While there is none, nothing has begun, and a
    signal just ends the process. Of later signals only a second Ctrl-C does, as a person insists; a service manager
    that loses patience kills the process anyway.
    """
    on_stop = [*acts]
    is_asked = False

    def stop(number: int, _: FrameType | None) -> None:
        nonlocal is_asked
        if not on_stop or (is_asked and number == signal.SIGINT):
            raise SystemExit(128 + number if is_asked else 0)
        acts_now, is_asked = [] if is_asked else [*on_stop], True
        for act in acts_now:
            act()

    before = {number: signal.signal(number, stop) for number in SIGNALS}
    try:
        yield on_stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

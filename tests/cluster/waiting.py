"""Polling for events up to a deadline."""

import threading
import time

LOOK_EVERY_S = 0.05
TIMEOUT_S = 300  # for events that take seconds: machines may be many times slower


def until(what, poll, *, seconds=TIMEOUT_S, every_s=LOOK_EVERY_S):
    """Returns the result of `poll` once it is true; fails after `seconds`, naming `what`."""
    clock, deadline_s = threading.Event(), time.monotonic() + seconds
    while not (found := poll()):
        assert time.monotonic() < deadline_s, f"waited {seconds:g} s in vain: {what}"
        clock.wait(every_s)
    return found

"""Waiting for events that others make: looked for again and again, up to a deadline."""

import threading
import time

LOOK_EVERY_S = 0.05
PATIENCE_S = 300  # for what takes seconds: a machine may be many times slower, and whoever waits in vain fails anyway


def until(what, look, *, seconds=PATIENCE_S, every_s=LOOK_EVERY_S):
    """What `look` returns once that is true; fails after `seconds`, saying what did not come."""
    clock, deadline_s = threading.Event(), time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline_s, f"waited {seconds:g} s in vain: {what}"
        clock.wait(every_s)
    return found

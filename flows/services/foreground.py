"""`ringmaster up --wait`: stays until the pool is to end, as a batch job or a service manager expects."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ringmaster.flows.output import announce, error_console
from ringmaster.flows.services.up_and_down import files_of, stop

LOOK_EVERY_S = 3600.0  # the end of the supervisor is noticed at once; another one may follow it


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Within the context, SIGTERM has the effect of Ctrl-C. For the main thread."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def stay(home: Path) -> bool:
    """Returns once the pool of a home has ended; returns whether it has ended in order.

    Ctrl-C ends it, as `ringmaster down` does. Where its supervisor dies, the services go on without one.
    """
    try:
        with sigterm_as_interrupt():
            announce("the pool is up; SIGTERM or Ctrl-C ends it")
            while (supervisor := files_of(home).supervisor()) is not None:
                supervisor.wait(LOOK_EVERY_S)
    except KeyboardInterrupt:
        return stop(home)
    if not any(state.lives() for state in files_of(home).states()):
        return stop(home)  # it was ended in order, for example by `ringmaster down`
    error_console().print(
        f"the supervisor has died, see {files_of(home).log('supervisor')}. To fix: `ringmaster up` starts "
        "another one, which takes over what runs",
        style="red",
    )
    return False

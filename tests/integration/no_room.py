"""Makes the first fork of a fork server fail, as on a machine without memory for another process."""

import errno
import os

_fork, _failures = os.fork, iter([BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")])


def fork():
    """Forks as os.fork does, after one failure."""
    for failure in _failures:
        raise failure
    return _fork()


os.fork = fork

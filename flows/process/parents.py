"""The end of a child process with its parent, however the parent ends."""

from __future__ import annotations

import os
import signal
import sys
import threading

END_PATIENCE_S = 10.0  # time for the process to end in order


def end_with_parent() -> None:
    """Ends this process by SIGTERM once its stdin ends: a pipe that the parent process holds open."""
    threading.Thread(target=_end_with_stdin, name="stdin", daemon=True).start()


def _end_with_stdin() -> None:
    while os.read(sys.stdin.fileno(), 4096):  # unbuffered: a buffer's lock would abort the interpreter at its end
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(END_PATIENCE_S)
    os._exit(1)

"""Actions in child processes.

The children are forked from a process with a single thread. The tests' own process may have more threads, and a child
of a plain `os.fork()` would wait for ever for a lock, such as SQLite's, that one of them held.
"""

import multiprocessing
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "ringmaster.model_lineage.tensors",
        "ringmaster.tasks.execution.engine",
        "ringmaster.techniques.checkpoints.checkpoint",
    ]
)


def started(action: Callable[..., Any], *args: Any) -> BaseProcess:
    """A child that calls `action`, which must be picklable by its name."""
    child = _context.Process(target=action, args=args)
    child.start()
    return child


def exit_status(child: BaseProcess) -> int | None:
    """Waits for the child. Returns 0 if its action returned, 1 if it raised, -9 if the child was killed."""
    child.join()
    return child.exitcode


def in_a_child(action: Callable[..., Any], *args: Any) -> int | None:
    """The exit status of `action` in a child."""
    return exit_status(started(action, *args))

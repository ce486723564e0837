"""Actions in processes of their own.

They are forked from a process that has one thread only. The tests' own process may have others at that moment, and a
child of a plain `os.fork()` waits for ever for a lock, such as SQLite's, that one of them held.
"""

import multiprocessing
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "ringmaster.model_lineage.tensors",
        "ringmaster.tasks.execution.local.leases",
        "ringmaster.techniques.runtime.checkpoints.checkpoint",
    ]
)


def started(action: Callable[..., Any], *args: Any) -> BaseProcess:
    """A child that calls `action`, which pickle must find by its name."""
    child = _context.Process(target=action, args=args)
    child.start()
    return child


def exit_status(child: BaseProcess) -> int | None:
    """Waits for the child. 0: its action returned; 1: it raised; -9: the child was killed."""
    child.join()
    return child.exitcode


def in_a_child(action: Callable[..., Any], *args: Any) -> int | None:
    """The exit status of `action` in a child."""
    return exit_status(started(action, *args))

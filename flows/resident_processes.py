"""Processes that stay after a command for later ones, where a feature keeps them (module `resident`).

Importing this is cheap: a command asks here before it imports anything slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from ringmaster.features import listed

if TYPE_CHECKING:
    from ringmaster.flows.services.first_processes import KeptServers, ServerProcess
    from ringmaster.techniques.processes.forkserver_client import ForkServer


class ResidentProcesses:
    """Keeps the servers of commands for later commands. This class keeps nothing; a feature lists one below it."""

    def forward(self, arguments: Sequence[str]) -> int | None:
        """Runs a command in a process that stays; returns its exit status, or None where this process has to run it.

        It is called before anything changes the environment, and before anything slow is imported.

        arguments: the command line from the command's name on.
        """
        return None

    def stays(self) -> bool:
        """Returns whether the servers of this command stay after it. Raises InputError on a wrong setting of that."""
        return False

    def use(self, home: Path) -> AbstractContextManager[KeptServers | None]:
        """Returns a context in which this command uses the servers kept for a home; None where none fit it."""
        return nullcontext()

    def hand_over(self, home: Path, *, fork_server: ForkServer, prefect: ServerProcess | None) -> None:
        """Lets the servers of this command stay, where that is wanted. The caller ends those that do not."""

    def status(self, home: Path) -> str:
        """Returns what stays ready for the next command of a home, as a sentence; empty where nothing does."""
        return ""

    def end(self, home: Path) -> str:
        """Ends what stays for a home; returns what happened, in a sentence, or nothing where nothing stays."""
        return ""


def resident_processes() -> ResidentProcesses:
    """Returns what keeps the servers of commands, of a built-in feature: others are found too slowly for a start."""
    return next(listed("resident", "RESIDENT_PROCESSES", only_builtin=True), ResidentProcesses())

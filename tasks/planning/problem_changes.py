"""Changes of planning problems, which answers about a plan compare with what it has."""

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import ClassVar

from ringmaster.tasks.planning.problems.problem import Problem


class ProblemChange(ABC):
    """A change of a problem, the base of frozen dataclasses. option: of the command that asks for it."""

    option: ClassVar[str]

    @abstractmethod
    def on(self, problem: Problem, *, node: str = "") -> Problem:
        """Returns the changed problem.

        node: the node that gets more devices; by default the first one of their type.

        Raises ProblemError where the change is impossible, with what would be possible.
        """

    @abstractmethod
    def in_words(self, *, node: str = "", device: str = "") -> str:
        """Returns what is changed, such as "one more device on n0". device: the kind of the devices of the node."""

    def users(self, problem: Problem) -> Collection[str]:
        """Returns the users for whom the answer says when their jobs end."""
        return ()


def more(number: int, what: str) -> str:
    """Returns how many more there are, such as "one more device"."""
    return f"one more {what}" if number == 1 else f"{number} more {what}s"

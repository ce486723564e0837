"""What a person is told when something was not done: faults in the input, and runs that did not end well."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ringmaster.model_lineage.faults import RingmasterError

if TYPE_CHECKING:
    from ringmaster.flows.result import BatchResult

__all__ = [
    "BatchFailed",
    "InputError",
    "Interrupted",
    "RetrainingFailed",
    "RingmasterError",
    "RunFailed",
    "SweepFailed",
]

from ringmaster.tasks.messages import listed


class InputError(RingmasterError, ValueError):
    """The user's input cannot be worked with; nothing was started. `faults` are all that is wrong."""

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = tuple(faults)
        super().__init__(listed(self.faults))


class RunFailed(RingmasterError):
    """A run has ended, and not all that was asked for is done. `result`: what the flow returns where all is.

    It is None only where Prefect has made the error from its text, in another process.
    """

    def __init__(self, message: str, result: Any = None) -> None:
        self.result = result
        super().__init__(message)


class BatchFailed(RunFailed):
    """Jobs of a batch have failed or were cancelled; `result` says what became of each, and the others are done."""

    result: "BatchResult"


class SweepFailed(RunFailed):
    """A sweep has no best trial, or was cancelled; `result` has its leaderboard."""


class RetrainingFailed(RunFailed):
    """Models of a retraining run have failed; `result` says what became of each, and the others are up to date."""


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM has stopped a run in order. `result`: what was done until then; the rest can be resumed.

    No RingmasterError: a program that goes on after errors must not go on after Ctrl-C. No KeyboardInterrupt either,
    which would end the event loop of Prefect's through which it comes.
    """

    def __init__(self, message: str = "", result: Any = None) -> None:
        self.result = result
        super().__init__(message)

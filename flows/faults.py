"""The exceptions of the flows: faults in the input, and runs that did not succeed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ringmaster.model_lineage.faults import InputFault, RingmasterError

if TYPE_CHECKING:
    from ringmaster.flows.batch.result import BatchResult

__all__ = [
    "BatchCancelled",
    "BatchFailed",
    "InputError",
    "Interrupted",
    "RetrainingFailed",
    "RingmasterError",
    "RunFailed",
    "SweepFailed",
]

from ringmaster.tasks.messages import listed


class InputError(InputFault):
    """The user's input cannot be used, and nothing was started.

    faults: all faults of the input.
    """

    faults: tuple[str, ...]

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = tuple(faults)
        super().__init__(listed(self.faults))


@contextmanager
def input_errors(kind: type[Exception] = ValueError, *, about: str = "") -> Iterator[None]:
    """Inside the context, an error of this kind becomes an InputError of the same message.

    about: what the message is about; it is written before it.
    """
    try:
        yield
    except kind as error:
        raise InputError([f"{about}{error}"]) from error


class RunFailed(RingmasterError):
    """A run has ended, and a part of the requested work is not done.

    result: what the flow returns on success. It is None only where Prefect has made the error from its text, in another
        process.
    """

    def __init__(self, message: str, result: Any = None) -> None:
        self.result = result
        super().__init__(message)


class BatchFailed(RunFailed):
    """Jobs of a batch have failed or were cancelled; the others are done. `result` has the status of each job."""

    result: "BatchResult"


class BatchCancelled(BatchFailed):
    """A batch on a pool was cancelled before its jobs were planned. There is no `result`."""


class SweepFailed(RunFailed):
    """A sweep has no best trial, or was cancelled. `result` has its leaderboard."""


class RetrainingFailed(RunFailed):
    """Models of a retraining run have failed; the others are up to date. `result` has the outcome of each model."""


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM has stopped a run, which wrote its checkpoints. The rest can be resumed.

    It is no RingmasterError: a program that goes on after errors must not go on after Ctrl-C. It is no
    KeyboardInterrupt either: that would end Prefect's event loop, through which the exception passes.

    result: what was done before the interruption.
    """

    def __init__(self, message: str = "", result: Any = None) -> None:
        self.result = result
        super().__init__(message)

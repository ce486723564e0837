"""All exceptions that pass between modules, by what has failed.

    RingmasterError
    ├── InputError                what the user gave; nothing was started, exit status 2
    │   ├── BatchFileError        a batch file or a batch
    │   ├── ProblemError          a planning problem
    │   ├── DatabaseFileError     a database file that is damaged, or a driver that is missing
    │   ├── ReleaseMismatch       a database or pool of another release
    │   └── NodeUnavailable       devices of a node that has left
    ├── RunFailed                 a run that ended with work undone
    │   ├── BatchFailed
    │   │   └── BatchCancelled
    │   ├── SweepFailed
    │   └── RetrainingFailed
    ├── LedgerError               MLflow refuses, or does not answer
    ├── PoolUnreachable           the servers of a pool elsewhere do not answer
    ├── LineageCycle, UnknownModel, TensorStoreError, TensorObjectError
    └── PromotionRefused, RetrainingInProgress, NodeAlreadyServed, ServerStartError, ForkServerError,
        InterpreterError

Errors of one job derive from ValueError (its description or data), OSError (storage) or ConnectionError (a process or
an engine that does not answer), as the code that runs jobs catches these from libraries as well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ringmaster.text import join_limited

if TYPE_CHECKING:
    from ringmaster.flows.batch.result import BatchResult


PERMANENT_ERRORS = (
    *(ValueError, TypeError, AttributeError, NameError, LookupError, ImportError, SyntaxError),
    *(ArithmeticError, AssertionError, NotImplementedError, RecursionError),
)
"""Errors of code or its input, which no other try changes. Files, memory, processes and networks may change (OSError,
RuntimeError)."""


class RingmasterError(Exception):
    """The base of every error that Ringmaster raises for its user: what is wrong, where, and how to fix it."""


class InputError(RingmasterError, ValueError):
    """The input cannot be used, and nothing was started. The command line ends with exit status 2.

    Attributes:
        faults: everything that is wrong, in the order in which it is shown; each is a line or has one as its text.
    """

    separator = "\n"  # between the errors in the text of the exception

    def __init__(self, faults: Iterable[Any]) -> None:
        self.faults = tuple(faults)
        super().__init__(join_limited(self.faults, between=self.separator))


class BatchFileError(InputError):
    """A batch cannot be run. `faults` are all of its faults, in file order; the text lists the first."""


class ProblemError(InputError):
    """A problem cannot be planned."""

    separator = "; "


class DatabaseFileError(InputError):
    """A SQLite file is damaged, cannot be written, or is none; or the driver of PostgreSQL is missing."""


class ReleaseMismatch(InputError):
    """A database or a pool belongs to another release of Ringmaster."""


class NodeUnavailable(InputError):
    """The devices of a node are not available, as it has left the pool, for good or for a moment."""


class RunFailed(RingmasterError):
    """A run has ended, and a part of the requested work is not done.

    Attributes:
        result: what the flow returns on success. It is None only where Prefect has made the error from its text, in
            another process.
    """

    def __init__(self, message: str, result: Any = None) -> None:
        self.result = result
        super().__init__(message)


class BatchFailed(RunFailed):
    """Jobs of a batch have failed or were cancelled; the others are done. `result` has the status of each job."""

    result: BatchResult


class BatchCancelled(BatchFailed):
    """A batch on a pool was cancelled before its jobs were planned. There is no `result`."""


class SweepFailed(RunFailed):
    """A sweep has no best trial, or was cancelled. `result` has its leaderboard."""


class RetrainingFailed(RunFailed):
    """Models of a retraining run have failed; the others are up to date. `result` has the outcome of each model."""


class RunInterrupted(BaseException):
    """Ctrl-C or SIGTERM has stopped a run, which wrote its checkpoints. The rest can be resumed.

    It is not a RingmasterError: a program that continues after errors must not continue after Ctrl-C. It is no
    KeyboardInterrupt either: that would end Prefect's event loop, through which the exception passes.

    Attributes:
        result: what was done before the interruption.
    """

    def __init__(self, message: str = "", result: Any = None) -> None:
        self.result = result
        super().__init__(message)


class ServerStartError(RingmasterError):
    """Prefect's server does not answer, or with a fault of its own."""


class PoolUnreachable(RingmasterError):
    """The servers of a pool do not answer, and whether its processes run cannot be seen from here."""


class ForkServerError(RingmasterError, RuntimeError):
    """The process that forks a machine's workers does not start."""


class InterpreterError(RingmasterError, RuntimeError):
    """The Python that is to run a job cannot be made, has changed, or lacks a package."""


class LedgerError(RingmasterError, ValueError):
    """MLflow's records cannot be read or written.

    Attributes:
        code: MLflow's error code, e.g. "RESOURCE_DOES_NOT_EXIST".
        may_pass: whether the same call may succeed later, because MLflow is unreachable or its disk is full at the
            moment.
    """

    def __init__(self, message: str, *, code: str = "INVALID_PARAMETER_VALUE", may_pass: bool = False) -> None:
        super().__init__(message)
        self.code, self.may_pass = code, may_pass


class LineageCycle(RingmasterError, ValueError):
    """Records state that a model is its own ancestor."""


class UnknownModel(RingmasterError, ValueError):
    """No model, component or data set has that name, or several have; the message lists similar names."""


class TensorObjectError(RingmasterError, ValueError):
    """An object of the tensor store is missing, or its content does not match its name."""


class TensorStoreError(RingmasterError, ValueError):
    """A model cannot be added to the tensor store or read from it; the message names the file and the reason."""


class SignatureError(RingmasterError, ValueError):
    """The files or records of a model are not what was signed, or nobody who is trusted has signed them."""


class PromotionRefused(RingmasterError, ValueError):
    """Another promotion of the same model is in progress, or was faster."""


class RetrainingInProgress(RingmasterError, ValueError):
    """Another process works on a run of the same models."""


class NodeAlreadyServed(RingmasterError, ValueError):
    """A worker of the same name serves this machine already."""


class RequestRefused(ValueError):
    """A request to a pool's controller cannot be met; the message states the cause, and what is available."""


class EngineUnavailable(ConnectionError):
    """An engine that lends nodes does not answer."""


class SchedulerError(ValueError):
    """A batch scheduler answers, and refuses the request."""


class DevicesBusy(Exception):
    """Others used a node's devices for longer than trials may wait."""


class NoRoomError(ValueError):
    """A job fits on no node: the nodes that could hold it become unavailable before it would end."""


class UntrainableJobs(ValueError):
    """Jobs cannot take a single step.

    Attributes:
        faults: the causes, by job.
    """

    def __init__(self, faults: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"job {name}: {why}" for name, why in faults.items()))
        self.faults = dict(faults)


class StepError(ValueError):
    """A job cannot take a step.

    Attributes:
        faults: messages, each with the job's key concerned and a remedy.
    """

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = tuple(faults)


class DataError(ValueError):
    """Something is wrong with the data as a whole, and not with a single row."""


class ModelTooLarge(ValueError):
    """A model is too large to be built on this machine."""


class NoCommonBase(ValueError):
    """Models or rows cannot be computed over one base. The caller then runs one model after another."""


class CheckpointError(OSError):
    """A checkpoint cannot be written (disk), or a stored one cannot be read (corrupt)."""


class CheckpointNotFound(OSError):
    """Stored checkpoints are not found: their folder is perhaps not mounted on this machine."""


class ObjectStoreUnavailable(OSError):
    """An object store does not answer or refuses. Whether a file exists is unknown."""


class ModelNotFound(OSError):
    """A finished model is neither on this machine nor whole in the store."""


class ChannelClosed(ConnectionError):
    """The other end of a channel between processes is closed."""


@contextmanager
def input_errors(*kinds: type[Exception], about: str = "", remedy: str = "") -> Iterator[None]:
    """Inside the context, an error of one of these kinds becomes an InputError of the same message.

    Args:
        kinds: the exceptions that are converted, by default ValueError.
        about: what the message is about; it is written before it.
        remedy: what to do; it is written after it.
    """
    caught = kinds or (ValueError,)
    try:
        yield
    except caught as error:
        raise InputError([f"{about}{error}{remedy and f'. To fix: {remedy}'}"]) from error


def retry_may_help(_task: Any, _run: Any, state: Any) -> bool:
    """Returns whether a failed Prefect task may succeed when tried again: the condition of all retries of tasks."""
    error = state.result(raise_on_failure=False)
    return bool(getattr(error, "may_pass", not isinstance(error, PERMANENT_ERRORS)))


def raise_faults(faults: Collection[Any]) -> None:
    """Raises an InputError with all of these faults, if there are any."""
    if faults:
        raise InputError(faults)

"""The retries and error translation around every MLflow call, and retries for as long as a server is unreachable.

Every call to MLflow goes through `RetryingClient`, which turns faults into `LedgerError`s with a remedy, and repeats it
by an `OutageRetry`: for a transient fault (a locked database, a server that answers 5xx) a few times, or for as long as
MLflow is unreachable.
"""

import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import tenacity

from ringmaster.errors import LedgerError
from ringmaster.text import redacted, storable_values

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 15.0

T = TypeVar("T")


def _may_pass(error: BaseException) -> bool:
    """Whether an error, usually a LedgerError, is marked as transient."""
    return bool(getattr(error, "may_pass", False))


def _is_busy(error: BaseException) -> bool:
    """Whether the error of MLflow behind a LedgerError is transient. MLflow itself has waited for an absent server."""
    return hasattr(error.__cause__, "error_code") and _is_transient(error.__cause__)


def show_nothing(_: str) -> None:
    """A notice that nobody sees."""


class OutageRetry:
    """Retries calls for as long as their server is unreachable, with growing delays, until a timeout.

    notice: called once when the server becomes unreachable, and once when it is back.
    server: the server's name in messages.
    may_pass: returns whether an error means that the server is unreachable.
    away: the second half of the message that the server is unreachable.
    delays_s: where retries are limited, the delay before each of them.
    gave_up: whether the timeout of `hurry` has passed; from then on failing calls raise at once.
    """

    def __init__(
        self,
        notice: Callable[[str], None],
        *,
        server: str = "MLflow",
        may_pass: Callable[[BaseException], bool] = _may_pass,
        away: str = "what needs it waits",
        delays_s: Sequence[float] | None = None,
    ) -> None:
        self.is_away = self.gave_up = False
        self._notice, self._server, self._may_pass, self._away = notice, server, may_pass, away
        self._deadline_s, self._delays_s = math.inf, delays_s
        self._is_hurried, self._never = threading.Event(), threading.Event()

    def call(self, action: Callable[[], T]) -> T:
        """Calls `action` and returns its result. Raises its error if that is not transient, or after the timeout."""
        delays_s = self._delays_s
        growing = tenacity.wait_exponential(multiplier=FIRST_WAIT_S, max=LONGEST_WAIT_S)
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(self._may_pass),
            wait=tenacity.wait_chain(*map(tenacity.wait_fixed, delays_s)) if delays_s else growing,
            stop=self._gives_up if delays_s is None else tenacity.stop_after_attempt(1 + len(delays_s)),
            before_sleep=self._report_first,
            sleep=self._wait,
            reraise=True,
        )
        try:
            result = retrying(action)
        except Exception as error:
            if not self._may_pass(error):
                self._is_back()
            raise
        self._is_back()
        return result

    def hurry(self, timeout_s: float) -> None:
        """Limits further waiting to `timeout_s` seconds from now. Can be called from any thread."""
        self._deadline_s = time.monotonic() + timeout_s
        self._is_hurried.set()

    def _gives_up(self, _: tenacity.RetryCallState) -> bool:
        is_over = time.monotonic() >= self._deadline_s
        self.gave_up = self.gave_up or is_over
        return is_over

    def _report_first(self, attempt: tenacity.RetryCallState) -> None:
        if not self.is_away:
            self.is_away = True
            cause = attempt.outcome.exception() if attempt.outcome is not None else None
            self._notice(f"{self._server} is away: {self._away}. {cause}")

    def _wait(self, wait_s: float) -> None:
        gate = self._never if self._is_hurried.is_set() else self._is_hurried
        gate.wait(min(wait_s, max(self._deadline_s - time.monotonic(), 0.0)))

    def _is_back(self) -> None:
        if self.is_away:
            self.is_away = False
            self._notice(f"{self._server} is back")


DOWNLOAD_FAILURES = re.compile(r"^The following failures occurred .*:\n##### File (.+) #####\n")
"""The head of MLflow's message on files that cannot be downloaded; the first one's error follows."""

CONNECTION_FAILURE = re.compile(
    r"^API request to \S+ failed with exception .*Caused by \w+\([\"'](?:.*?(?:\)|>): )?(.*)[\"']\)\)$", re.DOTALL
)
"""MLflow's message on a server that cannot be reached: the reason follows what requests and urllib3 say around it."""

TENSORS_SCHEME = "tensors"  # of the URI of a folder of artifacts whose weights are in a tensor store

RETRY_DELAYS_S = (0.2, 1.0, 4.0)
"""The delays before each retry of a transient fault. They are short, as MLflow itself already waits on a locked sqlite
file (20 s) and on a server that does not answer (minutes, `MLFLOW_HTTP_REQUEST_MAX_RETRIES`)."""
# The beginnings of MLflow's messages about a server that does not answer.
AWAY = ("API request to", "The following failures occurred while uploading one or more artifacts")


class RetryingClient:
    """An MlflowClient (or a similar object) whose methods retry transient faults and raise LedgerError for all others.

    waiting: retries calls; by default a transient fault, a few times.
    """

    def __init__(
        self,
        target: Any,
        *,
        tracking_uri: str,
        waiting: OutageRetry | None = None,
    ) -> None:
        self._target, self._uri = target, redacted(tracking_uri)
        self._waiting = waiting or OutageRetry(show_nothing, may_pass=_is_busy, delays_s=RETRY_DELAYS_S)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self.call, getattr(self._target, name))

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls `function`, with texts as databases take them, and the retries and error translation of this class."""
        return self._waiting.call(partial(self._call, function, *storable_values(args), **storable_values(kwargs)))

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from mlflow.exceptions import MlflowException

        try:
            return function(*args, **kwargs)
        except MlflowException as error:
            raise self._translated(error) from error
        except OSError as error:
            raise LedgerError(
                f"the ledger at {self._uri} could not read or write a file: {error}. "
                "To fix: free space on that disk, or give this user access to it.",
                code="IO_ERROR",
                may_pass=_may_pass_later(error),
            ) from error

    def _translated(self, error: Any) -> LedgerError:
        cause = getattr(error.__cause__, "orig", None)  # of the database, without SQLAlchemy's explanations
        message = str(cause or error.message).strip()
        is_away = _is_transient(error) or message.startswith(AWAY)
        message = CONNECTION_FAILURE.sub(r"API request to it failed: \1", message)
        message = DOWNLOAD_FAILURES.sub(r"\1: ", message)
        first_line = message.splitlines()[0] if message else type(error).__name__
        if _is_transient(error):
            remedy = "To fix: check that the database is reachable and not locked, and that its disk has free space."
        elif "out-of-date database schema" in message:
            remedy = f"To fix: back the database up, then run `mlflow db upgrade {self._uri}`."
        elif message.startswith(AWAY):
            remedy = "To fix: see that the MLflow server is up and that the tracking URI names it."
        else:
            remedy = ""
        text = f"MLflow at {self._uri}: {first_line}"
        if remedy:
            text = f"{text.removesuffix('.')}. {remedy}"
        return LedgerError(text, code=str(error.error_code), may_pass=is_away)


def _is_transient(error: Any) -> bool:
    from mlflow.exceptions import RestException

    if error.error_code == "TEMPORARILY_UNAVAILABLE":
        return True
    return isinstance(error, RestException) and int(error.get_http_status_code()) >= 500


def _may_pass_later(error: OSError) -> bool:
    """Whether a file operation may succeed later, because the file server is unreachable or the disk is full."""
    answer = getattr(error, "response", None)  # the response of a file server, if one refused
    if answer is not None:
        return int(answer.status_code) >= 500
    return not isinstance(error, (PermissionError, FileNotFoundError, FileExistsError, NotADirectoryError))


def tensors_uri(folder: Path) -> str:
    """Returns the URI of the artifacts in a folder whose weights are in a tensor store."""
    return TENSORS_SCHEME + folder.absolute().as_uri().removeprefix("file")

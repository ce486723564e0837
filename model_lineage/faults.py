"""The base of all errors for users, and what goes wrong between us and MLflow, handled in one place.

Every call to MLflow goes through `Guarded`: a fault that may pass (a locked database, a server that answers 5xx) is
tried again a few times; any other becomes a `LedgerError` that says what to do.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from ringmaster.model_lineage.waiting import Waiting

RETRY_DELAYS_S = (0.2, 1.0, 4.0)
# How MLflow begins its messages about a server that does not answer.
AWAY = ("API request to", "The following failures occurred while uploading one or more artifacts")


class RingmasterError(Exception):
    """The base of every error that Ringmaster raises for its user: what is wrong, where, and what to do."""


class LedgerError(RingmasterError, ValueError):
    """The ledger cannot do what was asked.

    code: MLflow's, e.g. "RESOURCE_DOES_NOT_EXIST". may_pass: the same call may go well later, since MLflow is away or
    its disk is full just now.
    """

    def __init__(self, message: str, *, code: str = "INVALID_PARAMETER_VALUE", may_pass: bool = False) -> None:
        super().__init__(message)
        self.code, self.may_pass = code, may_pass


def redacted(uri: str) -> str:
    """`uri` without the password that it may carry."""
    parts = urlsplit(uri)
    if parts.password is None:
        return uri
    user, host = parts.username or "", parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{user}:***@{host}"))


class Guarded:
    """An MlflowClient (or anything alike) whose methods retry transient faults and raise LedgerError for the rest.

    delays_s: how long to wait before each new try; MLflow itself already waits on a locked sqlite file (20 s) and on
        a server that does not answer (minutes, `MLFLOW_HTTP_REQUEST_MAX_RETRIES`), so that these stay few.
    waiting: tries calls again for as long as MLflow is away, instead of these delays.
    """

    def __init__(
        self,
        target: Any,
        *,
        tracking_uri: str,
        delays_s: tuple[float, ...] = RETRY_DELAYS_S,
        sleep: Callable[[float], None] = time.sleep,
        waiting: Waiting | None = None,
    ) -> None:
        self._target = target
        self._uri = redacted(tracking_uri)
        self._delays_s = delays_s if waiting is None else ()
        self._sleep, self._waiting = sleep, waiting

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._target, name)

        def guarded(*args: Any, **kwargs: Any) -> Any:
            return self.call(method, *args, **kwargs)

        return guarded

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`function(*args, **kwargs)`, guarded as described above."""
        act = partial(self._call, function, *args, **kwargs)
        return act() if self._waiting is None else self._waiting.call(act)

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from mlflow.exceptions import MlflowException

        for delay_s in (*self._delays_s, None):
            try:
                return function(*args, **kwargs)
            except MlflowException as error:
                if delay_s is None or not _is_transient(error):
                    raise self._translated(error) from error
                self._sleep(delay_s)
            except OSError as error:
                raise LedgerError(
                    f"the ledger at {self._uri} could not read or write a file: {error}. "
                    "To fix: make room on that disk, or give this user access to it.",
                    code="IO_ERROR",
                    may_pass=_may_pass(error),
                ) from error
        raise AssertionError("unreachable: the last try returns or raises")

    def _translated(self, error: Any) -> LedgerError:
        message = str(error.message).strip()
        is_away = _is_transient(error) or message.startswith(AWAY)
        first_line = message.splitlines()[0] if message else type(error).__name__
        if _is_transient(error):
            remedy = "To fix: see that the database is reachable and not kept locked, and that its disk has room."
        elif "out-of-date database schema" in message:
            remedy = f"To fix: back the database up, then run `mlflow db upgrade {self._uri}`."
        elif message.startswith(AWAY):
            remedy = "To fix: see that the MLflow server is up and that the tracking URI names it."
        else:
            remedy = ""
        text = f"MLflow at {self._uri}: {first_line} {remedy}".rstrip()
        return LedgerError(text, code=str(error.error_code), may_pass=is_away)


def _is_transient(error: Any) -> bool:
    from mlflow.exceptions import RestException

    if error.error_code == "TEMPORARILY_UNAVAILABLE":
        return True
    return isinstance(error, RestException) and int(error.get_http_status_code()) >= 500


def _may_pass(error: OSError) -> bool:
    """Whether a file or a file server may do later what it did not do now: it is away, or full."""
    answer = getattr(error, "response", None)  # of a server that keeps files, where that is who refused
    if answer is not None:
        return int(answer.status_code) >= 500
    return not isinstance(error, (PermissionError, FileNotFoundError, FileExistsError, NotADirectoryError))

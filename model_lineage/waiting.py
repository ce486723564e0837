"""Retries of calls to a server, MLflow or another, for as long as the server is unreachable."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception, wait_exponential

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 15.0

T = TypeVar("T")


def _may_pass(error: BaseException) -> bool:
    """Whether an error, usually a LedgerError, is marked as transient."""
    return bool(getattr(error, "may_pass", False))


class OutageRetry:
    """Retries calls for as long as their server is unreachable, with growing delays, until a timeout.

    notice: called once when the server becomes unreachable, and once when it is back.
    server: the server's name in messages.
    may_pass: returns whether an error means that the server is unreachable.
    away: the second half of the message that the server is unreachable.
    gave_up: whether the timeout of `hurry` has passed; from then on failing calls raise at once.
    """

    def __init__(
        self,
        notice: Callable[[str], None],
        *,
        server: str = "MLflow",
        may_pass: Callable[[BaseException], bool] = _may_pass,
        away: str = "what needs it waits",
    ) -> None:
        self.is_away = self.gave_up = False
        self._notice, self._server, self._may_pass, self._away = notice, server, may_pass, away
        self._deadline_s = math.inf
        self._is_hurried, self._never = threading.Event(), threading.Event()

    def call(self, action: Callable[[], T]) -> T:
        """Calls `action` and returns its result. Raises its error if that is not transient, or after the timeout."""
        retrying = Retrying(
            retry=retry_if_exception(self._may_pass),
            wait=wait_exponential(multiplier=FIRST_WAIT_S, max=LONGEST_WAIT_S),
            stop=self._gives_up,
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

    def hurry(self, patience_s: float) -> None:
        """Limits further waiting to `patience_s` seconds from now. Can be called from any thread."""
        self._deadline_s = time.monotonic() + patience_s
        self._is_hurried.set()

    def _gives_up(self, _: RetryCallState) -> bool:
        is_over = time.monotonic() >= self._deadline_s
        self.gave_up = self.gave_up or is_over
        return is_over

    def _wait(self, wait_s: float) -> None:
        if not self.is_away:
            self.is_away = True
            self._notice(f"{self._server} is away: {self._away}")
        gate = self._never if self._is_hurried.is_set() else self._is_hurried
        gate.wait(min(wait_s, max(self._deadline_s - time.monotonic(), 0.0)))

    def _is_back(self) -> None:
        if self.is_away:
            self.is_away = False
            self._notice(f"{self._server} is back")

"""Whether the servers of a pool answer: asked once, and for a limited time, where nothing else tells whether they run.

The processes of a pool on another machine or in another container cannot be seen from here (see `pool_processes`).
"""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from ringmaster.errors import PoolUnreachable
from ringmaster.flows.output import announce

TIMEOUT_S = 30.0
"""The seconds for which a command waits for a first answer: longer than a server takes that is started again."""
TRY_TIMEOUT_S = 5.0  # of one request
LOOK_EVERY_S = 0.5

timeout_s: ContextVar[float | None] = ContextVar("timeout_s", default=None)
"""The seconds for which this process waits for servers; None in a service, which waits for as long as it takes."""

_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def open_directly(request: urllib.request.Request | str, *, timeout_s: float) -> Any:
    """Opens the URL of a server of ours without any proxy: urllib does not find the exception of an IPv6 address."""
    return _direct.open(request, timeout=timeout_s)


def fault_of(url: str, *, timeout_s: float = TRY_TIMEOUT_S) -> str | None:
    """Returns why a server does not answer; None where it does, even if it requires a password."""
    try:
        with open_directly(url, timeout_s=timeout_s):
            return None
    except urllib.error.HTTPError as error:
        return None if error.code < 500 else f"status {error.code}"
    except (OSError, http.client.HTTPException) as error:  # URLError is an OSError
        reason = getattr(error, "reason", error)
        return str(getattr(reason, "strerror", None) or reason or type(reason).__name__)


def answers(url: str) -> bool:
    """Returns whether a server is up: it answers, even if it requires a password."""
    return fault_of(url) is None


def responds(url: str) -> bool:
    """Returns whether a server answers at all: one without its database, for example, says so and does not hang."""
    fault = fault_of(url)
    return fault is None or fault.startswith("status ")


def check_answer(urls: Mapping[str, str], *, about: Callable[[], str]) -> None:
    """Returns once one of several servers answers. Does nothing in a service.

    Args:
        urls: a URL of each server that needs no password, by the server's name.
        about: returns whose servers they are, and what to do.

    Raises:
        PoolUnreachable: None has answered in time.
    """
    if (limit_s := timeout_s.get()) is None:
        return
    began_s, is_announced = time.monotonic(), False
    while True:
        faults: dict[str, str] = {}
        for name, url in urls.items():
            if (fault := fault_of(url)) is None:
                return
            faults[f"{name} at {url}"] = fault
        if (waited_s := time.monotonic() - began_s) >= limit_s:
            break
        if not is_announced:
            announce(f"waiting at most {limit_s:.0f} s for {' and '.join(urls)} of the pool")
            is_announced = True
        time.sleep(min(LOOK_EVERY_S, limit_s - waited_s))
    reasons = " and ".join(dict.fromkeys(faults.values()))
    verb = "has" if len(faults) == 1 else "have"
    raise PoolUnreachable(f"{' and '.join(faults)} {verb} not answered for {waited_s:.0f} s ({reasons}); {about()}")

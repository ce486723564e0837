"""Webhook delivery of the report of a retraining run; a failed delivery is reported and does not fail the run."""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tenacity import Retrying, retry_if_result, stop_after_attempt, wait_chain, wait_fixed

TIMEOUT_S = 10.0
WAITS_S = (1.0, 5.0, 15.0)  # before each retry
MAY_PASS = (408, 425, 429)  # and all status codes from 500


def address_of(said: str, environment: Mapping[str, str] = os.environ) -> str:
    """Returns the URL of a webhook; `$NAME` stands for the variable's value, since such addresses are secrets.

    Raises ValueError if it is not an http or https address.
    """
    url = environment.get(said[1:], "").strip() if said.startswith("$") else said
    if not url:
        raise ValueError(f"the environment has no {said[1:]}, which names the webhook. To fix: export it")
    if not _is_address(url):
        raise ValueError(f"a webhook is an http or https address, {said} is none")
    return url


def _is_address(url: str) -> bool:
    """Whether requests can be sent to the URL. Without the check, invalid characters would fail only at delivery."""
    try:
        parts = urllib.parse.urlsplit(url)
        has_host = bool(parts.hostname) and parts.port != 0  # a port that is not a number raises ValueError
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and has_host and url.isascii() and url.isprintable() and " " not in url


def post(
    url: str,
    content: Mapping[str, Any],
    *,
    key: str,
    waits_s: Sequence[float] = WAITS_S,
    wait: Callable[[float], None] = time.sleep,
) -> str:
    """Posts `content` as JSON, with a retry after each of `waits_s` if the failure may be transient.

    key: identifies the message in the header `Idempotency-Key`; a slow receiver may get the message twice.
    wait: waits for a number of seconds.

    Returns why delivery failed, or "" on success. A fault of the receiver never raises.
    """
    request = urllib.request.Request(
        url,
        data=json.dumps(content, allow_nan=False).encode(),
        headers={"Content-Type": "application/json", "Idempotency-Key": key, "User-Agent": "ringmaster"},
        method="POST",
    )
    num_attempts = 1 + len(waits_s)
    retrying = Retrying(
        retry=retry_if_result(lambda attempt: attempt.may_pass),
        wait=wait_chain(*map(wait_fixed, waits_s)),
        stop=stop_after_attempt(num_attempts),
        sleep=wait,
        retry_error_callback=lambda state: state.outcome and state.outcome.result(),
    )
    last = retrying(_attempt, request)
    return f"{last.fault}, {num_attempts} times" if last.may_pass else last.fault


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: the POST would become a GET without the report, and count as delivered."""

    def redirect_request(self, *_: Any) -> None:
        """Returns None, so that the response with the redirect counts as the answer."""


@dataclass(frozen=True)
class _Attempt:
    """The outcome of one attempt: the fault or "", and whether a retry may help.

    The fault does not contain the address, which may be a secret.
    """

    fault: str = ""
    may_pass: bool = False


def _attempt(request: urllib.request.Request) -> _Attempt:
    try:
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=TIMEOUT_S) as answer:
            answer.read(1024)
    except urllib.error.HTTPError as error:
        error.close()
        may_pass = error.code in MAY_PASS or error.code >= 500
        return _Attempt(f"the webhook answers {error.code} {error.reason}", may_pass)
    except urllib.error.URLError as error:
        return _Attempt(f"the webhook cannot be reached: {error.reason}", may_pass=True)
    except (OSError, http.client.HTTPException) as error:
        return _Attempt(f"the webhook cannot be reached: {type(error).__name__}: {error}", may_pass=True)
    return _Attempt()

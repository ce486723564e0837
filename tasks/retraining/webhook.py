"""Posts the report of a night to whoever wants it. A webhook that does not answer is told, and fails no night."""

from __future__ import annotations

import http.client
import json
import os
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any

TIMEOUT_S = 10.0
WAITS_S = (1.0, 5.0, 15.0)  # before each further attempt
MAY_PASS = (408, 425, 429)  # and all from 500


def address_of(said: str, environment: Mapping[str, str] = os.environ) -> str:
    """The URL of a webhook; `$NAME` is that of the variable, since such addresses are secrets.

    Raises ValueError where it is none.
    """
    url = environment.get(said[1:], "").strip() if said.startswith("$") else said
    if not url:
        raise ValueError(f"the environment has no {said[1:]}, which names the webhook. To fix: export it")
    if not _is_address(url):
        raise ValueError(f"a webhook is an http or https address, {said} is none")
    return url


def _is_address(url: str) -> bool:
    """Whether requests can go there: what is in it that no address may have is found by the client, and told, late."""
    try:
        parts = urllib.parse.urlsplit(url)
        has_host = bool(parts.hostname) and parts.port != 0  # a port that is no number is a ValueError
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and has_host and url.isascii() and url.isprintable() and " " not in url


def post(
    url: str,
    content: Mapping[str, Any],
    *,
    key: str,
    waits_s: Sequence[float] = WAITS_S,
    wait: Callable[[float], object] | None = None,
) -> str:
    """Posts `content` as JSON, again after each of `waits_s` where it fails in a way that may pass.

    key: of this message; a receiver that was slow gets it twice, and knows it by the header `Idempotency-Key`. wait:
    waits so many seconds. Returns why it was not taken, empty where it was; nothing that the other side does raises.
    """
    wait = wait or threading.Event().wait
    request = urllib.request.Request(
        url,
        data=json.dumps(content, allow_nan=False).encode(),
        headers={"Content-Type": "application/json", "Idempotency-Key": key, "User-Agent": "ringmaster"},
        method="POST",
    )
    fault = ""
    for number in range(len(waits_s) + 1):
        if number:
            wait(waits_s[number - 1])
        fault, may_pass = _attempt(request)
        if not fault or not may_pass:
            return fault
    return f"{fault}, {len(waits_s) + 1} times"


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: a POST would arrive as a GET without the report, and count as taken."""

    def redirect_request(self, *_: Any) -> None:
        """There is nothing to ask instead, so the answer itself is what came."""


def _attempt(request: urllib.request.Request) -> tuple[str, bool]:
    """Why one attempt failed, empty where it did not, and whether another one may go better.

    The address is not told, which may be a secret.
    """
    try:
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=TIMEOUT_S) as answer:
            answer.read(1024)
    except urllib.error.HTTPError as error:
        error.close()
        return f"the webhook answers {error.code} {error.reason}", error.code in MAY_PASS or error.code >= 500
    except urllib.error.URLError as error:
        return f"the webhook cannot be reached: {error.reason}", True
    except (OSError, http.client.HTTPException) as error:
        return f"the webhook cannot be reached: {type(error).__name__}: {error}", True
    return "", False

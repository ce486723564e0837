"""A minimal client of MLflow's REST API for models, faster than importing MLflow.

Source: https://mlflow.org/docs/latest/api_reference/rest-api.html. MLflow's own client supports more (cloud tokens,
certificates, retries); if a request fails here, the caller falls back to that client.
"""

from __future__ import annotations

import base64
import json
import os
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlencode, urlsplit

PATIENCE_S = 30.0


class Server:
    """An MLflow server, with the user and password or the token that the environment has for it.

    All methods raise OSError or ValueError if the server does not answer as expected.
    """

    def __init__(self, uri: str) -> None:
        self._uri = uri.rstrip("/")

    def pages(self, path: str, body: Mapping[str, Any], *, key: str) -> Iterator[Any]:
        """Yields the entries under `key` on all pages of a search that is sent as JSON."""
        token = None
        while True:
            page = self._ask(path, body={**body, **({"page_token": token} if token else {})})
            yield from page.get(key, ())
            token = page.get("next_page_token")
            if not token:
                return

    def get(self, path: str, **query: Any) -> Any:
        """Returns the answer to a query."""
        return self._ask(f"{path}?{urlencode(query)}")

    def _ask(self, path: str, *, body: Mapping[str, Any] | None = None) -> Any:
        parts = urlsplit(self._uri)
        # urllib does not find an IPv6 address among the exceptions from proxies.
        if parts.scheme not in ("http", "https") or parts.username or ":" in (parts.hostname or ""):
            raise ValueError(f"{parts.scheme} is asked by MLflow's client")
        request = urllib.request.Request(
            f"{self._uri}/api/2.0/mlflow/{path}", data=None if body is None else json.dumps(body).encode()
        )
        request.add_header("Content-Type", "application/json")
        if (said := _authorization()) is not None:
            request.add_header("Authorization", said)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return json.loads(answer.read())


def _authorization() -> str | None:
    """Returns the Authorization header that MLflow's client would derive from the environment, or None."""
    if username := os.environ.get("MLFLOW_TRACKING_USERNAME"):
        pair = f"{username}:{os.environ.get('MLFLOW_TRACKING_PASSWORD', '')}"
        return f"Basic {base64.b64encode(pair.encode()).decode()}"
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    return f"Bearer {token}" if token else None

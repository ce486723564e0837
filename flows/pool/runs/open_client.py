"""A client of Prefect that stays open, for threads that ask Prefect every few seconds.

A new client builds a new TLS context and opens a new connection, which takes much more time than most requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prefect.client.orchestration import SyncPrefectClient, get_client


class OpenClient:
    """Keeps one client between its uses. All uses are in one thread."""

    def __init__(self) -> None:
        self._client: SyncPrefectClient | None = None

    @contextmanager
    def use(self) -> Iterator[SyncPrefectClient]:
        """Yields the client. After an error the client is closed, and the next use makes a new one."""
        if self._client is None:
            self._client = get_client(sync_client=True).__enter__()
        try:
            yield self._client
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the client, if it is open."""
        if self._client is not None:
            client, self._client = self._client, None
            client.__exit__(None, None, None)

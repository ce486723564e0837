"""JSON lines over a socket: how a worker and whoever asked for it talk."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
from typing import Any


class ChannelClosed(ConnectionError):
    """The other end is gone."""


class Channel:
    """One end of a stream of JSON objects, a line each. Sending is thread-safe; receiving is one reader's."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._pending = b""
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """The socket's file descriptor, for selectors."""
        return self._socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Sends one object. Raises ChannelClosed where nobody listens any more."""
        data = json.dumps(message).encode() + b"\n"
        try:
            with self._sending:
                self._socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosed("the other end of the channel is gone") from error

    def receive(self) -> dict[str, Any]:
        """The next object, waiting for it. Raises ChannelClosed at the end of the stream."""
        while (message := self._take()) is None:
            self._fill()
        return message

    def poll(self) -> dict[str, Any] | None:
        """The next object if one has arrived whole, else None, without waiting."""
        while (message := self._take()) is None and select.select([self._socket], [], [], 0)[0]:
            self._fill()
        return message

    def hang_up(self) -> None:
        """Says that nothing more will be sent, which ends a worker at the other end; what it says can still be read."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Closes this end."""
        self._socket.close()

    def _take(self) -> dict[str, Any] | None:
        line, newline, rest = self._pending.partition(b"\n")
        if not newline:
            return None
        self._pending = rest
        message: dict[str, Any] = json.loads(line)
        return message

    def _fill(self) -> None:
        try:
            data = self._socket.recv(65536)
        except ConnectionResetError as error:
            raise ChannelClosed("the other end of the channel is gone") from error
        if not data:
            raise ChannelClosed("the other end of the channel closed it")
        self._pending += data

"""Channel between a worker process and the process that requested it: JSON lines over a socket."""

import contextlib
import json
import os
import select
import selectors
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ringmaster.errors import ChannelClosed

TELL_S = 1.0  # timeout of sending a process's exit status, where the channel is full
HANG_UP = select.POLLRDHUP | select.POLLHUP | select.POLLERR  # poll's events when the other end is closed or hung up


class Channel:
    """One end of a stream of JSON objects, one a line. Sending is thread-safe; only one thread may receive."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._pending = b""
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """Returns the socket's file descriptor, for selectors."""
        return self._socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Sends one object. Raises ChannelClosed where the other end is closed, or this one, by another thread."""
        data = json.dumps(message).encode() + b"\n"
        try:
            with self._sending:
                self._socket.sendall(data)
        except OSError as error:
            if self.fileno() >= 0 and not isinstance(error, BrokenPipeError | ConnectionResetError):
                raise
            raise ChannelClosed("an end of the channel is closed") from error

    def receive(self) -> dict[str, Any]:
        """Returns the next object, and waits for it. Raises ChannelClosed at the end of the stream."""
        while (message := self._take()) is None:
            self._fill()
        return message

    def poll(self) -> dict[str, Any] | None:
        """Returns the next object if it has arrived completely, else None, without waiting."""
        while (message := self._take()) is None and select.select([self._socket], [], [], 0)[0]:
            self._fill()
        return message

    def send_descriptors(self, descriptors: Sequence[int]) -> None:
        """Sends open files to a process that waits for them in `receive_descriptors`."""
        socket.send_fds(self._socket, [b"\n"], descriptors)

    def receive_descriptors(self, number: int) -> list[int]:
        """Returns the open files that the other end sends as its next message. Raises ChannelClosed without them."""
        _, descriptors, _, _ = socket.recv_fds(self._socket, 1, number)
        if len(descriptors) != number:
            raise ChannelClosed("the other end of the channel closed it")
        return descriptors

    def hang_up(self) -> None:
        """Closes the sending direction, which ends a worker at the other end; its messages can still be received."""
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


@contextlib.contextmanager
def address_of(path: Path) -> Iterator[str]:
    """Yields the address of a socket: it has at most 107 characters, and a temporary folder's path may have more."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


@contextlib.contextmanager
def woken_by(*sources: Any) -> Iterator[Callable[[], object]]:
    """Yields a function that waits until one of some sources is readable, or a signal has arrived.

    Which one it was is not said: the waiting code checks all its sources each time.
    """
    wake, writer = os.pipe()
    for end in (wake, writer):
        os.set_blocking(end, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def wait() -> None:
        selector.select()
        with contextlib.suppress(BlockingIOError):
            os.read(wake, 4096)

    with selectors.DefaultSelector() as selector:
        for source in (wake, *sources):
            selector.register(source, selectors.EVENT_READ)
        try:
            yield wait
        finally:
            signal.set_wakeup_fd(before)
            os.close(wake)
            os.close(writer)

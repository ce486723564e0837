"""Ports for the tests' servers, which are chosen first and listened on later, and again after a restart."""

import random
import socket

PORTS = range(10_000, 20_000)
"""Below those that Linux gives to connections: in between nobody's connection takes one, and a client that tries again
and again while a server is down never reaches itself. And below those at which gangs over several nodes meet.
"""
MOST_DRAWS = 1000


def free_port(address: str = "127.0.0.1", *, but: int | None = None) -> int:
    """A port on which nobody listens; but: not that one, which is to be listened on later too."""
    for port in random.SystemRandom().choices(PORTS, k=MOST_DRAWS):
        if port == but:
            continue
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind((address, port))
            except OSError:
                continue
            return port
    raise OSError(f"no port of {address} is free in {PORTS}")

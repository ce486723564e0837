"""Ports for the tests' servers. They are chosen before a server listens on them, and again after it restarts."""

import random
import socket
from collections.abc import Collection

PORTS = range(10_000, 20_000)
"""These ports are below those that Linux gives to outgoing connections. So no connection takes one while a server is
down, and a client that retries never connects to itself. They are also below those at which gangs over several nodes
meet.
"""
MAX_DRAWS = 1000


def free_port(address: str = "127.0.0.1", *, but: Collection[int] = ()) -> int:
    """A port on which nobody listens. but: ports to leave out, as they will be used later."""
    for port in random.SystemRandom().choices(PORTS, k=MAX_DRAWS):
        if port in but:
            continue
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind((address, port))
            except OSError:
                continue
            return port
    raise OSError(f"no port of {address} is free in {PORTS}")


def free_ports(number: int, address: str = "127.0.0.1") -> list[int]:
    """Different ports on which nobody listens."""
    ports: list[int] = []
    while len(ports) < number:
        ports.append(free_port(address, but=ports))
    return ports

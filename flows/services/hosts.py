"""Host names under which a machine's servers may be requested, and checks of listening addresses."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

import psutil

ALLOWED_HOSTS = "RINGMASTER_ALLOWED_HOSTS"
"""Environment variable with further host names of the servers, separated by commas, such as that of a reverse proxy."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach a server that listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_wildcard(host: str) -> bool:
    """Returns whether `host` stands for all addresses of this machine."""
    return host in ("0.0.0.0", "::")


def in_url(host: str) -> str:
    """Returns the host as it is written in a URL: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def hosts_of(text: str) -> tuple[str, ...]:
    """Returns the host names in `text`, which are separated by commas, without brackets."""
    return tuple(name.strip().strip("[]") for name in text.split(",") if name.strip())


def names_of(host: str, *, further: Sequence[str] = ()) -> tuple[str, ...]:
    """Returns the names under which a server that listens on `host` may be requested, without ports and brackets."""
    own = _names_of_this_machine() if is_wildcard(host) else (host,)
    return tuple(dict.fromkeys([*LOOPBACK, *own, *further]))


def _names_of_this_machine() -> tuple[str, ...]:
    addresses = [address for each in psutil.net_if_addrs().values() for address in each]
    numbers = [a.address.partition("%")[0] for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6)]
    return (socket.gethostname(), socket.getfqdn(), *numbers)

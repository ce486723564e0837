"""By which names the servers of a machine are asked for, and which of its addresses others cannot reach."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

import psutil

ALLOWED_HOSTS = "RINGMASTER_ALLOWED_HOSTS"
"""Further names, with commas between them, by which the servers may be asked for: that of a reverse proxy, say."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine reaches what listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_wildcard(host: str) -> bool:
    """Whether it means all addresses of this machine."""
    return host in ("0.0.0.0", "::")


def in_url(host: str) -> str:
    """As it stands in a URL: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def hosts_of(text: str) -> tuple[str, ...]:
    """The names that `text` says, with commas between them; without brackets."""
    return tuple(name.strip().strip("[]") for name in text.split(",") if name.strip())


def names_of(host: str, *, further: Sequence[str] = ()) -> tuple[str, ...]:
    """The names by which a server that listens on `host` may be asked for, without ports and brackets."""
    own = _names_of_this_machine() if is_wildcard(host) else (host,)
    return tuple(dict.fromkeys([*LOOPBACK, *own, *further]))


def _names_of_this_machine() -> tuple[str, ...]:
    addresses = [address for each in psutil.net_if_addrs().values() for address in each]
    numbers = [a.address.partition("%")[0] for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6)]
    return (socket.gethostname(), socket.getfqdn(), *numbers)

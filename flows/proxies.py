"""Proxies of the environment: what runs on this machine or belongs to the pool is reached without them.

HTTP_PROXY and its relatives are meant for the internet. httpx (Prefect, Hugging Face), requests (MLflow), urllib and
websockets apply them to every host, loopback included, that NO_PROXY does not name. httpx also refuses to work at all
where one value of these variables is of a form that it does not know, even if the proxy would not be used.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import re
from collections.abc import Iterable, Iterator, MutableMapping
from urllib.parse import urlsplit

from ringmaster.flows.output import report_faults

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
EXCEPTIONS = ("NO_PROXY", "no_proxy")
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
EVERY_HOST = "*"
_HOST = re.compile(r"\*?\.?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?(:[0-9]{1,5})?")


def report_bypass() -> None:
    """Exempts loopback from the proxies, and reports which of them were removed."""
    if removed := bypass_proxies():
        report_faults(removed)


def bypass_proxies(hosts: Iterable[str] = (), *, environment: MutableMapping[str, str] = os.environ) -> list[str]:
    """Exempts loopback and `hosts` from the proxies, for this process and all that it starts.

    The exceptions that the user has named are kept, but for those that no client can read. Proxies that httpx does not
    know are removed from the environment, as no client of httpx would work at all.

    Returns what was removed, a message each.
    """
    named = [name.strip() for variable in EXCEPTIONS for name in environment.get(variable, "").split(",")]
    exempt = dict.fromkeys(filter(None, map(_readable, [*named, *LOOPBACK_HOSTS, *hosts])))
    # urllib knows the asterisk only if it is alone.
    environment.update(dict.fromkeys(EXCEPTIONS, EVERY_HOST if EVERY_HOST in exempt else ",".join(exempt)))
    return list(_remove_unusable(environment))


def _readable(host: str) -> str | None:
    """Returns an exception as all clients read it, or None if that is impossible."""
    host = host.removeprefix("[").removesuffix("]")
    if host == EVERY_HOST or _HOST.fullmatch(host):
        return host
    address, _, prefix = host.partition("/")
    try:
        version = ipaddress.ip_address(address).version
    except ValueError:
        return None
    # httpx takes the length of an IPv6 network's prefix for a port.
    return host if not prefix or (version == 4 and prefix.isdecimal()) else None


def _remove_unusable(environment: MutableMapping[str, str]) -> Iterator[str]:
    has_socks = importlib.util.find_spec("socksio") is not None
    schemes = ("http", "https", *(("socks5", "socks5h") if has_socks else ()))
    for variable in (spelling for name in PROXIES for spelling in (name, name.lower())):
        if fault := _fault(environment.get(variable, ""), schemes=schemes):
            del environment[variable]
            # The value may hold a password.
            yield f"{variable} is ignored: {fault}. To fix: set it to a proxy of {' or '.join(schemes)}, or unset it"


def _fault(proxy: str, *, schemes: Iterable[str]) -> str | None:
    """Returns why httpx cannot use a proxy; None if it can, or if there is none."""
    if not proxy:
        return None
    try:
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        host, _ = parts.hostname, parts.port
    except ValueError:
        return "its value is not a valid address of a proxy"
    if not (host and proxy.isascii() and proxy.isprintable() and " " not in proxy):
        return "its value is not a valid address of a proxy"
    if parts.scheme not in schemes:
        return f"a proxy of {parts.scheme} cannot be used"
    return None

"""The environment of a process: permissions of the files that it writes, and proxies.

What runs on this machine or belongs to the pool is reached without proxies. Files are for the owner alone or, with
RINGMASTER_UMASK, for the users of a group too.

HTTP_PROXY and its relatives are meant for the internet. httpx (Prefect, Hugging Face), requests (MLflow), urllib and
websockets apply them to every host, loopback included, that NO_PROXY does not name. httpx also refuses to work at all
where one value of these variables is of a form that it does not know, even if the proxy would not be used.
"""

import importlib.util
import ipaddress
import os
import re
import stat
import urllib.request
from collections.abc import Iterable, Iterator, MutableMapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ringmaster.errors import InputError
from ringmaster.flows.output import error_console, report_faults

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
EXCEPTIONS = ("NO_PROXY", "no_proxy")
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
EVERY_HOST = "*"
_HOST = re.compile(r"\*?\.?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?(:[0-9]{1,5})?")


_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def open_directly(request: urllib.request.Request | str, *, timeout_s: float) -> Any:
    """Opens the URL of a server of ours without any proxy: urllib does not find the exception of an IPv6 address."""
    return _direct.open(request, timeout=timeout_s)


def report_bypass() -> None:
    """Exempts loopback from the proxies, and tells people which of them were removed."""
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
    # urllib knows the asterisk only if it stands alone.
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


UMASK = "RINGMASTER_UMASK"
"""Environment variable for the umask, in octal: 077 by default, 007 for storage that the users of a group share."""

OWNER_ALONE = 0o077
# Files that mark a folder as a home. RINGMASTER_HOME may name another folder, such as /tmp, which stays as it is.
MARKS = ("batches", "cache", "machines", "mlflow.db", "nodes", "pool", "prefect", "tensors")


def keep_to_owner(home: Path) -> None:
    """Sets the umask of this process and its children, and closes the home to other users.

    Raises InputError if RINGMASTER_UMASK is no umask.
    """
    set_umask()
    if home.is_dir() and home.stat().st_uid == os.geteuid() and _is_home(home):
        _close(home)


def set_umask() -> None:
    """Sets the umask of this process and its children. Raises InputError if RINGMASTER_UMASK is no umask."""
    os.umask(_umask())


def _close(home: Path) -> None:
    before = stat.S_IMODE(home.stat().st_mode)
    wanted = before & ~_umask()
    if os.environ.get(UMASK):  # a group may get access that it lacked before
        wanted |= 0o777 & ~_umask()
    if wanted == before:
        return
    home.chmod(wanted)
    who = "only you" if not wanted & 0o077 else f"only who {UMASK} lets in"
    error_console().print(
        f"{home}: {who} may look into it from now on ({wanted:04o}, was {before:04o})", soft_wrap=True
    )


def _is_home(folder: Path) -> bool:
    return not folder.stat().st_mode & stat.S_ISVTX and (
        any((folder / name).exists() for name in MARKS) or not any(folder.iterdir())
    )


def _umask() -> int:
    value = os.environ.get(UMASK, "")
    if not value:
        return OWNER_ALONE
    if not re.fullmatch("0?0[0-7]{2}", value):
        raise InputError(
            [f"{UMASK} {value!r} is not a valid umask. To fix: 077 for the owner alone, 007 to let the group write"]
        )
    return int(value, 8)

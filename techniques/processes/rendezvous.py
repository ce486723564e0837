"""Rendezvous of a gang's ranks on several machines: a store that rank 0 serves, and the network interface to it."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import TCPStore  # the source of torch.distributed's, with types

SIOCGIFADDR = 0x8915  # netdevice(7)
LOOPBACK = "lo"


def meet(meeting: str, rank: int, *, num_ranks: int, timeout: timedelta) -> TCPStore:
    """Returns the store at `meeting`, "host:port"; rank 0 serves it at that address of its machine only.

    Gloo and NCCL are set to use the network interface that leads to it, unless the environment names another one.
    Raises OSError where rank 0 cannot listen there, ValueError where no interface leads there.
    """
    host, port = split_address(meeting)
    _talk_by(interface_towards(host, port))
    listener = None
    if rank == 0:
        # By default the store would listen on all addresses, and accept connections from any other machine.
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family).detach()
    return TCPStore(
        host,
        port,
        num_ranks,
        is_master=rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener,
    )


def split_address(address: str) -> tuple[str, int]:
    """Returns host and port of "host:port" or "[host]:port"."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def interface_towards(host: str, port: int) -> str:
    """Returns the name of the network interface by which this machine reaches a host."""
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # sends nothing; the kernel only selects the source address
        mine = probe.getsockname()[0]
    for _, name in socket.if_nameindex():
        if mine in _addresses(name):
            return name
    raise ValueError(
        f"no network interface has the address {mine}, from which {host} is reached. To fix: name the one that leads "
        "there in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
    )


def _talk_by(interface: str) -> None:
    if os.environ.get("GLOO_SOCKET_IFNAME", LOOPBACK) == LOOPBACK:  # the fork server's default, for one machine
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def _addresses(interface: str) -> list[str]:
    """Returns the first IPv4 address and all IPv6 addresses of an interface."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
            found.append(socket.inet_ntoa(answer[20:24]))
        except OSError:  # no IPv4 address
            pass
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else ():
        digits, *_, name = line.split()
        if name == interface:
            found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found

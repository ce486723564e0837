"""The options of a node, read from a command line or a flow run's parameters; it does not import Prefect."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

from ringmaster.errors import InputError
from ringmaster.flows.settings import PoolAddress
from ringmaster.tasks.batch.field_types import NAME_REMEDY, is_name
from ringmaster.tasks.cluster import Cluster, Device, detect
from ringmaster.tasks.pool.node_agent import DRAIN_S


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """The options of a node.

    home: RINGMASTER_HOME of this machine.
    pool: address of the pool.
    name: name of the node.
    cluster: the devices that it serves.
    address: address for the other nodes; None for the address of this machine that reaches the pool.
    allocation: the id under which an engine lends the machine; empty for a machine of one's own.
    serves_flows: whether its worker runs flows too.
    drain_s: seconds for gangs to stop at a checkpoint when the worker ends.
    """

    home: Path
    pool: PoolAddress
    name: str
    cluster: Cluster
    address: str | None = None
    allocation: str = ""
    serves_flows: bool = False
    drain_s: float = DRAIN_S

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices that it serves, in their order."""
        return self.cluster.devices


def node_name(name: str | None) -> str:
    """Returns the name of this machine's node: the one that was asked for, else the machine's. Raises InputError."""
    name = name or platform.node() or "localhost"
    if not is_name(name):
        raise InputError([f"a node cannot be called {name!r}. To fix: {NAME_REMEDY}"])
    return name


def cluster_of(devices: str) -> Cluster:
    """Returns the devices of this machine that `--devices` names: auto, cpu:N, gpu:N or gpu:all. Raises InputError."""
    kind, colon, number = devices.partition(":")
    try:
        return detect({kind: int(number) if number.isdigit() else number} if colon else devices)
    except ValueError as error:
        raise InputError([f"--devices {devices}: {error}"]) from error

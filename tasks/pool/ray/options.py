"""The options of the engine `ray`, and what an actor is told of the node that it is to serve."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urlsplit

ADDRESS, DEVICES = "RINGMASTER_RAY_ADDRESS", "RINGMASTER_RAY_DEVICES"
"""Environment variables for the address of the Ray cluster, as `ray.init` takes it, and for the devices of a node."""

LOOPBACK_ALONE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's environment variable that, at 0, lets a cluster of one machine use 127.0.0.1 on Linux, too."""

DATABASE = "RINGMASTER_DATABASE"
PREFIX = "ray:"  # of allocations
LONGEST_WHY = 600  # characters
CAUSES = ("The actor is dead because", "RuntimeError:")
"""How the lines of Ray's messages begin that say why an actor has died."""

PASSED_ON = ("RINGMASTER_", "PREFECT_", "MLFLOW_", "HF_", "AWS_", "DO_NOT_TRACK", "PYTHONSAFEPATH", "PYTHONUNBUFFERED")
KEPT = ("RINGMASTER_RAY_", "RINGMASTER_ENGINE", "RINGMASTER_NODE", "RINGMASTER_ALLOCATION", "RINGMASTER_READY_FILE")
"""Prefixes of the variables that nodes get from the controller, and of those among them that are the controller's."""


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """What is asked of Ray.

    address: address of the Ray cluster, as `ray.init` takes it: "auto", or HOST:PORT.
    devices: the devices of a node that serve: auto, cpu:N, gpu:N or gpu:all.
    namespace: Ray's namespace of the actors, one a pool.
    """

    address: str
    devices: str
    namespace: str

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> Self:
        """Reads the options. Raises ValueError where `devices` cannot be understood."""
        devices = environment.get(DEVICES) or "auto"
        kind, _, number = devices.partition(":")
        is_known = devices in ("auto", "gpu:all") or (kind in ("cpu", "gpu") and number.isdigit() and int(number) > 0)
        if not is_known:
            raise ValueError(f"{DEVICES}={devices} names no devices. To fix: auto, cpu:N, gpu:N or gpu:all")
        namespace = namespace_of(environment.get(DATABASE, ""))
        return cls(address=environment.get(ADDRESS) or "auto", devices=devices, namespace=namespace)


@dataclass(frozen=True, kw_only=True)
class NodeOrder:
    """What an actor is told. It may hold passwords: Ray shows the arguments of actors nowhere, unlike runtime_env.

    allocation: the id under which the node registers.
    name: the node's name, which the machine's name precedes.
    devices: the devices that it serves.
    environment: environment variables of the node agent, besides those of the machine.
    """

    allocation: str
    name: str
    devices: str
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)


def namespace_of(database: str) -> str:
    """Returns Ray's namespace for the actors of one pool: several pools may use one Ray cluster."""
    parts = urlsplit(database)
    place = f"{parts.scheme}://{parts.hostname}:{parts.port}{parts.path}"
    return f"ringmaster-{hashlib.sha256(place.encode()).hexdigest()[:8]}"


def node_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of the controller by which a node reaches the pool, its data and its checkpoints."""
    return {
        name: value for name, value in environment.items() if name.startswith(PASSED_ON) and not name.startswith(KEPT)
    }


def resources(devices: str, nodes: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """Returns Ray's resources for one actor; None where they are unknown before a machine has joined the cluster.

    "auto" and "gpu:all" take all GPUs of the largest machine; "auto" all CPUs where no machine has a GPU.

    nodes: the nodes of the cluster, as `ray.nodes()` describes them.
    """
    kind, _, number = devices.partition(":")
    if number.isdigit():
        return {"CPU": float(number)} if kind == "cpu" else {"GPU": float(number), "CPU": 0.0}
    result = [node["Resources"] for node in nodes if node["Alive"]]
    num_gpus = max((each.get("GPU", 0.0) for each in result), default=0.0)
    if num_gpus:
        return {"GPU": num_gpus, "CPU": 0.0}
    num_cpus = max((each.get("CPU", 0.0) for each in result), default=0.0)
    return {"CPU": num_cpus} if kind == "auto" and num_cpus else None


def cause(message: str) -> str:
    """Returns the lines of a message of Ray's from which on it says why an actor has died."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    first = next((n for n, line in enumerate(lines) if line.startswith(CAUSES)), 0)
    return " ".join(lines[first:])[:LONGEST_WHY]

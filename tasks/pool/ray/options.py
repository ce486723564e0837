"""The options of the engine `ray`, and what an actor is told of the node that it is to serve."""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from ringmaster.extras import missing_extra, require_extra
from ringmaster.tasks.pool.engines import EngineOptions, Service, option
from ringmaster.tasks.pool.ray import ADDRESS, DEVICES, LOOPBACK_ALONE

if TYPE_CHECKING:
    from ringmaster.tasks.execution.engine import Engine, EngineContext

HOST = "127.0.0.1"  # of a cluster of this machine alone
LEAVE_S = 60.0  # for its nodes to leave in order
CONNECT_S = 5.0
DATABASE = "RINGMASTER_DATABASE"
PREFIX = "ray:"  # of allocations
LONGEST_WHY = 600  # characters
CAUSES = ("The actor is dead because", "RuntimeError:")
"""How the lines of Ray's messages begin that say why an actor has died."""

PASSED_ON = ("RINGMASTER_", "PREFECT_", "MLFLOW_", "HF_", "AWS_", "DO_NOT_TRACK", "PYTHONSAFEPATH", "PYTHONUNBUFFERED")
KEPT = ("RINGMASTER_RAY_", "RINGMASTER_ENGINE", "RINGMASTER_NODE", "RINGMASTER_ALLOCATION", "RINGMASTER_READY_FILE")
"""Prefixes of the variables that nodes get from the controller, and of those among them that are the controller's."""


REMEDY = (
    "To fix: give the address of the cluster's head, as in --address 10.0.0.5:6379; add this machine to the cluster by "
    "`ray start --address=HEAD:6379 --num-cpus=0 --num-gpus=0`; and set RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH where "
    "the cluster asks for a token"
)


@dataclass(frozen=True, kw_only=True)
class RayOptions(EngineOptions):
    """What is asked of Ray.

    address: address of the Ray cluster, as `ray.init` takes it: "auto", or HOST:PORT; empty for a cluster of this
        machine alone, which the pool starts.
    """

    name: str = "ray"
    address: str = option(
        "",
        "Address of a Ray cluster, for example 10.0.0.5:6379; default: a new one on this machine alone.",
        flag="--address",
    )
    port: int = option(6379, "Port of a Ray cluster of this machine alone.", flag="--port-ray", least=1, most=65535)

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> Self:
        """Reads the options of a controller. Raises ValueError where `devices` cannot be understood."""
        result = cls(devices=environment.get(DEVICES) or "auto", address=environment.get(ADDRESS) or "auto")
        kind, _, number = result.devices.partition(":")
        is_number = kind in ("cpu", "gpu") and number.isdigit() and int(number) > 0
        if not (result.devices in ("auto", "gpu:all") or is_number):
            raise ValueError(f"{DEVICES}={result.devices} names no devices. To fix: auto, cpu:N, gpu:N or gpu:all")
        return result

    @classmethod
    def build(cls, context: EngineContext) -> Engine:
        """Builds the engine; see `EngineOptions`. Raises ValueError where Ray is not installed, too."""
        cls.of_environment(os.environ)
        require_extra("ray", feature="engine 'ray'")
        from ringmaster.tasks.pool.ray.ray_engine import LOG, BrokerConnection, RayActors
        from ringmaster.tasks.pool.work_pool import build_engine

        broker = BrokerConnection(log=context.folder / LOG)
        actors = RayActors(broker)
        return build_engine(context, lambda _: actors, name="ray", node_runs=actors, on_close=broker.close)

    @property
    def is_on_this_machine(self) -> bool:
        """Whether the pool starts the cluster."""
        return not self.address

    def environment(self, home: Path) -> dict[str, str]:
        """Returns the variables by which a process uses the cluster; see `EngineOptions`."""
        cluster = head_environment(home, port=self.port) if self.is_on_this_machine else {ADDRESS: self.address}
        return {DEVICES: self.devices, **cluster}

    def services(self, home: Path) -> Sequence[Service]:
        """Returns the head of the pool's own cluster."""
        if not self.is_on_this_machine:
            return ()
        command = (sys.executable, "-m", "ringmaster.tasks.pool.ray.head", "--port", str(self.port))
        return [
            Service(
                name="ray",
                command=(*command, "--home", str(home)),
                says_ready=True,
                group=False,
                grace_s=LEAVE_S + 60,
            )
        ]

    def ports(self) -> Mapping[str, int]:
        """Returns the port of the pool's own cluster."""
        return {"ray": self.port} if self.is_on_this_machine else {}

    def own_faults(self) -> Sequence[str]:
        """Returns the fault of a missing package."""
        fault = missing_extra("ray", feature="--engine ray")
        return [fault] if fault else []

    def preflight(self, home: Path) -> Sequence[str]:
        """Returns why an existing cluster cannot lend nodes; see `EngineOptions`."""
        if self.is_on_this_machine:
            return []
        from ringmaster.tasks.pool.ray import ray_engine

        environment = self.environment(home)
        try:
            self.of_environment(environment)
        except ValueError as error:
            return [f"--node-devices: {error}"]
        fault = port_fault(self.address) or ray_engine.fault(environment, log=home / ray_engine.LOG)
        return [f"--address {self.address}: {fault}. {REMEDY}"] if fault else []


def port_fault(address: str) -> str | None:
    """Returns why nothing listens at HOST:PORT, which is found sooner than Ray finds it; None for other addresses."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return None
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError) as error:
        return f"nothing answers there: {error}"
    return None


def token_file(home: Path) -> Path:
    """Returns the file with the token of a home's own cluster."""
    return home / "pool" / "ray-token"


def head_environment(home: Path, *, port: int) -> dict[str, str]:
    """Returns the environment variables of whoever uses a home's own cluster."""
    return {
        ADDRESS: f"{HOST}:{port}",
        LOOPBACK_ALONE: "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file(home)),
    }


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

"""The engine `ray`: its options, the description of its node that an actor gets, and the pool's actors.

A process of its own, the broker, talks to Ray; this module never imports it. It is light, as `engines` is.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from ringmaster.codec import from_json
from ringmaster.errors import EngineUnavailable
from ringmaster.extras import missing_extra, require_extra
from ringmaster.features.ray import ADDRESS, DEVICES, LOOPBACK_ALONE
from ringmaster.tasks.pool.engines import EngineOptions, Service, option
from ringmaster.tasks.pool.provider import Allocation, AllocationStatus
from ringmaster.techniques.processes.channel import Channel

if TYPE_CHECKING:
    from ringmaster.tasks.execution.engine import Engine, EngineContext, NodeRun

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "ringmaster.features.ray.broker")
ANSWER_S = 90.0  # Ray tries for a minute to reach its head

LOG = "ray.log"
LIVING = (AllocationStatus.PENDING, AllocationStatus.RUNNING, AllocationStatus.LEAVING)
PREFLIGHT_ANSWER_S = 30.0  # Ray itself tries for minutes to reach a head that is not there

HOST = "127.0.0.1"  # of a cluster of this machine alone
LEAVE_S = 60.0  # for its nodes to leave in order
CONNECT_S = 5.0
DATABASE = "RINGMASTER_DATABASE"
PREFIX = "ray:"  # of allocations
LONGEST_WHY = 600  # characters
CAUSES = ("The actor is dead because", "RuntimeError:")
"""How the lines of Ray's messages begin that have the cause of an actor's death."""

PASSED_ON = ("RINGMASTER_", "PREFECT_", "MLFLOW_", "HF_", "AWS_", "DO_NOT_TRACK", "PYTHONSAFEPATH", "PYTHONUNBUFFERED")
KEPT = ("RINGMASTER_RAY_", "RINGMASTER_ENGINE", "RINGMASTER_NODE", "RINGMASTER_ALLOCATION", "RINGMASTER_READY_FILE")
"""Prefixes of the variables that nodes get from the controller, and of those among them that are the controller's."""


REMEDY = (
    "To fix: give the address of the cluster's head, as in --address 10.0.0.5:6379; add this machine to the cluster by "
    "`ray start --address=HEAD:6379 --num-cpus=0 --num-gpus=0`; and set RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH where "
    "the cluster requires a token"
)


@dataclass(frozen=True, kw_only=True)
class RayOptions(EngineOptions):
    """The resource request of a node.

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
        from ringmaster.tasks.pool.work_pool import work_pool_engine

        broker = BrokerConnection(log=context.folder / LOG)
        actors = RayActors(broker)
        return work_pool_engine(context, lambda _: actors, name="ray", node_runs=actors, on_close=broker.close)

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
        command = (sys.executable, "-m", "ringmaster.features.ray.head", "--port", str(self.port))
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

    def queried_faults(self, home: Path) -> Sequence[str]:
        """Returns why an existing cluster cannot lend nodes; see `EngineOptions`."""
        if self.is_on_this_machine:
            return []
        environment = self.environment(home)
        try:
            self.of_environment(environment)
        except ValueError as error:
            return [f"--node-devices: {error}"]
        fault = port_fault(self.address) or broker_fault(environment, log=home / LOG)
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
    """The configuration of an actor. It may hold passwords: Ray shows the arguments of actors nowhere, unlike
    runtime_env.

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
    """Returns the lines of a message of Ray's from the cause of an actor's death on."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    first = next((n for n, line in enumerate(lines) if line.startswith(CAUSES)), 0)
    return " ".join(lines[first:])[:LONGEST_WHY]


class BrokerConnection:
    """Sends requests to the broker, one at a time, and starts it where it does not run.

    log: the file for its output, as Ray writes much of its own.
    command: starts the broker; its stdin is a socket.
    environment: the environment variables with the resource request and the address of Ray.
    answer_s: how long an answer is waited for.
    """

    def __init__(
        self,
        *,
        log: Path,
        command: Sequence[str] = COMMAND,
        environment: Mapping[str, str] = os.environ,
        answer_s: float = ANSWER_S,
    ) -> None:
        self._log, self._command = log, command
        self._environment, self._answer_s = environment, answer_s
        self._lock, self._asking = threading.Lock(), threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._is_closed = False

    def ask(self, call: str, *arguments: str) -> Any:
        """Returns the result of a request. Raises EngineUnavailable where Ray or the broker does not answer."""
        with self._asking:
            channel = self._connect()
            try:
                channel.send({"call": call, "arguments": arguments})
                answer = channel.receive()
            except OSError as error:
                self._hang_up()
                raise EngineUnavailable(f"Ray does not answer: {error}; see {self._log}") from error
        if "error" in answer:
            raise EngineUnavailable(answer["error"])
        return answer["result"]

    def close(self) -> None:
        """Ends the broker, and with it a request that waits."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()
        with self._asking:
            self._hang_up()

    def _connect(self) -> Channel:
        with self._lock:
            if self._is_closed:
                raise EngineUnavailable("this process is ending")
            if self._channel is None:
                ours, theirs = socket.socketpair()
                ours.settimeout(self._answer_s)
                environment = broker_environment(self._environment)
                with theirs, self._log.open("ab") as log:
                    self._process = subprocess.Popen(
                        self._command, stdin=theirs.fileno(), stdout=log, stderr=log, env=environment
                    )
                self._channel = Channel(ours)
            return self._channel

    def _hang_up(self) -> None:
        with self._lock:
            if self._channel is not None and self._process is not None:
                self._channel.close()
                self._process.kill()
                self._process.wait()
            self._channel = self._process = None


def broker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of the broker.

    By default Ray takes 127.0.0.1 for this machine's address in the network, where a cluster on loopback is not found.
    """
    is_loopback = environment.get(ADDRESS, "").startswith("127.0.0.1:")
    return {**environment, **({LOOPBACK_ALONE: "0"} if is_loopback else {})}


class RayActors:
    """The actors of a pool on a Ray cluster, each of which serves a node; implements `NodeRuns` and `Machines`.

    An actor is its own allocation. All methods but `live`, `allocation_of` and `why_ended` raise EngineUnavailable.
    """

    def __init__(self, broker: BrokerConnection) -> None:
        self._broker = broker
        self._seen: Mapping[str, Allocation] = {}

    def poll(self, runs: Sequence[NodeRun]) -> Mapping[str, Allocation]:
        """Returns the states of the actors in Ray: all that live, and those that ended lately."""
        result = [from_json(Allocation, each) for each in self._broker.ask("poll")]
        before, self._seen = self._seen, {each.id: each for each in result}
        for each in result:
            if each != before.get(each.id):
                logger.info("%s is %s%s", each.id, each.status, f": {each.why}" if each.why else "")
        return self._seen

    def live(self) -> Sequence[NodeRun]:
        """Returns the actors that lived at the last look."""
        from ringmaster.tasks.execution.engine import NodeRun

        return [
            NodeRun(
                id=each.id,
                infrastructure=each.id,
                is_begun=each.status != AllocationStatus.PENDING,
                is_ending=each.status == AllocationStatus.LEAVING,
            )
            for each in self._seen.values()
            if each.status in LIVING
        ]

    def allocation_of(self, run: NodeRun) -> str:
        """Returns the id of the actor's allocation."""
        return run.id

    def start(self) -> str:
        """Starts one more actor, for which Ray waits until it has a machine."""
        id: str = self._broker.ask("start")
        return id

    def end(self, allocation: str) -> None:
        """Ends an actor in order."""
        self._broker.ask("end", allocation)

    cancel = end  # of an actor whose node does not serve yet

    def why_ended(self, id: str) -> str:
        """Returns nothing: the actor's allocation has the reason."""
        return ""


def broker_fault(environment: Mapping[str, str], *, log: Path) -> str | None:
    """Returns why Ray does not answer; None if it does.

    environment: the variables of the controller that define its requests to Ray.
    log: the file for Ray's own output.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    broker = BrokerConnection(log=log, environment={**os.environ, **environment}, answer_s=PREFLIGHT_ANSWER_S)
    with closing(broker):
        try:
            broker.ask("poll")
        except EngineUnavailable as error:
            return str(error).rstrip(".")
    return None

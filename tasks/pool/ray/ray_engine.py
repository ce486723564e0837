"""The engine `ray`: nodes of a pool on the machines of a Ray cluster."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from ringmaster.codec import from_json
from ringmaster.errors import EngineUnavailable
from ringmaster.extras import require_extra
from ringmaster.tasks.execution.engine import EngineContext, NodeRun
from ringmaster.tasks.pool.pool_engine import PoolEngine, pool_engine
from ringmaster.tasks.pool.provider import Allocation, AllocationStatus
from ringmaster.tasks.pool.ray.options import ADDRESS, LOOPBACK_ALONE, RayOptions
from ringmaster.tasks.pool.work_pool import WorkPoolProvider
from ringmaster.techniques.processes.channel import Channel

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "ringmaster.tasks.pool.ray.broker")
ANSWER_S = 90.0  # Ray tries for a minute to reach its head

LOG = "ray.log"
LIVING = (AllocationStatus.PENDING, AllocationStatus.RUNNING, AllocationStatus.LEAVING)
CONNECT_S = 5.0
PREFLIGHT_ANSWER_S = 30.0  # Ray itself tries for minutes to reach a head that is not there
REMEDY = (
    "To fix: give the address of the cluster's head, as in --address 10.0.0.5:6379; add this machine to the cluster by "
    "`ray start --address=HEAD:6379 --num-cpus=0 --num-gpus=0`; and set RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH where "
    "the cluster asks for a token"
)


class BrokerConnection:
    """Sends requests to the broker, one at a time, and starts it where it does not run.

    log: the file for its output, as Ray writes much of its own.
    command: starts the broker; its stdin is a socket.
    environment: the environment variables that say what is asked of Ray, and by which Ray is reached.
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
                raise EngineUnavailable(f"Ray does not answer: {error}; {self._log} says more") from error
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
    is_loopback = RayOptions.of_environment(environment).address.startswith("127.0.0.1:")
    return {**environment, **({LOOPBACK_ALONE: "0"} if is_loopback else {})}


class RayActors:
    """The actors of a pool on a Ray cluster, each of which serves a node; implements `NodeRuns` and `Machines`.

    An actor is its own allocation. All methods but `live`, `allocation_of` and `why_ended` raise EngineUnavailable.
    """

    def __init__(self, broker: BrokerConnection) -> None:
        self._broker = broker
        self._seen: Mapping[str, Allocation] = {}

    def look(self, runs: Sequence[NodeRun]) -> Mapping[str, Allocation]:
        """Returns what Ray says of the actors: all that live, and those that ended lately."""
        result = [from_json(Allocation, each) for each in self._broker.ask("look")]
        before, self._seen = self._seen, {each.id: each for each in result}
        for each in result:
            if each != before.get(each.id):
                logger.info("%s is %s%s", each.id, each.status, f": {each.why}" if each.why else "")
        return self._seen

    def live(self) -> Sequence[NodeRun]:
        """Returns the actors that lived at the last look."""
        return [_as_run(each) for each in self._seen.values() if each.status in LIVING]

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

    def cancel(self, id: str) -> None:
        """Ends an actor whose node does not serve yet."""
        self._broker.ask("end", id)

    def why_ended(self, id: str) -> str:
        """Returns nothing: the actor's allocation says why."""
        return ""


class RayProvider(WorkPoolProvider):
    """Keeps as many actors alive as nodes are requested."""

    def __init__(self, broker: BrokerConnection, **options: Any) -> None:
        actors = RayActors(broker)
        super().__init__(node_runs=actors, machines=actors, **options)
        self._broker = broker

    def close(self) -> None:
        """Ends the thread, and the process that talks to Ray. Actors stay, for the next controller."""
        self._broker.close()
        super().close()


def _as_run(allocation: Allocation) -> NodeRun:
    return NodeRun(
        id=allocation.id,
        infrastructure=allocation.id,
        is_begun=allocation.status != AllocationStatus.PENDING,
        is_ending=allocation.status == AllocationStatus.LEAVING,
    )


def ray(context: EngineContext) -> PoolEngine:
    """Builds the engine whose nodes are on a Ray cluster.

    Raises ValueError outside of a pool, where Ray is not installed, and where the options cannot be understood.
    """
    RayOptions.of_environment(os.environ)
    require_extra("ray", feature="engine 'ray'")
    provider = RayProvider(BrokerConnection(log=context.folder / LOG), on_failure=context.on_failure)
    engine = pool_engine(context, name="ray", provider=provider)
    provider.begin()
    return engine


def faults(environment: Mapping[str, str], *, log: Path) -> Sequence[str]:
    """Returns why Ray cannot lend nodes; empty if it can.

    environment: the variables of the controller that say what it asks of Ray.
    log: the file for Ray's own output.
    """
    try:
        RayOptions.of_environment(environment)
    except ValueError as error:
        return [f"--node-devices: {error}"]
    address = environment[ADDRESS]
    if fault := _port_fault(address):
        return [fault]
    log.parent.mkdir(parents=True, exist_ok=True)
    broker = BrokerConnection(log=log, environment={**os.environ, **environment}, answer_s=PREFLIGHT_ANSWER_S)
    with closing(broker):
        try:
            broker.ask("look")
        except EngineUnavailable as error:
            return [f"--address {address}: {str(error).rstrip('.')}. {REMEDY}"]
    return []


def _port_fault(address: str) -> str | None:
    """Returns why nothing listens at HOST:PORT, which is found sooner than Ray finds it; None for other addresses."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return None
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError) as error:
        return f"--address {address}: nothing answers there: {error}. {REMEDY}"
    return None

"""The engine `ray`: nodes of a pool on the machines of a Ray cluster."""

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
from ringmaster.tasks.execution.engine import NodeRun
from ringmaster.tasks.pool.provider import Allocation, AllocationStatus
from ringmaster.tasks.pool.ray import ADDRESS, LOOPBACK_ALONE
from ringmaster.techniques.processes.channel import Channel

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "ringmaster.tasks.pool.ray.broker")
ANSWER_S = 90.0  # Ray tries for a minute to reach its head

LOG = "ray.log"
LIVING = (AllocationStatus.PENDING, AllocationStatus.RUNNING, AllocationStatus.LEAVING)
PREFLIGHT_ANSWER_S = 30.0  # Ray itself tries for minutes to reach a head that is not there


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
    is_loopback = environment.get(ADDRESS, "").startswith("127.0.0.1:")
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
        """Returns nothing: the actor's allocation says why."""
        return ""


def fault(environment: Mapping[str, str], *, log: Path) -> str | None:
    """Returns why Ray does not answer; None if it does.

    environment: the variables of the controller that say what it asks of Ray.
    log: the file for Ray's own output.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    broker = BrokerConnection(log=log, environment={**os.environ, **environment}, answer_s=PREFLIGHT_ANSWER_S)
    with closing(broker):
        try:
            broker.ask("look")
        except EngineUnavailable as error:
            return str(error).rstrip(".")
    return None

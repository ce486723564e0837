"""A controller's connection to the process that talks to Ray (`broker`), which is started again after it has ended."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ringmaster.tasks.pool.providers.provider import EngineAway
from ringmaster.tasks.pool.providers.ray.options import LOOPBACK_ALONE, RayOptions
from ringmaster.techniques.processes.channel import Channel

COMMAND = (sys.executable, "-P", "-m", "ringmaster.tasks.pool.providers.ray.broker")
ANSWER_S = 90.0  # Ray tries for a minute to reach its head


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
        """Returns the result of a request. Raises EngineAway where Ray or the broker does not answer."""
        with self._asking:
            channel = self._connect()
            try:
                channel.send({"call": call, "arguments": arguments})
                answer = channel.receive()
            except OSError as error:
                self._hang_up()
                raise EngineAway(f"Ray does not answer: {error}; {self._log} says more") from error
        if "error" in answer:
            raise EngineAway(answer["error"])
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
                raise EngineAway("this process is ending")
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

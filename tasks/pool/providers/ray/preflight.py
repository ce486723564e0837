"""Checks, before a pool starts, that the Ray cluster which is to lend its nodes answers."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from ringmaster.errors import EngineUnavailable
from ringmaster.tasks.pool.providers.ray.connection import BrokerConnection
from ringmaster.tasks.pool.providers.ray.options import ADDRESS, RayOptions

CONNECT_S = 5.0
ANSWER_S = 30.0  # Ray itself tries for minutes to reach a head that is not there

REMEDY = (
    "To fix: give the address of the cluster's head, as in --address 10.0.0.5:6379; add this machine to the cluster by "
    "`ray start --address=HEAD:6379 --num-cpus=0 --num-gpus=0`; and set RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH where "
    "the cluster asks for a token"
)


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
    broker = BrokerConnection(log=log, environment={**os.environ, **environment}, answer_s=ANSWER_S)
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

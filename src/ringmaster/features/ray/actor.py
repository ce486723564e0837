"""What runs on the machines of a Ray cluster: an actor for each node, and a check of what it has left behind."""

import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import ray

from ringmaster.codec import from_json
from ringmaster.features.ray import agent_parent
from ringmaster.features.ray.ray_engine import NodeOrder
from ringmaster.tasks.pool.engines import ALLOCATION
from ringmaster.tasks.process_identity import READY_FILE

LOOK_EVERY_S = 0.2
LONGEST_TAIL = 1500  # characters of a log


class NodeActor:
    """Serves a machine as a node of the pool: starts its agent, and lives as long as that.

    The constructor returns once the node serves, and raises RuntimeError with the end of the log where its agent ends
    before. All processes of the node bear its allocation in their environment.

    order: the JSON form of a `NodeOrder`.
    """

    def __init__(self, order: str) -> None:
        self._agent = _start_and_wait(from_json(NodeOrder, json.loads(order)))
        threading.Thread(target=self._end_with_agent, name="agent", daemon=True).start()

    def place(self) -> str:
        """Returns the id of Ray's node on which this actor lives."""
        id: str = ray.get_runtime_context().get_node_id()
        return id

    def give_back(self) -> None:
        """Has the node leave the pool in order; this actor ends once it has left. May be called again."""
        assert self._agent.stdin is not None
        self._agent.stdin.close()

    def _end_with_agent(self) -> None:
        self._agent.wait()
        os._exit(0)  # from a thread there is no other way to end a worker of Ray


def _start_and_wait(order: NodeOrder) -> subprocess.Popen[bytes]:
    name = f"{platform.node() or 'localhost'}-{order.name}"
    command = [sys.executable, "-P", "-m", "ringmaster.flows.entry", "pool", "worker", "--name", name]
    command += ["--devices", order.devices]
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    log = _log(order, name)
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder, "ready")
        environment = {**inherited, **order.environment, ALLOCATION: order.allocation, READY_FILE: str(ready)}
        with log.open("ab") as output:
            agent = subprocess.Popen(
                [sys.executable, "-P", "-m", agent_parent.__name__, *command],
                env=environment,
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        while not ready.exists():
            try:
                status = agent.wait(LOOK_EVERY_S)
            except subprocess.TimeoutExpired:
                continue
            tail = log.read_text(errors="replace")[-LONGEST_TAIL:]
            raise RuntimeError(f"its node agent ended with status {status} before it served; the end of {log}:\n{tail}")
    return agent


def _log(order: NodeOrder, name: str) -> Path:
    folder = Path(order.environment.get("RINGMASTER_HOME", ".ringmaster")).absolute() / "nodes" / name
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    log = folder / "agent.log"
    log.touch(mode=0o600)
    return log


def is_over(allocation: str) -> bool:
    """Returns whether no process of an allocation runs on this machine any more."""
    processes = psutil.process_iter(["environ"])
    return not any((each.info["environ"] or {}).get(ALLOCATION) == allocation for each in processes)

"""The process of a controller that talks to Ray: `python -m ringmaster.features.ray.broker`.

It is a process of its own, as Ray aborts its drivers where the head of the cluster does not answer for a minute. It
answers requests, which come over the socket that is its stdin, one after another until that is closed.
"""

import json
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ringmaster.codec import to_json
from ringmaster.errors import ChannelClosed
from ringmaster.features.ray import actor, ray_engine
from ringmaster.tasks.pool.provider import Allocation, AllocationStatus
from ringmaster.techniques.processes.channel import Channel

ANSWER_S = 0.5  # how long actors are waited for, each time
REMEMBERED_S = 600.0  # how long an allocation that is gone is reported


@dataclass
class _Actor:
    """An actor, as far as it is known.

    place: its answer to the last question where it is, which it has yet to give.
    node: id of Ray's node; empty before it serves.
    check: the answer of its machine whether processes of it are left.
    """

    handle: Any
    allocation: Allocation
    place: Any = None
    node: str = ""
    check: Any = None
    gone_s: float | None = None


class NodeActors:
    """The actors of one pool. All methods wait for Ray, and raise ConnectionError or RayError.

    environment: environment variables of the controller.
    """

    def __init__(self, options: ray_engine.RayOptions, *, environment: Mapping[str, str]) -> None:
        self._options, self._environment = options, ray_engine.node_environment(environment)
        self._actors: dict[str, _Actor] = {}
        self._actor_class = ray.remote(actor.NodeActor)
        self._is_over = ray.remote(actor.is_over)

    def poll(self) -> list[Allocation]:
        """Returns the states of the allocations in Ray: all that live, and those that ended lately."""
        for name in ray.util.list_named_actors():
            if (id := f"{ray_engine.PREFIX}{name}") not in self._actors:
                self._find(id, name)
        self._ask_for_places()
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        for each in self._actors.values():
            if each.allocation.status == AllocationStatus.LOST and each.node in alive:
                self._check(each)
        now_s = time.monotonic()
        for id, each in list(self._actors.items()):
            if each.gone_s is not None and now_s - each.gone_s > REMEMBERED_S:
                del self._actors[id]
        return [each.allocation for each in self._actors.values()]

    def start(self) -> str:
        """Starts one more actor, which Ray queues until it has a machine for it; returns its allocation's id.

        Raises ConnectionError where the cluster has no machine yet and the devices of a node depend on it.
        """
        wanted = ray_engine.resources(self._options.devices, ray.nodes())
        if wanted is None:
            raise ConnectionError("no machine of the Ray cluster has devices yet. To fix: name them, as in gpu:8")
        name = f"node-{uuid.uuid4().hex[:8]}"
        order = ray_engine.NodeOrder(
            allocation=f"{ray_engine.PREFIX}{name}",
            name=name.removeprefix("node-"),
            devices=self._options.devices,
            environment=self._environment,
        )
        handle = self._actor_class.options(
            name=name,
            lifetime="detached",
            num_cpus=wanted.get("CPU", 0.0),
            num_gpus=wanted.get("GPU", 0.0),
            max_restarts=0,
            scheduling_strategy="SPREAD",
        ).remote(json.dumps(to_json(order)))
        self._actors[order.allocation] = _new(handle, order.allocation)
        return order.allocation

    def end(self, id: str) -> None:
        """Has the node of an allocation leave in order; ends an actor whose node does not serve yet."""
        each = self._actors.get(id)
        if each is None or each.gone_s is not None:
            return
        if not each.node:
            ray.kill(each.handle)
            return
        each.handle.give_back.remote()
        each.allocation = Allocation(id=id, status=AllocationStatus.LEAVING, why="given back")

    def _find(self, id: str, name: str) -> None:
        try:
            self._actors[id] = _new(ray.get_actor(name), id)
        except ValueError:  # it has died meanwhile
            return

    def _ask_for_places(self) -> None:
        living = [each for each in self._actors.values() if each.gone_s is None]
        for each in living:
            if each.place is None:
                each.place = each.handle.place.remote()
        if not living:
            return
        answered, _ = ray.wait([each.place for each in living], num_returns=len(living), timeout=ANSWER_S)
        for each in living:
            if each.place in answered:
                self._take_answer(each)

    def _take_answer(self, each: _Actor) -> None:
        answer, each.place = each.place, None
        id, status = each.allocation.id, each.allocation.status
        try:
            each.node = ray.get(answer)
            if status == AllocationStatus.PENDING:
                each.allocation = Allocation(id=id, status=AllocationStatus.RUNNING)
        except ActorUnavailableError:
            pass  # Ray does not know yet whether it lives
        except RayError as error:
            each.gone_s = time.monotonic()
            # Processes of its node may still write their checkpoints.
            each.allocation = Allocation(id=id, status=AllocationStatus.LOST, why=ray_engine.cause(str(error)))

    def _check(self, each: _Actor) -> None:
        """Checks on the machine of an actor that has died whether processes of its node are left."""
        if each.check is None:
            here = NodeAffinitySchedulingStrategy(node_id=each.node, soft=False)
            options = self._is_over.options(num_cpus=0, max_retries=0, scheduling_strategy=here)
            each.check = options.remote(each.allocation.id)
        if not ray.wait([each.check], timeout=0)[0]:
            return
        answer, each.check = each.check, None
        try:
            is_over = ray.get(answer)
        except RayError:  # its machine has left the cluster meanwhile
            return
        if is_over:
            why = each.allocation.why
            each.allocation = Allocation(id=each.allocation.id, status=AllocationStatus.ENDED, why=why)


def _new(handle: Any, id: str) -> _Actor:
    return _Actor(handle=handle, allocation=Allocation(id=id, status=AllocationStatus.PENDING))


def serve(actors: NodeActors, channel: Channel) -> None:
    """Answers requests until the channel is closed."""
    calls: Mapping[str, Callable[..., Any]] = {
        "poll": lambda: [to_json(each) for each in actors.poll()],
        "start": actors.start,
        "end": actors.end,
    }
    while True:
        request = channel.receive()
        try:
            answer = {"result": calls[request["call"]](*request["arguments"])}
        except (RayError, ConnectionError) as error:
            answer = {"error": f"{type(error).__name__}: {ray_engine.cause(str(error))}"}
        channel.send(answer)


def main() -> int:
    """Connects to Ray, and answers requests; returns the exit status."""
    channel = Channel(socket.socket(fileno=os.dup(sys.stdin.fileno())))
    options, namespace = (
        ray_engine.RayOptions.of_environment(os.environ),
        ray_engine.namespace_of(os.environ.get(ray_engine.DATABASE, "")),
    )
    try:
        ray.init(address=options.address, namespace=namespace, log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError, ValueError) as error:
        channel.send({"error": f"Ray does not answer at {options.address}: {error}"})
        return 1
    try:
        serve(NodeActors(options, environment=os.environ), channel)
    except ChannelClosed:  # the controller has ended
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())

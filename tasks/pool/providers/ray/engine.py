"""The engine `ray`: nodes of a pool on the machines of a Ray cluster."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ringmaster.codec import from_json
from ringmaster.extras import require_extra
from ringmaster.tasks.execution.engines.context import EngineContext, NodeRun
from ringmaster.tasks.pool.controller.engine import PoolEngine, pool_engine
from ringmaster.tasks.pool.providers.provider import Allocation, AllocationStatus
from ringmaster.tasks.pool.providers.ray.connection import BrokerConnection
from ringmaster.tasks.pool.providers.ray.options import RayOptions
from ringmaster.tasks.pool.providers.work_pool import WorkPoolProvider

logger = logging.getLogger(__name__)

LOG = "ray.log"
LIVING = (AllocationStatus.PENDING, AllocationStatus.RUNNING, AllocationStatus.LEAVING)


class Broker(Protocol):
    """Answers requests about actors; `BrokerConnection` implements it."""

    def ask(self, call: str, *arguments: str) -> Any:
        """Returns the result of a request. Raises EngineAway."""

    def close(self) -> None:
        """Ends a request that waits."""


class RayActors:
    """The actors of a pool on a Ray cluster, each of which serves a node; implements `NodeRuns` and `Machines`.

    An actor is its own allocation. All methods but `live`, `allocation_of` and `why_ended` raise EngineAway.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._seen: Mapping[str, Allocation] = {}

    def look(self, runs: Sequence[NodeRun]) -> Mapping[str, Allocation]:
        """Returns what Ray says of the actors: all that live, and those that ended lately."""
        found = [from_json(Allocation, each) for each in self._broker.ask("look")]
        before, self._seen = self._seen, {each.id: each for each in found}
        for each in found:
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

    def __init__(self, broker: Broker, **options: Any) -> None:
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

"""The nodes of an engine as one executor knows them: changes between two looks become changes of its cluster."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from ringmaster.tasks.background_worker import background_thread, keep_calling
from ringmaster.tasks.cluster import Cluster, Device, Node
from ringmaster.tasks.execution.dispatch import DeviceId
from ringmaster.tasks.execution.engine import Engine, EngineNode
from ringmaster.tasks.execution.executor import Executor

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
EMPTY_BEFORE_S = 120.0
"""How long before its end, by default, a node takes no new segments, and those that run there stop: time for their
checkpoints.
"""

UNFENCED = "what ran on the node before it was lost may still run"


class KnownNodes:
    """Notifies one executor of the nodes that join, are leaving, and are gone. All methods are called on the executor's
    thread.

    A device of a lost node is not used again before the node is fenced, also if the node has come back.

    cluster: the cluster of healthy nodes that the executor has been given already, if any.
    empty_before_s: returns how long before its end a node is emptied.
    wall_clock: seconds since the epoch.
    """

    def __init__(
        self,
        engine: Engine,
        executor: Executor,
        *,
        cluster: Cluster | None = None,
        empty_before_s: Callable[[], float] = lambda: EMPTY_BEFORE_S,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine, self._executor, self._wall_clock = engine, executor, wall_clock
        self._empty_before_s, self._before_s = empty_before_s, EMPTY_BEFORE_S
        self.there: Mapping[str, EngineNode] = {}
        self._lost_nodes: dict[str, Node] = {}  # while the executor has yet to end a segment that ran there
        known = cluster or Cluster(nodes=())
        self._usable: Mapping[DeviceId, Device] = {device: known.device(*device) for device in known.lease_names()}
        self._leaving: set[str] = set()
        self._given_back: set[tuple[str, str]] = set()  # names and incarnations

    def begin(self, *, lost_nodes: Mapping[str, Node], why: str) -> None:
        """Looks at the nodes for the first time, and gives the executor its cluster.

        lost_nodes: the nodes of the segments that the executor is about to adopt. They stay in the cluster, unused,
            where they are gone.
        """
        self.there, self._lost_nodes = self._read(), dict(lost_nodes)
        self._move(why=why, is_first=True)

    def poll(self) -> None:
        """Looks at the nodes again, and passes on what has changed."""
        before, self.there = self.there, self._read()
        was, now = ({(name, node.incarnation) for name, node in nodes.items()} for nodes in (before, self.there))
        gone, come = ([name for name, _ in sorted(each)] for each in (was - now, now - was))
        self._lost_nodes |= {name: Node(name=name, devices=before[name].devices) for name in gone}
        self._hold_leaving()
        why = [f"node {name} is gone" for name in gone] + [f"node {name} came" for name in come]
        self._move(why=", ".join(why) or "the health of devices has changed")

    def seconds_left(self) -> Mapping[str, float]:
        """Returns, for each node whose end is known, the seconds until it is emptied."""
        soon_s = self._wall_clock() + self._before_s
        return {name: node.until_s - soon_s for name, node in self.there.items() if node.until_s is not None}

    def give_back(self, node: str) -> None:
        """Has a node take no new segments any more, so that it is released once nothing runs there."""
        self._given_back.add((node, self.there[node].incarnation))

    def release_empty(self, *, is_lent: Callable[[str], bool] = lambda node: False) -> None:
        """Gives the leaving nodes on which nothing runs back to the engine.

        is_lent: whether anybody else uses devices of a node.
        """
        for name in sorted(self._leaving):
            if self._executor.is_free(name) and not is_lent(name):
                self._engine.release(name)

    def _read(self) -> dict[str, EngineNode]:
        """Returns the nodes by name: nodes that end soon as leaving, devices that are not fenced as faulty."""
        nodes = self._engine.nodes()
        self._before_s = self._empty_before_s() if any(node.until_s is not None for node in nodes) else EMPTY_BEFORE_S
        soon_s = self._wall_clock() + self._before_s
        known = {}
        for node in nodes:
            is_leaving = node.is_leaving or (node.until_s is not None and node.until_s <= soon_s)
            is_leaving = is_leaving or (node.name, node.incarnation) in self._given_back
            faults = node.faults if self._engine.is_fenced(node.name) else dict.fromkeys(_numbers(node), UNFENCED)
            known[node.name] = replace(node, is_leaving=is_leaving, faults=faults)
        self._given_back &= {(node.name, node.incarnation) for node in known.values()}
        return dict(sorted(known.items()))

    def _move(self, *, why: str, is_first: bool = False) -> None:
        """Reports the devices to the executor if the set of usable devices has changed."""
        self._lost_nodes = {
            name: node
            for name, node in self._lost_nodes.items()
            if name not in self.there and (is_first or not self._executor.is_free(name))
        }
        cluster, out = cluster_of(self.there, lost_nodes=self._lost_nodes)
        usable = {device: cluster.device(*device) for device in cluster.lease_names() if device not in out}
        if is_first or usable != self._usable:
            self._usable = usable
            logger.info("%s: %d devices of %d can be used", why, len(usable), len(cluster.devices))
            self._executor.move_to(cluster, why=why, out=out)

    def _hold_leaving(self) -> None:
        """Keeps the executor from starting segments on nodes that leave."""
        leaving = {name for name, node in self.there.items() if node.is_leaving}
        for name in sorted(leaving - self._leaving):
            self._executor.hold(name)
        for name in sorted(self._leaving - leaving):
            self._executor.release(name)
        self._leaving = leaving


@contextmanager
def watch_nodes(engine: Engine, executor: Executor, *, cluster: Cluster) -> Iterator[None]:
    """Inside the context, passes the changes of an engine's nodes on to an executor whose cluster they are."""
    known_nodes = KnownNodes(engine, executor, cluster=cluster)

    def poll() -> None:
        known_nodes.poll()
        known_nodes.release_empty()

    with background_thread(partial(keep_calling, poll, call=executor.call, every_s=LOOK_EVERY_S), name="nodes"):
        yield


def cluster_of(
    there: Mapping[str, EngineNode], *, lost_nodes: Mapping[str, Node]
) -> tuple[Cluster, frozenset[DeviceId]]:
    """Returns the devices of all nodes, and those that must not be used: faulty ones, and those of leaving nodes.

    lost_nodes: nodes that are gone, by name, while a segment that ran there has yet to end.
    """
    draining = [lost_node for name, lost_node in lost_nodes.items() if name not in there]
    nodes = [*draining, *(Node(name=node.name, devices=node.devices) for node in there.values())]
    out = {(lost_node.name, number) for lost_node in draining for number in range(len(lost_node.devices))}
    for node in there.values():
        out |= {(node.name, number) for number in (_numbers(node) if node.is_leaving else node.faults)}
    return Cluster(nodes=tuple(sorted(nodes, key=lambda node: node.name))), frozenset(out)


def _numbers(node: EngineNode) -> range:
    return range(len(node.devices))

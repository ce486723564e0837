"""The nodes of an engine as the executor of a run on this machine follows them."""

import queue
import threading

from ringmaster.tasks.cluster import Cluster, Node
from ringmaster.tasks.execution import known_nodes
from ringmaster.tasks.execution.known_nodes import watch_nodes
from tests.fake_engine import FakeEngine

WAIT_S = 120.0  # the longest wait for another thread


class Listener:
    """Stands for an executor on which nothing runs: takes actions, and records the reasons for changes."""

    def __init__(self):
        self.actions, self.moves = queue.SimpleQueue(), []
        self.call = self.actions.put

    def move_to(self, cluster, *, why, out=()):
        self.moves.append((why, sorted({*cluster.lease_names()} - {*out})))

    def hold(self, node):
        self.moves.append(("hold", node))

    def release(self, node):
        self.moves.append(("release", node))

    def is_free(self, node):
        return True


def test_an_executor_hears_of_changes_alone(monkeypatch):
    monkeypatch.setattr(known_nodes, "LOOK_EVERY_S", 0.001)
    engine, executor = FakeEngine(), Listener()
    engine.add("n1")
    cluster = Cluster(nodes=tuple(Node(name=node.name, devices=node.devices) for node in engine.nodes()))

    def poll():
        executor.actions.get(timeout=WAIT_S)()
        return executor.moves

    with watch_nodes(engine, executor, cluster=cluster):
        assert poll() == poll() == []
        engine.add("n2")
        assert poll() == [("node n2 came", [("n1", 0), ("n2", 0)])]
        engine.leave("n1")
        assert poll()[1:] == [("hold", "n1"), ("the health of devices has changed", [("n2", 0)])]
        assert engine.released == ["n1"]
        engine.add("n1")
        assert poll()[-2:] == [("release", "n1"), ("node n1 is gone, node n1 came", [("n1", 0), ("n2", 0)])]
    assert "nodes" not in [thread.name for thread in threading.enumerate()]

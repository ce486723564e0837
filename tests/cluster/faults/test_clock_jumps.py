"""Clock jumps, injected into code instead of the machine's clock: unobserved processes are not declared dead."""

import pytest

from ringmaster.tasks.pool.failover import SILENT_S, Leadership
from ringmaster.tasks.pool.nodes import NodeRecord, NodeRegistry, Timeouts
from ringmaster.tasks.pool.pool_engine import NodeWatch
from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.techniques.processes.forkserver import TICK, Fence
from tests.fake_engine import cpu_devices

HOUR_S = 3600.0
JUMPS = pytest.mark.parametrize("jump_s", [30.0, HOUR_S, 24 * HOUR_S])
PATIENCE = Timeouts()


class Clock:
    """A clock that only the test advances."""

    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def database(tmp_path):
    database = Database(file_url(tmp_path / "pool.db"), synced=False)
    yield database
    database.close()


def watched(database, clock):
    """Returns a registered node's table, and the watch that observes it."""
    nodes = NodeRegistry(database)
    nodes.register(NodeRecord(name="n", incarnation="one", address="here", devices=cpu_devices(1)))
    watch = NodeWatch(nodes, clock=clock, lost_after_s=PATIENCE.lost_after_s)
    assert watch.poll() == []
    return nodes, watch


def pass_seconds(clock, watch, seconds, *, beats=lambda: None):
    """Polls once a second; returns the lost nodes, and after how many seconds."""
    for passed in range(1, seconds + 1):
        clock.now_s += 1.0
        beats()
        if gone := watch.poll():
            return gone, passed
    return [], seconds


@JUMPS
def test_a_node_is_not_lost_when_the_executors_clock_jumps(database, jump_s):
    clock = Clock()
    nodes, watch = watched(database, clock)
    clock.now_s += jump_s  # the machine slept, or was migrated: no heartbeat was missed that could have been observed
    assert watch.poll() == []
    gone, _ = pass_seconds(
        clock, watch, 120, beats=lambda: nodes.beat("n", incarnation="one", health={}) if clock.now_s % 5 == 0 else None
    )
    assert gone == []


@JUMPS
def test_a_node_that_is_silent_after_a_jump_is_still_found_in_time(database, jump_s):
    clock = Clock()
    _, watch = watched(database, clock)
    clock.now_s += jump_s
    assert watch.poll() == []
    gone, passed = pass_seconds(clock, watch, 120)
    assert [node.name for node, _ in gone] == ["n"]
    assert passed == PATIENCE.lost_after_s


@JUMPS
def test_a_leader_stays_the_leader_when_a_candidates_clock_jumps(database, jump_s):
    clock = Clock()
    first, second = Leadership(database, clock=clock), Leadership(database, clock=clock)
    assert first.claim() and not second.claim()
    clock.now_s += jump_s
    assert not second.claim()
    for _ in range(int(3 * SILENT_S)):
        clock.now_s += 1.0
        first.beat()
        assert not second.claim()


@JUMPS
def test_ranks_end_when_their_machine_has_slept_for_longer_than_the_fence(jump_s):
    """Their devices may belong to other gangs: the clock that counts sleep decides, before any rank continues."""
    clock = Clock()
    fence = Fence(PATIENCE.fence_after_s, clock=clock)
    fence.tick(TICK.pack(clock()))
    assert not fence.is_closed()
    clock.now_s += jump_s
    assert fence.is_closed() == (jump_s >= PATIENCE.fence_after_s)
    fence.tick(TICK.pack(clock()))
    assert not fence.is_closed()


def test_ticks_that_were_held_up_do_not_open_a_fence_again():
    """A worker that was frozen between heartbeat and tick sends the time of the heartbeat, not of its resumption."""
    clock = Clock()
    fence = Fence(PATIENCE.fence_after_s, clock=clock)
    beaten_s = clock()
    clock.now_s += HOUR_S
    fence.tick(TICK.pack(beaten_s))
    assert fence.is_closed()

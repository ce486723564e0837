"""The dead man's switch, on a simulated clock."""

import math

from ringmaster.techniques.processes.forkserver import TICK, Fence


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


def test_it_closes_when_the_last_tick_is_too_old_and_opens_with_a_newer_one():
    clock = Clock()
    fence = Fence(40.0, clock=clock)
    clock.now_s = 139.0
    assert not fence.is_closed()
    fence.tick(TICK.pack(120.0))
    clock.now_s = 159.0
    assert not fence.is_closed()
    clock.now_s = 160.0
    assert fence.is_closed()
    fence.tick(TICK.pack(159.5))
    assert not fence.is_closed()


def test_ticks_that_waited_long_to_be_read_count_from_when_they_were_written():
    clock = Clock()
    fence = Fence(40.0, clock=clock)
    clock.now_s = 200.0  # as if the machine had slept
    fence.tick(TICK.pack(101.0) + TICK.pack(106.0) + TICK.pack(104.0))
    assert fence.is_closed()


def test_it_is_looked_at_every_second_until_it_is_closed():
    clock = Clock()
    fence = Fence(40.0, clock=clock)
    assert fence.wait_ms() == 1000
    clock.now_s = 139.75
    assert fence.wait_ms() == 250
    clock.now_s = 140.0
    assert fence.wait_ms() is None  # until a tick or another message comes


def test_without_a_fence_nothing_is_waited_for():
    fence = Fence(math.inf)
    assert not fence.is_closed()
    assert fence.wait_ms() is None

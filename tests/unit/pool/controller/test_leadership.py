"""Leader election of a pool's controllers: one leads, and a deposed one cannot write. The clock is simulated."""

import os
import subprocess
from pathlib import Path

import pytest

from ringmaster.tasks.pool.failover import SILENT_S, Leadership, LeadershipLost
from ringmaster.tasks.pool.nodes import PoolLeases
from ringmaster.tasks.process_identity import has_ended, own_process
from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.tasks.storage.journal import Journal, SegmentSpec


class Clock:
    now_s = 1000.0

    def __call__(self):
        return self.now_s

    def pass_seconds(self, seconds):
        self.now_s += seconds


@pytest.fixture
def database(tmp_path):
    database = Database(file_url(tmp_path / "pool.db"), synced=False)
    yield database
    database.close()


def watch(candidate, clock, *, seconds, beats=lambda: None):
    """Lets a candidate try to lead each second. Returns the seconds until it leads, or None."""
    for passed in range(seconds + 1):
        if candidate.claim():
            return passed
        clock.pass_seconds(1.0)
        beats()
    return None


def test_the_first_one_leads_and_a_second_one_stands_by_while_it_beats(database):
    clock = Clock()
    first, second = Leadership(database, clock=clock), Leadership(database, clock=clock)
    assert first.claim()
    assert watch(second, clock, seconds=60, beats=first.beat) is None
    assert (first.epoch, second.epoch) == (1, 0)


def test_a_standby_takes_over_after_a_silence_and_the_former_leader_finds_out(database):
    clock = Clock()
    first, second = Leadership(database, clock=clock), Leadership(database, clock=clock)
    assert first.claim() and first.beat()
    assert watch(second, clock, seconds=60) == SILENT_S
    assert second.epoch == 2
    assert not first.beat()
    assert second.beat()


def test_of_two_standbys_one_takes_over(database):
    clock = Clock()
    first, *others = (Leadership(database, clock=clock) for _ in range(3))
    first.claim()
    for _ in range(60):
        claims = [other.claim() for other in others]
        if any(claims):
            break
        clock.pass_seconds(1.0)
    assert claims == [True, False]


def test_a_silence_while_nobody_could_look_is_none(database):
    clock = Clock()
    first, second = Leadership(database, clock=clock), Leadership(database, clock=clock)
    first.claim()
    assert not second.claim()
    clock.pass_seconds(300.0)  # the database was unavailable to both
    assert not second.claim()
    first.beat()
    assert watch(second, clock, seconds=60, beats=first.beat) is None


def test_who_resigns_is_followed_at_once(database):
    clock = Clock()
    first, second = Leadership(database, clock=clock), Leadership(database, clock=clock)
    first.claim()
    assert not second.claim()
    first.resign()
    assert second.claim()
    assert second.epoch == 2
    first.resign()  # a late call of the former leader changes nothing
    assert second.beat()


def test_a_leader_on_the_same_machine_that_has_ended_is_followed_at_once(database):
    ended = set()
    first, second = (
        Leadership(database, clock=Clock(), where=where, has_ended=ended.__contains__) for where in ("here/1", "here/2")
    )
    first.claim()
    assert not second.claim()
    ended.add("here/1")
    assert second.claim()


def test_a_process_that_has_ended_is_told_from_others():
    child = subprocess.Popen(["sleep", "60"])
    machine, pid, born = own_process().rsplit("/", 2)
    stat = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
    its = f"{machine}/{child.pid}/{stat[19]}"
    assert pid == str(os.getpid())
    assert not has_ended(own_process()) and not has_ended(its)
    assert has_ended(f"{machine}/{pid}/{int(born) - 1}"), "another process has its id by now"
    assert not has_ended(f"another-machine/{child.pid}/1") and not has_ended("")
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # the child has ended and is a zombie
    assert has_ended(its)
    child.wait()
    assert has_ended(its)


def test_a_deposed_leader_writes_nothing(database):
    clock, told = Clock(), []
    first, second = Leadership(database, clock=clock), Leadership(database, clock=clock)
    first.claim()
    mine = first.guarded(database, on_deposed=lambda: told.append("deposed"))
    journal, leases = Journal(mine, batch=None), PoolLeases(mine)
    journal.write_job("b/j", step=1)
    watch(second, clock, seconds=60)  # the first candidate is frozen meanwhile
    with pytest.raises(LeadershipLost):
        journal.start_segments([("b/j", SegmentSpec())])[0]
    with pytest.raises(LeadershipLost):
        leases.take(["n:cpu:0"], holder="pool")
    assert told == ["deposed"] * 2
    assert (journal.segments(), leases.held()) == ([], {})
    assert journal.jobs()["b/j"].step == 1  # it may still read
    theirs = second.guarded(database, on_deposed=lambda: told.append("no"))
    Journal(theirs, batch=None).write_job("b/j", step=2)
    assert "no" not in told


def test_devices_are_leased_all_or_none_and_outlive_their_taker(database):
    leases = PoolLeases(database)
    assert leases.take(["n:cpu:0", "n:cpu:1"], holder="pool")
    assert not leases.take(["n:cpu:1", "n:cpu:2"], holder="another")
    assert not leases.take(["n:cpu:1"], holder="pool")
    assert PoolLeases(database).held() == {"n:cpu:0": "pool", "n:cpu:1": "pool"}
    leases.give_back(["n:cpu:1"])
    leases.give_back(["n:cpu:1"])
    assert leases.take(["n:cpu:1", "n:cpu:2"], holder="another")
    assert leases.held() == {"n:cpu:0": "pool", "n:cpu:1": "another", "n:cpu:2": "another"}


def test_a_lease_whose_commit_is_tried_again_is_taken_once(database):
    class Forgetful(Database):
        """A database that loses the answer of each commit, and repeats the write."""

        def __init__(self):
            self.url = database.url

        def write(self, act):
            database.write(act)
            return database.write(act)

        def read(self, act):
            return database.read(act)

    leases = PoolLeases(Forgetful())
    assert leases.take(["n:cpu:0"], holder="pool")
    assert not leases.take(["n:cpu:0"], holder="pool")
    candidate = Leadership(Forgetful())
    assert candidate.claim()
    assert candidate.epoch == 1

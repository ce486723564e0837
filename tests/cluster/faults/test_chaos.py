"""Kills every part of a pool repeatedly while two batches are profiled, trained and recorded.

All submitted work completes: every model is in MLflow, and every job's weights are bit-equal to an undisturbed run,
since it uses the same option throughout. The same seed draws the same kills. RINGMASTER_TEST_CHAOS_SEED sets the seed,
and RINGMASTER_TEST_CHAOS_KILLS the number of kills of the long test; beyond 22, some are power losses of machines and
ranks that hang.
"""

import os
import random
import time
from collections import Counter
from itertools import pairwise
from statistics import median

import pytest

from ringmaster.tasks.control.requests import RequestStatus
from ringmaster.tasks.storage.journal import ENDED, JobStatus
from ringmaster.techniques.processes.gang_events import JobReady
from tests.cluster.checks import assert_devices_held_once, assert_nothing_twice
from tests.cluster.faults.chaos import NODES, Kills, WholePool, all_up
from tests.cluster.faults.test_faults_of_parents import layouts_of
from tests.cluster.jobs import assert_same_weights, batch_file, torch_job
from tests.cluster.waiting import TIMEOUT_S, until
from tests.matrix import matrix

SEED = int(os.environ.get("RINGMASTER_TEST_CHAOS_SEED", "0"))
NUM_KILLS = int(os.environ.get("RINGMASTER_TEST_CHAOS_KILLS", "22"))
# The short test kills each part once, and twice what ends a gang alone.
FEW = {
    "rank": 2,
    "fork_server": 2,
    "worker": 1,
    "controller": 1,
    "supervisor": 1,
    "postgresql": 1,
    "prefect": 1,
    "mlflow": 1,
    "flow": 1,
}
# Shares of 22 kills. Parts that end a gang are killed most often, as these kills can lose work; servers take the
# longest.
SHARES = {
    "rank": 5,
    "fork_server": 4,
    "worker": 3,
    "controller": 3,
    "supervisor": 2,
    "postgresql": 2,
    "prefect": 1,
    "mlflow": 1,
    "flow": 1,
}
if sum(SHARES.values()) < NUM_KILLS:  # these take the longest to be detected
    SHARES |= {"stopped_rank": 1, "node": 2}
TAKE_A_GANG = ("rank", "fork_server", "worker", "stopped_rank", "node")
MAX_AT_ONCE = 3
NUM_STEPS = 1900  # of 0.1 s, until all kills are done; the jobs train at full speed afterwards


@pytest.mark.parametrize("num_kills", matrix([sum(FEW.values()), NUM_KILLS], quick=[sum(FEW.values())]))
def test_whatever_is_killed_a_batch_that_was_handed_over_comes_to_its_end(
    chaos_pool, bench, tmp_path, recovered, num_kills
):
    print(f"\nchaos: RINGMASTER_TEST_CHAOS_SEED={SEED} RINGMASTER_TEST_CHAOS_KILLS={num_kills}")
    pool, draw = chaos_pool, random.Random(SEED)
    chaos = Chaos(pool, draw)
    batches = {
        name: [torch_job(f"{name}{i}", trace=pool.trace.file, num_steps=NUM_STEPS, step_s=0.1) for i in range(2)]
        for name in ("red", "blue")
    }
    deck = drawn(draw, num_kills)
    deck.remove("mlflow")
    chaos.strike(["mlflow"], waits=False)  # the batches submitted now are profiled without it
    for name, jobs in batches.items():
        pool.submit_file(str(batch_file(tmp_path, name, jobs)), name=name)
    chaos.wait_until_back()
    while deck:
        chaos.wait_for_steps(draw.randrange(1, 20))
        at_once, deck = together(deck, draw.randrange(1, MAX_AT_ONCE + 1))
        chaos.strike(at_once)
    pool.trace.hurry(*(job.name for jobs in batches.values() for job in jobs))
    chaos.until("every batch has ended", lambda: is_over(pool))
    handed_over = [request.status for request in pool.handed_over()]
    assert handed_over == [RequestStatus.DONE] * len(batches), report(pool)
    for batch, name, _ in pool.batches():
        assert {record.status for record in pool.jobs(batch).values()} == {JobStatus.DONE}
        assert all(record.model_uri for record in pool.jobs(batch).values()), "all is in MLflow"
        assert_nothing_twice(pool, batch)
        for job in batches[name]:
            layout = layouts_of(pool, batch)[job.name]
            assert_same_weights(bench, job, pool.model_dir(batch, job.name), layout=layout)
    assert_devices_held_once(pool)
    for line in chaos.table(repeated_steps(pool)):
        print(line)
    recovered(f"chaos, seed {SEED}: {sum(chaos.num_kills.values())} kills, all is done", chaos.seconds())


@pytest.fixture
def chaos_pool(network, pool_postgresql, tmp_path):
    """A running pool with two nodes that serve."""
    pool = WholePool(tmp_path, network=network, postgresql=pool_postgresql, timeouts="1,30,18")
    try:
        for name in NODES:
            pool.start_worker(name)
        pool.up()
        until("all nodes serve", lambda: set(pool.serving()) == set(NODES), seconds=TIMEOUT_S)
        assert "waiting for a pool" in pool.tail("alpha")
        yield pool
    finally:
        pool.close()


class Chaos:
    """Performs kills and records their costs."""

    def __init__(self, pool, draw):
        self.pool, self.kills = pool, Kills(pool, draw)
        self.began_s = time.monotonic()
        self.num_kills, self.took_s = Counter(), {}
        self.rounds = []  # (time, names that were killed)
        self.waiting = {}  # (name, time) of parts that have not recovered, by their predicate
        self.kept = {}  # the newest checkpoint of each job at the last kill

    def seconds(self):
        return time.monotonic() - self.began_s

    def strike(self, names, *, waits=True):
        """Kills the named parts at once, and waits until they have recovered and a step was made."""
        if any(name in TAKE_A_GANG for name in names):
            self.wait_until_kept()
        struck_s = time.monotonic()
        print(f"chaos: {self.seconds():6.1f} s: {', '.join(names)}", flush=True)
        self.rounds.append((struck_s, names))
        # The supervisor is killed last, so that it finds the others dead after its restart.
        for name in sorted(names, key=lambda name: name == "supervisor"):
            at_s = time.monotonic()
            self.num_kills[name] += 1
            self.waiting[getattr(self.kills, name)()] = name, at_s
        if waits:
            self.wait_until_back()
            self.wait_for_steps(1)

    def wait_until_back(self):
        def poll():
            for is_back, (name, since_s) in list(self.waiting.items()):
                if is_back():
                    self.took_s.setdefault(name, []).append(time.monotonic() - since_s)
                    del self.waiting[is_back]
            return not self.waiting and all_up(self.pool)

        self.until("what was killed is back", poll)

    def wait_for_steps(self, number):
        """Waits for a number of training steps, or until all jobs are done."""
        since_s = time.monotonic()
        self.until("it trains on", lambda: len(self.pool.trace.of(after_s=since_s)) >= number or is_over(self.pool))

    def wait_until_kept(self):
        """Waits until each running job has a newer checkpoint than at the last kill, as three crashes without one fail
        it.
        """

        def poll():
            on_devices = {segment.job.rpartition("/")[2] for segment in self.pool.segments() if segment.outcome is None}
            newest = {job: newest_checkpoint(self.pool, job) for job in on_devices}
            if not on_devices or any(step <= self.kept.get(job, 0) for job, step in newest.items()):
                return is_over(self.pool)
            self.kept |= newest
            return True

        self.until("what trains is kept", poll)

    def until(self, what, poll):
        """Waits for a condition; on a timeout, raises with a report of all states."""
        try:
            until(what, poll)
        except AssertionError as error:
            left = [name for name, _ in self.waiting.values()]
            raise AssertionError(f"{error}; not back: {left}\n{report(self.pool)}") from None

    def table(self, repeated):
        """Yields a table of killed parts: number of kills, seconds to recovery, and repeated steps."""
        again = Counter()
        for at_s, steps in repeated:
            names = next(names for struck_s, names in reversed(self.rounds) if struck_s <= at_s)
            name = next((each for each in TAKE_A_GANG if each in names), " and ".join(names))
            again[name] += steps
        yield "| killed | times | back after, median | at most | steps trained again |"
        yield "| --- | ---: | ---: | ---: | ---: |"
        for name in dict.fromkeys([*SHARES, *again]):
            took = self.took_s.get(name, [0.0]) if name != "flow" else [0.0]  # a flow's recovery shows at the end only
            yield (
                f"| {name.replace('_', ' ')} | {self.num_kills[name]} | {median(took):.1f} s | {max(took):.1f} s "
                f"| {again[name]} |"
            )


def drawn(draw, num_kills):
    """Returns the names of the parts to kill, in random order."""
    shares = FEW if num_kills == sum(FEW.values()) else SHARES
    whole, rest = divmod(num_kills, sum(shares.values()))
    every = [name for name, number in shares.items() for _ in range(number)]
    deck = every * whole + draw.sample(every, rest)
    if "mlflow" not in deck:
        deck.append("mlflow")
    draw.shuffle(deck)
    return deck


def together(deck, number):
    """Returns the first `number` different names, of which at most one ends a gang, and the remaining names."""
    chosen = []
    for name in deck:
        is_second = name in TAKE_A_GANG and any(other in TAKE_A_GANG for other in chosen)
        if len(chosen) < number and name not in chosen and not is_second:
            chosen.append(name)
    left = list(deck)
    for name in chosen:
        left.remove(name)
    return chosen, left


def newest_checkpoint(pool, job):
    """Returns the step of a job's newest checkpoint, or 0 without one."""
    folders = (pool.home / "batches").glob(f"*/*/checkpoints/{job}/step-*")
    return max((int(folder.name.removeprefix("step-")) for folder in folders if folder.name[5:].isdecimal()), default=0)


def is_over(pool):
    """Returns whether every submitted request is done or refused."""
    requests = pool.handed_over()
    return bool(requests) and all(request.status in (RequestStatus.DONE, RequestStatus.REFUSED) for request in requests)


def repeated_steps(pool):
    """Returns when jobs restarted behind their last step, and by how many steps."""
    found = []
    for batch, _, _ in pool.batches():
        words, segments = pool.words(batch), pool.segments(batch)
        first_step = {w.segment: w.content.step for w in words if isinstance(w.content, JobReady)}
        for name in pool.jobs(batch):
            steps = [first_step[s.id] for s in segments if s.job == name and s.id in first_step]
            processes = {}
            for line in pool.trace.of(job=name):
                processes.setdefault((line["pid"], line["born"]), []).append(line["s"])
            trained = sorted(processes.values())[-len(steps) :]
            for (begun, lines), (again, after) in pairwise(zip(steps, trained, strict=False)):
                found.append((after[0], max(0, begun + len(lines) - again)))
    return found


def report(pool):
    """Returns the state of all jobs, requests and services, and the ends of the logs."""
    jobs = {
        batch: {n: (r.status, r.step, r.message) for n, r in pool.jobs(batch).items()} for batch, *_ in pool.batches()
    }
    handed = [(request.status, request.answer) for request in pool.handed_over()]
    tails = "\n".join(f"--- {name}\n{pool.tail(name)}" for name in ("controller", "supervisor", *NODES, "prefect"))
    left = [name for record in jobs.values() for name, (status, *_) in record.items() if status not in ENDED]
    return f"left: {left}\n{jobs}\n{handed}\n{pool.servers.states()}\n{tails}"

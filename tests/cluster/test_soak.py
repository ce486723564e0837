"""All faults at random, one after another, while two batches train. The same seed draws the same faults."""

import os
import random
import signal
import time

import pytest

from tests.cluster.checks import assert_well
from tests.cluster.jobs import torch_job
from tests.cluster.machines import end
from tests.cluster.waiting import PATIENCE_S, until

SECONDS = float(os.environ.get("RINGMASTER_TEST_SOAK_S", "120"))  # ten minutes in earnest: 600
SEED = int(os.environ.get("RINGMASTER_TEST_SOAK_SEED", "0"))
CALM_STEPS = 40  # that are trained between two faults, so that there is something to lose


class Chaos:
    """Draws faults, and mends what does not mend itself."""

    def __init__(self, pool, postgresql, draw):
        self.pool, self.postgresql, self.draw = pool, postgresql, draw
        self.done = []

    def strike(self):
        """One fault, and what a machine room would do about it."""
        fault = self.draw.choice(
            [
                self.rank_killed,
                self.rank_killed,
                self.rank_stopped,
                self.worker_killed,
                self.worker_ended,
                self.node_lost,
                self.node_cut,
                self.prefect_restarted,
                self.postgresql_restarted,
                self.executor_killed,
            ]
        )
        self.done.append(fault.__name__)
        fault()

    def rank_killed(self):
        self._signal_rank(signal.SIGKILL)

    def rank_stopped(self):
        self._signal_rank(signal.SIGSTOP)

    def worker_killed(self):
        name = self._node()
        self.pool.workers[name].kill()
        self.pool.workers[name].wait()
        self.pool.start_worker(name)

    def worker_ended(self):
        name = self._node()
        self.pool.workers[name].send_signal(signal.SIGTERM)
        self.pool.workers[name].wait(timeout=PATIENCE_S)
        self.pool.start_worker(name)

    def node_lost(self):
        name = self._node()
        node = self.pool.nodes[name]
        node.unplug()
        node.lose()
        node.mend()
        self.pool.workers[name].wait()
        self.pool.start_worker(name)

    def node_cut(self):
        node = self.pool.nodes[self._node()]
        node.unplug()
        self._some_steps()
        node.mend()

    def prefect_restarted(self):
        self.pool.prefect.stop()
        self._some_steps(seconds=5)
        self.pool.prefect.start()

    def postgresql_restarted(self):
        self.postgresql.stop(self.draw.choice(["fast", "immediate"]))
        self.postgresql.start()

    def executor_killed(self):
        end(self.pool.executor, number=signal.SIGKILL)
        self.pool.start_executor()

    def _node(self):
        return self.draw.choice(sorted(self.pool.nodes))

    def _signal_rank(self, number):
        steps = self.pool.trace.of(after_s=time.monotonic() - 1.0)
        if steps:
            try:
                os.kill(steps[-1]["pid"], number)
            except ProcessLookupError:
                return  # it had just ended

    def _some_steps(self, *, seconds=None):
        """Lets training go on where it can, at least for a moment."""
        since_s = time.monotonic()
        span_s = seconds or self.draw.uniform(2, 20)
        until("time passes", lambda: time.monotonic() - since_s > span_s, seconds=span_s + 5)


@pytest.mark.timeout(3 * PATIENCE_S + 3 * SECONDS)
def test_all_at_random(pool, pool_postgresql, bench, tmp_path, recovered):
    draw = random.Random(SEED)
    chaos = Chaos(pool, pool_postgresql, draw)
    num_steps = int(SECONDS * 2 / 6 / 0.15)  # of each of six jobs on two devices, were there no faults
    batches = {}
    for name in ("red", "blue"):
        jobs = [torch_job(f"{name}{i}", trace=pool.trace.file, num_steps=num_steps, step_s=0.1) for i in range(3)]
        batches[pool.submit(jobs, name=name)] = jobs
    began_s = time.monotonic()
    while time.monotonic() - began_s < SECONDS and any(not _is_done(pool, batch) for batch in batches):
        struck_s = time.monotonic()
        until(
            "training goes on",
            lambda struck_s=struck_s: (
                len(pool.trace.of(after_s=struck_s)) >= CALM_STEPS or all(_is_done(pool, batch) for batch in batches)
            ),
            seconds=PATIENCE_S,
        )
        chaos.strike()
    pool.heal()
    for batch in batches:
        pool.finish(batch)
    trained = len([step for step in pool.trace.of() if step["job"].startswith(("red", "blue"))])
    again = trained - num_steps * 6
    recovered(
        f"soak, seed {SEED}: {len(chaos.done)} faults ({', '.join(chaos.done)}), {again} of {trained} steps done again",
        time.monotonic() - began_s,
    )
    for batch, jobs in batches.items():
        assert_well(pool, batch, jobs, bench, tmp_path)


def _is_done(pool, batch):
    return all(record.status == "done" for record in pool.jobs(batch).values())

"""Faults of workers and nodes: they end, vanish and return."""

import os
import signal
import time
from pathlib import Path

import pytest

from ringmaster.features.clones.batch_requests import clone_job
from ringmaster.features.clones.execute import START
from ringmaster.features.warm_start.job import WarmStart
from ringmaster.flows.pool.batch_requests import ask_about
from ringmaster.tasks.control.job_changes import with_settings
from ringmaster.tasks.control.requests import RequestKind
from ringmaster.tasks.pool.nodes import NodeRegistry
from ringmaster.tasks.pool.submissions import Submissions
from ringmaster.techniques.checkpoints.checkpoint import copy_checkpoint
from tests.cluster.checks import assert_devices_held_once, assert_nothing_twice, assert_well
from tests.cluster.conftest import LOST_S
from tests.cluster.jobs import assert_same_weights, torch_job
from tests.cluster.waiting import TIMEOUT_S, until
from tests.integration.training.test_warm_start import CHANGES
from tests.matrix import matrix

# Steps of 0.25 s, for a job that trains until its node is declared lost, and long after that.
LONG_ENOUGH = int(4 * LOST_S) + 280
OTHER = {"alpha": "beta", "beta": "alpha"}


def node_of(pool, job):
    """Returns the name of the node that trains a job, and the id of the process."""
    step = pool.trace.of(job=job)[-1]
    return next(name for name, node in pool.nodes.items() if node.mark == step["node"]), step["pid"]


def running(pool, name, **changes):
    """Returns a job that trains and has a checkpoint, its batch, its node, and its process id."""
    job = torch_job(name, trace=pool.trace.file, **changes)
    batch = pool.submit([job])
    pool.wait_for_checkpoint(batch)
    return job, batch, *node_of(pool, name)


def test_a_worker_that_is_killed(pool, bench, recovered):
    job, batch, name, pid = running(pool, "orphaned")
    before_s = time.monotonic()
    pool.workers[name].kill()
    pool.workers[name].wait()
    pool.start_worker(name)  # as systemd does
    again = pool.trains("orphaned", after_s=before_s + 0.5, not_by=pid)
    recovered("a worker killed and started again", again["s"] - before_s)
    pool.finish(batch)
    assert_well(pool, batch, [job], bench)


@pytest.mark.parametrize("how", matrix(["cut", "reject"], quick=["reject"]))
def test_a_node_that_is_cut_off_and_comes_back(pool, bench, recovered, how):
    """Either packets are lost, or every server refuses connections: the node cannot know who owns its jobs."""
    job, batch, name, pid = running(pool, how, num_steps=LONG_ENOUGH)
    incarnation = pool.serving()[name]
    before_s = time.monotonic()
    getattr(pool.nodes[name], how)()
    again = pool.trains(how, after_s=before_s, not_by=pid, node=OTHER[name])
    recovered(f"a node cut off ({how}): its job trains elsewhere", again["s"] - before_s)
    last_s = max(step["s"] for step in pool.trace.of(job=how) if step["pid"] == pid)
    assert last_s < again["s"], "it trained on two nodes at once"
    mended_s = time.monotonic()
    pool.nodes[name].mend()
    until("the node serves again", lambda: pool.serving().get(name) not in (None, incarnation))
    recovered(f"a node that was cut off ({how}) serves again", time.monotonic() - mended_s)
    other = torch_job(f"returned-{how}", trace=pool.trace.file)
    second = pool.submit([other])
    pool.trains(other.name, after_s=mended_s, node=name)
    for each in (batch, second):
        pool.finish(each)
    assert_well(pool, batch, [job], bench)
    assert_well(pool, second, [other], bench)


def test_a_node_that_gets_notice(pool, bench, recovered):
    job, batch, name, pid = running(pool, "spot")
    before_s = time.monotonic()
    worker = pool.workers[name]
    worker.send_signal(signal.SIGTERM)
    worker.wait(timeout=TIMEOUT_S)
    recovered("SIGTERM to a worker: it has ended in order", time.monotonic() - before_s)
    again = pool.trains("spot", after_s=before_s, not_by=pid, node=OTHER[name])
    recovered("SIGTERM to a worker: its job trains elsewhere", again["s"] - before_s)
    pool.finish(batch)
    assert name not in {node.name for node in NodeRegistry(pool.database).all()}
    first, second = pool.segments(batch)
    assert first.outcome.status == "preempted"
    assert second.spec.first_step == first.outcome.step
    assert len(pool.trace.of(job="spot")) == job.num_steps, "every step is trained once, and no more"
    assert_well(pool, batch, [job], bench)


def test_a_worker_that_is_frozen(pool, bench, recovered):
    """Its fork server ends the ranks on its own; the resumed worker finds that it was declared lost, and rejoins."""
    job, batch, name, pid = running(pool, "frozen", num_steps=LONG_ENOUGH)
    before_s = time.monotonic()
    os.kill(pool.workers[name].pid, signal.SIGSTOP)
    again = pool.trains("frozen", after_s=before_s, not_by=pid, node=OTHER[name])
    recovered("a worker frozen (SIGSTOP): its job trains elsewhere", again["s"] - before_s)
    os.kill(pool.workers[name].pid, signal.SIGCONT)
    pool.finish(batch)
    assert_well(pool, batch, [job], bench)


def changes_of_clones(num_clones):
    """What differs in each clone, with as many steps as all jobs of the test train."""
    changes = [{**each, "num_steps": LONG_ENOUGH + 360} if "num_steps" in each else each for each in CHANGES]
    return {f"clone-{number}": each for number, each in enumerate(changes[:num_clones])}


@pytest.mark.parametrize("num_clones", matrix([2, 8], quick=[]))
def test_warm_clones_of_a_sweep_whose_node_is_lost(pool, bench, tmp_path, recovered, num_clones):
    """Each clone ends bit-equal to an undisturbed continuation of the checkpoint from which it was taken."""
    pool.trace.cloned.add("swept-0")
    # The source outlasts the requests of all its clones, each of which waits for a price and a checkpoint.
    num_steps = {"swept-0": 6 * LONG_ENOUGH} | {f"swept-{k}": 2 * LONG_ENOUGH for k in range(1, 8)}
    jobs = {name: torch_job(name, trace=pool.trace.file, num_steps=num) for name, num in num_steps.items()}
    batch = pool.submit(jobs.values())
    pool.wait_for_checkpoint(batch, job="swept-0")
    name, source = node_of(pool, "swept-0")
    ask_about(pool.database, RequestKind.PAUSE, batch=batch, jobs=[other for other in jobs if other != "swept-0"])
    until("a device is idle", lambda: sum(segment.ended_s is None for segment in pool.segments(batch)) == 1)
    kept, clones = tmp_path / "kept", {}
    for clone, changes in changes_of_clones(num_clones).items():
        before_s, prices = time.monotonic(), []

        def accept(answer, before_s=before_s, prices=prices):
            prices.append((time.monotonic() - before_s, answer.price))

        options = {"batch": batch, "job": "swept-0", "name": clone, "is_warm": True, "accept": accept}
        answer = clone_job(pool.database, settings_of_clone=changes, **options)
        ((priced_s, price),) = prices
        assert answer.is_done and price is not None, answer.message
        recovered(f"{clone}: its price is known", priced_s)
        if not clones:
            first = pool.trains("swept-0", after_s=before_s, not_by=source)
            recovered(f"{clone}, for which a device is idle: it trains", first["s"] - before_s)
        root = Path(Submissions(pool.database).find(batch).run_folder(), "checkpoints", clone, START)
        (step,) = (int(folder.name.rpartition("-")[2]) for folder in root.iterdir())
        copy_checkpoint(root, step, to=kept / clone)
        clones[clone] = with_settings(jobs["swept-0"], changes, name=clone), step
    ask_about(pool.database, RequestKind.RESUME, batch=batch)

    pool.nodes[name].unplug()
    pool.nodes[name].lose()
    until("the node is given up", lambda: name not in pool.serving(), seconds=3 * LOST_S + TIMEOUT_S)
    pool.heal()
    pool.finish(batch)
    assert_nothing_twice(pool, batch)
    assert_devices_held_once(pool)
    for clone, (job, step) in clones.items():
        offline = job.with_features(WarmStart(checkpoints=str(kept / clone), step=step))
        assert_same_weights(bench, offline, pool.model_dir(batch, clone))

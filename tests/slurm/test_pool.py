"""A pool whose nodes Slurm lends: nodes come and go, and no fault of Slurm loses more than a checkpoint interval."""

import signal
import time

import pytest

from tests.cluster.checks import assert_well
from tests.cluster.jobs import torch_job
from tests.cluster.machines import end
from tests.cluster.waiting import until

pytestmark = pytest.mark.timeout(900)

DRAINED_WITHIN_S = 60  # what people who drain a node can rely on


def slow_job(pool, name, *, num_steps=400):
    """Returns a job that trains for minutes, unless it may hurry."""
    return torch_job(name, trace=pool.trace.file, num_steps=num_steps, step_s=0.3)


def running(pool, name, **changes):
    """Returns a job that trains and has a checkpoint, its batch, and its node."""
    job = slow_job(pool, name, **changes)
    batch = pool.submit([job])
    pool.wait_for_checkpoint(batch)
    return job, batch, pool.node_of(name)


def test_nodes_come_while_jobs_need_them_and_are_given_back(pool, bench, recovered):
    before, began_s = pool.num_alarms(), time.monotonic()
    earlier = {job.id for job in pool.cluster.slurm.jobs()}  # of other tests: Slurm remembers jobs for a while
    jobs = [slow_job(pool, name) for name in ("first", "second")]
    batch = pool.submit(jobs)
    recovered("no node is there: a batch's first step", pool.trains("first")["s"] - began_s)
    pool.trains("second")
    until("both nodes serve", lambda: len(pool.serving()) == 2)
    assert set(pool.jobs_of_nodes()) == set(pool.cluster.nodes) == set(pool.serving())
    pool.finish(batch)
    done_s = time.monotonic()
    until("the nodes are given back", lambda: not pool.jobs_of_nodes())
    recovered("a batch is done: its nodes are given back, after 5 s idle", time.monotonic() - done_s)
    lent = [job for job in pool.cluster.slurm.jobs() if job.node and job.id not in earlier]
    assert [job.state for job in lent] == ["COMPLETED"] * 2
    assert_well(pool, batch, jobs, bench)
    assert pool.alarms_since_nodes_left() == before, "nodes that leave in order raise no alarm"


def test_a_preempted_node_loses_no_step(pool, bench, recovered):
    before = pool.num_alarms()
    job, batch, node = running(pool, "preempted")
    began_s = time.monotonic()
    pool.cluster.submit("--partition=urgent", "--exclusive", f"--nodelist={node}", script="#!/bin/sh\nsleep 20\n")
    again = pool.trains_again(job.name, after_s=began_s)
    recovered("a node preempted: its job trains elsewhere", again["s"] - began_s)
    pool.finish(batch)
    assert "preempted" in pool.outcomes(batch)
    assert pool.steps_lost(batch) == 0
    assert pool.alarms_since_nodes_left() == before
    assert_well(pool, batch, [job], bench)


@pytest.mark.full
def test_scancel_of_all_nodes_loses_no_step(pool, bench, recovered):
    before = pool.num_alarms()
    job, batch, _ = running(pool, "cancelled")
    began_s = time.monotonic()
    pool.cluster.command("scancel", "--user=root")
    again = pool.trains_again(job.name, after_s=began_s)
    recovered("all nodes cancelled by scancel: the job trains again", again["s"] - began_s)
    pool.finish(batch)
    assert pool.steps_lost(batch) == 0
    assert pool.alarms_since_nodes_left() == before
    assert_well(pool, batch, [job], bench)


@pytest.mark.full
def test_a_drained_node_is_emptied(pool, bench, recovered):
    job, batch, node = running(pool, "drained")
    began_s = time.monotonic()
    pool.cluster.command("scontrol", "update", f"nodename={node}", "state=drain", "reason=the fan is loud")
    again = pool.trains_again(job.name, after_s=began_s)
    assert again["node"] != node
    recovered("a node drained: its job trains elsewhere", again["s"] - began_s)
    until("the drained node is empty", lambda: node not in pool.jobs_of_nodes(), seconds=DRAINED_WITHIN_S)
    recovered("a node drained: it is given back", time.monotonic() - began_s)
    pool.finish(batch)
    assert pool.steps_lost(batch) == 0
    assert_well(pool, batch, [job], bench)


@pytest.mark.full
def test_a_requeued_node_is_replaced(pool, bench, recovered):
    job, batch, node = running(pool, "requeued")
    number, began_s = pool.jobs_of_nodes()[node].id, time.monotonic()
    pool.cluster.command("scontrol", "update", f"jobid={number}", "requeue=1")
    pool.cluster.command("scontrol", "requeue", str(number))
    again = pool.trains_again(job.name, after_s=began_s)
    recovered("a node requeued: its job trains again", again["s"] - began_s)
    pool.finish(batch)
    assert pool.steps_lost(batch) == 0
    assert_well(pool, batch, [job], bench)


@pytest.mark.full
def test_a_job_goes_on_beyond_the_time_limit_of_its_node(pool, bench, recovered):
    before = pool.num_alarms()
    pool.prepare(time="3m", notice_s=30)
    try:
        job, batch, node = running(pool, "limited", num_steps=1000)
        limited = pool.jobs_of_nodes()[node]
        number, pid = limited.id, pool.trace.of(job="limited")[-1]["pid"]
        end_s = limited.end_s - time.time() + time.monotonic()  # by the clock of traces
        ended = until("its job ends", lambda: (found := pool.cluster.job(number)).has_ended and found)
        assert "COMPLETED" in ended.states, "it left before Slurm had to end it"
        again = pool.trains(job.name, not_by=pid)
        last_s = max(step["s"] for step in pool.trace.of(job=job.name) if step["pid"] == pid)
        assert last_s < end_s, "it was stopped before the end of its node"
        recovered("a node's time limit: from the job's last step there to its next one elsewhere", again["s"] - last_s)
    finally:
        pool.prepare()
    pool.finish(batch)
    assert pool.steps_lost(batch) == 0
    assert pool.alarms_since_nodes_left() == before
    assert_well(pool, batch, [job], bench)


@pytest.mark.full
def test_a_node_whose_processes_are_killed(pool, bench, recovered):
    job, batch, node = running(pool, "killed")
    number, began_s = pool.jobs_of_nodes()[node].id, time.monotonic()
    pool.cluster.kill_processes(number)
    again = pool.trains_again(job.name, after_s=began_s)
    recovered("all processes of a node killed: its job trains again", again["s"] - began_s)
    log = (pool.folder / "controller.log").read_text(errors="replace")
    assert f"is gone: its Slurm job {number} has ended" in log, (
        f"Slurm's word is enough, without silence:\n{log[-3000:]}"
    )
    pool.finish(batch)
    assert_well(pool, batch, [job], bench)


@pytest.mark.full
def test_a_node_whose_slurmd_is_killed(pool, bench, recovered):
    job, batch, node = running(pool, "unwatched")
    number, began_s = pool.jobs_of_nodes()[node].id, time.monotonic()
    pool.cluster.kill(node)
    until("Slurm gives the node up", lambda: "NODE_FAIL" in pool.cluster.job(number).states)
    recovered("slurmd killed: found by Slurm, with SlurmdTimeout 15 s", time.monotonic() - began_s)
    again = pool.trains_again(job.name, after_s=began_s)
    assert again["node"] != node, "its node agent lives, and gets no more segments"
    recovered("slurmd killed: the job trains elsewhere", again["s"] - began_s)
    pool.cluster.start_node(node)  # ends what still runs there
    pool.finish(batch)
    assert pool.steps_lost(batch) == 0
    assert_well(pool, batch, [job], bench)


@pytest.mark.full
def test_jobs_go_on_without_slurmctld(pool, bench):
    job, batch, node = running(pool, "uncontrolled")
    number = pool.jobs_of_nodes()[node].id
    pid = pool.trace.of(job=job.name)[-1]["pid"]
    pool.cluster.wait_until_saved(number)
    pool.cluster.kill("slurmctld")
    killed_s = time.monotonic()
    until("it trains on", lambda: pool.trace.of(job=job.name, after_s=killed_s + 15))
    pool.cluster.start_controller()
    until("slurmctld answers", lambda: pool.cluster.command("scontrol", "ping", check=False).returncode == 0)
    pool.finish(batch)
    assert {step["pid"] for step in pool.trace.of(job=job.name)} == {pid}
    assert_well(pool, batch, [job], bench)


@pytest.mark.full
def test_nodes_outlive_the_controller_and_the_worker(pool, bench, recovered):
    job, batch, node = running(pool, "orphaned")
    number = pool.jobs_of_nodes()[node].id
    pid, epoch = pool.trace.of(job=job.name)[-1]["pid"], pool.epoch()
    killed_s = time.monotonic()
    for process in (pool.executor, pool.worker):
        end(process, number=signal.SIGKILL)
    pool.start_executor()
    pool.start_slurm_worker()
    until("another controller leads", lambda: pool.epoch() > epoch)
    recovered("controller and worker killed: another controller leads", time.monotonic() - killed_s)
    pool.finish(batch)
    assert {step["pid"] for step in pool.trace.of(job=job.name)} == {pid}, "its segment was adopted"
    assert (
        "COMPLETED" in until("the node is given back", lambda: (j := pool.cluster.job(number)).has_ended and j).states
    )
    assert_well(pool, batch, [job], bench)

"""What Slurm says of its jobs, by real daemons."""

import pytest

from ringmaster.errors import EngineUnavailable, SchedulerError
from ringmaster.features.slurm.slurm_engine import BATCH_SCRIPT, Slurm, SlurmOptions, comment_of
from ringmaster.tasks.pool.batch_scheduler import COMMAND, SchedulerMachines
from ringmaster.tasks.pool.provider import AllocationStatus
from tests.cluster.waiting import until

# Ends in order: it says so, and takes a moment.
SERVE = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("serving", flush=True)
signal.sigwait({signal.SIGTERM})
print("left in order", flush=True)
"""


@pytest.fixture
def machines(cluster):
    return SchedulerMachines(cluster.slurm)


@pytest.fixture
def pilot(cluster, tmp_path, monkeypatch):
    """Submits a job with the batch script of nodes; returns its number once it serves."""
    (tmp_path / "serve.py").write_text(SERVE)
    monkeypatch.setenv(COMMAND, f"python3 {tmp_path}/serve.py")

    def submit(*options, waits=True):
        job = cluster.submit(
            "--no-requeue", "--exclusive", f"--comment={comment_of('x')}", *options, script=BATCH_SCRIPT
        )
        if waits:
            until("the job serves", lambda: serves(job))
        return job

    def serves(job):
        if "serving" in cluster.output(job):
            return True
        assert not cluster.is_over(job), f"{cluster.job(job)} has not served: {cluster.log('slurmctld')}"
        return False

    return submit


def status(machines, job):
    return machines.poll([])[Slurm.allocation_of(job)].status


def reaches(machines, job, wanted):
    until(f"job {job} is {wanted}", lambda: status(machines, job) == wanted)
    return machines.poll([])[Slurm.allocation_of(job)]


def test_a_job_runs_until_its_time_limit_and_ends_in_order(cluster, machines, pilot):
    job = pilot("--time=30")
    allocation = reaches(machines, job, AllocationStatus.RUNNING)
    assert allocation.until_s is not None
    machines.end(allocation.id)
    ended = reaches(machines, job, AllocationStatus.ENDED)
    assert "left in order" in cluster.output(job)
    assert "COMPLETED, exit status 0" in ended.why


def test_a_waiting_job_is_pending_and_is_withdrawn(cluster, machines, pilot):
    job = pilot("--begin=now+1hour", waits=False)
    assert status(machines, job) == AllocationStatus.PENDING
    machines.end(Slurm.allocation_of(job))
    assert reaches(machines, job, AllocationStatus.ENDED)


def test_a_drained_node_leaves(cluster, machines, pilot):
    job = pilot("--nodelist=n1")
    cluster.command("scontrol", "update", "nodename=n1", "state=drain", "reason=the fan is loud")
    assert "the fan is loud" in reaches(machines, job, AllocationStatus.LEAVING).why
    cluster.command("scontrol", "update", "nodename=n1", "state=resume")
    reaches(machines, job, AllocationStatus.RUNNING)


def test_a_preempted_job_leaves_at_once(cluster, machines, pilot):
    job = pilot("--nodelist=n1")
    cluster.submit("--partition=urgent", "--exclusive", "--nodelist=n1", script="#!/bin/sh\nsleep 1\n")
    assert "is preempted" in reaches(machines, job, AllocationStatus.LEAVING).why
    machines.end(Slurm.allocation_of(job))
    reaches(machines, job, AllocationStatus.ENDED)
    assert "left in order" in cluster.output(job)


@pytest.mark.full
def test_the_notice_before_the_time_limit_ends_a_job_in_order(cluster, machines, pilot):
    job = pilot("--time=1", "--signal=B:USR1@45")
    reaches(machines, job, AllocationStatus.ENDED)
    assert "left in order" in cluster.output(job)


def test_a_requeued_job_never_serves_again(cluster, machines, pilot):
    job = pilot("--requeue")
    assert status(machines, job) == AllocationStatus.RUNNING
    cluster.command("scontrol", "requeue", str(job))
    assert "was requeued" in reaches(machines, job, AllocationStatus.ENDED).why
    until("it is cancelled", lambda: "CANCELLED" in cluster.job(job).states)
    assert cluster.output(job).count("serving") == 1


def test_scancel_ends_a_job_in_order(cluster, machines, pilot):
    job = pilot()
    cluster.command("scancel", str(job))
    reaches(machines, job, AllocationStatus.ENDED)
    assert "left in order" in cluster.output(job)


@pytest.mark.full
def test_slurm_that_is_away_says_nothing_of_jobs(cluster, machines, pilot):
    job = pilot()
    assert status(machines, job) == AllocationStatus.RUNNING
    cluster.wait_until_saved(job)
    cluster.kill("slurmctld")
    with pytest.raises(EngineUnavailable, match="does not answer"):
        machines.poll([])
    cluster.start_controller()
    until("slurmctld answers", lambda: cluster.command("scontrol", "ping", check=False).returncode == 0)
    reaches(machines, job, AllocationStatus.RUNNING)


@pytest.mark.full
def test_a_node_whose_daemon_dies_is_lost_although_its_processes_live(cluster, machines, pilot):
    job = pilot("--nodelist=n1")
    assert status(machines, job) == AllocationStatus.RUNNING
    cluster.kill("n1")
    lost = reaches(machines, job, AllocationStatus.LOST)
    assert "NODE_FAIL" in lost.why and "left in order" not in cluster.output(job)
    cluster.start_node("n1")
    until("the node is back", cluster.are_all_idle)
    assert status(machines, job) == AllocationStatus.LOST  # what still runs there ends at some time


def test_options_that_slurm_refuses_are_named_before_anything_starts(cluster):
    with pytest.raises(SchedulerError, match="nope"):
        cluster.slurm.check(["--partition=nope"])
    cluster.slurm.check(["--partition=batch", "--gres=gpu:2", "--time=8:00:00"])


def test_all_that_slurm_cannot_give_is_named_at_once(cluster):
    def found(partition, gres):
        options = SlurmOptions(partition=partition, time="8h", gres=gres, sbatch_options=["--bogus"])
        return options.refusals(cluster.slurm)

    assert [fault.split(" To fix: ")[0][:25] for fault in found("nope", "gpu:3")] == [
        "--partition nope is not i",
        "--gres gpu:3: no node of ",
        "Slurm refuses sbatch: sba",
    ]
    assert len(found("batch", "gpu:2")) == 1

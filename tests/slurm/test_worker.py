"""Prefect's worker of type `slurm`: flow runs are jobs, whatever ends them."""

import os
import signal
import uuid

import pytest
from prefect.states import Cancelling

from tests.cluster.waiting import until
from tests.slurm.pools import WorkPool


@pytest.fixture(scope="module")
def module_work_pool(session_cluster, prefect, tmp_path_factory):
    """A work pool with its worker, for all tests; tests use `work_pool`."""
    folder = tmp_path_factory.mktemp("work-pool")
    pool = WorkPool(folder, cluster=session_cluster, prefect=prefect, name=f"slurm-{uuid.uuid4().hex[:8]}").create()
    try:
        pool.start_worker()
        yield pool
    finally:
        pool.close()


@pytest.fixture
def work_pool(module_work_pool, cluster):
    """The work pool, whose worker runs, on a cluster without jobs."""
    if module_work_pool.worker is None:  # a test that failed has stopped it
        module_work_pool.start_worker()
    return module_work_pool


def job_of(work_pool, run):
    """Returns the number of a flow run's job."""
    return int(until("its job is known", lambda: work_pool.infrastructure(run)).removeprefix("slurm:"))


def test_a_flow_run_is_a_job_that_knows_its_allocation_and_its_devices(work_pool, cluster, tmp_path):
    run = work_pool.run(tmp_path / "run", gres="gpu:1", exclusive=False, time="30m")
    facts = work_pool.begun(tmp_path / "run")
    job = job_of(work_pool, run)
    assert facts["RINGMASTER_ALLOCATION"] == f"slurm:{job}"
    assert facts["RINGMASTER_NODE"] in {f"{node}-{job}" for node in cluster.nodes}
    assert facts["CUDA_VISIBLE_DEVICES"] in ("0", "1")
    assert facts["A_PASSWORD"] == "of-the-pool"
    assert "of-the-pool" not in cluster.command("scontrol", "show", "job", "-dd", str(job)).stdout
    (tmp_path / "run" / "end").touch()
    work_pool.ends(run, "COMPLETED")
    assert (tmp_path / "run" / "ended").read_text() == "by itself"


def test_a_job_that_ends_without_a_word_makes_its_run_crash_with_the_cause(work_pool, cluster, tmp_path):
    run = work_pool.run(tmp_path / "run")
    facts = work_pool.begun(tmp_path / "run")
    assert facts["RINGMASTER_NODE"] in cluster.nodes
    os.kill(facts["pid"], signal.SIGKILL)
    assert f"Slurm job {job_of(work_pool, run)} has ended on {facts['RINGMASTER_NODE']}: FAILED, exit status 137" in (
        work_pool.ends(run, "CRASHED")
    )


def test_a_job_that_slurm_refuses_makes_its_run_crash_with_the_cause(work_pool, tmp_path):
    run = work_pool.run(tmp_path / "run", partition="nope")
    assert "nope" in work_pool.ends(run, "CRASHED")


def test_jobs_outlive_the_worker_and_the_next_one_watches_them(work_pool, cluster, tmp_path):
    lives = work_pool.run(tmp_path / "lives")
    work_pool.begun(tmp_path / "lives")
    dies = work_pool.run(tmp_path / "dies")
    facts = work_pool.begun(tmp_path / "dies")
    job = job_of(work_pool, dies)
    work_pool.stop_worker(number=signal.SIGKILL)
    os.kill(facts["pid"], signal.SIGKILL)
    until("the job is over", lambda: cluster.is_over(job))
    assert not work_pool.state(dies).is_final()
    work_pool.start_worker()
    assert f"Slurm job {job} has ended" in work_pool.ends(dies, "CRASHED")
    assert work_pool.state(lives).is_running()
    (tmp_path / "lives" / "end").touch()
    work_pool.ends(lives, "COMPLETED")


def test_a_run_that_prefect_cancels_ends_in_order(work_pool, cluster, tmp_path):
    run = work_pool.run(tmp_path / "run")
    work_pool.begun(tmp_path / "run")
    with work_pool.client() as client:
        client.set_flow_run_state(run, Cancelling())
    until("it has ended", lambda: work_pool.state(run).is_final())
    assert (tmp_path / "run" / "ended").read_text() == "SIGTERM"
    assert cluster.is_over(job_of(work_pool, run))


def test_a_run_whose_job_waits_is_withdrawn(work_pool, cluster, tmp_path):
    run = work_pool.run(tmp_path / "run", sbatch_options=["--begin=now+1hour"])
    job = job_of(work_pool, run)
    with work_pool.client() as client:
        client.set_flow_run_state(run, Cancelling())
    work_pool.ends(run, "CANCELLED")
    assert cluster.is_over(job)

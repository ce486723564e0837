"""A second batch scheduler: PBS, whose commands are stubs that start real processes."""

import os
import time
from pathlib import Path

import pytest

from ringmaster.errors import EngineUnavailable, SchedulerError
from ringmaster.features.pbs.pbs_engine import BATCH_SCRIPT, FLOW_RUN, Pbs, PbsOptions
from ringmaster.flows.pool.batch_worker import WORKERS, SubmissionVerdict, decide, jobs_by_run
from ringmaster.tasks.execution.engine import NodeRun
from ringmaster.tasks.pool.batch_scheduler import COMMAND, IS_SHARED, SchedulerMachines
from ringmaster.tasks.pool.engines import engine_options, options_class
from ringmaster.tasks.pool.provider import AllocationStatus
from tests.pbs_site import Site

TIMEOUT_S = 60.0
SERVE = """\
trap 'echo left in order; exit 0' TERM
echo serves "$RINGMASTER_NODE $RINGMASTER_ALLOCATION $PASSWORD"
while true; do sleep 0.1; done
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    site = Site(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{site.folder}:{os.environ['PATH']}")
    (site.folder / "serve").write_text(SERVE)
    yield site
    for number, job in site.jobs().items():
        if "pid" in job and not (site.state / f"{number}.status").exists():
            os.killpg(job["pid"], 9)


def until(what, holds):
    end_s = time.monotonic() + TIMEOUT_S
    while not (result := holds()):
        assert time.monotonic() < end_s, what
        time.sleep(0.1)
    return result


def submit(site, flow_run="abc", command="", **options):
    arguments = PbsOptions(**options).arguments(job_name="node", flow_run=flow_run, log_dir=Path("/logs"))
    environment = {
        **os.environ,
        COMMAND: command or f"bash {site.folder}/serve",
        "PASSWORD": "it's secret",
        IS_SHARED: "",
    }
    return Pbs().submit(arguments, script=BATCH_SCRIPT, environment=environment)


def serving(site, job):
    log = site.folder / f"{job}.log"
    return until("the job serves", lambda: (text := log.exists() and log.read_text()) and "serves" in text and text)


def test_a_job_is_asked_for_in_the_words_of_qsub(site):
    job = submit(site, queue="gpu", time="8h", select="1:ngpus=8", qsub_options=["-A", "ml"])
    words = " ".join(site.jobs()[job]["words"])
    assert f"-N node -v {FLOW_RUN}=abc -o /logs/ -j oe -r n -S /bin/bash -q gpu" in words
    assert words.endswith("-l select=1:ngpus=8 -l place=excl -l walltime=28800 -A ml")
    assert "secret" not in words, "which all users can read"
    with pytest.raises(SchedulerError, match="PBS refuses qsub: qsub: Unknown queue"):
        submit(site, queue="nope")


def test_a_job_serves_as_a_node_until_it_is_given_back(site):
    machines, job = SchedulerMachines(Pbs()), submit(site)
    assert serving(site, job) == f"serves pbs1 pbs:{job} it's secret\n"
    allocation = machines.poll([])[f"pbs:{job}"]
    assert allocation.status == AllocationStatus.RUNNING
    assert time.time() < allocation.until_s <= time.time() + 3600
    machines.end(allocation.id)
    ended = until("it has ended", lambda: (a := machines.poll([])[f"pbs:{job}"]).status == "ended" and a)
    assert ended.why == f"its PBS job {job} has ended: COMPLETED, exit status 0"
    assert "left in order" in (site.folder / f"{job}.log").read_text()
    Pbs().end(job), Pbs().cancel(job)  # what has ended is ended no more


def test_jobs_wait_for_a_machine_and_can_be_withdrawn(site):
    machines, jobs = SchedulerMachines(Pbs()), [submit(site, flow_run=f"run-{number}") for number in range(3)]
    for job in jobs[:2]:
        serving(site, job)
    assert [each.status for each in machines.poll([]).values()] == ["running", "running", "pending"]
    machines.end(f"pbs:{jobs[2]}")
    assert machines.poll([])[f"pbs:{jobs[2]}"].status == AllocationStatus.ENDED


def test_a_machine_that_is_set_offline_leaves(site):
    machines, job = SchedulerMachines(Pbs()), submit(site)
    serving(site, job)
    (site.state / "offline-pbs1").write_text("the fan is loud")
    allocation = machines.poll([])[f"pbs:{job}"]
    assert (allocation.status, allocation.why) == (AllocationStatus.LEAVING, "PBS drains pbs1: the fan is loud")


def test_a_server_that_is_away_says_nothing_of_jobs(site):
    job = submit(site)
    (site.state / "away").touch()
    for ask in (Pbs().jobs, lambda: Pbs().cancel(job), lambda: submit(site)):
        with pytest.raises(EngineUnavailable, match=r"The server of PBS does not answer: .*`qstat -B`"):
            ask()
    (fault,) = PbsOptions().queried_faults(site.folder)
    assert "does not answer" in fault and "To fix" in fault


def test_a_flow_run_whose_job_ends_without_a_word_has_crashed(site):
    job = submit(site, command="bash -c 'exit 7'")
    jobs = until("it has ended", lambda: (j := jobs_by_run(Pbs().jobs()))["abc"].has_ended and j)
    decision = decide(NodeRun(id="abc", infrastructure=f"pbs:{job}"), jobs, age_s=0.0, scheduler=Pbs)
    assert decision.verdict == SubmissionVerdict.CRASHED
    assert decision.message == f"PBS job {job} has ended on pbs1: COMPLETED, exit status 7"


def test_up_and_prefect_know_the_engine_by_its_one_line():
    assert options_class("pbs") is PbsOptions
    (fault,) = engine_options("slurm", {"queue": "gpu", "time": "8h"}).faults(has_server=True)
    assert fault == "--queue is of --engine pbs, not of slurm. To fix: leave it out"
    (worker,) = engine_options("pbs", {"queue": "gpu"}).services(Path("/home"))
    assert " ".join(worker.command[2:-1]) == "prefect worker start --type pbs --pool ringmaster-pbs --name"
    template = WORKERS["pbs"].get_default_base_job_template()
    assert {"queue", "select", "time", "batch_script"} <= template["variables"]["properties"].keys()

"""The commands of Slurm: what is asked, and what their failures mean."""

import subprocess

import pytest

from ringmaster.errors import EngineUnavailable, SchedulerError
from ringmaster.features.slurm.slurm_engine import Slurm

EMPTY = '{"jobs": [], "errors": []}'


def slurm(*, status=0, output="", errors="", raises=None):
    asked = []

    def run(command, input, env):
        asked.append((list(command), input, env))
        if raises is not None:
            raise raises
        return subprocess.CompletedProcess(command, status, output, errors)

    found = Slurm(run=run)
    found.asked = asked
    return found


def test_a_job_is_submitted_without_its_environment_on_the_command_line():
    site = slurm(output="12;cluster\n")
    assert site.submit(["--time=30"], script="#!/bin/sh\n", environment={"PASSWORD": "secret"}) == 12
    ((command, script, environment),) = site.asked
    assert command == ["sbatch", "--parsable", "--export=ALL", "--time=30"]
    assert (script, environment) == ("#!/bin/sh\n", {"PASSWORD": "secret"})


@pytest.mark.parametrize(
    "said",
    [
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
        "squeue: error: Munge encode failed: Failed to access munge.socket: No such file or directory",
    ],
)
def test_a_controller_that_is_away_is_told_apart_with_a_remedy(said):
    site = slurm(status=1, errors=said)
    for ask in (site.jobs, lambda: site.submit([], script="", environment={}), lambda: site.cancel(1)):
        with pytest.raises(EngineUnavailable, match=r"slurmctld.* does not answer: .*To fix"):
            ask()


def test_an_empty_list_with_an_error_is_no_list():
    with pytest.raises(EngineUnavailable, match="does not answer"):
        slurm(output='{"jobs": [], "errors": [{"description": "Failed while looking for jobs"}]}').jobs()
    assert slurm(output=EMPTY).jobs() == []


def test_commands_that_are_missing_or_hang_are_an_engine_that_is_away():
    with pytest.raises(EngineUnavailable, match="login node"):
        slurm(raises=FileNotFoundError(2, "No such file or directory")).jobs()
    with pytest.raises(EngineUnavailable, match="squeue has waited"):
        slurm(raises=subprocess.TimeoutExpired("squeue", 60)).jobs()


def test_what_slurm_refuses_is_said_in_its_words():
    site = slurm(status=1, errors="sbatch: error: invalid partition specified: nope\n")
    with pytest.raises(SchedulerError, match="invalid partition specified: nope"):
        site.check(["--partition=nope"])


def test_ending_what_has_ended_is_no_error():
    over = slurm(status=1, errors="scancel: error: Kill job error on job id 3: Invalid job id specified")
    over.end(3), over.cancel(3)
    with pytest.raises(SchedulerError, match="denied"):
        slurm(status=1, errors="scancel: error: Kill job error: Access/permission denied").cancel(3)


def test_a_signal_goes_to_the_batch_script_alone():
    site = slurm()
    site.end(3), site.cancel(3)
    assert [command for command, _, _ in site.asked] == [["scancel", "--batch", "--signal=TERM", "3"], ["scancel", "3"]]


def test_no_nodes_need_no_question():
    site = slurm()
    assert site.nodes([]) == {}
    assert not site.asked


def test_a_job_inherits_nothing_of_the_job_in_which_its_pool_runs():
    own = {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf", "SLURM_JOB_ID": "3", "SLURM_MEM_PER_NODE": "100"}
    assert Slurm.environment_of_jobs(own) == {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf"}

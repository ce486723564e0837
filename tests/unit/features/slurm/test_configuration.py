"""The job of a flow run: its options, its environment, and its batch script."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ringmaster.features.slurm.slurm_engine import BATCH_SCRIPT, slurm_time
from ringmaster.flows.pool.batch_worker import WORKERS
from ringmaster.tasks.pool.batch_scheduler import COMMAND

SlurmWorker = WORKERS["slurm"]
SlurmJobConfiguration = SlurmWorker.job_configuration

LOGS = Path("/shared/slurm")


def arguments(**changes):
    return SlurmJobConfiguration(**changes).arguments(flow_run="abc", log_dir=LOGS)


def test_what_is_asked_of_slurm_is_what_the_work_pool_says():
    found = arguments(
        name="node of Ada's pool", partition="gpu", time="8h", gres="gpu:8", sbatch_options=["--constraint=a100"]
    )
    assert {"--partition=gpu", "--time=480", "--gres=gpu:8", "--exclusive", "--no-requeue", "--nodes=1"} <= {*found}
    assert "--comment=prefect-flow-run:abc" in found
    assert "--job-name=node-of-Ada-s-pool" in found
    assert f"--output={LOGS}/%j.log" in found
    assert found[-1] == "--constraint=a100"  # it has the last word
    assert not [option for option in arguments() if option.startswith(("--partition", "--time", "--gres", "--account"))]


def test_a_job_that_shares_its_node_leaves_memory_to_others():
    assert {"--exclusive", "--mem=0"} <= {*arguments()}
    shared = arguments(exclusive=False, cpus=4)
    assert "--cpus-per-task=4" in shared
    assert not [option for option in shared if option.startswith(("--exclusive", "--mem"))]
    assert "--mem=64G" in arguments(exclusive=False, memory="64G")


@pytest.mark.parametrize(
    ("text", "wanted"), [("8h", "480"), ("30m", "30"), ("2d", "2880"), ("1-12:00:00", "1-12:00:00"), (" 90 ", "90")]
)
def test_times_are_read_as_people_write_them(text, wanted):
    assert slurm_time(text) == wanted


def test_passwords_are_in_the_environment_alone():
    configuration = SlurmJobConfiguration(env={"PASSWORD": "secret"})
    environment = configuration.environment({"PATH": "/bin", "SLURM_JOB_ID": "1"})
    assert environment["PASSWORD"] == "secret"
    assert environment["PATH"] == "/bin" and "SLURM_JOB_ID" not in environment
    assert (
        "secret"
        not in " ".join(configuration.arguments(flow_run="abc", log_dir=LOGS)) + configuration.options.batch_script
    )


def test_the_base_job_template_has_a_variable_for_every_option():
    template = SlurmWorker.get_default_base_job_template()
    names = set(SlurmWorker.job_configuration_variables.model_fields)
    assert set(template["variables"]["properties"]) == names == set(SlurmJobConfiguration.model_fields)
    assert template["variables"]["properties"]["batch_script"]["default"] == BATCH_SCRIPT
    assert SlurmWorker.get_worker_class_from_type("slurm") is SlurmWorker


# -- the batch script --------------------------------------------------------------------------------------------------

SERVE = """
import os, signal, threading
stopping = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stopping.set())
print("serving", flush=True)
stopping.wait()
print("left in order", flush=True)
os._exit(0)  # a second signal must not disturb the interpreter's end
"""


@pytest.fixture
def script(tmp_path):
    """Starts the batch script with a flow run's command; ends what a failed test leaves."""
    started = []

    def start(command="true", **environment):
        process = subprocess.Popen(
            ["bash", "-c", BATCH_SCRIPT],
            env={**os.environ, COMMAND: command, "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1", **environment},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_reaches_the_flow_run_for_whose_end_the_script_waits(script, tmp_path, number):
    (tmp_path / "serve.py").write_text(SERVE)
    process = script(f"{sys.executable} {tmp_path}/serve.py")
    assert process.stdout.readline() == "serving\n"
    process.send_signal(number)
    assert process.stdout.read() == "left in order\n"
    assert process.wait() == 0


def test_a_signal_to_all_processes_ends_the_flow_run_in_order(script, tmp_path):
    (tmp_path / "serve.py").write_text(SERVE)
    process = script(f"{sys.executable} {tmp_path}/serve.py")
    assert process.stdout.readline() == "serving\n"
    os.killpg(process.pid, signal.SIGTERM)
    assert process.stdout.read() == "left in order\n"
    assert process.wait() == 0


def test_a_requeued_job_ends_at_once(script):
    process = script("echo served", SLURM_RESTART_COUNT="1")
    assert process.communicate()[0] == "" and process.returncode == 0


def test_the_flow_run_knows_its_allocation_and_its_node(script):
    show = "printenv RINGMASTER_ALLOCATION RINGMASTER_NODE"
    assert script(show).communicate()[0].split() == ["slurm:7", "n1"]
    assert script(show, JOB_IS_SHARED="1").communicate()[0].split() == ["slurm:7", "n1-7"]


@pytest.mark.parametrize("status", [0, 5])
def test_the_status_of_the_flow_run_is_that_of_the_job(script, status):
    process = script(f"bash -c 'exit {status}'")
    process.communicate()
    assert process.returncode == status

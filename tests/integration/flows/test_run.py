"""`ringmaster run` from the command line to the exported weights, including runs that are killed midway.

All runs share one home, because a new one spends ten seconds on databases.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from ringmaster.flows.interrupts import STOPPING
from tests.attacks import expect_closed_prefect, open_to_others
from tests.integration.counting_frames import FILE
from tests.integration.workbench import is_bit_equal, weights_in, write_prose

# `exact` leaves one option to a model with dropout, so that every run of it must end with bit-equal weights.
BATCH = """
name: nightly
devices: {cpu: 2}
objective: weighted
jobs:
  - &long
    name: long
    model: {architecture: GPT2LMHeadModel, config: {n_embd: 32, n_layer: 2, n_head: 2}}
    data: {path: prose.txt, seq_len: 24, vocab_size: 300}
    optimizer: {lr: 1e-3}
    schedule: {name: cosine, warmup_steps: 20}
    global_batch_size: 8
    num_steps: 600
    evaluation: {max_batches: 2}
    techniques: [single]
    num_devices: [1]
    exact: true
  - {<<: *long, name: child, base: long, num_steps: 5, schedule: {}}
  - name: vit
    model:
      architecture: ViTForImageClassification
      config: {patch_size: 2, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2,
               hidden_dropout_prob: 0.1}
    data: {source: digits}
    global_batch_size: 8
    num_steps: 20
    deadline_s: 3600
    weight: 3
    evaluation: {metrics: [accuracy]}
    techniques: [single]
    num_devices: [1]
    exact: true
"""
TIMEOUT_S = 400.0
pytestmark = pytest.mark.timeout(1200)  # three runs in one test


class Place:
    """A folder with a batch file, and the home of its runs. program: the module that is run as the command."""

    program = "tests.integration.counting_frames"

    def __init__(self, folder):
        self.folder, self.home = folder, folder / "home"
        write_prose(folder / "prose.txt")
        self.batch = folder / "nightly.yaml"
        self.batch.write_text(BATCH)
        self._num_runs = 0

    @property
    def environment(self):
        """The environment variables of the processes that run here."""
        source = Path(__file__).parents[3]
        path = f"{source / 'src'}{os.pathsep}{source}"  # of these files, whatever is installed
        return {**os.environ, "RINGMASTER_HOME": str(self.home), "PYTHONPATH": path, "COLUMNS": "200"}

    @contextmanager
    def run(self, *options, batch=None):
        """Starts `ringmaster run`; kills it at the end if it is still alive."""
        self._num_runs += 1
        stdout = self.folder / f"stdout-{self._num_runs}"
        command = [sys.executable, "-m", self.program, "run", str(batch or self.batch), "--json", *options]
        with (
            stdout.open("wb") as file,
            subprocess.Popen(
                command, cwd=self.folder, env=self.environment, stdout=file, stderr=subprocess.PIPE
            ) as process,
        ):
            run = Run(process, stdout)
            try:
                yield run
            finally:
                process.kill()

    def done(self, *options):
        """Returns the JSON object of a run that is not disturbed."""
        with self.run(*options) as run:
            return run.result(exit_code=0)

    @property
    def newest(self):
        return max((self.home / "batches" / "nightly").iterdir())


class Run:
    """A running `ringmaster run`."""

    def __init__(self, process, stdout):
        self.process, self._stdout = process, stdout
        self.said = b""

    def read_until(self, text):
        """Reads stderr until `text` appears, or fails at its end."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while text not in self.said.decode(errors="replace"):
            left_s = deadline_s - time.monotonic()
            assert select.select([self.process.stderr], [], [], max(left_s, 0))[0], self.said.decode()
            data = os.read(self.process.stderr.fileno(), 65536)
            assert data, f"it ended without saying {text!r}:\n{self.said.decode()}"
            self.said += data

    def result(self, *, exit_code):
        """Returns the JSON object of a run after it has exited with `exit_code`."""
        _, rest = self.process.communicate(timeout=TIMEOUT_S)
        self.said += rest
        assert self.process.returncode == exit_code, self.said.decode()
        return json.loads(self._stdout.read_text())

    def until_checkpointed(self, folder, job="long"):
        """Waits for the job's next checkpoint, after which the job is still training."""
        root = folder / "checkpoints" / job
        before = {path.name for path in root.glob("step-????????")}
        deadline_s = time.monotonic() + TIMEOUT_S
        while not {path.name for path in root.glob("step-????????")} - before:
            assert self.process.poll() is None, "it has ended"
            assert time.monotonic() < deadline_s
            time.sleep(0.005)

    def tree(self):
        return psutil.Process(self.process.pid).children(recursive=True)

    def rank(self, job):
        """The worker process of a started job, recognized by the log file that it writes."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline_s:
            for process in self.tree():
                with suppress(FileNotFoundError):  # the process has ended
                    if str(Path(f"/proc/{process.pid}/fd/1").readlink()).endswith(f"-{job}/rank-0.log"):
                        return process.pid
            time.sleep(0.005)
        raise AssertionError(f"no worker of {job} runs")


FAST_CHECKPOINTS = ("--checkpoint-every", "0.1")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def first(place):
    """The result of an undisturbed run, and its weights."""
    result = place.done()
    return result, {job["name"]: weights_in(Path(job["model_dir"])) for job in result["jobs"]}


def assert_done_with_the_same_weights(result, first):
    assert result["status"] == "done"
    for job in result["jobs"]:
        assert job["status"] == "done"
        assert is_bit_equal(weights_in(Path(job["model_dir"])), first[1][job["name"]]), job["name"]


@pytest.mark.full
def test_the_result_says_what_was_done(first):
    result, _ = first
    assert (result["batch"], result["status"], result["faults"]) == ("nightly", "done", [])
    assert set(result) >= {"batch", "status", "plan", "makespan_s", "num_trials", "jobs"}
    assert set(result["plan"]) == {"makespan_s", "lower_bound_s", "gap", "objective", "value"}
    assert result["objective"] == result["plan"]["objective"] == "weighted"
    assert result["value"] > result["makespan_s"]  # the sum of three jobs' end times, one of them weighted threefold
    assert result["plan"]["makespan_s"] >= result["plan"]["lower_bound_s"] > 0
    prediction = result["prediction"]
    assert 0 < prediction["low_s"] < prediction["makespan_s"] < prediction["high_s"]
    assert (prediction["num_earlier"], prediction["load"] >= 1) == (0, True)
    assert result["num_trials"] == 0
    jobs = {job["name"]: job for job in result["jobs"]}
    assert list(jobs) == ["long", "child", "vit"]
    assert {name: job["num_steps"] for name, job in jobs.items()} == {"long": 600, "child": 5, "vit": 20}
    assert set(jobs["long"]["metrics"]) == {"loss"}
    assert jobs["long"]["num_evaluated_rows"] == 2 * 8
    assert 0 <= jobs["vit"]["metrics"]["accuracy"] <= 1
    assert 0 < jobs["vit"]["ended_s"] < jobs["vit"]["deadline_s"] == 3600
    assert "deadline_s" not in jobs["long"]
    for job in jobs.values():
        assert set(job) >= {"name", "status", "num_steps", "metrics", "segments", "model_dir", "model_uri"}
        (segment,) = job["segments"]
        assert (segment["technique"], segment["num_devices"]) == ("single", 1)
        assert segment["config"] == {"micro_batch": 4, "recompute": "none"}  # the chunk of exact jobs
        assert (segment["first_step"], segment["last_step"]) == (0, job["num_steps"])
        assert segment["seconds"] > 0
        assert job["model_uri"].startswith("models:/")


@pytest.mark.full
def test_the_way_from_the_command_line_to_the_first_segment_is_short(place, first):
    functions = json.loads((place.home / FILE).read_text())
    assert functions[0] == "ringmaster.flows.entry:main"
    assert 3 < len(functions) <= 14, "\n".join(functions)  # one of them gives the command an option of a feature


@pytest.mark.full
def test_a_child_starts_where_its_base_ended(first):
    _, weights = first
    one, other = weights["long"], weights["child"]
    assert 0 < max(float((one[name] - other[name]).abs().max()) for name in one) < 0.01  # five small steps


@pytest.mark.full
def test_all_that_is_written_is_its_owners_alone(place, first):
    assert open_to_others(place.home) == []


@pytest.mark.full
def test_a_rank_that_is_killed_costs_one_interval(place, first):
    with place.run(*FAST_CHECKPOINTS) as run:
        run.read_until("long starts at step 0")
        rank = run.rank("long")  # found before it is needed: the job trains for a few seconds only
        run.until_checkpointed(place.newest)
        os.kill(rank, signal.SIGKILL)
        result = run.result(exit_code=0)
    assert result["num_trials"] == 0
    assert_done_with_the_same_weights(result, first)
    crashed, again = result["jobs"][0]["segments"]
    assert (crashed["status"], again["status"]) == ("crashed", "done")
    assert 0 < again["first_step"] < again["last_step"] == 600


@pytest.mark.full
def test_interrupted_then_killed_it_is_resumed_and_ends_in_the_same_weights(place, first):
    with place.run(*FAST_CHECKPOINTS) as run:
        run.read_until("long starts at step 0")
        assert run.rank("long")
        started = run.tree()
        run.until_checkpointed(place.newest)
        run.process.send_signal(signal.SIGINT)
        run.read_until(STOPPING)
        result = run.result(exit_code=130)
    command = f"ringmaster run {place.batch} --json {' '.join(FAST_CHECKPOINTS)} --resume"
    assert f"to continue: {command}" in run.said.decode()
    assert result["status"] == "interrupted"
    assert_gone(started)
    reached = result["jobs"][0]["num_steps"]
    assert result["jobs"][0]["segments"][0]["status"] == "preempted"
    assert 0 < reached < 600
    folder = place.newest

    with place.run("--resume", *FAST_CHECKPOINTS) as run:
        run.read_until(f"long starts at step {reached}")
        assert run.rank("long")
        helpers = run.tree()
        assert any("forkserver" in command_of(process) for process in helpers)
        (server,) = (process for process in helpers if "prefect_server" in command_of(process))
        port = server.cmdline()[server.cmdline().index("--port") + 1]
        user = server.environ()["PREFECT_SERVER_API_AUTH_STRING"]
        expect_closed_prefect(f"http://127.0.0.1:{port}/api", user=user)
        run.until_checkpointed(folder)
        run.process.kill()
        run.process.wait()
        assert_gone(helpers)

    result = place.done("--resume")
    assert place.newest == folder
    assert_done_with_the_same_weights(result, first)
    statuses = [segment["status"] for segment in result["jobs"][0]["segments"]]
    assert statuses == ["preempted", "lost", "done"]
    assert result["jobs"][0]["segments"][-1]["first_step"] > reached
    assert result["num_trials"] == 0

    with place.run("--resume") as run:
        _, said = run.process.communicate(timeout=TIMEOUT_S)
    assert run.process.returncode == 2
    assert b"is done. To fix: leave out --resume" in said


def command_of(process):
    with suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def assert_gone(processes):
    gone, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive, [(process.pid, command_of(process)) for process in alive]
    assert gone


@pytest.mark.full
def test_deadlines_that_cannot_be_met_are_told_before_anything_is_trained(place, first):
    hurried = place.folder / "hurried.yaml"
    hurried.write_text(BATCH.replace("nightly", "hurried").replace("3600", "0.001"))
    with place.run(batch=hurried) as run:
        _, said = run.process.communicate(timeout=TIMEOUT_S)
    assert run.process.returncode == 2, said.decode()
    assert "job vit: cannot end before" in said.decode()
    assert "To fix: give" in said.decode()
    (folder,) = (place.home / "batches" / "hurried").iterdir()
    assert not list(folder.glob("gangs/*"))


def test_a_wrong_file_is_told_with_every_fault_before_anything_starts(tmp_path):
    place = Place(tmp_path)
    place.batch.write_text(
        BATCH.replace("num_steps: 20", "num_steps: -1").replace("base: long", "base: lung").replace("exact", "exakt")
    )
    with place.run() as run:
        _, said = run.process.communicate(timeout=TIMEOUT_S)
    assert run.process.returncode == 2
    lines = said.decode().splitlines()
    for fault in ("num_steps", "lung", "exakt"):
        assert [line for line in lines if fault in line], said.decode()
    assert not (tmp_path / "stdout-1").read_bytes()
    assert not place.home.exists()

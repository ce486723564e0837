"""External trainers, with a tiny stub: the protocol, checkpoints, and the end of all processes that they start."""

import json
import signal
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from ringmaster.techniques import DataSpec, ModelSpec, registry
from ringmaster.techniques.processes.forkserver_client import ForkServer
from ringmaster.techniques.processes.gang_events import JobReady, Steps, TrialMeasured
from ringmaster.techniques.processes.order import TRIAL
from ringmaster.techniques.processes.reporter import MEASURE, STOP
from tests.integration.workbench import Layout, Workbench

STUB = str(Path(__file__).parents[1] / "stub_trainer.py")
COMMAND = Layout("command", 2, {"knob": 7})
ENDLESS = 1_000_000


def job(bench, how="well", **changes):
    model = ModelSpec(command=(sys.executable, STUB), kwargs={"how": how, **changes.pop("kwargs", {})})
    return bench.job(model, data=DataSpec(source="command"), **changes)


def sum_below(number):
    return number * (number - 1) // 2


def exported(folder):
    return json.loads((folder / "model" / "model.json").read_text())


def test_a_command_trains_from_its_order_to_the_exported_model(bench, tmp_path):
    trained = bench.train(job(bench, num_steps=6), COMMAND, tmp_path)
    assert trained.outcome.status == "done", trained.outcome
    result = trained.outcome.result
    assert (result.first_step, result.step) == (0, 6)
    assert result.metrics == {"loss": pytest.approx(1 / sum_below(6)), "total": 15.0}
    assert (result.evaluate_s, result.export_s) == (0.25, 0.125)
    assert trained.losses == pytest.approx([1 / step for step in range(1, 7)])
    assert exported(tmp_path) == sum_below(6)
    order = json.loads((tmp_path / "gang" / "order.json").read_text())
    assert (order["mode"], order["config"]["knob"], len(order["devices"])) == ("run", 7, 2)
    assert order["job"]["name"] == "tiny"


def test_a_segment_ends_where_it_should_and_the_next_goes_on(bench, tmp_path):
    first = bench.train(job(bench, num_steps=6), COMMAND, tmp_path, last_step=4)
    assert (first.outcome.status, first.outcome.result.step) == ("done", 4)
    assert not (tmp_path / "model").exists()
    second = bench.train(job(bench, num_steps=6), COMMAND, tmp_path)
    assert second.outcome.result.first_step == 4
    assert exported(tmp_path) == sum_below(6)


@pytest.mark.parametrize("how", ["well", "wordless"])
def test_told_to_stop_it_checkpoints_and_goes_on_later(bench, tmp_path, how):
    """SIGTERM reaches the command; it may report the preemption, or only exit with the status for it."""
    endless = job(bench, how, num_steps=ENDLESS)

    def stop(gang, event):
        if isinstance(event, Steps):
            gang.send(STOP)

    trained = bench.train(endless, COMMAND, tmp_path, on_event=stop)
    assert trained.outcome.status == "preempted", trained.outcome
    step = trained.outcome.result.step
    assert 0 < step == trained.said("checkpoint")[-1].step
    again = bench.train(endless, COMMAND, tmp_path, last_step=step + 2)
    assert (again.outcome.result.first_step, again.outcome.result.step) == (step, step + 2)


def test_told_to_stop_before_it_has_begun_it_has_lost_nothing(bench, tmp_path):
    """The command has installed no signal handler yet, and dies of the signal."""
    trained = bench.train(job(bench, "sleeps"), COMMAND, tmp_path, on_event=lambda gang, _: gang.send(STOP))
    assert (trained.outcome.status, trained.outcome.result.step) == ("preempted", 0)


def test_checkpoints_are_kept_whole_and_few_and_a_damaged_one_is_passed_over(bench, tmp_path):
    bench.train(job(bench, "saves", num_steps=20), COMMAND, tmp_path, last_step=8)
    root = tmp_path / "checkpoints"
    assert sorted(path.name for path in root.glob("step-*")) == ["step-00000006", "step-00000008"]
    assert (root / "latest").read_text() == "step-00000008"
    (root / "step-00000008" / "deep" / "model.json").write_text("27")  # the same length as before
    trained = bench.train(job(bench, "saves", num_steps=20), COMMAND, tmp_path)
    assert trained.outcome.result.first_step == 6
    assert "is damaged" in trained.said("checkpoint_failed")[0].message
    assert exported(tmp_path) == sum_below(20)


def test_a_checkpoint_of_another_version_is_refused(bench, tmp_path):
    bench.train(job(bench, num_steps=6), COMMAND, tmp_path, last_step=2)
    outcome = bench.train(job(bench, num_steps=6, seed=1), COMMAND, tmp_path).outcome
    assert outcome.status == "invalid"
    assert "is of another version of job tiny" in outcome.message


@pytest.mark.parametrize(
    ("how", "status", "message"),
    [
        ("memory", "out_of_memory", "the device is full"),
        ("mistaken", "invalid", "width 3 is not a power of two"),
        ("dies", "crashed", "ended with status -9 without saying done; the last line of its output: cannot continue"),
        ("mute", "invalid", "reports nothing. To fix: add these lines to its loop: `from ringmaster import report`"),
        ("leaves", "invalid", "ended with status 0 without saying done"),
        ("mistyped", "invalid", "ended with status 1 without saying done; the last line of its output: KeyError: "),
        ("offline", "crashed", "ended with status 1 without saying done; the last line of its output: OSError: "),
        ("babbles", "invalid", "To fix: give `event` one of start, step"),
        ("skips", "invalid", "sent step 2 after step 0"),
        ("diverges", "invalid", "the loss became nan at step 2"),
        ("lies", "invalid", "sent done at step 0, and its order ends at 6"),
        ("silent", "invalid", "sent no metrics of step 6"),
    ],
)
def test_however_it_ends_the_reason_is_told(bench, tmp_path, how, status, message):
    outcome = bench.train(job(bench, how, num_steps=6), COMMAND, tmp_path).outcome
    assert (outcome.status, message in outcome.message) == (status, True), outcome.message


def test_a_command_that_cannot_be_started_is_invalid(bench, tmp_path):
    absent = replace(job(bench), model=ModelSpec(command=("/no/such/program",)))
    outcome = bench.train(absent, COMMAND, tmp_path).outcome
    assert outcome.status == "invalid"
    assert "'/no/such/program' cannot be started" in outcome.message


@pytest.mark.parametrize("number", [signal.SIGKILL, None], ids=["worker-killed", "gang-killed"])
def test_nobody_outlives_the_worker_not_even_in_a_session_of_its_own(bench, tmp_path, number):
    pids = tmp_path / "pids"
    spawning = job(bench, "spawns", kwargs={"pids": str(pids)}, num_steps=ENDLESS)
    started = []

    def kill(gang, event):
        if isinstance(event, Steps) and pids.exists() and not started:
            started.extend(psutil.Process(int(pid)) for pid in pids.read_text().split())
            if number is None:
                gang.kill()
            else:
                psutil.Process(gang.pids[0]).send_signal(number)

    outcome = bench.train(spawning, COMMAND, tmp_path, on_event=kill).outcome
    assert outcome.status == "crashed"
    assert len(started) == 2
    _, alive = psutil.wait_procs(started, timeout=300)
    assert not alive


@pytest.mark.full
def test_nobody_outlives_the_fork_server_killed_with_all_that_it_could_have_done(tmp_path):
    pids = tmp_path / "pids"
    with ForkServer() as server:
        bench = Workbench(server, tmp_path)
        spawning = job(bench, "spawns", kwargs={"pids": str(pids)}, num_steps=ENDLESS)
        started = []

        def kill(gang, event):
            if isinstance(event, Steps) and pids.exists() and not started:
                started.extend(psutil.Process(int(pid)) for pid in pids.read_text().split())
                psutil.Process(gang.pids[0]).parent().kill()

        assert bench.train(spawning, COMMAND, tmp_path, on_event=kill).outcome.status == "crashed"
    assert len(started) == 2
    _, alive = psutil.wait_procs(started, timeout=300)
    assert not alive


def test_what_a_command_leaves_behind_ends_with_it(bench, tmp_path):
    pids = tmp_path / "pids"
    outcome = bench.train(job(bench, "spawns", kwargs={"pids": str(pids)}, num_steps=4), COMMAND, tmp_path).outcome
    assert outcome.status == "done"
    assert not any(psutil.pid_exists(int(pid)) for pid in pids.read_text().split())


def test_a_trial_measures_steps_a_save_an_evaluation_and_an_export(bench, tmp_path):
    said = []

    def conduct(gang, event):
        said.append(event.NAME)
        if isinstance(event, JobReady):
            gang.send(MEASURE)
        if isinstance(event, TrialMeasured):
            gang.send(STOP)

    trained = bench.train(job(bench, num_steps=6), COMMAND, tmp_path, on_event=conduct, purpose=TRIAL)
    assert trained.outcome.status == "done", trained.outcome
    assert said.index("ready") < said.index("measured")
    (event,) = trained.said("measured")
    profile = event.profile
    assert profile["step_s"] == 0.01
    assert (profile["evaluate_s"], profile["export_s"], profile["peak_bytes"]) == (0.25, 0.125, 12345678)
    assert profile["save_s"] > 0.5
    assert profile["startup_s"] > 0
    assert not (tmp_path / "gang" / "scratch").exists()


def test_only_the_gangs_devices_can_be_seen(bench, tmp_path):
    script = tmp_path / "look.py"
    script.write_text(
        "import os, sys\n"
        "print(sorted(os.sched_getaffinity(0)), repr(os.environ['CUDA_VISIBLE_DEVICES']), 'flows' in str(sys.path))\n"
    )
    looking = replace(job(bench), model=ModelSpec(command=(sys.executable, str(script))))
    bench.train(looking, Layout("command", 1), tmp_path)
    cores = list(bench.slot(0).cores)
    assert (tmp_path / "gang" / "rank-0.log").read_text().startswith(f"{cores} '' False")


def test_a_commands_job_is_for_the_command_alone(bench):
    from ringmaster.techniques.estimates.job_preflight import _black_box
    from ringmaster.techniques.models.facts import model_facts

    commanded, plain = job(bench), bench.job()
    command = registry.load(registry.dotted_path("command"))
    facts = model_facts(commanded.model, data=None)
    assert command.supports(commanded, bench.shape(2), facts) is None
    assert "not a command" in command.supports(plain, bench.shape(2), facts)
    assert "command" in _black_box(registry.load(registry.dotted_path("ddp")), commanded)
    assert list(command.configs(commanded, bench.shape(2), facts)) == [{}]
    knobs = replace(commanded, model=replace(commanded.model, configs=({"a": 1}, {"a": 2})))
    assert list(command.configs(knobs, bench.shape(2), facts)) == [{"a": 1}, {"a": 2}]

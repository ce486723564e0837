"""Gangs whose ranks end in any way: the gang ends too, reports the cause, and leaves no process on the devices."""

import contextlib
import os
import signal

import psutil
import pytest

from ringmaster.techniques import ModelSpec, OptimizerSpec
from ringmaster.techniques.processes.gang_events import JobResult, Steps
from tests.integration.workbench import ADAMW, SINGLE, Layout, is_bit_equal
from tests.matrix import matrix

ENDLESS = 1_000_000
IMPATIENT_SINGLE = Layout("tests.integration.stubs:ImpatientSingle")
IMPATIENT_DDP = Layout("tests.integration.stubs:ImpatientDdp", 2)
BOTH = pytest.mark.parametrize("layout", [SINGLE, Layout("ddp", 2)], ids=str)


def factory(name, **kwargs):
    return ModelSpec(factory=f"tests.integration.stubs:{name}", kwargs=kwargs)


def signal_once(number, *, rank, at):
    """Returns an `on_event` that signals a rank at the gang's first event `at`."""
    sent = []

    def on_event(gang, event):
        if at == event.NAME and not sent:
            sent.append(gang.pids)
            os.kill(gang.pids[rank], number)

    return on_event, sent


def assert_gone(pids):
    assert pids
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_its_gang_which_names_it(bench, tmp_path, rank):
    on_event, sent = signal_once(signal.SIGKILL, rank=rank, at="steps")
    trained = bench.train(bench.job(num_steps=ENDLESS), Layout("ddp", 2), tmp_path, on_event=on_event)
    assert trained.outcome.status == "crashed"
    assert trained.outcome.message.startswith(f"rank {rank} was killed by SIGKILL while training")
    assert_gone(sent[0])


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "rank"), matrix([(IMPATIENT_SINGLE, 0), (IMPATIENT_DDP, 1)], quick=[(IMPATIENT_DDP, 1)])
)
def test_a_rank_that_hangs_is_found_and_its_gang_killed(bench, tmp_path, layout, rank):
    on_event, sent = signal_once(signal.SIGSTOP, rank=rank, at="steps")
    trained = bench.train(bench.job(num_steps=ENDLESS), layout, tmp_path, on_event=on_event)
    assert trained.outcome.status == "crashed"
    assert "sent no event for" in trained.outcome.message
    assert "while training: killed as hung" in trained.outcome.message
    assert_gone(sent[0])


@BOTH
def test_memory_that_runs_out_is_told_apart(bench, tmp_path, layout):
    trained = bench.train(bench.job(factory("model_that_is_too_large")), layout, tmp_path)
    assert trained.outcome.status == "out_of_memory"
    assert "MemoryError: cannot allocate 1 TiB" in trained.outcome.message


@BOTH
def test_what_only_the_user_can_mend_is_invalid(bench, tmp_path, layout):
    trained = bench.train(bench.job(factory("model_that_is_wrong", width=3)), layout, tmp_path)
    assert trained.outcome.status == "invalid"
    assert "ValueError: width 3 is not a power of two" in trained.outcome.message
    assert "model_that_is_wrong" in (tmp_path / "gang" / "rank-0.log").read_text()


@pytest.mark.parametrize(
    ("result", "fault"),
    [
        ({"status": "fine", "step": 3}, "ValueError: its run returned {'status': 'fine', 'step': 3}. To fix: a "),
        ({"status": "done", "metrics": {}}, "ValueError: its run was done at step None. To fix: a step from 0 to 3"),
        ({"status": "preempted", "step": 4}, "ValueError: its run was preempted at step 4"),
        ({"status": "done", "step": 3}, "ValueError: its run was done with the last step and returned no metrics"),
    ],
)
def test_a_box_whose_result_says_too_little_is_invalid(bench, tmp_path, result, fault):
    layout = Layout("tests.integration.stubs:Boxed")
    trained = bench.train(bench.job(factory("nothing", result=result), num_steps=3), layout, tmp_path)
    assert trained.outcome.status == "invalid"
    assert fault in trained.outcome.message


def test_a_box_whose_result_says_enough_is_believed(bench, tmp_path):
    result = {"status": "done", "step": 3, "metrics": {"loss": 1.0}}
    layout = Layout("tests.integration.stubs:Boxed")
    trained = bench.train(bench.job(factory("nothing", result=result), num_steps=3), layout, tmp_path)
    assert trained.outcome.result == JobResult(status="done", step=3, metrics={"loss": 1.0})


def test_what_another_try_may_mend_is_a_crash(bench, tmp_path):
    trained = bench.train(bench.job(factory("model_that_fails_at_random")), SINGLE, tmp_path)
    assert (trained.outcome.status, trained.outcome.message) == ("crashed", "rank 0: OSError: the file server is away")


@BOTH
def test_a_loss_that_is_not_a_number_says_what_to_do(bench, tmp_path, layout):
    job = bench.job(loss="tests.integration.stubs:loss_that_is_not_a_number", num_steps=ENDLESS)
    trained = bench.train(job, layout, tmp_path, checkpoint_every_s=0.0)
    assert trained.outcome.status == "invalid"
    assert "the loss became nan at step 2. To fix: a lower learning rate" in trained.outcome.message
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000001"]


def test_an_option_that_the_optimizer_has_not_is_invalid(bench, tmp_path):
    job = bench.job(optimizer=OptimizerSpec(name="sgd", options={"betas": [0.9, 0.99]}))
    outcome = bench.train(job, SINGLE, tmp_path).outcome
    assert outcome.status == "invalid"
    assert "optimizer sgd" in outcome.message
    assert "betas" in outcome.message


@pytest.mark.full
@pytest.mark.parametrize(("technique", "rank"), matrix([("GatedSingle", 0), ("GatedDdp", 1)], quick=[("GatedDdp", 1)]))
def test_a_terminated_rank_checkpoints_with_its_gang_and_goes_on_bit_equal(bench, tmp_path, technique, rank):
    gate = tmp_path / "gate"  # opened after the signal is sent: sixty steps take a fraction of a second
    layout = Layout(f"tests.integration.stubs:{technique}", rank + 1, {"gate": str(gate)})
    job = bench.job(optimizer=ADAMW, num_steps=60)
    terminate, sent = signal_once(signal.SIGTERM, rank=rank, at="ready")

    def on_event(gang, event):
        terminate(gang, event)
        if sent:
            gate.touch()

    first = bench.train(job, layout, tmp_path / "halves", on_event=on_event)
    whole = bench.train(job, layout, tmp_path / "whole")
    assert first.outcome.status == "preempted"
    assert 0 < first.outcome.result.step < 60
    assert_gone(sent[0])
    second = bench.train(job, layout, tmp_path / "halves")
    assert second.outcome.result.first_step == first.outcome.result.step
    assert is_bit_equal(second.weights, whole.weights)


def test_sigterm_to_every_process_of_a_job_loses_no_step(bench, tmp_path):
    """As Slurm does when it takes a machine back: the fork server outlives it, and the ranks checkpoint."""
    sent = []

    def terminate_all(gang, event):
        if isinstance(event, Steps) and not sent:
            server = psutil.Process(gang.pids[0]).parent()
            sent.extend([server, *server.children(recursive=True)])
            for process in sent:
                process.terminate()

    job = bench.job(num_steps=ENDLESS)
    stopped = bench.train(job, Layout("ddp", 2), tmp_path, on_event=terminate_all)
    assert len(sent) >= 3
    assert stopped.outcome.status == "preempted", stopped.outcome
    assert (tmp_path / "checkpoints" / f"step-{stopped.outcome.result.step:08d}").is_dir()
    assert sent[0].is_running()


def test_a_gang_that_is_told_to_stop_checkpoints(bench, tmp_path):
    job = bench.job(num_steps=ENDLESS)
    trained = bench.train(job, Layout("ddp", 2), tmp_path, on_event=lambda gang, _: gang.send("stop"))
    assert trained.outcome.status == "preempted"
    step = trained.outcome.result.step
    assert (tmp_path / "checkpoints" / f"step-{step:08d}").is_dir()


def test_a_gang_that_is_killed_from_outside_ends_at_once(bench, tmp_path):
    gangs = []

    def kill(gang, event):
        if isinstance(event, Steps):
            gangs.append(gang)
            gang.kill()

    trained = bench.train(bench.job(num_steps=ENDLESS), Layout("ddp", 2), tmp_path, on_event=kill)
    assert trained.outcome.status == "crashed"
    assert_gone(gangs[0].pids)


def test_gangs_side_by_side_do_not_hear_of_each_other(bench, tmp_path):
    """The death of one gang does not affect another."""
    doomed = bench.start(bench.order(bench.job(num_steps=ENDLESS), Layout("ddp", 2), tmp_path / "doomed"))
    with contextlib.closing(_Gang(doomed)):
        fine = bench.train(bench.job(), Layout("ddp", 2), tmp_path / "fine")
        assert fine.outcome.status == "done"


class _Gang:
    def __init__(self, gang):
        self.gang = gang

    def close(self):
        self.gang.kill()
        assert self.gang.wait(lambda _: None).status == "crashed"
        assert_gone(self.gang.pids)

"""Calls in child processes: their results, and the errors of children that return none."""

import os
import signal

import pytest

from ringmaster.techniques.estimates.device_rates import in_children


def test_each_answers_from_a_process_of_its_own():
    answers = in_children([lambda i=i: {"number": i, "pid": os.getpid()} for i in range(3)])
    assert [answer["number"] for answer in answers] == [0, 1, 2]
    assert len({answer["pid"] for answer in answers} | {os.getpid()}) == 4


def whereabouts():
    return {"parent": os.getppid(), "gpus": os.environ["CUDA_VISIBLE_DEVICES"]}


def test_one_that_takes_a_gpu_is_no_fork_of_this_process(monkeypatch):
    """Forks of a process that has gone backward can use no GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    (forked,), (other,) = in_children([whereabouts]), in_children([whereabouts], use_gpus=True)
    assert forked == {"parent": os.getpid(), "gpus": ""}
    assert other["parent"] != os.getpid() and other["gpus"] == ""


def test_one_that_raises_says_why(capfd):
    with pytest.raises(RuntimeError, match="could not be measured"):
        in_children([lambda: {"fine": 1}, lambda: {"wrong": 1 / 0}])
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_one_that_hangs_is_ended(capfd):
    with pytest.raises(RuntimeError, match="could not be measured"):
        in_children([signal.pause], timeout_s=0.1)
    assert "took longer than 0.1 s" in capfd.readouterr().err

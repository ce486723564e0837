"""The log of a rank: whose lines it has, and a full disk, on which a `print` must not end the rank."""

import os
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from ringmaster.features.adaptation.rewrite import Rewrite
from ringmaster.features.external_trainers.technique import Command
from ringmaster.techniques.processes import worker
from ringmaster.techniques.processes.order import TRAIN
from ringmaster.techniques.processes.worker import _Log, _tolerate_full_logs
from ringmaster.techniques.shared_base import SharedBase


@contextmanager
def full_streams():
    """Within the context, the standard streams of this process write to a full disk."""
    streams = {number: os.dup(number) for number in (1, 2)}
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        for number in streams:
            os.dup2(full, number)
        yield
    finally:
        for number, before in streams.items():
            os.dup2(before, number)
            os.close(before)
        os.close(full)


def test_what_a_full_disk_does_not_take_of_a_log_is_lost(monkeypatch):
    with _Log(os.open("/dev/full", os.O_WRONLY), "w") as log:
        assert log.write(b"four") == 4
    with full_streams(), monkeypatch.context() as patch:
        for name in ("stdout", "stderr"):
            patch.setattr(sys, name, getattr(sys, name))  # which is restored after it was replaced
        with pytest.raises(OSError, match="No space left"):
            os.write(1, b"four")
        _tolerate_full_logs()
        for _ in range(1000):
            print("a line that is lost" * 10)
            print("another", file=sys.stderr)
        sys.stdout.flush()


@pytest.mark.parametrize(("technique", "has_lines"), [(SharedBase, True), (Rewrite, True), (Command, False)])
def test_groups_and_rewritten_models_have_lines_of_the_harness_and_commands_their_own(
    technique, has_lines, monkeypatch
):
    def leave(status):
        raise SystemExit(status)

    monkeypatch.setattr(worker, "_exit_process", leave)
    monkeypatch.setattr(worker.registry, "load", lambda _: technique())
    monkeypatch.setattr(technique, "run", lambda *_: {"status": "done", "step": 0, "metrics": {}})
    job = SimpleNamespace(total_steps=0, features=())
    order = SimpleNamespace(technique="", purpose=TRAIN, job=job, slots=(), model_url=None, model_urls={})
    reporter = SimpleNamespace(log=None, phase=lambda *_, **__: None, send=lambda _: None)
    with pytest.raises(SystemExit):
        worker._run(order, 0, reporter)
    assert (reporter.log is not None) == has_lines

"""Processes that a signal has stopped are detected; those that are busy or asleep, and a suspended machine, are not."""

import os
import signal
import socket
import subprocess
import threading
import time

import psutil
import pytest

from ringmaster.techniques.job import Job
from ringmaster.techniques.job_specs import DataSpec, ModelSpec
from ringmaster.techniques.processes.channel import Channel
from ringmaster.techniques.processes.gang import Gang
from ringmaster.techniques.processes.gang_events import RankStarted, event_to_json
from ringmaster.techniques.processes.order import TRAIN, GangOrder
from ringmaster.techniques.processes.stopped import VARIABLE, StoppedProcesses, is_stopped, stopped_s


@pytest.fixture
def process():
    """A shell that leads a session and waits for a child process."""
    with subprocess.Popen(["sh", "-c", "sleep 600; true"], start_new_session=True) as process:
        yield process
        os.killpg(process.pid, signal.SIGKILL)


def stop(pid):
    os.kill(pid, signal.SIGSTOP)
    while not is_stopped(pid):
        pass


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def test_a_process_that_stays_stopped_is_hung(process):
    clock = Clock()
    stopped = StoppedProcesses(after_s=15.0, clock=clock)
    found = []
    for _ in range(3):
        found.append(stopped.among([process.pid]))
        clock.now_s += 10.0
    assert found == [set()] * 3  # it sleeps
    stop(process.pid)
    for _ in range(3):
        found.append(stopped.among([process.pid]))
        clock.now_s += 10.0
    assert found[3:] == [set(), set(), {process.pid}]


def test_one_that_goes_on_is_not_hung_however_often_it_was_stopped(process):
    clock = Clock()
    stopped = StoppedProcesses(after_s=15.0, clock=clock)
    for _ in range(3):
        stop(process.pid)
        stopped.among([process.pid])
        os.kill(process.pid, signal.SIGCONT)
        while is_stopped(process.pid):
            pass
        clock.now_s += 10.0
        assert not stopped.among([process.pid])
        clock.now_s += 10.0


def test_a_process_of_the_session_that_stays_stopped_counts_too(process):
    clock = Clock()
    stopped = StoppedProcesses(after_s=15.0, clock=clock)
    while not (children := psutil.Process(process.pid).children()):
        pass
    stop(children[0].pid)
    stopped.among([process.pid])
    clock.now_s += 15.0
    assert stopped.among([process.pid]) == {process.pid}


def test_no_time_passes_while_the_observer_is_stopped_too(process):
    clock = Clock()
    stopped = StoppedProcesses(after_s=15.0, clock=clock)
    stop(process.pid)
    stopped.among([process.pid])
    clock.now_s += 1000.0
    assert not stopped.among([process.pid])


def test_the_time_is_set_by_the_environment(monkeypatch):
    assert stopped_s() == 15.0
    monkeypatch.setenv(VARIABLE, "0.5")
    assert StoppedProcesses().after_s == 0.5
    for wrong in ("soon", "0", "nan"):
        monkeypatch.setenv(VARIABLE, wrong)
        with pytest.raises(ValueError, match="To fix"):
            stopped_s()


def test_a_gang_with_a_stopped_rank_is_ended_and_may_be_tried_again(process, tmp_path, monkeypatch):
    """Its fellow rank is alive: it beats all the time, as ranks do in a step of hours."""
    monkeypatch.setenv(VARIABLE, "0.2")
    ends = []

    class Launcher:
        def start_rank(self, order, *, rank, log):
            ours, theirs = socket.socketpair()
            ends.append(theirs)
            pid = process.pid if rank == 1 else os.getpid()
            theirs.sendall(b"%s\n" % str(event_to_json(RankStarted(pid=pid))).replace("'", '"').encode())
            threading.Thread(target=close_when_hung_up, args=(theirs,), daemon=True).start()
            return Channel(ours)

    def close_when_hung_up(end):
        while end.recv(1024):
            pass
        end.close()

    order = GangOrder(
        purpose=TRAIN,
        job=Job(name="a", model=ModelSpec(factory="x:y"), data=DataSpec(), num_steps=1, global_batch_size=1),
        technique="ddp",
        config={},
        slots=(),
        folder=str(tmp_path),
        cache_dir=str(tmp_path),
        ordered_at_s=time.monotonic(),
    )
    gang = Gang(Launcher(), order, num_ranks=2)
    stop(process.pid)
    outcome = gang.wait(lambda _: None)
    assert (outcome.status, outcome.was_killed) == ("crashed", True)
    assert outcome.message == "rank 1 was stopped (SIGSTOP) for 0 s while starting: killed as hung"

"""Processes are identified by pid and start time, so that no other process is ever ended."""

import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from ringmaster.flows.services.service_files import reap
from ringmaster.tasks.process_identity import ProcessId
from ringmaster.techniques.processes.stopped import is_stopped

WAITING = "import signal; print(flush=True); signal.pause()"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
WITH_CHILD = "import subprocess; child = subprocess.Popen(['sleep', '60']); print(child.pid, flush=True); child.wait()"


@pytest.fixture
def start():
    """A function that starts a Python program as leader of a process group, and waits for its first line."""
    started = []

    def start(program):
        command = [sys.executable, "-c", program]
        # A separate pipe makes `input()` wait, whatever the standard input of the tests is.
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = subprocess.Popen(command, **pipes, text=True, start_new_session=True)
        started.append(process)
        line = process.stdout.readline()
        return ProcessId.of(process.pid), line

    yield start
    for process in started:
        if ProcessId.of(process.pid) is not None:
            process.kill()
        process.returncode = process.returncode if process.returncode is not None else reap(process.pid) or 0
        process.stdin.close()
        process.stdout.close()


def test_a_process_is_itself_until_it_ends(start):
    process, _ = start(WAITING)
    assert process.lives()
    assert not process.wait(0)
    assert process.end(grace_s=120)
    assert not process.lives()
    assert process.wait(0)


def test_one_that_is_stopped_ends_in_order_too(start):
    process, _ = start(WAITING)
    process.signal(signal.SIGSTOP)
    while not is_stopped(process.pid):
        pass
    assert process.end(grace_s=120)


def test_one_that_has_ended_and_was_not_waited_for_does_not_live(start):
    process, _ = start("print()")
    assert process is None or process.wait(120)
    assert process is None or not process.lives()


def test_another_process_of_the_same_number_is_left_alone(start):
    process, _ = start(WAITING)
    earlier = replace(process, born="another-boot:1")
    assert not earlier.lives()
    assert not earlier.signal(signal.SIGKILL)
    assert earlier.wait(0)
    assert process.lives()


def test_one_that_does_not_listen_is_killed(start):
    process, _ = start(STUBBORN)
    assert not process.end(grace_s=0.2)
    assert not process.lives()


def test_a_group_ends_with_whom_leads_it(start):
    process, line = start(WITH_CHILD)
    child = ProcessId.of(int(line))
    process.end(grace_s=120, group=True)
    assert child.wait(120)


def test_what_is_left_of_a_group_ends_when_its_leader_is_reaped(start):
    process, line = start(WITH_CHILD)
    child = ProcessId.of(int(line))
    process.signal(signal.SIGKILL)
    process.wait(120)
    assert child.lives()
    assert reap(process.pid, group=True) == -signal.SIGKILL
    assert child.wait(120)


def test_nobody_reaps_what_is_not_his_child():
    assert reap(os.getppid()) is None

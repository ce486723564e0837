"""The supervisor starts services in order, restarts ended ones, and stops them in reverse order."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from ringmaster.flows.services.pool_processes import ServiceState, ServiceStatus
from ringmaster.flows.services.service_files import ServiceFiles
from ringmaster.flows.services.supervisor import Supervisor, delay_s
from ringmaster.flows.settings import PoolAddress
from ringmaster.tasks.pool.engines import Service
from ringmaster.tasks.process_identity import ProcessId
from ringmaster.techniques.processes.stopped import StoppedProcesses

ADDRESS = PoolAddress(database="sqlite:///x", prefect_api="http://p/api", mlflow_uri="http://m")
LIVES = "import signal; print('started', flush=True); signal.pause()"
# A program that reports when it is asked to end, which shows the order of the stops.
NOTES = """
import os, signal, sys
def end(*_):
    with open(sys.argv[1], "a") as file:
        file.write(sys.argv[2] + "\\n")
    os._exit(0)
signal.signal(signal.SIGTERM, end)
print("started", flush=True)
while True:
    signal.pause()
"""


@pytest.fixture
def files(tmp_path):
    files = ServiceFiles(tmp_path / "pool")
    files.make()
    yield files
    for state in files.states():
        if state.process is not None and state.lives():
            state.process.end(grace_s=0, group=True)


def service(name, program=LIVES, *arguments, **options):
    return Service(name=name, command=(sys.executable, "-c", program, *arguments), environment={}, **options)


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


class Running:
    """A supervisor in a thread, and the states that it has written."""

    def __init__(self, files, services, **options):
        files.write_services(services, address=ADDRESS)
        self.files, self.told = files, threading.Condition()
        write = files.write_states

        def write_states(states):
            write(states)
            with self.told:
                self.told.notify_all()

        files.write_states = write_states
        self.supervisor = Supervisor(services, files, **options)
        self.thread = threading.Thread(target=self.supervisor.run)
        self.thread.start()

    def state(self, name):
        return next((state for state in self.files.states() if state.name == name), None)

    def wait(self, name, poll):
        with self.told:
            assert self.told.wait_for(lambda: (s := self.state(name)) is not None and poll(s), timeout=120), (
                self.files.states()
            )
        return self.state(name)

    def stop(self):
        self.supervisor.stop()
        self.thread.join(timeout=120)
        assert not self.thread.is_alive()


@pytest.fixture
def run(files):
    running = []

    def run(*services, **options):
        running.append(Running(files, services, **options))
        return running[-1]

    yield run
    for each in running:
        if each.thread.is_alive():
            each.stop()


def test_a_service_waits_for_those_before_it_and_they_end_after_it(run, tmp_path):
    notes = tmp_path / "notes"
    asked, is_there = [], threading.Event()

    def is_up(url):
        asked.append(url)
        return is_there.is_set()

    pool = run(
        service("server", NOTES, str(notes), "server", ready_url="http://server"),
        service("once", "pass", after=("server",), once=True),
        service("worker", NOTES, str(notes), "worker", after=("server", "once")),
        is_up=is_up,
    )
    pool.wait("server", lambda state: state.status == "starting")
    assert pool.state("once").status == pool.state("worker").status == ServiceStatus.WAITING
    is_there.set()
    pool.wait("worker", lambda state: state.status == ServiceStatus.UP)
    assert pool.state("once").status == ServiceStatus.DONE
    assert set(asked) == {"http://server"}
    # Without an address to ask, up means started. The handler is installed once the program has printed.
    log = pool.files.log("worker")
    while "started" not in log.read_text():
        pool.thread.join(timeout=0.02)
    pool.stop()
    assert notes.read_text().split() == ["worker", "server"]
    assert {state.status for state in pool.files.states()} == {ServiceStatus.ENDED}


SAYS_READY = """
import signal, sys
from ringmaster.tasks.process_identity import say_ready
print("started", flush=True)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
signal.sigwait([signal.SIGUSR1])
say_ready()
signal.pause()
"""


def test_up_means_that_a_service_does_its_work_not_that_it_runs(run):
    clock = Clock()
    services = (
        service("controller", SAYS_READY, says_ready=True, timeout_s=5),
        service("worker", after=("controller",)),
    )
    pool = run(*services, clock=clock)
    begun = pool.wait("controller", lambda state: state.message)
    assert (begun.status, begun.message) == ("starting", "it does not lead or serve yet")
    clock.now_s = 1000.0  # it may stand by for another controller as long as that lives
    while "started" not in pool.files.log("controller").read_text():
        pool.thread.join(timeout=0.02)
    assert pool.state("worker").status == ServiceStatus.WAITING
    begun.process.signal(signal.SIGUSR1)
    pool.wait("worker", lambda state: state.status == ServiceStatus.UP)
    assert (pool.state("controller").status, pool.state("controller").pid) == (ServiceStatus.UP, begun.pid)
    begun.process.signal(signal.SIGKILL)
    pool.wait("controller", lambda state: state.status == ServiceStatus.WAITING)
    clock.now_s += 10.0
    again = pool.wait("controller", lambda state: state.status == "starting" and state.pid is not None)
    assert again.pid != begun.pid  # the former one's messages do not apply to this one


def test_what_ends_is_started_again(run):
    clock = Clock()
    pool = run(service("worker"), clock=clock)
    first = pool.wait("worker", lambda state: state.status == ServiceStatus.UP)
    first.process.signal(signal.SIGKILL)
    ended = pool.wait("worker", lambda state: state.status == ServiceStatus.WAITING)
    assert (ended.num_restarts, ended.message) == (1, "ended with -9")
    clock.now_s = 1.0
    again = pool.wait("worker", lambda state: state.status == ServiceStatus.UP)
    assert again.pid != first.pid


def test_what_ends_again_and_again_waits_longer_but_not_for_ever():
    assert [delay_s(number) for number in (0, 1, 2, 100)] == [1, 2, 4, 60]


def test_what_ends_at_once_says_how_and_why(run):
    pool = run(service("server", "print('no such database'); raise SystemExit(3)"), clock=Clock())
    assert pool.wait("server", lambda state: state.num_restarts).message == "ended with 3"
    assert "no such database" in pool.files.log("server").read_text()


def test_what_does_not_answer_in_time_is_ended(run):
    clock = Clock()
    pool = run(service("server", ready_url="http://server", timeout_s=5), is_up=lambda _: False, clock=clock)
    pool.wait("server", lambda state: state.pid is not None)
    clock.now_s = 6.0
    assert pool.wait("server", lambda state: state.num_restarts).message == "no answer from http://server after 5 s"


def test_a_supervisor_takes_over_what_another_has_left(run, files):
    first = run(service("once", "pass", once=True), service("worker", after=("once",)), clock=Clock())
    left = first.wait("worker", lambda state: state.status == ServiceStatus.UP)
    second = Supervisor(files.services(), files)  # as if the first had been killed
    second.step()
    once, worker = files.states()
    assert (once.status, once.num_restarts) == (ServiceStatus.DONE, 0)
    assert (worker.pid, worker.status, worker.num_restarts) == (left.pid, ServiceStatus.UP, 0)


def test_states_of_another_supervisor_are_told_apart(files):
    files.write_services([], address=ADDRESS)
    files.write_states([ServiceState(name="x", status=ServiceStatus.UP, pid=None, born="", num_restarts=0, message="")])
    me = ProcessId.of(os.getpid())
    assert len(files.states()) == len(files.states(by=me)) == 1
    assert files.states(by=ProcessId(me.pid, "another")) == ()


def test_a_supervisor_restores_the_signals_that_its_starter_ignored(files):
    """A shell's `&` ignores SIGINT, and child processes would inherit that."""
    read = "import signal as s; print(s.getsignal(s.SIGINT) is s.default_int_handler, flush=True); s.pause()"
    files.write_services([service("worker", read)], address=ADDRESS)
    command = [sys.executable, "-m", "ringmaster.flows.services.supervisor", str(files.folder)]
    ignores = f"trap '' INT; exec {' '.join(command)}"
    process = subprocess.Popen(["sh", "-c", ignores], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        log = files.log("worker")
        for _ in range(10_000):
            if log.exists() and log.read_text():
                break
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(timeout=0.02)
        assert log.read_text().strip() == "True"
        other = subprocess.run(command, capture_output=True, text=True)
        assert (other.returncode, "another supervisor" in other.stderr) == (1, True)
        assert files.supervisor() == ProcessId.of(process.pid)
    finally:
        process.terminate()
        assert process.wait(timeout=120) == 0
        process.stdout.close()
    assert files.supervisor() is None
    assert [state.status for state in files.states()] == [ServiceStatus.ENDED]


def test_files_with_secrets_are_their_owners_alone(files):
    files.write_services([], address=ADDRESS)
    assert files.folder.stat().st_mode & 0o777 == 0o700
    for name in ("services.json", "state.json"):
        assert (files.folder / name).stat().st_mode & 0o777 == 0o600
    assert json.loads((files.folder / "services.json").read_text())["address"]["database"] == "sqlite:///x"
    assert files.address() == ADDRESS


def test_a_full_disk_ends_neither_the_supervisor_nor_its_services(files, monkeypatch, caplog):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    clock = Clock()
    supervisor = Supervisor([service("a"), service("b")], files, clock=clock)
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_states", full)
        patch.setattr(files, "log", lambda name: full() if name == "a" else files.folder / f"{name}.log")
        supervisor.step()
    assert "the states of the services cannot be written" in caplog.text
    supervisor.step()
    told = {state.name: state for state in files.states()}
    assert (told["a"].status, told["b"].status) == (ServiceStatus.WAITING, ServiceStatus.UP)
    assert "could not be started: [Errno 28] No space left on device" in told["a"].message
    clock.now_s += delay_s(0)
    supervisor.step(), supervisor.step()
    assert {state.name: state.status for state in files.states()} == {"a": ServiceStatus.UP, "b": ServiceStatus.UP}


def test_a_stopped_service_is_ended_and_started_again(run):
    pool = run(service("worker"), stopped=StoppedProcesses(after_s=1.0))
    first = pool.wait("worker", lambda state: state.status == ServiceStatus.UP)
    first.process.signal(signal.SIGSTOP)
    ended = pool.wait("worker", lambda state: state.num_restarts)
    assert ended.message == "hung: it was stopped (SIGSTOP) for 1 s"
    assert pool.wait("worker", lambda state: state.status == ServiceStatus.UP).pid != first.pid


def test_a_server_that_hangs_is_ended_and_one_that_is_busy_is_not(files):
    """Nothing tells its threads that hang from outside, but that it does not answer for minutes."""
    clock, answers = Clock(), [True]
    services = [service("server", ready_url="http://server")]
    server = Supervisor(services, files, is_up=lambda _: True, responds=lambda _: answers[-1], clock=clock)
    server.step(), server.step()
    (state,) = files.states()
    assert state.status == ServiceStatus.UP
    clock.now_s += 1000.0  # this process was stopped, or the machine was suspended
    answers.append(False)
    for _ in range(3):
        server.step()
        clock.now_s += 15.0
    answers.append(True)
    server.step()
    answers.append(False)
    for _ in range(6):
        assert state.lives()
        clock.now_s += 15.0
        server.step()
    assert state.process.wait(60)
    server._ended(server._children["server"])
    server.step()
    (again,) = files.states()
    assert (again.status, again.message) == (ServiceStatus.WAITING, "hung: no answer from http://server for 90 s")

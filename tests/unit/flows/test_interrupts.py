"""Ctrl-C and SIGTERM: answered at once, followed by an orderly stop; a second signal kills."""

import fcntl
import os
import pty
import signal
import subprocess
import sys
import tempfile
import termios
import threading
from pathlib import Path

import pytest

from ringmaster.flows import interrupts
from ringmaster.flows.interrupts import (
    STOPPING,
    Interrupts,
    command,
    command_that_goes_on,
)

TIMEOUT_S = 60


class Told:
    """Records the printed lines. A test can wait for a line."""

    def __init__(self):
        self.lines, self._changed = [], threading.Condition()

    def __call__(self, line):
        with self._changed:
            self.lines.append(line)
            self._changed.notify_all()

    def wait(self, line):
        with self._changed:
            assert self._changed.wait_for(lambda: line in self.lines, TIMEOUT_S), self.lines


@pytest.fixture(autouse=True)
def as_before():
    """Asserts that the former signal handlers are restored."""
    before = [signal.getsignal(number) for number in interrupts.SIGNALS]
    yield
    assert [signal.getsignal(number) for number in interrupts.SIGNALS] == before


def press(number=signal.SIGINT):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_before_anything_trains_it_ends_at_once(number, code):
    told = Told()
    with pytest.raises(SystemExit) as end, Interrupts(say=told).of_command():
        press(number)
        threading.Event().wait(TIMEOUT_S)
    assert end.value.code == code
    assert told.lines == [STOPPING]


def test_a_closed_terminal_stops_in_order_and_kills_nothing():
    code = (
        "import os, signal, sys, threading\n"
        "from ringmaster.flows.interrupts import Interrupts\n"
        "stopped, signals = threading.Event(), Interrupts()\n"
        "with signals.of_command(), signals.stopped_by(stopped.set):\n"
        "    print('begun', flush=True)\n"
        "    assert stopped.wait(60)\n"
        "    os.kill(os.getpid(), signal.SIGHUP)  # the shell's, after the system's\n"
        "    print('ends', flush=True)  # an error where the terminal is gone\n"
        "    print('ends', file=sys.stderr, flush=True)\n"
        "open(sys.argv[1], 'w').write('ended')\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = pty.openpty()
        arguments = [sys.executable, "-c", code, f"{folder}/file"]
        child = subprocess.Popen(
            arguments, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY),
        )  # fmt: skip
        os.close(theirs)
        told = b""
        while not told.endswith(b"\n"):  # a terminal that is closed within a line would fail the line's `print`
            told += os.read(ours, 100)
        os.close(ours)  # the system sends SIGHUP
        assert child.wait(TIMEOUT_S) == 0
        assert Path(folder, "file").read_text() == "ended"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("option", "code"), [("--help", 0), ("--never", 2)])
def test_a_signal_while_the_interpreter_ends_kills_without_a_traceback_and_leaves_the_status(number, option, code):
    script = (
        "import atexit, sys, threading\n"
        "from ringmaster.flows import entry\n"
        "atexit.register(lambda: (print('ends', flush=True), threading.Event().wait(60)))\n"
        f"sys.argv = ['ringmaster', 'run', '{option}']\n"
        "entry.main()\n"
    )
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], text=True, **streams) as child:
        while "ends" not in child.stdout.readline():
            pass
        child.send_signal(number)
        assert "Traceback" not in child.communicate(timeout=TIMEOUT_S)[1]
        assert child.returncode == code


def test_what_nohup_has_started_goes_on():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts(say=lambda line: pytest.fail(line)).of_command():
            press(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_it_is_answered_while_the_main_thread_is_busy_elsewhere():
    """Python runs no handler during an import or a solver's call. Here the handler itself blocks the main thread."""
    told, interrupted = Told(), Interrupts()
    interrupted.say = told
    interrupted._act = lambda *_: told.wait(STOPPING)
    with interrupted.of_command():
        press()
    assert told.lines == [STOPPING]


def test_one_signal_in_a_flow_run_of_prefect_is_answered_once():
    """Prefect's own handler for SIGTERM sends the signal again, which would kill the command."""
    from prefect.utilities.engine import capture_sigterm

    told = Told()
    interrupted = Interrupts(say=told, kill=lambda: None, end=told)
    with pytest.raises(SystemExit) as end, interrupted.of_command(), capture_sigterm(), interrupted.handled_again():
        press(signal.SIGTERM)
        threading.Event().wait(TIMEOUT_S)
    assert end.value.code == 128 + signal.SIGTERM
    assert told.lines == [STOPPING]


def test_while_jobs_train_it_stops_them_in_order_and_raises_nothing():
    told, stopped = Told(), threading.Event()
    interrupted = Interrupts(say=told)
    with interrupted.of_command(), interrupted.stopped_by(stopped.set):
        press()
        assert stopped.wait(TIMEOUT_S)
        told.wait(STOPPING)
    assert interrupted.exit_code == 130


def test_the_second_kills_all_that_was_started_and_says_how_to_go_on(capfd):
    killed, ended = threading.Event(), threading.Event()
    codes, stops, told = [], [], Told()

    def end(code):
        codes.append(code)
        ended.set()

    interrupted = Interrupts(go_on="ringmaster run f.yaml --resume", say=told, kill=killed.set, end=end)
    with interrupted.of_command(), interrupted.stopped_by(lambda: stops.append(1)):
        press()
        told.wait(STOPPING)
        press()
        assert ended.wait(TIMEOUT_S) and killed.is_set()
    assert (codes, stops, told.lines) == ([130], [1], [STOPPING])
    assert capfd.readouterr().err == "killed\nto continue: ringmaster run f.yaml --resume\n"


def test_what_something_on_the_way_has_swallowed_ends_the_command_before_it_trains():
    interrupted = Interrupts(say=Told())
    with pytest.raises(SystemExit), interrupted.of_command():
        try:
            press()
            threading.Event().wait(TIMEOUT_S)
        except SystemExit:  # as a destructor would
            pass
        with interrupted.stopped_by(lambda: None):
            pytest.fail("it has begun to train")


def test_a_program_of_the_users_is_stopped_in_order_too(capfd):
    stopped = threading.Event()
    with Interrupts().stopped_by(stopped.set):
        press()
        assert stopped.wait(TIMEOUT_S)
    assert capfd.readouterr().err == f"{STOPPING}\n"


def test_other_threads_leave_signals_alone():
    def work():
        with interrupted.of_command(), interrupted.stopped_by(lambda: None):
            seen.append(interrupted.is_of_command)

    seen, interrupted = [], Interrupts()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]


def test_a_view_shows_the_answer_while_it_is_there():
    first, view = Told(), Told()
    interrupted = Interrupts(say=first)
    with interrupted.of_command(), interrupted.stopped_by(lambda: None):
        with interrupted.shown_by(view):
            press()
            view.wait(STOPPING)
        assert interrupted.say is first


@pytest.mark.parametrize(
    ("given", "goes_on"),
    [
        ("run f.yaml", "ringmaster run f.yaml --resume"),
        ("run f.yaml --json --seed 3", "ringmaster run f.yaml --json --seed 3 --resume"),
        ("run 'my batch.yaml' --resume", "ringmaster run 'my batch.yaml' --resume"),
        ("run f.yaml --dry-run", "ringmaster run f.yaml --dry-run"),
        ("sweep s.yaml", "ringmaster sweep s.yaml --resume"),
        ("retrain r.yaml --night 2026-11-20", "ringmaster retrain r.yaml --night 2026-11-20"),
        ("profile f.yaml -o p.json", "ringmaster profile f.yaml -o p.json"),
    ],
)
def test_the_command_that_goes_on_is_the_same_with_all_its_options(given, goes_on):
    import shlex

    assert command_that_goes_on(shlex.split(given)) == goes_on


def test_commands_that_serve_have_their_own_way_to_stop():
    with command(["worker", "--name", "a"]) as signals:
        assert not signals.is_of_command


def test_a_command_that_came_to_its_end_all_the_same_has_its_own_exit_code(capfd):
    for code, expected in ((0, 0), (1, 130)):
        with (
            pytest.raises(SystemExit) as end,
            command(["run", "f.yaml"]) as signals,
            signals.stopped_by(lambda: None),
        ):
            press()
            while signals.first_signal is None:
                pass
            raise SystemExit(code)
        assert end.value.code == expected
    assert capfd.readouterr().err.splitlines()[-1] == "to continue: ringmaster run f.yaml --resume"


STARTING = """
import sys, importlib.abc
class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "ringmaster.flows.cli":
            print("importing", flush=True)
            import threading; threading.Event().wait(60)
sys.meta_path.insert(0, Slow())
sys.argv = ["ringmaster", "run", "f.yaml"]
from ringmaster.flows.entry import main
main()
"""


def test_ctrl_c_while_the_command_is_being_imported():
    with subprocess.Popen(
        [sys.executable, "-c", STARTING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert said.splitlines() == [STOPPING, "to continue: ringmaster run f.yaml --resume"]


STUCK = """
import sys, threading
from ringmaster.flows.interrupts import ending_in_time
with ending_in_time(timeout_s=0.1):
    threading._register_atexit(threading.Event().wait)  # as Prefect waits for its server
    print("the result")
    sys.exit({status})
"""


@pytest.mark.parametrize("status", ["0", "None", "2"])
def test_a_command_ends_with_its_status_although_a_library_waits_for_ever(status):
    done = subprocess.run(
        [sys.executable, "-c", STUCK.format(status=status)], stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S
    )
    assert (done.returncode, done.stdout) == (int(status.replace("None", "0")), "the result\n")

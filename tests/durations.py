"""A pytest plugin that says what the tests cost: the longest files and cases, and the share of each kind of cost.

Seconds are those of the clock, beside which stand the CPU seconds of the process and of its descendants: beside other
work, these alone can be compared. The kinds are drawn from samples of the main thread's stack:
a sample counts for the innermost frame that one of `KINDS` names. `pytest --durations-file FILE` writes all numbers as
JSON.
"""

import faulthandler
import json
import os
import re
import resource
import threading
from collections import Counter, defaultdict
from contextlib import suppress
from functools import cache
from pathlib import Path
from time import monotonic, process_time  # bound here: tests replace the clocks of module time

import pytest

NUM_SHOWN = 15
INTERVAL_S = 0.2  # a sample takes half a millisecond

# By parts of the paths of source files, from the innermost frame outwards.
FORK_SERVERS, TRAINING = "fork servers", "training"
KINDS = {
    "imports": ("<frozen importlib",),
    FORK_SERVERS: ("techniques/processes/",),  # or training, if a fork server has children
    "migrations": ("/alembic/",),
    "servers": ("flows/services/", "/uvicorn/", "tests/ports.py"),
    TRAINING: ("techniques/training/", "techniques/probing/"),
    "planning": ("tasks/planning/",),
    "commands": ("/subprocess.py",),
}
OTHER = "other"
FILE, MAX_BYTES = re.compile(r'^  File "(.*)", line ', re.MULTILINE), 1 << 20  # of the stacks of all threads


def cpu_s():
    """Returns the CPU seconds of this process and of its descendants, those that have ended included."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return process_time() + ended.ru_utime + ended.ru_stime + sum(map(_cpu_of_child_s, _children("self")))


def _children(pid):
    """Returns the numbers of a process's children; none where it has ended, or where the kernel does not tell them."""
    with suppress(OSError):
        return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in _words(task / "children")]
    return []


def _cpu_of_child_s(pid):
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        own_s = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # utime, stime, cutime, cstime
        return own_s + sum(map(_cpu_of_child_s, _children(pid)))
    return 0.0


def _words(file):
    return file.read_text().split()


def kind_of(files):
    """Returns the kind of cost of what a stack does, whose source files come from the innermost frame outwards."""
    return next((kind for file in files if (kind := _kind_of_file(file)) is not None), OTHER)


@cache
def _kind_of_file(path):
    return next((kind for kind, parts in KINDS.items() if any(part in path for part in parts)), None)


class Sampler(threading.Thread):
    """Looks at the main thread's stack every INTERVAL_S, and adds the seconds since its last look to a kind."""

    def __init__(self):
        super().__init__(name="durations", daemon=True)
        self.seconds = Counter()
        self._main = f"0x{threading.main_thread().ident:016x} (most recent call first):"
        self._stacks = os.memfd_create("stacks")
        self._end = threading.Event()

    def run(self):
        """Samples until `stop`."""
        last_s = monotonic()
        while not self._end.wait(INTERVAL_S):
            kind, now_s = kind_of(self._files_of_main()), monotonic()
            if kind == FORK_SERVERS and any(map(_children, _children("self"))):
                kind = TRAINING
            self.seconds[kind] += now_s - last_s
            last_s = now_s

    def stop(self):
        """Ends the thread, and returns the seconds by kind."""
        self._end.set()
        self.join()
        os.close(self._stacks)
        return dict(self.seconds)

    def _files_of_main(self):
        """Returns the source files of the main thread's frames, the innermost first.

        Frame objects of another thread are not walked: `f_back` crashes where that thread is in a greenlet.
        """
        os.ftruncate(self._stacks, 0)
        os.lseek(self._stacks, 0, os.SEEK_SET)
        faulthandler.dump_traceback(self._stacks)
        text = os.pread(self._stacks, MAX_BYTES, 0).decode(errors="replace")
        return FILE.findall(text.partition(self._main)[2].partition("\n\n")[0])


class Worker:
    """Adds to each report what it cost. Runs in the process that runs the tests: xdist has several of them."""

    def __init__(self):
        self._sampler = Sampler()
        self._collected = (monotonic(), cpu_s())
        self._sampler.start()

    @pytest.hookimpl
    def pytest_collection_finish(self):
        began_s, began_cpu_s = self._collected
        self._case_began_cpu_s = cpu_s()
        self._collecting = (monotonic() - began_s, self._case_began_cpu_s - began_cpu_s)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call):
        report = yield
        if call.when == "teardown":  # once a case, as many threads and child processes have to be looked at
            now_cpu_s = cpu_s()
            # What a killed fork server's orphans took before is known no longer.
            report.cpu_s = max(now_cpu_s - self._case_began_cpu_s, 0.0)
            self._case_began_cpu_s = now_cpu_s
        return report

    @pytest.hookimpl
    def pytest_sessionfinish(self, session):
        summary = {"collecting": self._collecting, "kinds": self._sampler.stop()}
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["durations"] = summary
        else:
            session.config.pluginmanager.get_plugin("durations-summary").add(summary)


class Summary:
    """Collects the reports of all workers, and prints what they cost."""

    def __init__(self, file):
        self._file = file
        self._cases = defaultdict(lambda: [0.0, 0.0])
        self._workers = []

    def add(self, summary):
        """Adds what a worker says of itself at its end."""
        self._workers.append(summary)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        if (summary := getattr(node, "workeroutput", {}).get("durations")) is not None:
            self.add(summary)

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report):
        case = self._cases[report.nodeid]
        case[0] += report.duration
        case[1] += getattr(report, "cpu_s", 0.0)

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter):
        files = defaultdict(lambda: [0.0, 0.0])
        for name, (seconds, case_cpu_s) in self._cases.items():
            file = files[name.partition("::")[0]]
            file[0] += seconds
            file[1] += case_cpu_s
        kinds = Counter()
        for summary in self._workers:
            kinds.update(summary["kinds"])
        if self._file:
            numbers = {"files": files, "cases": self._cases, "workers": self._workers}
            Path(self._file).write_text(json.dumps(numbers, indent=1))
        if len(self._cases) <= NUM_SHOWN:
            return
        for title, costs in (("files", files), ("cases", self._cases)):
            terminalreporter.write_sep("=", f"{NUM_SHOWN} longest {title}: seconds, CPU seconds")
            for name, (seconds, each_cpu_s) in sorted(costs.items(), key=lambda item: -item[1][0])[:NUM_SHOWN]:
                terminalreporter.write_line(f"{seconds:8.1f} {each_cpu_s:8.1f}  {name}")
        terminalreporter.write_sep("=", f"kinds of cost, in {len(self._workers)} processes")
        total_s = kinds.total() or 1.0
        for kind, seconds in kinds.most_common():
            terminalreporter.write_line(f"{seconds:8.1f} s {seconds / total_s:5.0%}  {kind}")
        for seconds, each_cpu_s in (summary["collecting"] for summary in self._workers):
            terminalreporter.write_line(f"Collecting: {seconds:.1f} s, {each_cpu_s:.1f} CPU seconds.")


def pytest_addoption(parser):
    parser.addoption("--durations-file", metavar="FILE", help="Write what each file and case took to FILE, as JSON.")


def pytest_configure(config):
    if config.option.collectonly:
        return
    is_worker = hasattr(config, "workerinput")
    if not is_worker:
        config.pluginmanager.register(Summary(config.getoption("--durations-file")), "durations-summary")
    if is_worker or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Worker(), "durations-worker")

"""Compilation of kernels: its time does not count on the planner's clock, and a changed kernel is recompiled."""

import math
import subprocess
import sys

import pytest
from numba import njit
from numba.core.event import Listener, install_listener, trigger_event

from ringmaster.tasks.planning import Option, PlanningJob, PlanningNode, Problem, kernels, rigid_search, solve
from ringmaster.tasks.planning import rigid_search as exhaustive_search
from ringmaster.tasks.planning.divisions import FusedSearch
from ringmaster.tasks.planning.objectives import MAKESPAN
from ringmaster.tasks.planning.work import Clock, WorkBudget, clock
from tests.unit.planning.draw import tiny

TIME_LIMIT_S, COMPILING_S = 10.0, 60.0
CALLED = "from ringmaster.tasks.planning.kernels import kernel\n\n@kernel\ndef called(x):\n    return x + {}\n"
CALLER = """
from called import called
from ringmaster.tasks.planning.kernels import kernel

@kernel
def caller(x):
    return called(x)

print(caller(0), sum(caller.stats.cache_hits.values()))
"""


class Seconds:
    """A manual clock."""

    def __init__(self):
        self.now_s = 0.0

    def compile(self):
        with trigger_event("numba:compile"):
            self.now_s += COMPILING_S


@pytest.fixture
def seconds(monkeypatch):
    assert kernels  # importing this reports compilations to the clock
    by_hand = Seconds()
    monkeypatch.setattr(clock, "now_s", lambda: by_hand.now_s)
    return by_hand


class Reading(Listener):
    """Reads the planner's clock at the start and end of each compiler pass."""

    def __init__(self):
        self.read = []

    def on_start(self, event):
        self.read.append(clock())

    on_end = on_start


def test_the_clock_stands_still_while_a_function_is_compiled():
    with install_listener("numba:run_pass", Reading()) as reading:
        njit(lambda x: x + 1)(1)
    assert len(reading.read) > 2 and len(set(reading.read)) == 1
    assert clock() > reading.read[0]


def test_stops_within_stops_are_left_out_once():
    seconds = Seconds()
    mine = Clock(lambda: seconds.now_s)
    for change in (mine.stop, mine.stop, mine.go_on, mine.go_on):
        seconds.now_s += 1
        change()
    assert mine() == 1  # before the first stop
    seconds.now_s += 2
    assert mine() == 3


def test_compiling_takes_nothing_of_the_time_to_plan(seconds, monkeypatch):
    jobs = tuple(PlanningJob(f"j{i}", (Option("single", 1, 400.0 + 70 * i),)) for i in range(20))
    problem, was_over = Problem("large", (PlanningNode("n", 8),), jobs), []

    def compiles(budget):
        seconds.compile()
        was_over.append(budget.is_over())

    monkeypatch.setattr(rigid_search, "plan_without_preemption", lambda *_, work, **__: compiles(work))
    monkeypatch.setattr(exhaustive_search, "search", lambda *_, budget, **__: compiles(budget))
    solve(problem, preemption="never", time_limit_s=TIME_LIMIT_S)
    assert was_over == [False, False]


def test_nor_of_the_time_to_choose_groups(seconds):
    def solving(problem, **_):
        seconds.compile()
        return solve(problem)

    work = WorkBudget.of(math.inf, time_limit_s=TIME_LIMIT_S)
    FusedSearch(tiny(), solving, work=work, preemption="auto", objective=MAKESPAN).run()
    assert work.time_left_s == TIME_LIMIT_S


@pytest.mark.full
def test_a_kernel_is_compiled_anew_after_a_change_to_one_that_it_calls(tmp_path):
    (tmp_path / "caller.py").write_text(CALLER)
    said = []
    for added in (1, 1, 2):
        (tmp_path / "called.py").write_text(CALLED.format(added))
        code = f"import sys; sys.path.append({str(tmp_path)!r}); import caller"
        done = subprocess.run([sys.executable, "-B", "-c", code], capture_output=True, text=True, check=True)
        said.append(done.stdout.split())
    assert said == [["1", "0"], ["1", "1"], ["2", "0"]]


NEW_KERNELS = """
import importlib, pkgutil
from dataclasses import replace
from ringmaster.tasks import planning
from ringmaster.tasks.planning.compile_ahead import compile_kernels
from benchmarks.planning.families import draw
from ringmaster.tasks.planning.solve import solve

modules = [importlib.import_module(m.name) for m in pkgutil.walk_packages(planning.__path__, planning.__name__ + ".")]
found = [(f"{m.__name__}.{name}", value) for m in modules for name, value in vars(m).items()]
kernels = {name: value for name, value in found if hasattr(value, "nopython_signatures")}
compile_kernels()
before = {name: len(kernel.signatures) for name, kernel in kernels.items()}
assert sum(before.values()) > 5, before
for family in ("tiny-4x2", "paper-mixed-12x32", "multi-16x64", "gavel-20x16", "types-12x16", "adapters-8x8"):
    for objective in ("makespan", "weighted"):
        solve(draw(family, seed=2), objective=objective, work_s=1.0)
free = draw("tiny-4x2", seed=2)
limited = replace(free, jobs=tuple(replace(job, user="ana") for job in free.jobs), quotas={"ana": 1})
solve(limited, work_s=1.0)
print([name for name, kernel in kernels.items() if len(kernel.signatures) > before[name]])
"""


@pytest.mark.full
def test_everything_that_plans_need_is_compiled_ahead():
    """A kernel that a plan calls first is loaded or compiled then; the first plan of an installation took 34 s more."""
    done = subprocess.run([sys.executable, "-c", NEW_KERNELS], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

"""Compiles the planner's kernels before anybody waits for a plan: `python -m ringmaster.tasks.planning.compile_ahead`.

numba compiles a kernel when it is first called, for the types of its arguments, and keeps that beside the code. So a
few small problems are planned that reach the kernels of each kind of search: with preemption and without, under
constraints, and with other objectives. It takes a processor one to two minutes once, and seconds afterwards.
"""

from __future__ import annotations

from ringmaster.tasks.planning.families import draw
from ringmaster.tasks.planning.search import Objective, Preemption
from ringmaster.tasks.planning.solve import solve

PROBLEMS: tuple[tuple[str, Preemption, Objective], ...] = (
    ("scale-6x8", "auto", "makespan"),
    ("scale-6x8", "never", "makespan"),
    ("scale-6x8", "auto", "weighted"),
    ("types-6x8", "auto", "makespan"),
    ("paper-mixed-8x16", "auto", "makespan"),
)
TIME_LIMIT_S = 2.0  # of each; compiling is not counted


def compile_kernels() -> None:
    """Plans each of the problems."""
    for family, preemption, objective in PROBLEMS:
        solve(draw(family, seed=1), preemption=preemption, objective=objective, time_limit_s=TIME_LIMIT_S)


if __name__ == "__main__":
    compile_kernels()

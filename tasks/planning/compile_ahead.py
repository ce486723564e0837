"""Compiles the planner's kernels ahead of the first plan: `python -m ringmaster.tasks.planning.compile_ahead`.

numba compiles a kernel at its first call, for the types of its arguments, and caches the result beside the source file.
The script therefore plans a few small problems that reach the kernels of every kind of search: preemptive and
non-preemptive, with constraints, and with other objectives. The first run takes one to two minutes on one processor,
later runs a few seconds.
"""

from __future__ import annotations

from ringmaster.tasks.planning.problems.families import draw
from ringmaster.tasks.planning.search import Preemption
from ringmaster.tasks.planning.solve import solve

PROBLEMS: tuple[tuple[str, Preemption, str], ...] = (
    ("scale-6x8", "auto", "makespan"),
    ("scale-6x8", "never", "makespan"),
    ("scale-6x8", "auto", "weighted"),
    ("types-6x8", "auto", "makespan"),
    ("paper-img-8x16", "auto", "makespan"),  # jobs are assigned to groups of nodes
)
WORK_S = 2.0  # per problem


def compile_kernels() -> None:
    """Plans each problem in `PROBLEMS`, which compiles all kernels."""
    for family, preemption, objective in PROBLEMS:
        solve(draw(family, seed=1), preemption=preemption, objective=objective, work_s=WORK_S)


if __name__ == "__main__":
    compile_kernels()

"""Compiles the planner's kernels ahead of the first plan: `python -m ringmaster.tasks.planning.compile_ahead`.

numba compiles a kernel at its first call, for the types of its arguments, and caches the result next to the source
file. The script therefore plans a few small problems that reach the kernels of every kind of search: preemptive and
non-preemptive, with constraints, and with other objectives. The first run takes one to two minutes on one processor,
later runs a few seconds.
"""

from dataclasses import replace

from ringmaster.tasks.planning.plan_search import Preemption
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.problems.problem_parts import Option, PlanningJob, PlanningNode
from ringmaster.tasks.planning.solve import solve

PLANS: tuple[tuple[tuple[str, ...], Preemption, str], ...] = (
    (("",), "auto", "makespan"),
    (("",), "never", "makespan"),
    (("",), "auto", "weighted"),
    (("fast", "slow"), "auto", "makespan"),  # jobs are divided between types of devices
    (("", ""), "auto", "makespan"),  # jobs are assigned to groups of nodes
    (("",), "auto", "cost"),  # at prices that change
)
"""The device type of each node, the preemption and the objective of each plan."""
WORK_S = 2.0  # per problem
USER = "u"


def compile_kernels() -> None:
    """Makes each of `PLANS` and one under a quota, which compiles all kernels."""
    for device_types, preemption, objective in PLANS:
        solve(_problem(device_types), preemption=preemption, objective=objective, work_s=WORK_S)
    solve(replace(_problem(("",)), quotas={USER: 3}), work_s=WORK_S)  # lists of jobs are searched


def _problem(device_types: tuple[str, ...]) -> Problem:
    """Returns jobs of hours that scale more or less well on nodes of eight devices; the second type is slower."""
    slowness = {kind: 1.0 + i for i, kind in enumerate(dict.fromkeys(device_types))}
    jobs = tuple(
        PlanningJob(
            f"j{i}",
            tuple(
                Option("fsdp", size, slow * 3600.0 * (3 + 2 * i) / size ** (0.5 + i / 16), device_type=kind)
                for kind, slow in slowness.items()
                for size in range(1, 9)
            ),
            user=USER if i % 2 else "",
        )
        for i in range(8)
    )
    prices = ((0.0, 2.0), (7200.0, 1.0))
    nodes = (PlanningNode(f"n{v}", 8, kind, price_steps=prices) for v, kind in enumerate(device_types))
    return Problem("ahead", tuple(nodes), jobs)


if __name__ == "__main__":
    compile_kernels()

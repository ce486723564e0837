"""Planning problems for tests: a small one, and Hypothesis strategies for unusual ones."""

from hypothesis import strategies as st

from ringmaster.tasks.planning import Option, PlanningJob, PlanningNode, Problem


def tiny(num_jobs: int = 4, num_devices: int = 2) -> Problem:
    """Jobs that are somewhat faster on two devices than on one."""
    jobs = tuple(
        PlanningJob(f"j{i}", (Option("single", 1, 40.0 + 7 * i), Option("ddp", 2, 24.0 + 4 * i)))
        for i in range(num_jobs)
    )
    return Problem("tiny", (PlanningNode("n0", num_devices),), jobs, switch_cost_s=1.0)


@st.composite
def problems(draw, *, max_jobs: int = 7, with_after: bool = True) -> Problem:
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=3))
    nodes = tuple(PlanningNode(f"n{i}", size) for i, size in enumerate(sizes))
    runtimes = st.floats(0.01, 1e5, allow_nan=False) | st.sampled_from([1.0, 60.0, 1e9])
    jobs = []
    for i in range(draw(st.integers(1, max_jobs))):
        options = []
        for _ in range(draw(st.integers(1, 4))):
            num_nodes = draw(st.integers(1, len(sizes)))
            slot = draw(st.integers(1, sorted(sizes, reverse=True)[num_nodes - 1]))
            options.append(Option("t", slot * num_nodes, draw(runtimes), num_nodes))
        after = draw(st.lists(st.sampled_from(range(i)), max_size=2, unique=True)) if i and with_after else []
        jobs.append(PlanningJob(f"j{i}", tuple(options), tuple(f"j{k}" for k in after)))
    return Problem("drawn", nodes, tuple(jobs), draw(st.sampled_from([0.0, 0.5, 60.0])))

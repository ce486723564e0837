"""Problems with prices by the hour, drawn at random, and the best plans of tiny ones by an integer program."""

from dataclasses import replace

from hypothesis import strategies as st

from ringmaster.tasks.planning import Option, PlanningJob, PlanningNode, Problem
from ringmaster.tasks.planning.bounds.linear_program import LinearProgram
from ringmaster.tasks.planning.problems.series import value_at
from tests.unit.planning.draw import problems

UNIT_S = 100.0


def steps(draw, *, length_s: float) -> tuple[tuple[float, float], ...]:
    values = draw(st.lists(st.sampled_from([0.0, 1.0, 2.5, 7.0]), min_size=1, max_size=5))
    return tuple((i * length_s, value) for i, value in enumerate(values))


@st.composite
def unit_problems(draw) -> Problem:
    """Returns jobs of whole units on one node of two devices, with prices by the unit, and no switch cost."""
    jobs = []
    for j in range(draw(st.integers(1, 3))):
        units = draw(st.integers(1, 3))
        options = [Option("single", 1, units * UNIT_S)]
        if draw(st.booleans()):
            options.append(Option("ddp", 2, (units + 1) // 2 * UNIT_S))
        jobs.append(PlanningJob(f"j{j}", tuple(options), deadline_s=draw(st.sampled_from([None, 10 * UNIT_S]))))
    node = PlanningNode("n0", 2, price_steps=steps(draw, length_s=2 * UNIT_S))
    factors = draw(st.sampled_from([{"cost": 1.0}, {"cost": 1.0, "end": 0.5}, {"cost": 0.5, "end": 4.0}]))
    return Problem("units", (node,), tuple(jobs), switch_cost_s=0.0, factors=factors)


@st.composite
def priced_problems(draw) -> Problem:
    """Returns problems of all kinds of nodes and gangs with series, powers, releases and factors."""
    problem = draw(problems(max_jobs=5))
    scale_s = max(o.runtime_s for job in problem.jobs for o in job.options)
    nodes = tuple(
        replace(
            node,
            price_steps=steps(draw, length_s=scale_s / 3),
            carbon_steps=steps(draw, length_s=scale_s / 4),
            energy_price_steps=draw(st.sampled_from([(), ((0.0, 3.0),)])),
            power_w=draw(st.sampled_from([100.0, 300.0])),
        )
        for node in problem.nodes
    )
    jobs = tuple(
        replace(
            job,
            release_s=draw(st.sampled_from([0.0, scale_s / 5])),
            options=tuple(
                replace(
                    option,
                    power_w=draw(st.sampled_from([None, 50.0])),
                    startup_s=draw(st.sampled_from([0.0, scale_s / 100])),
                    save_s=draw(st.sampled_from([0.0, scale_s / 200])),
                    evaluate_s=draw(st.sampled_from([0.0, scale_s / 300])),
                )
                for option in job.options
            ),
        )
        for job in problem.jobs
    )
    return replace(problem, nodes=nodes, jobs=jobs, factors={"end": draw(st.sampled_from([0.0, 1.0])), "cost": 1.0})


def best_value(problem: Problem, *, horizon: int) -> float:
    """Returns the least value of plans whose jobs start and stop at whole units, by an integer program."""
    (node,), program = problem.nodes, LinearProgram()
    factors = {"end": 0.0, "cost": 0.0, **problem.factors}
    end = program.column(cost=factors["end"])
    program.limits[end] = (0.0, horizon * UNIT_S)
    free = [program.row(-float("inf"), float(node.num_devices)) for _ in range(horizon)]
    for job in problem.jobs:
        work = program.row(1.0, float("inf"))
        until = horizon if job.deadline_s is None else int(job.deadline_s / UNIT_S)
        for t in range(until):
            once, last = program.row(-float("inf"), 1.0), program.row(-float("inf"), 0.0)
            program.columns[end].append((last, -1.0))
            for option in job.options:
                cost = factors["cost"] * option.num_devices * value_at(node.price_steps, t * UNIT_S) * UNIT_S
                entries = [(work, UNIT_S / option.runtime_s), (once, 1.0), (free[t], float(option.num_devices))]
                entries.append((last, (t + 1) * UNIT_S))
                program.column(entries, cost=cost, upper=1.0, is_integer=True)
    values = program.values()
    return sum(cost * value for cost, value in zip(program.costs, values, strict=True))

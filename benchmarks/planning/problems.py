"""Problems of the planner's benchmark beyond the drawn families: sweeps, fused groups, rules, and re-planning."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

from benchmarks.planning.families import draw
from ringmaster.tasks.planning import Option, Plan, PlanningJob, PlanningNode, Problem, Segment, solve
from ringmaster.tasks.planning.problems.problem_parts import CurrentRun

Maker = Callable[[int, float | None], Problem]
"""Makes a problem from a seed and a switch cost, None for 5 % of the median runtime."""


def drawn(family: str) -> Maker:
    return lambda seed, switch_cost_s: draw(family, seed=seed, switch_cost_s=switch_cost_s)


def short(family: str, *, num_switches: int) -> Maker:
    """Returns a family's problems in which the longest job lasts for so many switches, under its slowest option."""

    def make(seed: int, switch_cost_s: float | None) -> Problem:
        problem = draw(family, seed=seed, switch_cost_s=switch_cost_s)
        longest_s = max(option.runtime_s for job in problem.jobs for option in job.options)
        return replace(problem, name=f"short-{problem.name}", switch_cost_s=longest_s / num_switches)

    return make


def sweep(family: str, *, copies: int) -> Maker:
    """Returns every job of a family `copies` times, as in a sweep over settings that do not change speed."""

    def make(seed: int, switch_cost_s: float | None) -> Problem:
        problem = draw(family, seed=seed, switch_cost_s=switch_cost_s)
        jobs = tuple(replace(job, id=f"{job.id}-{i}") for job in problem.jobs for i in range(copies))
        return replace(problem, name=f"sweep-{problem.name}", jobs=jobs)

    return make


def fused(family: str) -> Maker:
    """Lets every two jobs of one model train together on one gang, in 1.25 to 1.6 times the longer one's time."""

    def make(seed: int, switch_cost_s: float | None) -> Problem:
        problem = draw(family, seed=seed, switch_cost_s=switch_cost_s)
        random = Random(f"fused/{family}/{seed}")
        waiting: dict[str, PlanningJob] = {}
        jobs = {job.id: job for job in problem.jobs}
        for job in problem.jobs:
            model = job.id.split("-", 1)[1]
            if model in waiting:
                first, slower = waiting.pop(model), random.uniform(1.25, 1.6)
                jobs[first.id] = replace(first, options=(*first.options, *_together(first, job, slower)))
            else:
                waiting[model] = job
        return replace(problem, name=f"fused-{problem.name}", jobs=tuple(jobs.values()))

    return make


def _together(first: PlanningJob, second: PlanningJob, slower: float) -> list[Option]:
    longer = {}
    for option in second.options:
        longer[option.technique, option.num_devices, option.num_nodes] = option.runtime_s
    return [
        replace(option, runtime_s=round(slower * max(option.runtime_s, other_s), 1), jobs=(second.id,))
        for option in first.options
        if (other_s := longer.get((option.technique, option.num_devices, option.num_nodes)))
    ]


def ruled(family: str) -> Maker:
    """Adds all rules to a family's problems.

    Every third job waits for the one before it, and every fifth arrives later. Options have times to start, save and
    evaluate. A node leaves halfway, and each node has host memory for two spilling gangs.
    """

    def make(seed: int, switch_cost_s: float | None) -> Problem:
        problem = draw(family, seed=seed, switch_cost_s=switch_cost_s)
        area_s = sum(min(o.runtime_s * o.num_devices for o in job.options) for job in problem.jobs)
        length_s = area_s / problem.num_devices
        jobs = tuple(
            replace(
                job,
                after=(problem.jobs[i - 1].id,) if i % 3 == 2 else (),
                release_s=round(0.1 * length_s, 1) if i % 5 == 4 else 0.0,
                options=tuple(
                    replace(o, startup_s=20.0, save_s=10.0, evaluate_s=30.0, host_memory_bytes=_host_memory(o))
                    for o in job.options
                ),
            )
            for i, job in enumerate(problem.jobs)
        )
        nodes = [replace(node, host_memory_bytes=2 * 400_000_000_000) for node in problem.nodes]
        if len(nodes) > 1:
            nodes[-1] = PlanningNode(nodes[-1].id, nodes[-1].num_devices, available_until_s=round(length_s / 2, 1))
        return replace(problem, name=f"ruled-{problem.name}", nodes=tuple(nodes), jobs=jobs)

    return make


def weighted(make: Maker) -> Maker:
    """Gives the jobs of a kind of problems a weight of 1, 2, 5 or 10 each."""

    def make_weighted(seed: int, switch_cost_s: float | None) -> Problem:
        problem, random = make(seed, switch_cost_s), Random(f"weighted/{seed}")
        jobs = tuple(replace(job, weight=random.choice((1.0, 2.0, 5.0, 10.0))) for job in problem.jobs)
        return replace(problem, name=f"weighted-{problem.name}", jobs=jobs)

    return make_weighted


def _host_memory(option: Option) -> int:
    return 400_000_000_000 if option.technique == "spilling" else 40_000_000_000


def replanned(family: str) -> Maker:
    """Returns the rest of a problem halfway through its plan, where one of the running jobs has just ended early."""

    def make(seed: int, switch_cost_s: float | None) -> Problem:
        problem = draw(family, seed=seed, switch_cost_s=switch_cost_s)
        plan = solve(problem, seed=seed)
        at_s = plan.makespan_s / 2
        running = sorted(s.job for s in plan.segments if s.start_s <= at_s < s.end_s and not _ends(s, plan))
        ended = Random(f"event/{family}/{seed}").choice(running) if running else ""
        return rest_of(problem, plan, at_s=at_s, ended=ended)

    return make


def _ends(segment: Segment, plan: Plan) -> bool:
    return segment == plan.segments_of(segment.job)[-1] and segment.end_s >= plan.makespan_s


def rest_of(problem: Problem, plan: Plan, *, at_s: float, ended: str = "") -> Problem:
    """Returns the rest of a problem at a moment of a plan that went as planned, but for one job that ended just then.

    A segment under way continues at no cost (`running`) or is switched; a job between two segments has started. A
    moment within a segment's initial overhead counts the overhead as paid.
    """
    jobs = []
    for job in problem.jobs:
        mine = plan.segments_of(job.id)
        done = sum(_work_by(segment, at_s) for segment in mine)
        if done > 1 - 1e-6 or job.id == ended:
            continue
        now = next((segment for segment in mine if segment.start_s <= at_s < segment.end_s), None)
        jobs.append(
            replace(
                job,
                options=tuple(replace(o, runtime_s=o.runtime_s * (1 - done)) for o in job.options),
                running=CurrentRun(now.option, now.devices) if now else None,
                started=bool(mine) and mine[0].start_s < at_s,
                after=(),
                release_s=max(0.0, job.release_s - at_s),
            )
        )
    return replace(problem, name=f"rest-of-{problem.name}", jobs=tuple(jobs))


def _work_by(segment: Segment, at_s: float) -> float:
    """Returns the share of its job that a segment has done by a moment."""
    if at_s >= segment.end_s:
        return segment.work
    working_s = segment.duration_s - segment.overhead_s
    done_s = at_s - segment.start_s - segment.overhead_s
    return segment.work * max(0.0, done_s) / working_s if working_s > 0 else 0.0


def switches(plan: Plan, problem: Problem) -> int:
    """Returns the switches within a plan, plus those between the running segments and the plan's first ones."""
    moved = 0
    for job in problem.jobs:
        first = next(iter(plan.segments_of(job.id)), None)
        if first is not None and job.running is not None:
            moved += not job.goes_on(first.option, first.start_s, first.devices)
    return plan.num_switches + moved

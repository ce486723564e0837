"""Drawn problems with order, releases, overheads and leaving nodes, and random preemptive plans of them."""

from dataclasses import replace

from hypothesis import strategies as st

from ringmaster.errors import NoRoomError
from ringmaster.tasks.planning import Option, Plan, PlanningJob, PlanningNode, Problem
from ringmaster.tasks.planning.plans.list_scheduling import Piece, schedule_pieces

SECONDS = st.integers(1, 40).map(float)


def nested(pairs):
    """Values by (a job, one that waits for it), as prices have them: by the second job and then by the first."""
    jobs = {after for _, after in pairs}
    return {job: {before: value for (before, after), value in pairs.items() if after == job} for job in jobs}


@st.composite
def ruled_problems(draw, *, max_jobs: int = 5, with_seconds: bool = True, with_leaving: bool = True) -> Problem:
    nodes = [PlanningNode(f"n{i}", draw(st.integers(1, 3)), draw(st.sampled_from(["", "a"]))) for i in range(2)]
    if with_leaving:
        nodes[1] = replace(nodes[1], available_until_s=draw(st.sampled_from([None, 30.0])))
    amounts = st.sampled_from([0.0, 0.0, 3.0]) if with_seconds else st.just(0.0)
    jobs: list[PlanningJob] = []
    for i in range(draw(st.integers(1, max_jobs))):
        options = []
        for slot in draw(st.lists(st.integers(1, nodes[0].num_devices), min_size=1, max_size=2, unique=True)):
            options.append(
                Option(
                    "t", slot, draw(SECONDS), startup_s=draw(amounts), save_s=draw(amounts), evaluate_s=draw(amounts)
                )
            )
        after = draw(st.lists(st.sampled_from(range(i)), max_size=2, unique=True)) if i else []
        release_s = draw(st.sampled_from([0.0, 0.0, 20.0]))
        weight = draw(st.sampled_from([0.0, 1.0, 1.0, 4.0]))
        names = tuple(f"j{k}" for k in after)
        jobs.append(PlanningJob(f"j{i}", tuple(options), after=names, release_s=release_s, weight=weight))
    return Problem("ruled", tuple(nodes), tuple(jobs), switch_cost_s=draw(st.sampled_from([0.0, 2.0])))


@st.composite
def plans_of(draw, problem: Problem) -> Plan | None:
    """A valid plan in which some jobs are split at random, or None where it finds no place before nodes leave."""
    pieces: list[Piece] = []
    for job in problem.jobs:
        first = draw(st.integers(0, len(job.options) - 1))
        share = draw(st.sampled_from([1.0, 1.0, 0.5, 0.25]))
        pieces.append((job.id, first, share))
        if share < 1.0:
            pieces.append((job.id, draw(st.integers(0, len(job.options) - 1)), 1.0 - share))
    try:
        return Plan(problem.name, schedule_pieces(problem, pieces))
    except NoRoomError:
        return None

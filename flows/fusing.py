"""Which jobs of a batch one gang trains together: chosen by the planner, once, before any of them runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ringmaster.flows.views import current_view
from ringmaster.tasks.cluster import Cluster
from ringmaster.tasks.execution.directions import GOAL
from ringmaster.tasks.execution.groups import LEFT, PARTED
from ringmaster.tasks.execution.journal import ENDED, JobRecord, Journal
from ringmaster.tasks.planning import Plan, Problem, ProblemError
from ringmaster.tasks.planning.baselines import current_practice
from ringmaster.tasks.planning.fusion import Fusion, as_executed, without_groups
from ringmaster.tasks.planning.search import Objective
from ringmaster.tasks.planning.task import choose_groups_task
from ringmaster.tasks.profiling.options import planning_problem
from ringmaster.tasks.profiling.stage import Profiled
from ringmaster.tasks.scribe import FUSION
from ringmaster.techniques import Job, Profile


@dataclass(frozen=True, kw_only=True)
class Together:
    """What was chosen: by the job that leads a group, what the group can run under. fusion: None where none may be.

    plan: that it was chosen by, in which each group is its leader.
    """

    profiles: Mapping[str, tuple[Profile, ...]] = field(default_factory=dict)
    fusion: Fusion | None = None
    plan: Plan | None = None


def choose_together(
    profiled: Profiled,
    *,
    jobs: Sequence[Job],
    name: str,
    cluster: Cluster,
    journal: Journal,
    on_terms: Callable[[Problem], Problem],
    objective: Objective,
    time_limit_s: float,
    goals: Mapping[str, int] | None = None,
    seed: int = 0,
) -> Together:
    """Divides what is left of a batch into groups and jobs that train alone, and tells what that saves.

    name: the batch's. jobs: those that can be trained. goals: how far jobs may train as yet; one whose place is kept
    for values that a sweep has still to choose, at 0, is in no group. The journal keeps the choice as `FUSION`.
    """
    records = journal.jobs()
    left = [job for job in jobs if _is_left(records.get(job.name))]
    may_join = {job.name for job in left if (goals or {}).get(job.name) != 0 and not _is_alone(records.get(job.name))}
    groups = _candidates(profiled.groups, may_join)
    if not groups:
        return Together()
    problem = on_terms(
        planning_problem(
            left,
            profiled.profiles,
            cluster,
            name=name,
            steps_done={name: record.step for name, record in records.items()},
            groups=groups,
        )
    )
    try:
        fusion = choose_groups_task(problem, time_limit_s=time_limit_s, seed=seed, objective=objective)
    except ProblemError:
        return Together()  # no plan meets the deadlines: whoever plans the jobs says so, with what is missing
    current_view.get().notice(fusion.in_words())
    journal.put(
        FUSION,
        {
            "words": fusion.in_words(),
            "groups": fusion.groups,
            "together_s": fusion.together.makespan_s,
            "alone_s": fusion.alone.makespan_s,
            "lower_bound_s": fusion.together.lower_bound_s,
            "practice_s": current_practice(without_groups(problem)).makespan_s,
        },
    )
    chosen = {
        leader: tuple(p for p in groups[leader] if {f.job for f in p.fellows} == set(fellows))
        for leader, fellows in fusion.groups.items()
    }
    return Together(profiles=chosen, fusion=fusion, plan=as_executed(problem, fusion.together)[1])


def goals_in(records: Mapping[str, JobRecord]) -> dict[str, int]:
    """How far jobs may train as yet, of those that somebody steers."""
    return {name: record.details[GOAL] for name, record in records.items() if GOAL in record.details}


def _candidates(groups: Mapping[str, Sequence[Profile]], names: Collection[str]) -> dict[str, tuple[Profile, ...]]:
    """The groups as far as their jobs are among `names`."""
    found: dict[str, tuple[Profile, ...]] = {}
    for leader, profiles in groups.items():
        left = tuple(p for p in (profile.beside(names) for profile in profiles) if p.fellows)
        if leader in names and left:
            found[leader] = left
    return found


def _is_alone(record: JobRecord | None) -> bool:
    """Whether a job goes on by itself since its group has parted, or since it has left that."""
    return record is not None and bool(record.details.get(PARTED) or record.details.get(LEFT))


def _is_left(record: JobRecord | None) -> bool:
    return record is None or record.status not in ENDED

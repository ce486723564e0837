"""Choice of the jobs of a batch that one gang trains together: by the planner, once, before any of them runs."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ringmaster.codec import to_json
from ringmaster.errors import ProblemError
from ringmaster.flows.batch.artifacts import show_groups
from ringmaster.flows.batch.flow_runs import for_prefect
from ringmaster.tasks.cluster import Cluster
from ringmaster.tasks.planning import Plan, Problem
from ringmaster.tasks.planning.fusion import Fusion, as_executed, choose_groups, without_groups
from ringmaster.tasks.planning.plans.list_scheduling import current_practice
from ringmaster.tasks.profiling.search import planning_problem
from ringmaster.tasks.profiling.stage import ProfilingResult
from ringmaster.tasks.storage.fact_keys import FUSION
from ringmaster.tasks.storage.journal import ENDED, GroupDecision, JobRecord, Journal
from ringmaster.techniques import Job, Profile


@dataclass(frozen=True, kw_only=True)
class ChosenGroups:
    """The chosen groups.

    profiles: by lead job, the profiles of its group.
    plan: the plan on which the choice is based, in which the lead job represents its group.
    fusion: the decision of the planner, and the problem that it is about; None where no jobs could form a group.
    """

    profiles: Mapping[str, tuple[Profile, ...]] = field(default_factory=dict)
    plan: Plan | None = None
    fusion: tuple[Fusion, Problem] | None = None

    def report(self, journal: Journal, *, notice: Callable[[str], None]) -> None:
        """Shows the choice and what it saves, and stores it in the journal of the batch."""
        if self.fusion is None:
            journal.put(FUSION, None)
            return
        fusion, problem = self.fusion
        notice(fusion.in_words())
        for_prefect(lambda: show_groups(fusion, problem), notice)
        decision = GroupDecision(
            words=fusion.in_words(),
            groups=fusion.groups,
            together_s=fusion.fused_plan.makespan_s,
            alone_s=fusion.alone.makespan_s,
            lower_bound_s=fusion.fused_plan.best_bound_s,
            practice_s=current_practice(without_groups(problem)).makespan_s,
        )
        journal.put(FUSION, to_json(decision))


def choose_job_groups(
    profiling: ProfilingResult,
    *,
    jobs: Sequence[Job],
    name: str,
    cluster: Cluster,
    records: Mapping[str, JobRecord],
    add_terms: Callable[[Problem], Problem],
    objective: str,
    work_s: float,
    goals: Mapping[str, int] | None = None,
    seed: int = 0,
) -> ChosenGroups:
    """Divides the remaining jobs of a batch into groups and jobs that train alone.

    name: name of the batch.
    jobs: the jobs that can be trained.
    records: the records of the jobs, as far as there are any.
    goals: the step up to which each job may train now. A trial of a sweep whose values are still to be chosen has goal
        0, and joins no group.
    """
    left = [job for job in jobs if job.name not in records or records[job.name].status not in ENDED]
    # A job trains alone since its group was divided, or since it left the group.
    alone = {name for name, record in records.items() if record.parted or record.left_group}
    may_join = {job.name for job in left if (goals or {}).get(job.name) != 0} - alone
    groups = _candidates(profiling.groups, may_join)
    if not groups:
        return ChosenGroups()
    problem = add_terms(
        planning_problem(
            left,
            profiling.profiles,
            cluster,
            name=name,
            steps_done={name: record.step for name, record in records.items()},
            groups=groups,
        )
    )
    try:
        fusion = choose_groups(problem, work_s=work_s, seed=seed, objective=objective)
    except ProblemError:
        return ChosenGroups()  # no plan meets the deadlines: the planner of the jobs reports it, with details
    chosen = {
        lead: tuple(p for p in groups[lead] if {f.job for f in p.members} == set(members))
        for lead, members in fusion.groups.items()
    }
    plan = as_executed(problem, fusion.fused_plan)[1]
    return ChosenGroups(profiles=chosen, plan=plan, fusion=(fusion, problem))


def goals_in(records: Mapping[str, JobRecord]) -> dict[str, int]:
    """Returns the step up to which each steered job may train now."""
    return {name: record.goal for name, record in records.items() if record.goal is not None}


def _candidates(groups: Mapping[str, Sequence[Profile]], names: Collection[str]) -> dict[str, tuple[Profile, ...]]:
    """Returns the groups, restricted to the jobs in `names`."""
    result: dict[str, tuple[Profile, ...]] = {}
    for lead, profiles in groups.items():
        left = tuple(p for p in (profile.restricted_to(names) for profile in profiles) if p.members)
        if lead in names and left:
            result[lead] = left
    return result

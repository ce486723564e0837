"""Contraction of fused groups to single jobs, which leaves an ordinary problem to plan."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace

from ringmaster.tasks.planning.bounds.pattern_model import Group, members_of
from ringmaster.tasks.planning.plans.plan import Plan, Segment
from ringmaster.tasks.planning.problems.faults import cycle_in
from ringmaster.tasks.planning.problems.parts import Option, PlanningJob, Running
from ringmaster.tasks.planning.problems.problem import Problem, likeness

Place = tuple[int, int]  # index of a job, index of its option


@dataclass(frozen=True)
class Contracted:
    """A problem with one job per group; places[job id][k] is the (job, option) that the job's option k stands for."""

    problem: Problem
    places: dict[str, tuple[Place, ...]]

    def expanded(self, plan: Plan, problem: Problem) -> tuple[Segment, ...]:
        """Returns a plan's segments as segments of the fused problem."""
        segments = []
        for segment in plan.segments:
            j, k = self.places[segment.job][segment.option]
            segments.append(replace(segment, job=problem.jobs[j].id, option=k))
        return tuple(segments)


def contract(problem: Problem, groups: Iterable[Group]) -> Contracted | None:
    """Returns the problem with each group as one job, or None where groups would wait for each other in a cycle.

    The job has the name of the first job that owns options of the group.
    """
    return Contraction(problem).of(groups)


class Contraction:
    """Contracts one problem by many divisions.

    groups: the groups that options train together, in the order of the problem.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._places: dict[Group, list[Place]] = {}
        for j, job in enumerate(problem.jobs):
            for k, option in enumerate(job.options):
                self._places.setdefault(members_of(job, option), []).append((j, k))
        self.groups = tuple(group for group in self._places if len(group) > 1)
        self._index = {job.id: j for j, job in enumerate(problem.jobs)}
        self._waited_for = {other for job in problem.jobs for other in job.after}
        self._ones: dict[Group, PlanningJob] = {}

    def of(self, groups: Iterable[Group]) -> Contracted | None:
        """Returns the contracted problem, or None, as `contract` does."""
        ones = {group: self.as_one(group) for group in sorted(groups, key=self._first_place)}
        name_of = {name: one.id for group, one in ones.items() for name in group}
        jobs = tuple(
            replace(one, after=tuple(dict.fromkeys(name_of[other] for other in one.after))) if one.after else one
            for one in ones.values()
        )
        if cycle_in({job.id: job.after for job in jobs}):
            return None
        problem = self.problem
        return Contracted(
            Problem(problem.name, problem.nodes, jobs, problem.switch_cost_s),
            {one.id: tuple(self._places[group]) for group, one in ones.items()},
        )

    def options_of(self, group: Group) -> tuple[Option, ...]:
        """Returns the options that train a group."""
        return tuple(self.problem.jobs[j].options[k] for j, k in self._places[group])

    def likeness(self, group: Group) -> Hashable:
        """Returns a key that is equal for groups that the planner cannot tell apart."""
        one = self.as_one(group)
        is_special = one.after or one.running is not None or not self._waited_for.isdisjoint(group)
        return group if is_special else likeness(one)

    def as_one(self, group: Group) -> PlanningJob:
        """Returns a group as one job.

        Its release is the latest and its deadline the earliest of its members, and its weight is their sum. It
        belongs to the user of the first of them. It waits for jobs of the problem, not for groups of them.
        """
        if group not in self._ones:
            self._ones[group] = self._made_one(group)
        return self._ones[group]

    def _first_place(self, group: Group) -> Place:
        return self._places[group][0]

    def _made_one(self, group: Group) -> PlanningJob:
        jobs, places = self.problem.jobs, self._places[group]
        lead = jobs[places[0][0]]
        members = [jobs[j] for j in sorted(self._index[name] for name in group)]
        due = [job.deadline_s for job in members if job.deadline_s is not None]
        running: Running | None = None
        for new, (j, k) in enumerate(places):
            old = jobs[j].running
            if old is not None and old.option == k:
                running = replace(old, option=new)
        others = (name for job in members for name in (job.id, *job.members) if name != lead.id)
        return PlanningJob(
            id=lead.id,
            options=tuple(replace(jobs[j].options[k], jobs=()) for j, k in places),
            after=tuple(dict.fromkeys(other for job in members for other in job.after if other not in group)),
            release_s=max(job.release_s for job in members),
            deadline_s=min(due, default=None),
            weight=sum(job.weight for job in members),
            group=lead.group,
            running=running,
            started=any(job.started for job in members),
            members=tuple(others),
        )

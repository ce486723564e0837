"""Groups of jobs as single jobs: what is left to plan once the jobs are divided into groups."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace

from ringmaster.tasks.planning.pattern_model import Group, members_of
from ringmaster.tasks.planning.plan import Plan, Segment
from ringmaster.tasks.planning.problem import Option, PlanningJob, Problem, Running, likeness
from ringmaster.tasks.planning.problem_faults import cycle_in

Place = tuple[int, int]  # index of a job, index of its option


@dataclass(frozen=True)
class Contracted:
    """A problem with one job a group; places[job id][k] is what its option k stands for."""

    problem: Problem
    places: dict[str, tuple[Place, ...]]

    def expanded(self, plan: Plan, problem: Problem) -> tuple[Segment, ...]:
        """A plan's segments as those of the fused problem."""
        segments = []
        for segment in plan.segments:
            j, k = self.places[segment.job][segment.option]
            segments.append(replace(segment, job=problem.jobs[j].id, option=k))
        return tuple(segments)


def contract(problem: Problem, groups: Iterable[Group]) -> Contracted | None:
    """The problem with each group as one job, or None where groups would wait for each other in a cycle.

    The job is named for the first owner of the group's options.
    """
    return Contraction(problem).of(groups)


class Contraction:
    """Contracts one problem by many divisions. groups: that options train together, in the order of the problem."""

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
        """As `contract`."""
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
        """What a group can be trained under."""
        return tuple(self.problem.jobs[j].options[k] for j, k in self._places[group])

    def likeness(self, group: Group) -> Hashable:
        """Equal for groups that the planner cannot tell apart."""
        one = self.as_one(group)
        is_special = one.after or one.running is not None or not self._waited_for.isdisjoint(group)
        return group if is_special else likeness(one)

    def as_one(self, group: Group) -> PlanningJob:
        """A group as one job: it starts when all may, is due when the first is, and weighs as much as all.

        It waits for jobs of the problem, not for groups of them.
        """
        if group not in self._ones:
            self._ones[group] = self._made_one(group)
        return self._ones[group]

    def _first_place(self, group: Group) -> Place:
        return self._places[group][0]

    def _made_one(self, group: Group) -> PlanningJob:
        jobs, places = self.problem.jobs, self._places[group]
        leader = jobs[places[0][0]]
        members = [jobs[j] for j in sorted(self._index[name] for name in group)]
        due = [job.deadline_s for job in members if job.deadline_s is not None]
        running: Running | None = None
        for new, (j, k) in enumerate(places):
            old = jobs[j].running
            if old is not None and old.option == k:
                running = replace(old, option=new)
        others = (name for job in members for name in (job.id, *job.fellows) if name != leader.id)
        return PlanningJob(
            id=leader.id,
            options=tuple(replace(jobs[j].options[k], jobs=()) for j, k in places),
            after=tuple(dict.fromkeys(other for job in members for other in job.after if other not in group)),
            release_s=max(job.release_s for job in members),
            deadline_s=min(due, default=None),
            weight=sum(job.weight for job in members),
            running=running,
            started=any(job.started for job in members),
            fellows=tuple(others),
        )

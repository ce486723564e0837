"""What an executor will do next: the plan of all that is left, made anew where that is asked for or may pay."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import count

from ringmaster.tasks.cluster import Cluster
from ringmaster.tasks.execution.course import Command, Course
from ringmaster.tasks.execution.dispatch import DeviceId, in_steps
from ringmaster.tasks.execution.events import ExecutionEvent, Planned
from ringmaster.tasks.execution.journal import Journal
from ringmaster.tasks.execution.replanner import Replanner, State, Thought
from ringmaster.tasks.execution.roster import Roster
from ringmaster.tasks.planning import Plan, Problem
from ringmaster.tasks.profiling.options import planning_problem

MakePlan = Callable[[Problem], Plan]

OnTerms = Callable[[Problem], Problem]
"""Adds what is asked of plans beside the jobs: deadlines, as they stand now, weights, prices."""


class Forethought:
    """Keeps the course of one executor planned, called by its thread alone.

    cluster, out: the devices that there are, and those of them that must not be used. replanner: None where the first
    plan is followed to its end. command: tells gangs where to end. tell: hears of each plan that is followed. post:
    hands over a thought whose plan is made, from any thread; it is `weighed` then.
    """

    def __init__(
        self,
        *,
        name: str,
        cluster: Cluster,
        roster: Roster,
        course: Course,
        journal: Journal,
        make_plan: MakePlan,
        on_terms: OnTerms,
        replanner: Replanner | None,
        command: Callable[[Iterable[Command]], None],
        tell: Callable[[ExecutionEvent], None],
        post: Callable[[Thought], None],
    ) -> None:
        self._name, self.cluster, self._roster, self._course, self._journal = name, cluster, roster, course, journal
        self._make_plan, self._on_terms, self.replanner = make_plan, on_terms, replanner
        self._command, self._tell, self._post = command, tell, post
        self.out: frozenset[DeviceId] = frozenset()
        self._wanted: dict[int, str] = {}  # reasons for a new plan, as they came
        self._numbers = count()
        self._answered: tuple[int, ...] = ()  # those that the plan in the making takes into account

    @property
    def is_wanted(self) -> bool:
        """Whether a new plan is asked for that is not followed yet."""
        return bool(self._wanted)

    @property
    def failures(self) -> list[BaseException]:
        """Why the last plans that were asked for could not be made."""
        return self.replanner.failures if self.replanner is not None else []

    def want(self, why: str) -> None:
        """Asks for a new plan of what is left; one that is in the making for an earlier wish is still followed, lest
        changes that come faster than plans are made keep new jobs from ever being planned.
        """
        if self.replanner is None:
            self.replan(why=why)
            return
        self._wanted[next(self._numbers)] = why
        self.replanner.void_improvement()

    def move_to(self, cluster: Cluster, *, out: Collection[DeviceId] = ()) -> None:
        """Other devices are there now; nothing stays planned on those that are gone or must not be used."""
        self.cluster, self.out = cluster, frozenset(out)
        self.drop_unusable()

    def drop_unusable(self) -> bool:
        """Plans nothing on devices that are gone or must not be used; returns whether anything was."""
        there = set(self.cluster.lease_names()) - self.out
        jobs = {s.job for s in self._course.planned if not there.issuperset(s.devices)}
        for job in jobs:
            self._course.drop(job)
        return bool(jobs)

    def forget_speed(self, job: str) -> None:
        """The options of a job are others now, or numbered anew."""
        if self.replanner is not None:
            self.replanner.forget(job)

    def replan(self, *, why: str) -> None:
        """Plans what is left, and waits for it; segments that run keep what the plan had for their jobs after them."""
        active = self._course.active_jobs
        jobs = [job for job in self._roster.left() if job.name not in active]
        kept = [segment for segment in self._course.planned if segment.job in active]
        if not jobs:
            self._course.planned = kept
            return
        done = {job.name: self._roster.records[job.name].step for job in jobs}
        so_far = {**self._roster.groups.steps(), **done}
        problem = planning_problem(jobs, self._roster.profiles, self.cluster, name=self._name, steps_done=so_far)
        problem = self._on_terms(problem)
        plan = self._make_plan(problem)
        steps = {job.name: job.total_steps for job in jobs}
        self._course.planned = [*kept, *in_steps(plan, num_steps=steps, steps_done=done)]
        self._follow(problem, plan, why=why)

    def seconds_to_look(self) -> float:
        """Seconds until `look` may have something to do."""
        if self.replanner is None:
            return float("inf")
        return self.replanner.seconds_to_look(is_running=bool(self._course.running), is_wanted=self.is_wanted)

    def look(self) -> bool:
        """Has the rest planned anew in the background where it is time to; the plan comes by `post`. Returns False
        where a plan was asked for, and nothing is left that could be planned.
        """
        if self.replanner is None or self.seconds_to_look() > 0:
            return True
        state = self.state()
        if self._wanted:
            thought = self.replanner.demand(state, why="; ".join(dict.fromkeys(self._wanted.values())))
            self._answered = tuple(self._wanted)
            if thought is None:
                self._wanted.clear()
                return False
        elif (thought := self.replanner.look(state)) is None:
            return True
        thought.plan.add_done_callback(lambda _: self._post(thought))
        return True

    def weigh(self, thought: Thought) -> None:
        """Follows a plan where that pays: gangs that need not move never notice, the others are told to stop."""
        assert self.replanner is not None
        fresh = self.replanner.judge(thought, self.state())
        if fresh is None:
            return
        if thought.is_needed:
            for number in self._answered:
                self._wanted.pop(number, None)
        self._command(self._course.follow(fresh))
        self.drop_unusable()  # what has gone since the plan was begun
        self._follow(thought.rest.problem, thought.plan.result(), why=thought.why)

    def state(self) -> State:
        """Where the batch stands now."""
        jobs = self._roster.left()
        steps = {job.name: self._roster.records[job.name].step for job in jobs}
        for running in self._course.running.values():
            if (name := running.segment.job) in steps:
                steps[name] = max(steps[name], running.step)
                if running.fellows:  # they may go on when the leader is through
                    steps[name] = min(steps[name], self._roster.totals[name] - 1)
        return State(
            cluster=self.cluster,
            out=self.out,
            jobs=jobs,
            profiles=self._roster.profiles,
            steps=steps,
            running=tuple(r for r in self._course.running.values() if r.segment.job in steps),
            planned=tuple(segment for segment in self._course.planned if segment.job in steps),
            fellow_steps=self._fellow_steps(),
        )

    def _fellow_steps(self) -> dict[str, int]:
        """Of those that run too, as far as their gangs have told."""
        steps = dict(self._roster.groups.steps())
        for running in self._course.running.values():
            steps |= {f: max(steps[f], running.step_of(f)) for f in running.fellows if f in steps}
        return steps

    def _follow(self, problem: Problem, plan: Plan, *, why: str) -> None:
        self._journal.write_plan({"problem": problem.to_json(), "plan": plan.to_json()}, why=why)
        if self.replanner is not None:
            self.replanner.planned(self.state())
        self._tell(Planned(problem=problem, plan=plan, why=why))

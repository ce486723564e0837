"""The plan manager of an executor: re-plans what is left when that is requested or may pay off."""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from itertools import count

from ringmaster.tasks.cluster import Cluster
from ringmaster.tasks.execution.dispatch import Command, DeviceId, UserLimits, in_steps, waits_of
from ringmaster.tasks.execution.execution_events import (
    ExecutionEvent,
    PlanUpdate,
)
from ringmaster.tasks.execution.job_price import JobPrice
from ringmaster.tasks.execution.job_table import JobTable
from ringmaster.tasks.execution.progress import PlanProgress, RunningSegment
from ringmaster.tasks.execution.replanner import PendingPlan, RemainingWork, Replanner
from ringmaster.tasks.planning import Plan, Problem
from ringmaster.techniques import Job, Profile


class PlanManager:
    """Plans and re-plans for one executor, on whose thread all methods are called.

    cluster, out: the devices that exist, and those of them that must not be used.
    replanner: makes the plans, in the background.
    command: sends commands that change where gangs end.
    notify: receives an event for each plan that is followed.
    post: passes a pending plan whose plan is made to the executor, from any thread; the executor then calls
        `follow_if_better`.
    """

    def __init__(
        self,
        *,
        cluster: Cluster,
        job_table: JobTable,
        plan_progress: PlanProgress,
        replanner: Replanner,
        command: Callable[[Iterable[Command]], None],
        notify: Callable[[ExecutionEvent], None],
        post: Callable[[PendingPlan], None],
    ) -> None:
        self.cluster, self._job_table, self._plan_progress = cluster, job_table, plan_progress
        self.replanner = replanner
        self._command, self._notify, self._post = command, notify, post
        self.out: frozenset[DeviceId] = frozenset()
        self._wanted: dict[int, str] = {}  # reasons for a new plan, in order of their requests
        self._numbers = count()
        self._answered: tuple[int, ...] = ()  # the requests that the pending plan takes into account

    @property
    def is_wanted(self) -> bool:
        """Whether a new plan was requested that is not followed yet."""
        return bool(self._wanted)

    def num_devices_for(self, job: str) -> int:
        """Returns how many of the devices that exist and may be used the user of a job may hold."""
        num_usable, limits = len(set(self.cluster.lease_names()) - self.out), self._plan_progress.limits
        batch = self._job_table.of_batch(self._job_table.entries[job].batch)  # a member of a group was not planned
        user = next((user for name in (job, *batch) if (user := limits.user(name)) is not None), None)
        return num_usable if user is None else min(num_usable, limits.devices[user])

    def request_plan(self, why: str) -> None:
        """Requests a new plan of what is left.

        A plan that is being made for an earlier request is still followed: otherwise changes that arrive faster than
        plans are made would keep new jobs from ever being planned.
        """
        self._wanted[next(self._numbers)] = why
        self.replanner.void_improvement()

    def move_to(self, cluster: Cluster, *, out: Collection[DeviceId] = ()) -> None:
        """Replaces the cluster. Removes planned segments whose devices are gone or must not be used."""
        self.cluster, self.out = cluster, frozenset(out)
        self.drop_unusable()

    def drop_unusable(self) -> bool:
        """Drops the planned segments of each job that has one on devices that are gone or must not be used.

        Returns whether there were any.
        """
        there = set(self.cluster.lease_names()) - self.out
        jobs = {s.job for s in self._plan_progress.planned if not there.issuperset(s.devices)}
        for job in jobs:
            self._plan_progress.drop(job)
        return bool(jobs)

    def begin(self, planned: PlanUpdate) -> None:
        """Follows a plan of jobs of which nothing is planned yet."""
        jobs = {job.name: job for job in self._job_table.left()}
        steps = {job.id: jobs[job.id].total_steps for job in planned.problem.jobs}
        done = {name: self._job_table.records[name].step for name in steps}
        self._plan_progress.planned += self.replanner.explored(
            self.state(),
            in_steps(
                planned.plan,
                num_steps=steps,
                steps_done=done,
                waits=waits_of(planned.plan, planned.problem),
                begins_s=planned.begins_s or self._plan_progress.wall_clock(),
            ),
        )
        self._follow(planned.problem, planned.plan, why=planned.why)

    def price(self, job: Job, *, profiles: Sequence[Profile], step: int) -> tuple[Problem, JobPrice] | None:
        """Returns what a further job costs, with the problem; None where it has no place in the plan now."""
        state = self.state()
        if not any(each.name == job.name for each in state.jobs):
            state = replace(state, jobs=[*state.jobs, job])
        return self.replanner.price(
            replace(state, profiles={**state.profiles, job.name: profiles}, steps={**state.steps, job.name: step}),
            job.name,
        )

    def take_in(self, problem: Problem, price: JobPrice, *, why: str) -> None:
        """Follows the plan by which a further job was priced: all that runs continues."""
        planned = self._plan_progress.planned
        planned.insert(0 if price.is_first else len(planned), price.segment)
        self._follow(problem, price.plan, why=why)

    def decide_after_trials(self) -> None:
        """Plans the rest of each job whose last trial is about to end under the option that is best by now."""
        planned = self._plan_progress.planned
        for running in self._plan_progress.running.values():
            trial = running.segment
            if not (trial.is_trial and running.is_about_to_end):
                continue
            number = next((k for k, segment in enumerate(planned) if segment.job == trial.job), None)
            if number is None or planned[number].is_trial or set(planned[number].devices) != set(trial.devices):
                continue
            best = self.replanner.best_option(self.state(), trial, planned[number])
            planned[number] = replace(planned[number], option=best)

    def seconds_to_look(self) -> float:
        """Returns the seconds until `start_planning_if_due` may have something to do.

        What is left is not planned while a gang is about to end whose jobs have been evaluated at their goals: those
        that continue may be trained with others.
        """
        if any(self._is_ending(running) for running in self._plan_progress.running.values()):
            return math.inf
        return self.replanner.seconds_to_look(is_running=bool(self._plan_progress.running), is_wanted=self.is_wanted)

    def start_planning_if_due(self) -> bool:
        """Starts re-planning in the background if it is due; the result arrives through `post`.

        Returns False if a plan was requested but nothing is left that can be planned.
        """
        if self.seconds_to_look() > 0:
            return True
        state = self.state()
        if self._wanted:
            pending_plan = self.replanner.demand(state, why="; ".join(dict.fromkeys(self._wanted.values())))
            self._answered = tuple(self._wanted)
            if pending_plan is None:
                self._wanted.clear()
                return False
        elif (pending_plan := self.replanner.poll(state)) is None:
            return True
        pending_plan.plan.add_done_callback(lambda _: self._post(pending_plan))
        return True

    def follow_if_better(self, pending_plan: PendingPlan) -> None:
        """Follows a pending plan if that pays off. Gangs that it leaves in place continue; the others are commanded to
        stop.
        """
        if (fresh := self.replanner.judge(pending_plan, self.state())) is None:
            return
        if pending_plan.is_needed:
            for number in self._answered:
                self._wanted.pop(number, None)
        fresh = [replace(segment, reason=f"a new plan ({pending_plan.why})") for segment in fresh]
        self._command(self._plan_progress.follow(self.replanner.explored(self.state(), fresh)))
        self.drop_unusable()  # devices that are gone since planning began
        self._follow(pending_plan.rest.problem, pending_plan.plan.result(), why=pending_plan.why)

    def state(self) -> RemainingWork:
        """Returns the current state of the batch, without the segments that keep their devices whatever is planned."""
        segments = [running.segment for running in self._plan_progress.running.values() if running.is_held]
        held = [segment for segment in segments if self.out.isdisjoint(segment.devices)]
        holders = {segment.job for segment in held}
        jobs = [job for job in self._job_table.left() if job.name not in holders]
        member_steps = dict(self._job_table.groups.steps())
        steps = {job.name: self._job_table.records[job.name].step for job in jobs}
        for running in self._plan_progress.running.values():
            member_steps |= {f: max(member_steps[f], running.step_of(f)) for f in running.members if f in member_steps}
            if (name := running.segment.job) in steps:
                # Members may continue after the lead job has ended.
                most = self._job_table.totals[name] - 1 if running.members else math.inf
                steps[name] = int(min(max(steps[name], running.step), most))
        return RemainingWork(
            cluster=self.cluster,
            out=self.out.union(*(segment.devices for segment in held)),
            jobs=jobs,
            profiles=self._job_table.profiles,
            steps=steps,
            running=tuple(r for r in self._plan_progress.running.values() if r.segment.job in steps),
            planned=tuple(segment for segment in self._plan_progress.planned if segment.job in steps),
            member_steps=member_steps,
        )

    def _is_ending(self, running: RunningSegment) -> bool:
        """Whether nothing of a gang is left but its end, as its jobs were evaluated at the steps that they end at.

        A member ends where it was evaluated if it has trained no further: it may have more steps than the lead job.
        """
        ends = {running.segment.job: running.ordered_step, **{name: running.step_of(name) for name in running.members}}
        evaluated = {name: record.evaluated for name in ends if (record := self._job_table.records.get(name))}
        return all((last := evaluated.get(name)) is not None and last.step >= step for name, step in ends.items())

    def _follow(self, problem: Problem, plan: Plan, *, why: str) -> None:
        limits, before = UserLimits.of(problem), self._plan_progress.limits
        self._plan_progress.limits = replace(limits, users={**before.users, **limits.users})  # of what runs, too
        self._job_table.journal.write_plan({"problem": problem.to_json(), "plan": plan.to_json()}, why=why)
        self.replanner.planned(self.state(), certificate=plan.certificate)
        self._notify(PlanUpdate(problem=problem, plan=plan, why=why))

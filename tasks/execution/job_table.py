"""The jobs of an executor and their state.

The journal is the record. The table caches in memory what this executor alone writes there, so that a list of a
thousand jobs is not read again for each event of a gang.

A job's *goal* is the step up to which it is planned. A job that has reached its goal rests and holds no devices, until
its goal is raised or it is stopped early. A stop is not a failure: the last checkpoint and metrics stay. The job's
record in the journal holds all of this, so that another executor that takes over finds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ringmaster.codec import to_json
from ringmaster.tasks.execution.group_table import GroupTable
from ringmaster.tasks.execution.job_rows import JobRows, JobTableEntry
from ringmaster.tasks.execution.job_rules import job_rules
from ringmaster.tasks.storage.journal import ENDED, Evaluation, JobRecord, JobStatus, Journal, Variation
from ringmaster.techniques import Job, Profile
from ringmaster.techniques.job import Variant
from ringmaster.techniques.loss import writes
from ringmaster.techniques.processes.gang_events import EvaluationReported


def added_jobs(records: Mapping[str, JobRecord]) -> list[Job]:
    """Returns the jobs that were added while their batch ran, in order."""
    return [job for each in records.values() if each.variation is not None and (job := each.settled_job) is not None]


def jobs_left(records: Mapping[str, JobRecord], names: Iterable[str]) -> list[str]:
    """Returns the jobs that a run has left if it is resumed: those that are neither done nor were stopped early."""
    ended = (JobStatus.DONE, JobStatus.STOPPED)
    return [name for name in names if name not in records or records[name].status not in ended]


def variant_options(job: Job, profiles: Mapping[str, Sequence[Profile]]) -> dict[Variant, tuple[Profile, ...]]:
    """Returns the options of each of `Job.variants`. profiles: by the names of their jobs."""
    return {variant: tuple(profiles.get(each.name, ())) for variant, each in job.variants.items()}


class JobTable(JobRows):
    """The table of jobs. It writes each change into the journal first."""

    def __init__(self, journal: Journal) -> None:
        super().__init__(journal)
        self.after: dict[str, tuple[str, ...]] = {}  # the jobs that each job depends on
        self.attempts: dict[str, int] = {}  # crashes without progress
        self._before_pinned: dict[str, list[Profile]] = {}  # the options of jobs that keep their layout
        self._before_rules: dict[str, list[Profile]] = {}  # the options of jobs of which rules permit a part
        self.groups = GroupTable(self)

    def add(self, entries: Iterable[JobTableEntry]) -> None:
        """Adds jobs, with their state from the journal."""
        added = {entry.job.name: entry for entry in entries}
        self.entries |= added
        self.profiles |= {name: list(entry.profiles) for name, entry in added.items()}
        for name, entry in self.entries.items():
            if parents := tuple(parent for parent in entry.job.parents if parent in self.entries):
                self.after[name] = parents
        self._read(added)

    def _read(self, entries: Mapping[str, JobTableEntry]) -> None:
        known = self.journal.jobs(batches={entry.batch for entry in entries.values()})
        added = {name: of for name, record in known.items() if (of := record.variation) and name not in self.entries}
        for name, variation in added.items():
            self._enter_variant(name, variation)
        self.records |= {name: known.get(name, JobRecord(name=name)) for name in (*entries, *added)}
        for name in dict.fromkeys((*entries, *added)):
            self.renew(name)
            self._change_by_rules(name)
        self.groups.form()

    def _enter_variant(self, name: str, variation: Variation) -> None:
        """Adds a variant of a job of the table, which `renew` then defines."""
        prefix = name[: name.rfind("/") + 1]
        source = self.entries[prefix + variation.job]
        job, in_batch = replace(source.job, name=name), replace(source.job_in_batch, name=name.removeprefix(prefix))
        self.entries[name] = replace(source, job_in_batch=in_batch, job=job, group_profiles=())
        self.profiles[name] = list(source.profiles)
        if source.job.name in self.after:
            self.after[name] = self.after[source.job.name]

    def renew(self, name: str) -> None:
        """Updates a job from its record: its definition if it was a placeholder, and its goal."""
        entry, record = self.entries[name], self.records[name]
        self.profiles[name] = self._before_rules.pop(name, self.profiles[name])
        if record.settled is not None:
            entry = self.entries[name] = self._settled(entry, record)
        if (job := record.of(entry.job)) != entry.job:
            profiles = entry.variants.get(job.phases[-1].variant, entry.profiles)
            entry = self.entries[name] = replace(
                entry, job_in_batch=record.of(entry.job_in_batch), job=job, profiles=profiles
            )
            self.profiles[name] = list(profiles)
        # A job that could not be inspected has no number of steps, and will not run.
        start = entry.job.started_from
        if start is not None and record.step < start.step:
            self.write(name, step=start.step)
        total = entry.job.num_steps or 0
        goal = total if record.goal is None else min(record.goal, total)
        for rule in job_rules():
            goal = rule.goal(record, goal)
        self.totals[name] = goal
        self.groups.renew(name)
        self._pin(name)
        self._apply_rules(name)

    def keep_layout(self, name: str, profile: Profile) -> set[int]:
        """Pins a job to the option under which it starts, if its results depend on the layout.

        The option takes the place of all others, whose numbers in plans stay valid. Returns the numbers of those that
        it replaces now; empty for a job of another kind, and after the first call.
        """
        if not keeps_layout(self.entries[name].job) or self.records[name].layout:
            return set()
        replaced = {k for k, each in enumerate(self.profiles[name]) if not each.is_like(profile)}
        self.write(name, layout=layout_of(profile))
        self._pin(name)
        return replaced

    def _pin(self, name: str) -> None:
        """Replaces the options of a job that keeps its layout, if it has one already, by the option it ran under."""
        layout, profiles = self.records[name].layout, self.profiles[name]
        kept = [each for each in profiles if layout and layout_of(each) == layout]
        if kept and len(kept) < len(profiles):
            self._before_pinned[name] = profiles
            self.profiles[name] = kept[:1] * len(profiles)

    def _apply_rules(self, name: str) -> None:
        """Replaces the options that rules do not permit now, so that the numbers of the others stay valid."""
        profiles = self.profiles[name]
        fits: Sequence[Profile] = profiles
        for rule in job_rules():
            fits = rule.options(self.entries[name].job, self.records[name], fits)
        if fits is not profiles:
            self._before_rules[name] = profiles
            self.profiles[name] = [each if each in fits else fits[0] for each in profiles] if fits else []

    def _settled(self, entry: JobTableEntry, record: JobRecord) -> JobTableEntry:
        """Replaces a placeholder by the job it now represents, with profiles and data of a job of the same shape."""
        name, job, shape = entry.job.name, record.settled_job, record.like
        assert job is not None and shape is not None, f"{name} represents no job"
        same_shape = self.entries[self.name_of(shape, in_batch_of=name)]
        data, weights = entry.paths.data, entry.paths.weights
        paths = replace(
            entry.paths,
            data={**data, **({job.name: same_shape.paths.data[shape]} if shape in same_shape.paths.data else {})},
            weights={
                **weights,
                **({job.name: same_shape.paths.weights[shape]} if shape in same_shape.paths.weights else {}),
            },
        )
        # If it has this shape already, some options may have been removed after running out of memory: keep the rest.
        is_alike = bool(entry.profiles) and all(profile in same_shape.profiles for profile in entry.profiles)
        if not is_alike:
            self.profiles[name] = list(same_shape.profiles)
        prefix = name[: name.rfind("/") + 1]
        listed = job.renamed(name, lambda other: prefix + other if prefix + other in self.entries else other)
        profiles = entry.profiles if is_alike else same_shape.profiles
        return replace(entry, job_in_batch=job, job=listed, profiles=profiles, paths=paths)

    def remove(self, jobs: Iterable[str]) -> None:
        """Removes jobs from the table."""
        for name in list(jobs):
            self.groups.forget(name)
            tables = self.entries, self.records, self.profiles, self.totals, self.after, self.attempts
            for kept in (*tables, self._before_pinned, self._before_rules):
                kept.pop(name, None)

    # -- goals, placeholders, variants and changes, for steered batches ------------------------------------------------

    def add_variant(self, name: str, job: Job, *, source: str, step: int | None) -> None:
        """Adds a job that differs from another one of the table in what affects neither its speed nor its size.

        job: under its name within the batch. step: the step of the source's checkpoint from which it continues, if any.
        """
        own = self.entries[source].job_in_batch.name
        like, variation = self.records[source].like or own, Variation(job=own, step=step)
        self.records[name] = self.journal.write_job(name, settled=to_json(job), like=like, variation=variation)
        self._enter_variant(name, variation)
        self.renew(name)

    def redefine(self, name: str, job: Job) -> None:
        """Replaces the definition of a job by one of the same speed and size, under its name within the batch."""
        self.write(name, settled=to_json(job), like=self.records[name].like or job.name, rested=None)
        self.renew(name)

    def settle(self, name: str, job: Job, *, like: str) -> None:
        """Defines the job of a placeholder. A job that has begun or ended stays unchanged.

        job: adapts no other job of the table.
        like: a job of the same batch and shape, by its name within the batch.
        """
        record = self.records[name]
        if record.step == 0 and record.status == JobStatus.WAITING and not record.goal:
            self.write(name, settled=to_json(job), like=like)
            self.renew(name)

    def allow(self, name: str, goal: int) -> None:
        """Raises a job's goal, the step up to which it may train. A goal is never lowered."""
        if goal > (reached := self.records[name].goal or 0):
            if reached:
                self.groups.let_continue(name)
            self.write(name, goal=goal)
            self.renew(name)

    def change(self, name: str, changes: Mapping[str, Any]) -> None:
        """Changes the record of a job, and the job by it."""
        if changes:
            self.write(name, **changes)
            self.renew(name)

    def rest(self, name: str, step: int) -> None:
        """Records that a job has reached its goal and was evaluated there."""
        self.write(name, status=JobStatus.WAITING, step=step, rested=step)
        self._change_by_rules(name)

    def _change_by_rules(self, name: str) -> None:
        for rule in job_rules():
            self.change(name, rule.changes(self.entries[name].job_in_batch, self.records[name]))

    def evaluated(self, name: str, event: EvaluationReported) -> None:
        """Stores the metrics of a job that has a goal, unless they are of a part of the rows."""
        if self.records[name].goal is not None and event.part is None:
            evaluation = Evaluation(step=event.step, metrics=dict(event.metrics), num_rows=event.num_rows)
            self.write(name, evaluated=evaluation)

    def is_whole(self, name: str, step: int) -> bool:
        """Whether `step` is the last step of a job, and not only its goal."""
        return step == (self.entries[name].job.num_steps or 0)

    def of_batch(self, batch: str) -> list[str]:
        """Returns the jobs of a batch."""
        return [name for name, entry in self.entries.items() if entry.batch == batch]

    def done(self) -> set[str]:
        """Returns the jobs that are done."""
        return {name for name, record in self.records.items() if record.status == JobStatus.DONE}

    def left(self) -> list[Job]:
        """Returns the jobs to plan, up to their goals: those that run or wait.

        The result omits jobs that rest, jobs that wait for a paused base, and members that the gang of another job
        trains.
        """
        return [
            self._up_to_goal(name)
            for name, record in self.records.items()
            if record.status in (JobStatus.WAITING, JobStatus.RUNNING) and self.groups.lead_of(name) is None
            if not self._waits_for_paused(name) and not self.rests(name)
        ]

    def _up_to_goal(self, name: str) -> Job:
        job, goal = self.entries[name].job, self.totals[name]
        return job if job.num_steps in (None, goal) else replace(job, num_steps=goal)

    def _waits_for_paused(self, job: str) -> bool:
        """Whether a job depends on a paused one, directly or not. A plan must not hold devices for it meanwhile."""
        return any(
            self.records[base].status == JobStatus.PAUSED or self._waits_for_paused(base)
            for base in self.after.get(job, ())
        )

    def orphans(self) -> Iterator[tuple[str, str]]:
        """Yields (job, reason) for jobs whose base or parent failed, was cancelled or was stopped early."""
        gone = {
            JobStatus.FAILED: "has failed",
            JobStatus.CANCELLED: "was cancelled",
            JobStatus.STOPPED: "was stopped early",
        }
        for job, bases in self.after.items():
            for base in bases if self.records[job].status not in ENDED else ():
                if (why := gone.get(self.records[base].status)) is not None:
                    yield job, f"its {'base' if base == self.entries[job].job.base else 'parent'} {base} {why}"

    def unended(self, jobs: Sequence[str], *, paused: bool) -> list[str]:
        """Returns those of `jobs` that have not ended and whose being paused equals `paused`."""
        statuses = {job: self.records[job].status for job in jobs}
        return [job for job in jobs if statuses[job] not in ENDED and (statuses[job] == JobStatus.PAUSED) == paused]

    def with_dependents(self, jobs: Iterable[str]) -> list[str]:
        """Returns jobs, each before the jobs that depend on it, directly or not."""
        ordered = dict.fromkeys(jobs)
        for name in list(ordered):
            children = [child for child, parents in self.after.items() if name in parents]
            ordered |= dict.fromkeys(self.with_dependents(children))
        return list(ordered)

    def begin_again(self, job: str) -> None:
        """Sets a job that has ended to waiting, from its last checkpoint, under all options if none was left."""
        self.attempts.pop(job, None)
        self.profiles[job] = self.profiles[job] or list(self.entries[job].profiles)
        self._pin(job)
        self.write(job, status=JobStatus.WAITING, message="")

    def strike_out(self, job: str, profile: Profile) -> bool:
        """Removes an option from a job for good. Returns whether another one is left.

        A job that has taken no step yet is not bound to the layout that it started under.
        """
        if self.records[job].step == 0 and job in self._before_pinned:
            self.profiles[job] = self._before_pinned.pop(job)
            self.write(job, layout=None)
        self.profiles[job] = [p for p in self.profiles[job] if not p.is_like(profile)]
        return bool(self.profiles[job])

    def count_crash(self, job: str, *, made_progress: bool) -> int:
        """Counts a crash of a job. Returns the number of its crashes without progress."""
        self.attempts[job] = 1 if made_progress else self.attempts.get(job, 0) + 1
        return self.attempts[job]


def keeps_layout(job: Job) -> bool:
    """Returns whether a job must stay under the option that it starts with, as it trains on what it generates.

    Rounding differs between layouts, and another token changes those after it.
    """
    return writes(job.loss, job.loss_options)


def layout_of(profile: Profile) -> dict[str, Any]:
    """Returns what of an option decides the bits of a job's results."""
    return {"technique": profile.technique, "config": dict(profile.config), "num_devices": profile.num_devices}

"""The active batches of a pool, and how the terms of each are combined into the terms of the one plan of all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from ringmaster.errors import ProblemError
from ringmaster.tasks.cluster import Cluster, Device, Node
from ringmaster.tasks.execution import events
from ringmaster.tasks.execution.job_table import JobState
from ringmaster.tasks.execution.starter import OptionKey, option_key
from ringmaster.tasks.execution.target_scheduler import variant_options
from ringmaster.tasks.planning import Plan
from ringmaster.tasks.planning.objectives import Makespan, PlanningTerms, WeightedCompletion, objective_names
from ringmaster.tasks.pool.submissions import Submission
from ringmaster.tasks.profiling.search import planning_problem
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.journal import Journal
from ringmaster.tasks.storage.schema import FACTS
from ringmaster.techniques import Profile
from ringmaster.text import printable_lines

logger = logging.getLogger(__name__)

PRIORITIES = "priorities"  # the key of a batch's fact: priorities that a person has set, by job; "" for the batch
TERMS = "terms"  # the key of a batch's fact: {"weights", "deadlines_s"} that a person has set, and {"like"} of clones
QUOTAS = "quotas"  # the key of the pool's fact: by user, `max_devices` or `share` that a person has set for the pool
USUAL = 1.0
HEAVIEST = 1e12  # the limit of a job's weight: planners refuse values above 1e15, and their sums too

T = TypeVar("T")
MAX_FAILURES = 2  # by an exception
MAX_DEATHS = 3  # of the controller's process: more, as it may be ended from outside just then
HANDLING = "handling "  # begins the key of the pool's fact with the number of processes that have begun to handle a row


@dataclass(frozen=True, kw_only=True)
class ActiveBatch:
    """A batch that has not ended.

    priorities: by job name, "" for the whole batch; 1 for jobs that are not named.
    changes: by job, the weights and deadlines that a person has set, and of a clone the job that it is like (`TERMS`).
    """

    submission: Submission
    priorities: Mapping[str, float] = field(default_factory=dict)
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, submission: Submission, journal: Journal) -> ActiveBatch:
        """Returns a batch with what a person has set, which is in its journal."""
        return cls(submission=submission, priorities=journal.get(PRIORITIES, {}), changes=journal.get(TERMS, {}))

    @property
    def terms(self) -> PlanningTerms:
        """The terms of its plans."""
        own, like = self.submission.terms, self.changes.get("like", {})
        inherited = {name: own.weights[source] for name, source in like.items() if source in own.weights}
        users = {name: own.users[source] for name, source in like.items() if source in own.users}
        return replace(
            own,
            weights={**own.weights, **inherited, **self.changes.get("weights", {})},
            deadlines_s={**own.deadlines_s, **self.changes.get("deadlines_s", {})},
            users={**own.users, **users},
        )

    @property
    def jobs(self) -> list[str]:
        """The names of its jobs and of their clones."""
        return [*(job.name for job in self.submission.jobs), *self.changes.get("like", {})]

    def priority(self, job: str) -> float:
        """Returns the priority of a job, by its name within the batch: the batch's priority times the job's own."""
        return self.priorities.get("", USUAL) * self.priorities.get(job, USUAL)


Quotas = Mapping[str, Mapping[str, float]]
"""By user, `max_devices` or `share`."""


def quotas_of_pool(database: Database) -> Quotas:
    """Returns the quotas that a person has set for all batches of a pool."""
    return dict(Journal(database, batch="").get(QUOTAS, {}))


def quota_of(text: str) -> Mapping[str, float] | None:
    """Returns a quota that a person writes as 4, 25% or none (None). Raises ValueError on anything else."""
    if text == "none":
        return None
    number, percent, rest = text.partition("%")
    if percent and not rest and number.isdecimal() and 0 < int(number[:4]) <= 100:
        return {"share": int(number) / 100}
    if not percent and number.isdecimal() and 0 < int(number[:7]) < 10**6:
        return {"max_devices": int(number)}
    raise ValueError(f"{text!r} is not a quota. To fix: a number of devices such as 4, a share such as 25%, or none")


def quota_text(quota: Mapping[str, float]) -> str:
    """Returns a quota as a person writes it."""
    return f"{quota['share']:.0%}" if "share" in quota else f"{quota['max_devices']:.0f}"


def set_quotas(database: Database, quotas: Mapping[str, Mapping[str, float] | None]) -> Quotas:
    """Sets the quotas of users for all batches of a pool, which its controller follows within seconds; returns all.

    quotas: by user; None removes one.
    """
    changed = {user: quota for user, quota in {**quotas_of_pool(database), **quotas}.items() if quota is not None}
    Journal(database, batch="").put(QUOTAS, changed)
    return changed


def combined_terms(active_batches: Iterable[ActiveBatch], *, quotas: Quotas | None = None) -> PlanningTerms:
    """Returns the terms of the plan of all batches, with times from the epoch: `on(problem, elapsed_s=now)`.

    Each batch's deadlines count from its own start. The objective is the one that every batch requests, if they agree
    and nobody has set a priority or a weight; without batches it is the makespan. Otherwise it is the sum of weight x
    end over all jobs. A job's weight is the weight that its batch gives it, times
    the batch's priority, times the job's own priority, and at most `HEAVIEST`. The price of devices is the highest
    price that a batch names. Jobs without a user belong to their batch. A user's quota is the least that a batch or the
    pool (`quotas`) names.
    """
    every = list(active_batches)
    objectives = {each.submission.terms.objective for each in every} or {Makespan.name}
    has_priorities = any(priority != USUAL for each in every for priority in each.priorities.values())
    has_priorities |= any(each.changes.get("weights") for each in every)
    objective = WeightedCompletion.name
    if len(objectives) == 1 and not has_priorities:
        (objective,) = objectives
    deadlines_s: dict[str, float] = {}
    weights: dict[str, float] = {}
    users: dict[str, str] = {}
    own = (quotas or {}).items()
    max_devices = {user: int(quota["max_devices"]) for user, quota in own if "max_devices" in quota}
    shares = {user: quota["share"] for user, quota in own if "share" in quota}
    for each in every:
        batch, requested = each.submission, each.terms
        for user, most in requested.max_devices.items():
            max_devices[user] = min(most, max_devices.get(user, most))
        for user, share in requested.shares.items():
            shares[user] = min(share, shares.get(user, share))
        for name, deadline_s in requested.deadlines_s.items():
            deadlines_s[batch.qualified(name)] = batch.started_s + deadline_s
        for job in each.jobs:
            weight = requested.weights.get(job, 1.0) * each.priority(job)
            weights[batch.qualified(job)] = min(weight, HEAVIEST)
            users[batch.qualified(job)] = requested.users.get(job, batch.id)
    prices = [each.submission.terms.price_per_device_hour for each in every]
    return PlanningTerms(
        objective=objective,
        deadlines_s=deadlines_s,
        weights=weights,
        users=users,
        price_per_device_hour=max(prices, default=1.0),
        max_devices=max_devices,
        shares=shares,
    )


def entries_of(submission: Submission, *, struck_out: Mapping[str, Collection[OptionKey]]) -> list[JobState]:
    """Returns a batch's jobs as the entries of an executor's job table.

    struck_out: by job, the options (`option_key`) under which it has run out of memory.
    """
    place, qualified = submission.run_paths(), submission.qualified
    names = {job.name for job in submission.jobs}

    def left(job: str, profiles: Sequence[Profile]) -> tuple[Profile, ...]:
        return tuple(each for each in profiles if option_key(each) not in struck_out.get(job, ()))

    def in_pool(profile: Profile) -> Profile:
        return replace(profile, members=tuple(replace(each, job=qualified(each.job)) for each in profile.members))

    entries = []
    for job in submission.jobs:
        profiles, variants = submission.profiles.get(job.name, ()), variant_options(job, submission.profiles)
        entries.append(
            JobState(
                local_job=job,
                job=job.renamed(qualified(job.name), lambda name: qualified(name) if name in names else name),
                profiles=left(job.name, profiles) or profiles,
                place=place,
                variants={variant: left(job.name, its) or its for variant, its in variants.items()},
                batch=submission.id,
                group_profiles=tuple(map(in_pool, left(job.name, submission.together.get(job.name, ())))),
            )
        )
    return entries


def fault_of(submission: Submission) -> str | None:
    """Returns why a batch cannot be planned even alone, or None. Such a batch must not block the planning of others."""
    jobs = [job for job in submission.jobs if submission.profiles.get(job.name)]
    if not jobs:
        return None
    every = [profile for job in jobs for profile in submission.profiles[job.name]]
    most, most_nodes = max(profile.num_devices for profile in every), max(profile.num_nodes for profile in every)
    slot = Device(kind="cpu", index=0, name="", memory_bytes=0, cores=())
    anywhere = Cluster(nodes=tuple(Node(name=f"anywhere-{i}", devices=(slot,) * most) for i in range(most_nodes)))
    untyped = {
        name: [replace(profile, device_type="") for profile in profiles]
        for name, profiles in submission.profiles.items()
    }
    try:
        if submission.terms.objective not in objective_names():
            return f"it cannot be planned: {submission.terms.objective!r} is no objective"
        submission.terms.on(planning_problem(jobs, untyped, anywhere, name=submission.name))
    except (ProblemError, TypeError, ValueError) as error:
        return f"it cannot be planned: {error}"
    return None


def split(name: str) -> tuple[str, str]:
    """Splits the name of a job in the pool into its batch and its name within the batch."""
    batch, _, job = name.partition("/")
    assert job, f"{name} does not say which batch it is of"
    return batch, job


def batch_of(event: events.ExecutionEvent) -> str | None:
    """Returns the batch that an event is about; None for an event that is about all batches."""
    if isinstance(event, events.PredictionUpdate):
        return event.batch
    if isinstance(event, (events.PlanUpdate, events.DeviceWait)):
        return None
    return split(event.segment.job if isinstance(event, (events.SegmentStarted, events.SegmentEnded)) else event.job)[0]


def as_logged(event: events.ExecutionEvent, batch: str) -> events.ExecutionEvent | None:
    """Returns an event as one batch sees it, with the batch's own job names; None if it does not concern the batch."""
    if isinstance(event, events.PlanUpdate):
        return _planned(event, batch)
    if isinstance(event, (events.SegmentStarted, events.SegmentEnded)):
        members = tuple(split(member)[1] for member in event.members)
        return replace(event, segment=replace(event.segment, job=split(event.segment.job)[1]), members=members)
    if isinstance(event, events.JobEnded):
        return replace(event, job=split(event.job)[1], message=event.message.replace(f"{batch}/", ""))
    return event


def _planned(event: events.PlanUpdate, batch: str) -> events.PlanUpdate | None:
    """Returns the part of a plan that is about one batch. It has bounds only if the plan has no other jobs."""
    problem, plan = event.problem, event.plan
    own = {job.id: split(job.id)[1] for job in problem.jobs if split(job.id)[0] == batch}
    if not own:
        return None
    jobs = tuple(
        replace(
            job,
            id=own[job.id],
            after=tuple(own[other] for other in job.after if other in own),
            members=tuple(split(member)[1] for member in job.members),
        )
        for job in problem.jobs
        if job.id in own
    )
    segments = tuple(replace(segment, job=own[segment.job]) for segment in plan.segments if segment.job in own)
    if len(own) < len(problem.jobs):
        part = Plan(problem_name=plan.problem_name, segments=segments, method=plan.method)
    else:
        certificates = plan.certificate, plan.value_certificate
        own_certificate, of_value = (each and each.renamed(own) for each in certificates)
        part = replace(plan, segments=segments, certificate=own_certificate, value_certificate=of_value)
    return events.PlanUpdate(problem=replace(problem, jobs=jobs), plan=part, why=event.why)


class Quarantine:
    """Handles rows, such as requests and batches, and sets aside those that the controller fails on.

    A row is marked in the database before it is handled. So a controller that a row ends, by a lack of memory for
    example, is followed by one that knows it. A database that is away is no fault of a row.
    """

    def __init__(self, database: Database) -> None:
        self._facts = Journal(database, batch="")
        result = database.rows(
            select(FACTS.c.key, FACTS.c.value).where(FACTS.c.batch == "", FACTS.c.key.startswith(HANDLING))
        )
        rows = [row for row in result if isinstance(row.value, list)]
        self._num_begun: dict[str, int] = {row.key.removeprefix(HANDLING): row.value[0] for row in rows}

    def handle(
        self,
        row: str,
        act: Callable[[], T],
        *,
        set_aside: Callable[[str], None],
        most_failures: int = MAX_FAILURES,
        is_marked: bool = True,
    ) -> T | None:
        """Returns the result of `act`, or None where the row is set aside.

        row: the row in words, which are the same in every process, such as "request 7".
        set_aside: is called with the cause if `act` raises `most_failures` times, or ended the processes before.
        is_marked: False where the row is handled too often to be marked.
        """
        num_begun = self._num_begun.get(row, 0)
        if num_begun >= MAX_DEATHS:
            cause = f"the process ended {num_begun} times while it handled it"
        else:
            if is_marked:
                self._mark(row, num_begun + 1)
            for _ in range(most_failures):
                try:
                    result = act()
                except SQLAlchemyError:
                    raise
                except Exception as error:
                    logger.exception("%s cannot be handled", row)
                    cause = f"{type(error).__name__}: {error}"
                else:
                    self._mark(row, 0)
                    return result
        message = printable_lines(f"the pool's controller cannot handle it, and goes on without it: {cause}")
        logger.error("%s is set aside: %s", row, message)
        set_aside(message)
        self._mark(row, 0)
        return None

    def _mark(self, row: str, num_begun: int) -> None:
        if num_begun == self._num_begun.get(row, 0):
            return
        self._num_begun[row] = num_begun
        if num_begun:
            self._facts.put(f"{HANDLING}{row}", num_begun)
        else:
            self._facts.remove(f"{HANDLING}{row}")

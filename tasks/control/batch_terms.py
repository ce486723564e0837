"""The terms of the batches that run: what their files say, and what people have changed since."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ringmaster.tasks.planning.objectives import Makespan, PlanningTerms, WeightedCompletion, objective_by_name
from ringmaster.tasks.planning.term_features import DeviceUse, TermsFeature, combined_features
from ringmaster.tasks.storage.fact_keys import PRIORITIES, TERMS
from ringmaster.tasks.storage.journal import Journal, SegmentRecord

ALONE = ""  # the id of a batch that runs on one machine alone, in its own database
USUAL = 1.0
HEAVIEST = 1e12  # the limit of a job's weight: planners refuse values above 1e15, and their sums too


@dataclass(frozen=True, kw_only=True)
class ActiveBatch:
    """A batch that has not ended, as far as people may change it.

    id: of a batch of a pool; `ALONE` for a batch that runs on one machine alone.
    started_s: the start of the batch, from which its deadlines count.
    given: the terms of its file.
    priorities: by job name, "" for the whole batch; 1 for jobs that are not named.
    changes: by job, the weights and deadlines that a person has set, and of an added job what it is like (`TERMS`).
    """

    id: str
    name: str
    job_names: tuple[str, ...]
    given: PlanningTerms
    started_s: float
    priorities: Mapping[str, float] = field(default_factory=dict)
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def with_changes(self, journal: Journal) -> ActiveBatch:
        """Returns the batch with what a person has set, which is in its journal."""
        return replace(self, priorities=journal.get(PRIORITIES, {}), changes=journal.get(TERMS, {}))

    def qualified(self, job: str) -> str:
        """Returns a job's name in the pool; the jobs of a run on one machine alone have plain names."""
        return f"{self.id}/{job}" if self.id else job

    @property
    def terms(self) -> PlanningTerms:
        """The terms of its plans."""
        own, like = self.given, self.changes.get("like", {})
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
        """The names of its jobs, and of those that were added while it runs."""
        return [*self.job_names, *self.changes.get("like", {})]

    def priority(self, job: str) -> float:
        """Returns the priority of a job, by its name within the batch: the batch's priority times the job's own."""
        return self.priorities.get("", USUAL) * self.priorities.get(job, USUAL)


def past_use(journal: Journal, active_batches: Collection[ActiveBatch]) -> list[DeviceUse]:
    """Returns what the jobs of batches have held until now, one after another of their segments."""
    jobs, now_s = {each.qualified(job) for each in active_batches for job in each.jobs}, journal.clock()
    return [use for record in journal.segments() if record.job in jobs for use in uses_of(record, now_s=now_s)]


def uses_of(record: SegmentRecord, *, now_s: float) -> list[DeviceUse]:
    """Returns what a segment has held on each of its nodes."""
    ended_s = now_s if record.ended_s is None else record.ended_s
    nodes = Counter(name.rsplit(":", 2)[0] for name in record.spec.devices)
    return [
        DeviceUse(node=node, num_devices=number, started_s=record.started_s, ended_s=max(record.started_s, ended_s))
        for node, number in nodes.items()
    ]


@dataclass(frozen=True, kw_only=True)
class PoolTerms:
    """What a person has set for all batches of a pool.

    features: of the terms of plans. revision: counts how often these were set.
    """

    features: tuple[TermsFeature, ...] = ()
    revision: int = 0


def combined_terms(active_batches: Iterable[ActiveBatch], *, of_pool: PoolTerms = PoolTerms()) -> PlanningTerms:
    """Returns the terms of the plan of all batches, with times from the epoch: `on(problem, elapsed_s=now)`.

    Each batch's deadlines count from its own start. The objective is the one that every batch requests, if they agree
    and nobody has set a priority or a weight; without batches it is the makespan. Otherwise it is the sum of weight x
    end over all jobs; jobs whose batches may wait are then planned in what the others leave, if they request the same
    objective and something depends on the time. A job's weight is the weight that its batch gives it, times
    the batch's priority, times the job's own priority, and at most `HEAVIEST`. The price of devices is the highest
    price that a batch names. Jobs without a user belong to their batch. Features combine theirs with those of the
    pool (`TermsFeature.combined`).
    """
    every = list(active_batches)
    objectives = {each.given.objective for each in every} or {Makespan.name}
    has_priorities = any(priority != USUAL for each in every for priority in each.priorities.values())
    has_priorities |= any(each.changes.get("weights") for each in every)
    objective = WeightedCompletion.name
    if len(objectives) == 1 and not has_priorities:
        (objective,) = objectives
    patient = [each for each in every if not has_priorities and objective_by_name(each.given.objective).may_wait]
    waiting = {each.given.objective for each in patient}
    second = next(iter(waiting)) if len(waiting) == 1 < len(objectives) else ""
    deadlines_s: dict[str, float] = {}
    weights: dict[str, float] = {}
    users: dict[str, str] = {}
    for each in every:
        requested = each.terms
        for name, deadline_s in requested.deadlines_s.items():
            deadlines_s[each.qualified(name)] = each.started_s + deadline_s
        for job in each.jobs:
            weight = requested.weights.get(job, 1.0) * each.priority(job)
            weights[each.qualified(job)] = min(weight, HEAVIEST)
            users[each.qualified(job)] = requested.users.get(job, each.id)
    prices = [each.given.price_per_device_hour for each in every]
    return PlanningTerms(
        objective=objective,
        deadlines_s=deadlines_s,
        weights=weights,
        users=users,
        price_per_device_hour=max(prices, default=1.0),
        second=second,
        patient=tuple(each.qualified(job) for each in patient for job in each.jobs if second),
        features=combined_features([each.given.features for each in every], of_pool=of_pool.features),
    )

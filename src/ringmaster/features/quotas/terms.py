"""Quotas in the terms of plans: limits of groups of jobs in planning problems."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ringmaster.features.quotas.job import UserQuota
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.term_features import PastUse, TermsFeature


@dataclass(frozen=True, kw_only=True)
class Quotas(TermsFeature):
    """What the jobs of users may hold at a time. Jobs without a user belong to their batch, by its id."""

    key = "quotas"
    limits = "quotas"

    users: Mapping[str, UserQuota] = field(default_factory=dict)

    def on(self, problem: Problem, *, now_s: float, past: PastUse) -> Problem:
        """Returns the problem with the quotas of its groups.

        A quota never keeps a job from running: it is at least the smallest gang of each.
        """
        quotas = {}
        for user, quota in self.users.items():
            options = [job.options for job in problem.jobs if job.user == user]
            smallest = (min(o.num_devices for o in own if not o.jobs) for own in options)
            share = math.floor((1.0 if quota.share is None else quota.share) * problem.num_devices)
            most = share if quota.max_devices is None else min(share, quota.max_devices)
            quotas[user] = max(1, most, *smallest)
        return replace(problem, quotas=quotas)

    def in_words(self) -> Iterator[str]:
        """Yields the quotas, in sentences."""
        yield from (f"quota of {user}: {quota.in_words()}" for user, quota in self.users.items())

    @classmethod
    def worth_in_words(cls, problem: Problem) -> Iterator[str]:
        """Yields what one more device of each quota gains its user, and what it costs another one."""
        if problem.limits:
            from ringmaster.features.quotas.quota_worth import quota_lines  # loads a solver

            yield from quota_lines(problem)

    @classmethod
    def submitted(cls, own: Quotas | None, *, batch: str, max_devices: int | None) -> Quotas | None:
        """Returns the quotas with one of the batch itself, where it requests a number of devices."""
        if max_devices is None:
            return own
        return Quotas(users={**(own.users if own else {}), batch: UserQuota(max_devices=max_devices)})

    @classmethod
    def combined(cls, each: Sequence[Quotas | None], *, of_pool: Quotas | None) -> Quotas:
        """Returns the least quota of each user that a batch or the pool names."""
        users: dict[str, UserQuota] = {}
        for quotas in (of_pool, *each):
            for user, quota in () if quotas is None else quotas.users.items():
                users[user] = quota.within(users.get(user, quota))
        return Quotas(users=users)


TERMS_FEATURES = (Quotas,)

"""What a quota is worth: its price by bounds, and what another one changes in a plan."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from ringmaster.errors import ProblemError
from ringmaster.tasks.planning.bounds.bounds import preemptive_bound
from ringmaster.tasks.planning.bounds.job_costs import only
from ringmaster.tasks.planning.durations import counted, seconds_text
from ringmaster.tasks.planning.problem_changes import ProblemChange, more
from ringmaster.tasks.planning.problems.problem import Problem


@dataclass(frozen=True, kw_only=True)
class MoreQuota(ProblemChange):
    """The jobs of `user` may hold `num_devices` more at a time, and those of `taken_from`, if any, as many less."""

    option = "add_quota"

    user: str
    num_devices: int = 1
    taken_from: str = ""

    def on(self, problem: Problem, *, node: str = "") -> Problem:
        """Returns the problem with the changed quotas. Raises ProblemError where a user has none."""
        quotas = dict(problem.quotas)
        for user, num in ((self.user, self.num_devices), (self.taken_from, -self.num_devices)):
            if user and user not in quotas:
                known = ", ".join(quotas) or "none"
                raise ProblemError([f"{user!r} has no quota. To fix: name a user with one; there are {known}"])
            if user:
                quotas[user] += num
        return replace(problem, quotas=quotas)

    def in_words(self, *, node: str = "", device: str = "") -> str:
        """Returns what is changed, such as "one more device for ana"."""
        less = f" and as many less for {self.taken_from}" if self.taken_from else ""
        return f"{more(self.num_devices, 'device')} for {self.user}{less}"

    def users(self, problem: Problem) -> Collection[str]:
        """Returns all users with a quota."""
        return problem.quotas


@dataclass(frozen=True, kw_only=True)
class QuotaPrice:
    """What a device of a user's quota is worth to the user's jobs, by the bound on their last end if they were alone.

    most: the devices of the quota.
    sooner_s: by how much sooner they could all end with one more.
    later_s: by how much later they end with one less, at least; None where a job needs all.
    """

    user: str
    most: int
    sooner_s: float
    later_s: float | None


def quota_prices(problem: Problem) -> list[QuotaPrice]:
    """Returns the price of a device of each quota that can bind, by one linear program for each number of devices."""

    def ends_s(user: str, most: int) -> float | None:
        own = only(replace(problem, quotas={}), [job.id for job in problem.jobs if job.user == user])
        try:
            return preemptive_bound(replace(own, quotas={user: most})).seconds
        except ProblemError:  # a job needs more devices
            return None

    prices = []
    for user, most in problem.limits.items():
        now_s, more_s, less_s = (ends_s(user, most + change) for change in (0, 1, -1))
        if now_s is not None and more_s is not None:
            later_s = None if less_s is None else max(0.0, less_s - now_s)
            prices.append(QuotaPrice(user=user, most=most, sooner_s=max(0.0, now_s - more_s), later_s=later_s))
    return prices


def quota_lines(problem: Problem) -> list[str]:
    """Returns what one more device of each quota gains its user, and what it costs another one, in sentences."""
    prices, lines = quota_prices(problem), []
    for price in prices:
        others = [(o.later_s, o.user) for o in prices if o.user != price.user and o.later_s is not None]
        cost = "".join(f", and cost those of {user} {seconds_text(later_s)}" for later_s, user in sorted(others)[:1])
        lines.append(
            f"{price.user} may hold {counted(price.most, 'device')} at a time; one more would save its jobs "
            f"{seconds_text(price.sooner_s)}{cost}."
        )
    return lines

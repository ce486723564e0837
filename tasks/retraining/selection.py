"""Selection of the due models that fit in a retraining run, by priority; its dates and deadlines.

Models that do not fit are left for the next run. All functions are pure: they are given the time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from zoneinfo import ZoneInfo

from ringmaster.errors import ProblemError
from ringmaster.tasks.planning import Plan, Problem
from ringmaster.tasks.planning.objectives import HOUR_S

Clock = Callable[[], float]
"""Returns the time in seconds since the epoch, as `time.time` does; tests and demonstrations pass their own."""


@dataclass(frozen=True, kw_only=True)
class Hours:
    """The schedule of retraining runs, in local times such as "22:00" of `timezone`.

    starts: when a run starts; its date identifies the run.
    deadline: a run ends at the first deadline after its start; None for no deadline.

    A moment between a run's deadline and the next start still belongs to that run, but is too late for training.
    """

    starts: str = "00:00"
    deadline: str | None = None
    timezone: str = "UTC"

    def run_date_of(self, now_s: float) -> str:
        """Returns the date of the run that started last, in ISO format such as "2026-11-20"."""
        local = datetime.fromtimestamp(now_s, UTC).astimezone(ZoneInfo(self.timezone))
        day = local.date()
        return (day if local.time() >= time.fromisoformat(self.starts) else day - timedelta(days=1)).isoformat()

    def deadline_of(self, run_date: str) -> float | None:
        """Returns the deadline of a run in seconds since the epoch, or None if there is no deadline."""
        if self.deadline is None:
            return None
        zone, day = ZoneInfo(self.timezone), date.fromisoformat(run_date)
        start = datetime.combine(day, time.fromisoformat(self.starts), zone)
        end = datetime.combine(day, time.fromisoformat(self.deadline), zone)
        if end <= start:
            end = datetime.combine(day + timedelta(days=1), time.fromisoformat(self.deadline), zone)
        return end.timestamp()

    def next_in_time(self, now_s: float) -> str:
        """Returns the date of the first run whose deadline has not passed."""
        run_date = self.run_date_of(now_s)
        deadline_s = self.deadline_of(run_date)
        is_late = deadline_s is not None and deadline_s <= now_s
        return (date.fromisoformat(run_date) + timedelta(days=int(is_late))).isoformat()


def num_missed(run_date: str, before: str | None) -> int:
    """Returns the number of runs missed between two run dates; 0 if there is no run before."""
    if before is None:
        return 0
    return max(0, num_days(before, run_date) - 1)


def num_days(since: str, until: str) -> int:
    """Returns the number of days between two run dates, whatever the times of day of the runs."""
    return (date.fromisoformat(until) - date.fromisoformat(since)).days


def day_text(moment_s: float) -> str:
    """Formats a time for display, in UTC: "2026-11-20 02:00"."""
    return datetime.fromtimestamp(moment_s, UTC).strftime("%Y-%m-%d %H:%M")


MakePlan = Callable[[Problem], Plan]
"""Plans a problem. Raises ProblemError if its deadlines cannot be met."""


@dataclass(frozen=True, kw_only=True)
class RunLimits:
    """The limits of a retraining run; None for no limit.

    left_s: the seconds until the deadline.
    deadline_s: the deadline, in seconds since the epoch.
    budget: in the unit of the price.
    price_per_device_hour: the price of an hour of one device; at 1 costs are in device-hours.
    """

    left_s: float | None = None
    deadline_s: float | None = None
    budget: float | None = None
    price_per_device_hour: float = 1.0

    @property
    def unit(self) -> str:
        """The unit of costs, for display."""
        return unit_of(self.price_per_device_hour)


@dataclass(frozen=True, kw_only=True)
class DueModel:
    """A model that is due.

    job: the name of its own job.
    variants: the names of the jobs of its sweep.
    priority: models of higher priority are selected first.
    waited: the number of consecutive runs that left it out.
    """

    model: str
    job: str
    variants: tuple[str, ...] = ()
    priority: int = 0
    waited: int = 0


@dataclass(frozen=True, kw_only=True)
class RunSelection:
    """The jobs to train in a retraining run.

    jobs: their names.
    models: the names of their models.
    left: by model, why the model, or only its sweep, has to wait.
    plan: the plan of all selected jobs, or None if there are none.
    cost: the cost of the plan.
    """

    jobs: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    left: Mapping[str, str] = field(default_factory=dict)
    plan: Plan | None = None
    cost: float = 0.0


def choose(
    wanted: Sequence[DueModel],
    limits: RunLimits,
    *,
    problem_of: Callable[[Sequence[str]], Problem],
    make_plan: MakePlan,
) -> RunSelection:
    """Selects models one after another: higher priority first, then longer waiting, then in the given order.

    A model is selected if one plan of it and all models selected before keeps the deadline and the budget: with its
    sweep if that fits too, otherwise without it. A model that does not fit is skipped; smaller ones after it may still
    fit.

    problem_of: returns the planning problem of jobs, given their names, with the run's deadlines.
    """
    order = sorted(wanted, key=lambda w: (-w.priority, -w.waited))
    if limits.left_s is not None and limits.left_s <= 0:
        assert limits.deadline_s is not None
        why = f"the run was over at {day_text(limits.deadline_s)} UTC, before it could be trained"
        return RunSelection(left={w.model: why for w in order})
    every = [job for w in order for job in (w.job, *w.variants)]
    if every and isinstance(whole := _tried(every, limits, problem_of, make_plan), RunSelection):
        return RunSelection(jobs=whole.jobs, models=tuple(w.model for w in order), plan=whole.plan, cost=whole.cost)
    chosen, models, left = RunSelection(), list[str](), dict[str, str]()
    for w in order:
        tries = [(w.job, *w.variants), (w.job,)] if w.variants else [(w.job,)]
        for jobs in tries:
            found = _tried([*chosen.jobs, *jobs], limits, problem_of, make_plan)
            if isinstance(found, RunSelection):
                chosen = found
                models.append(w.model)
                if len(jobs) < len(tries[0]):
                    left[w.model] = f"its sweep does not fit in the run: {left[w.model]}"
                else:
                    left.pop(w.model, None)
                break
            left[w.model] = found
    return RunSelection(jobs=chosen.jobs, models=tuple(models), left=left, plan=chosen.plan, cost=chosen.cost)


def unit_of(price_per_device_hour: float) -> str:
    """Returns the unit of costs, as it follows a number."""
    return "device-hours" if price_per_device_hour == 1.0 else f"at {price_per_device_hour:g} a device-hour"


def cost_of(plan: Plan, *, price_per_device_hour: float = 1.0) -> float:
    """Returns the cost of the devices of a plan while they work on it."""
    device_s = sum(
        (segment.end_s - segment.start_s) * sum(len(numbers) for _, numbers in segment.devices)
        for segment in plan.segments
    )
    return device_s * price_per_device_hour / HOUR_S


def _tried(
    jobs: Sequence[str], limits: RunLimits, problem_of: Callable[[Sequence[str]], Problem], make_plan: MakePlan
) -> RunSelection | str:
    """Returns a plan of these jobs that keeps all limits, or why there is none."""
    try:
        plan = make_plan(problem_of(jobs))
    except ProblemError:
        assert limits.deadline_s is not None, "without deadlines every problem can be planned"
        return f"with it the run would not be over at {day_text(limits.deadline_s)} UTC"
    cost = cost_of(plan, price_per_device_hour=limits.price_per_device_hour)
    if limits.budget is not None and cost > limits.budget:
        return f"with it the run would cost {cost:.3g} of {limits.budget:g} {limits.unit}"
    return RunSelection(jobs=tuple(jobs), plan=plan, cost=cost)

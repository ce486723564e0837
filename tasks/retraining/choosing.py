"""What of the models that are due fits in the night, by priority; the rest is left for tomorrow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ringmaster.tasks.planning import Plan, Problem, ProblemError
from ringmaster.tasks.planning.terms import HOUR_S
from ringmaster.tasks.retraining.dates import day_text

MakePlan = Callable[[Problem], Plan]
"""Plans a problem. Raises ProblemError where its deadlines cannot be met."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a night may take. left_s: seconds until its deadline; deadline_s: that, since the epoch; budget: in the unit
    of the price, which is that of an hour of one device (1: device-hours). None for no such limit."""

    left_s: float | None = None
    deadline_s: float | None = None
    budget: float | None = None
    price_per_device_hour: float = 1.0

    @property
    def unit(self) -> str:
        """What costs are told in."""
        return unit_of(self.price_per_device_hour)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A model that is due. job: its own one; variants: the jobs of its sweep. waited: nights that it was left out."""

    model: str
    job: str
    variants: tuple[str, ...] = ()
    priority: int = 0
    waited: int = 0


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What is trained tonight. jobs: their names. left: why a model, or its sweep alone, has to wait, by model.

    plan: of all jobs that were chosen, None where there is none; cost: of that.
    """

    jobs: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    left: Mapping[str, str] = field(default_factory=dict)
    plan: Plan | None = None
    cost: float = 0.0


def choose(
    wanted: Sequence[Wanted], limits: Limits, *, problem_of: Callable[[Sequence[str]], Problem], make_plan: MakePlan
) -> Choice:
    """Chooses models one after another: the higher priority first, then who has waited longest, then as they stand.

    A model is chosen where one plan of it and all that were chosen before it keeps the deadline and the budget; with
    its sweep if that fits, too, else by itself. What does not fit is passed over, and smaller ones behind it may fit.

    problem_of: the planning problem of jobs, by their names, with the night's deadlines.
    """
    order = sorted(wanted, key=lambda w: (-w.priority, -w.waited))
    if limits.left_s is not None and limits.left_s <= 0:
        assert limits.deadline_s is not None
        why = f"the night was over at {day_text(limits.deadline_s)} UTC, before it could be trained"
        return Choice(left={w.model: why for w in order})
    every = [job for w in order for job in (w.job, *w.variants)]
    if every and isinstance(whole := _tried(every, limits, problem_of, make_plan), Choice):
        return Choice(jobs=whole.jobs, models=tuple(w.model for w in order), plan=whole.plan, cost=whole.cost)
    chosen, models, left = Choice(), list[str](), dict[str, str]()
    for w in order:
        tries = [(w.job, *w.variants), (w.job,)] if w.variants else [(w.job,)]
        for jobs in tries:
            found = _tried([*chosen.jobs, *jobs], limits, problem_of, make_plan)
            if isinstance(found, Choice):
                chosen = found
                models.append(w.model)
                if len(jobs) < len(tries[0]):
                    left[w.model] = f"its sweep does not fit in the night: {left[w.model]}"
                else:
                    left.pop(w.model, None)
                break
            left[w.model] = found
    return Choice(jobs=chosen.jobs, models=tuple(models), left=left, plan=chosen.plan, cost=chosen.cost)


def unit_of(price_per_device_hour: float) -> str:
    """What costs are told in, after their number."""
    return "device-hours" if price_per_device_hour == 1.0 else f"at {price_per_device_hour:g} a device-hour"


def cost_of(plan: Plan, *, price_per_device_hour: float = 1.0) -> float:
    """What the devices of a plan cost while they work on it."""
    device_s = sum(
        (segment.end_s - segment.start_s) * sum(len(numbers) for _, numbers in segment.devices)
        for segment in plan.segments
    )
    return device_s * price_per_device_hour / HOUR_S


def _tried(
    jobs: Sequence[str], limits: Limits, problem_of: Callable[[Sequence[str]], Problem], make_plan: MakePlan
) -> Choice | str:
    """A plan of these jobs that keeps all limits, else why there is none."""
    try:
        plan = make_plan(problem_of(jobs))
    except ProblemError:
        assert limits.deadline_s is not None, "without deadlines every problem can be planned"
        return f"with it the night would not be over at {day_text(limits.deadline_s)} UTC"
    cost = cost_of(plan, price_per_device_hour=limits.price_per_device_hour)
    if limits.budget is not None and cost > limits.budget:
        return f"with it the night would cost {cost:.3g} of {limits.budget:g} {limits.unit}"
    return Choice(jobs=tuple(jobs), plan=plan, cost=cost)

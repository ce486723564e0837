"""Selection of the due models that fit in a retraining run, by priority.

Models that do not fit are left for the next run. All functions are pure: they are given the time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, create_model

from ringmaster.errors import ProblemError
from ringmaster.tasks.batch.references import Positive
from ringmaster.tasks.batch.sections import Section, keys_of
from ringmaster.tasks.planning import Plan, Problem
from ringmaster.tasks.planning.objectives import HOUR_S, objective_by_name
from ringmaster.tasks.retraining.drift import Drift, DriftEntry
from ringmaster.tasks.retraining.due_keys import MAX_DAYS, due_keys
from ringmaster.tasks.retraining.promotion import ServingVersions, training_digest, version_of

Clock = Callable[[], float]
"""Returns the time in seconds since the epoch, as `time.time` does; tests and demonstrations pass their own."""


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
    price_per_device_hour: the price of an hour of one device; at 1 costs are in device-hours. Prices of the nodes over
        time come first.
    """

    left_s: float | None = None
    deadline_s: float | None = None
    budget: float | None = None
    price_per_device_hour: float = 1.0

    @property
    def deadline_text(self) -> str:
        """The deadline for a person; empty if there is none."""
        return "" if self.deadline_s is None else day_text(self.deadline_s)

    @property
    def unit(self) -> str:
        """The unit of costs, for display."""
        return unit_of(self.price_per_device_hour)


@dataclass(frozen=True, kw_only=True)
class DueModel:
    """A model that is due.

    model: its name, which is that of its job.
    variants: the names of the jobs of its sweep.
    priority: models of higher priority are selected first.
    waited: the number of consecutive runs that left it out.
    """

    model: str
    variants: tuple[str, ...] = ()
    priority: int = 0
    waited: int = 0


@dataclass(frozen=True, kw_only=True)
class RunSelection:
    """The jobs to train in a retraining run.

    jobs: their names.
    left: by model, why the model, or only its sweep, has to wait.
    plan: the plan of all selected jobs, or None if there are none.
    cost: the cost of the plan.
    """

    jobs: tuple[str, ...] = ()
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
        why = f"the run was over at {limits.deadline_text} UTC, before it could be trained"
        return RunSelection(left={w.model: why for w in order})
    every = [job for w in order for job in (w.model, *w.variants)]
    if every and isinstance(whole := _tried(every, limits, problem_of, make_plan), RunSelection):
        return whole
    chosen, left = RunSelection(), dict[str, str]()
    for w in order:
        tries = [(w.model, *w.variants), (w.model,)] if w.variants else [(w.model,)]
        for jobs in tries:
            result = _tried([*chosen.jobs, *jobs], limits, problem_of, make_plan)
            if isinstance(result, RunSelection):
                chosen = result
                if len(jobs) < len(tries[0]):
                    left[w.model] = f"its sweep does not fit in the run: {left[w.model]}"
                else:
                    left.pop(w.model, None)
                break
            left[w.model] = result
    return replace(chosen, left=left)


def unit_of(price_per_device_hour: float) -> str:
    """Returns the unit of costs, as it follows a number."""
    return "device-hours" if price_per_device_hour == 1.0 else f"at {price_per_device_hour:g} a device-hour"


IN_MONEY = "in the currency of the prices"


def cost_of(plan: Plan, problem: Problem, *, price_per_device_hour: float = 1.0) -> float:
    """Returns the cost of the devices of a plan while they work on it."""
    if has_prices(problem):
        return objective_by_name("cost").value(plan, problem)
    device_s = sum(
        (segment.end_s - segment.start_s) * sum(len(numbers) for _, numbers in segment.devices)
        for segment in plan.segments
    )
    return device_s * price_per_device_hour / HOUR_S


def has_prices(problem: Problem) -> bool:
    """Returns whether devices or their energy have prices over time."""
    return any(node.price_steps or node.energy_price_steps for node in problem.nodes)


def _tried(
    jobs: Sequence[str], limits: RunLimits, problem_of: Callable[[Sequence[str]], Problem], make_plan: MakePlan
) -> RunSelection | str:
    """Returns a plan of these jobs that keeps all limits, or why there is none."""
    problem = problem_of(jobs)
    try:
        plan = make_plan(problem)
    except ProblemError as error:
        if problem.budgets:
            return f"with it no plan keeps the limits of the run: {error}"
        return f"with it the run would not be over at {limits.deadline_text} UTC"
    cost = cost_of(plan, problem, price_per_device_hour=limits.price_per_device_hour)
    if limits.budget is not None and cost > limits.budget:
        unit = IN_MONEY if has_prices(problem) else limits.unit
        return f"with it the run would cost {cost:.3g} of {limits.budget:g} {unit}"
    return RunSelection(jobs=tuple(jobs), plan=plan, cost=cost)


SHORT = 8  # characters of a digest, enough for users to see that two differ


class AssertionsEntry(Section):
    """Assertions on logged predictions, as `ringmaster monitor` checks them."""

    suite: str = Field(description="a file with assertions, such as tests.yaml")
    predictions: str = Field(description="a JSONL or Parquet file of logged predictions, such as predictions.jsonl")


NumDays = Annotated[int, Field(ge=1, le=MAX_DAYS)]


class DueEntry(Section):
    """The conditions for retraining; any of them makes a model due.

    New data has another digest, and at least `min_new_samples` more samples than the data of the last training.
    """

    new_data: bool = Field(default=True, description="false where new data alone does not count, else true")
    min_new_samples: Annotated[int, Field(ge=0)] = Field(
        default=0, description="how many samples new data must have more, such as 500"
    )
    max_age_days: Positive | None = Field(default=None, description="days after which it is trained anyway, such as 30")
    drift: DriftEntry | None = Field(default=None, description="what counts as drift, such as {psi: 0.2}")
    assertions: AssertionsEntry | None = Field(
        default=None, description="{suite: tests.yaml, predictions: predictions.jsonl}"
    )


if not TYPE_CHECKING:
    entry = DueEntry
    DueEntry = create_model("DueEntry", __base__=entry, __doc__=entry.__doc__, **keys_of(due_keys()))


@dataclass(frozen=True, kw_only=True)
class NewDataDecision:
    """Whether new data makes a model due, by a rule of a feature in place of `new_data`.

    is_known: whether the rule could decide.
    """

    is_due: bool
    why: str
    is_known: bool = True


@dataclass(frozen=True, kw_only=True)
class ModelObservations:
    """The observations about a model on which a retraining run bases its decision.

    run_date: the date of the run.
    digest, num_samples: of the model's current data.
    trained: the date of the run that trained the model's newest version, or None if unknown.
    drifts: the drift of each feature.
    failed_assertions: messages.
    missing: messages about what could not be inspected.
    only_older: whether the data differs from the training data only by what it lacks, because days have left its
        window.
    had_champion: whether the model had a champion after an earlier run.
    is_forced: whether a user requests the training in any case.
    by_rule: the decision about new data by a rule of a feature; None where the model has none.
    """

    run_date: str
    digest: str
    num_samples: int | None = None
    trained: str | None = None
    drifts: tuple[Drift, ...] = ()
    failed_assertions: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    only_older: bool = False
    had_champion: bool = False
    is_forced: bool = False
    by_rule: NewDataDecision | None = None


@dataclass(frozen=True, kw_only=True)
class DueDecision:
    """Whether a model is to be retrained, and the reason. notes: what users should inspect."""

    is_due: bool
    why: str
    notes: tuple[str, ...] = field(default=())


def due(serving: ServingVersions, seen: ModelObservations, rules: DueEntry = DueEntry()) -> DueDecision:
    """Decides whether a model is due: by force, without a champion, or by new data, age, drift or a failed assertion.

    Drift and failed assertions make a model due only if there is new data, as the same data would yield the same model
    again. For the same reason no rule applies while a version trained on the current data waits to be compared.
    """
    champion, latest = serving.champion, serving.latest
    if seen.is_forced:
        return DueDecision(is_due=True, why="it was requested (forced)")
    is_known = latest is not None and training_digest(latest) == seen.digest
    if is_known and serving.candidate is not None:
        why = f"version {version_of(latest)} was trained on this data, and is to be compared yet"
        return DueDecision(is_due=False, why=why)
    if champion is None:
        return _without_champion(serving, seen, is_known=is_known)
    is_new = not (is_known or seen.only_older or training_digest(champion) == seen.digest)
    reasons = [*_by_data(serving, seen, rules, is_new=is_new), *_by_age(serving, seen, rules)]
    if seen.by_rule is not None and seen.by_rule.is_due and is_new:
        reasons.append(seen.by_rule.why)
    alarms = [drift.why for drift in seen.drifts if drift.has_drifted] if rules.drift else []
    alarms += seen.failed_assertions if rules.assertions else ()
    notes = list(seen.missing)
    if is_new:
        reasons += alarms
    else:
        notes += [f"{alarm}, but there is no new data to learn from" for alarm in alarms]
    if reasons:
        return DueDecision(is_due=True, why="; ".join(reasons), notes=tuple(notes))
    return DueDecision(is_due=False, why="; ".join(_why_not(serving, seen, rules, is_new=is_new)), notes=tuple(notes))


def _without_champion(serving: ServingVersions, seen: ModelObservations, *, is_known: bool) -> DueDecision:
    latest = serving.latest
    if latest is None and seen.had_champion:
        why = "it was deleted from the registry; `--force` its name to train it again, or take it out of the file"
        return DueDecision(is_due=False, why=why)
    if seen.had_champion:
        return DueDecision(is_due=True, why="its champion was deleted from the registry")
    if is_known:
        return DueDecision(is_due=False, why=_lost(latest_version=version_of(latest)))
    return DueDecision(is_due=True, why="it has no champion yet")


def _by_data(serving: ServingVersions, seen: ModelObservations, rules: DueEntry, *, is_new: bool) -> Iterator[str]:
    if not (is_new and rules.new_data) or seen.by_rule is not None or _too_little(serving, seen, rules):
        return
    known = training_digest(serving.champion)
    if known is None:
        yield "it is not recorded what data the champion was trained on"
    else:
        yield f"new data: {seen.digest[:SHORT]}, the champion was trained on {known[:SHORT]}"


def _by_age(serving: ServingVersions, seen: ModelObservations, rules: DueEntry) -> Iterator[str]:
    if rules.max_age_days is None or seen.trained is None:
        return
    days = num_days(seen.trained, seen.run_date)
    if days < 0:
        yield f"its last training is dated {seen.trained}, which is still to come: the clock was wrong then"
    elif days >= rules.max_age_days:
        yield f"its last training is {days} days ago, and {rules.max_age_days:g} are allowed"


def _why_not(serving: ServingVersions, seen: ModelObservations, rules: DueEntry, *, is_new: bool) -> Iterator[str]:
    champion, latest = serving.champion, serving.latest
    if seen.by_rule is not None and (is_new or seen.by_rule.is_known):
        yield seen.by_rule.why if is_new else f"{seen.by_rule.why}, but there is no new data to learn from"
    elif is_new and not rules.new_data:
        yield "there is new data, which alone does not count (new_data: false)"
    elif is_new and (grown := _too_little(serving, seen, rules)):
        yield grown
    elif seen.only_older:
        yield "no new data: days have only left its window"
    elif training_digest(latest) != seen.digest:
        yield "its data is what the champion was trained on"
    elif version_of(champion) == version_of(latest):
        yield "no new data since the champion was trained"
    else:
        yield _lost(latest_version=version_of(latest))
    if rules.max_age_days is not None and seen.trained is not None:
        yield f"trained {num_days(seen.trained, seen.run_date)} of {rules.max_age_days:g} days ago"
    if rules.drift is not None and seen.drifts and not any(drift.has_drifted for drift in seen.drifts):
        yield "no drift (" + ", ".join(_figure(drift) for drift in seen.drifts) + ")"
    if rules.assertions and not seen.failed_assertions and not seen.missing:
        yield "every assertion holds"


def _too_little(serving: ServingVersions, seen: ModelObservations, rules: DueEntry) -> str:
    """Returns why new data is too little, or "" if it is enough or was not counted."""
    newest = serving.latest or serving.champion
    datasets = () if newest is None else newest.datasets
    then = next((data.num_rows for data in datasets if data.context == "training"), None)
    if not rules.min_new_samples or then is None or seen.num_samples is None:
        return ""
    grown = seen.num_samples - then
    if grown >= rules.min_new_samples:
        return ""
    return f"new data has {max(grown, 0)} more samples, and {rules.min_new_samples} are required"


def _lost(*, latest_version: int) -> str:
    return f"no new data since version {latest_version} was trained, which was not promoted"


def _figure(drift: Drift) -> str:
    if drift.psi is not None:
        return f"{drift.feature} {drift.psi:.2f}"
    return drift.why if drift.p is None else f"{drift.feature} p {drift.p:.2g}"

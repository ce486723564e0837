"""The rules by which a production model is due for retraining, as pure functions that also return their reasons."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ringmaster.tasks.retraining.drift import Drift, DriftRule
from ringmaster.tasks.retraining.promotion import ServingVersions, training_digest, version_of
from ringmaster.tasks.retraining.selection import num_days

SHORT = 8  # characters of a digest, enough for people to see that two differ


@dataclass(frozen=True, kw_only=True)
class DueRules:
    """The conditions for retraining; any of them makes a model due.

    new_data: data with another digest counts, if it has at least `min_new_samples` more samples than the data of the
        last training.
    max_age_days: the longest time since the last training.
    drift: the thresholds for drift of inputs or predictions.
    asserts: whether a failed assertion on logged predictions counts.
    """

    new_data: bool = True
    min_new_samples: int = 0
    max_age_days: float | None = None
    drift: DriftRule | None = None
    asserts: bool = False


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


@dataclass(frozen=True, kw_only=True)
class DueDecision:
    """Whether a model is to be retrained, and the reason. notes: what people should inspect."""

    is_due: bool
    why: str
    notes: tuple[str, ...] = field(default=())


def due(standing: ServingVersions, seen: ModelObservations, rules: DueRules = DueRules()) -> DueDecision:
    """Decides whether a model is due: by force, without a champion, or by new data, age, drift or a failed assertion.

    Drift and failed assertions make a model due only if there is new data, as the same data would yield the same model
    again. For the same reason no rule applies while a version trained on the current data waits to be compared.
    """
    champion, latest = standing.champion, standing.latest
    if seen.is_forced:
        return DueDecision(is_due=True, why="it was requested (forced)")
    is_known = latest is not None and training_digest(latest) == seen.digest
    if is_known and standing.candidate is not None:
        assert latest is not None
        why = f"version {version_of(latest)} was trained on this data, and is to be compared yet"
        return DueDecision(is_due=False, why=why)
    if champion is None:
        return _without_champion(standing, seen, is_known=is_known)
    is_new = not (is_known or seen.only_older or training_digest(champion) == seen.digest)
    reasons = [*_by_data(standing, seen, rules, is_new=is_new), *_by_age(standing, seen, rules)]
    alarms = [drift.why for drift in seen.drifts if drift.has_drifted] if rules.drift else []
    alarms += seen.failed_assertions if rules.asserts else ()
    notes = list(seen.missing)
    if is_new:
        reasons += alarms
    else:
        notes += [f"{alarm}, but there is no new data to learn from" for alarm in alarms]
    if reasons:
        return DueDecision(is_due=True, why="; ".join(reasons), notes=tuple(notes))
    return DueDecision(is_due=False, why="; ".join(_why_not(standing, seen, rules, is_new=is_new)), notes=tuple(notes))


def _without_champion(standing: ServingVersions, seen: ModelObservations, *, is_known: bool) -> DueDecision:
    latest = standing.latest
    if latest is None and seen.had_champion:
        why = "it was deleted from the registry; `--force` its name to have it trained anew, or take it out of the file"
        return DueDecision(is_due=False, why=why)
    if seen.had_champion:
        return DueDecision(is_due=True, why="its champion was deleted from the registry")
    if is_known:
        assert latest is not None
        return DueDecision(is_due=False, why=_lost(latest_version=version_of(latest)))
    return DueDecision(is_due=True, why="it has no champion yet")


def _by_data(standing: ServingVersions, seen: ModelObservations, rules: DueRules, *, is_new: bool) -> Iterator[str]:
    if not (is_new and rules.new_data) or _too_little(standing, seen, rules):
        return
    known = training_digest(standing.champion)
    if known is None:
        yield "it is not recorded what data the champion was trained on"
    else:
        yield f"new data: {seen.digest[:SHORT]}, the champion was trained on {known[:SHORT]}"


def _by_age(standing: ServingVersions, seen: ModelObservations, rules: DueRules) -> Iterator[str]:
    if rules.max_age_days is None or seen.trained is None:
        return
    days = num_days(seen.trained, seen.run_date)
    if days >= rules.max_age_days:
        yield f"its last training is {days} days ago, and {rules.max_age_days:g} are allowed"


def _why_not(standing: ServingVersions, seen: ModelObservations, rules: DueRules, *, is_new: bool) -> Iterator[str]:
    champion, latest = standing.champion, standing.latest
    assert champion is not None, "a model without one has other reasons"
    assert latest is not None, "a champion is a version"
    if is_new and not rules.new_data:
        yield "there is new data, which alone does not count (new_data: false)"
    elif is_new and (grown := _too_little(standing, seen, rules)):
        yield grown
    elif seen.only_older:
        yield "no new data: days have only left its window"
    elif training_digest(latest) != seen.digest:
        yield "its data is what the champion was trained on"
    elif champion.version == version_of(latest):
        yield "no new data since the champion was trained"
    else:
        yield _lost(latest_version=version_of(latest))
    if rules.max_age_days is not None and seen.trained is not None:
        yield f"trained {num_days(seen.trained, seen.run_date)} of {rules.max_age_days:g} days ago"
    if rules.drift is not None and seen.drifts and not any(drift.has_drifted for drift in seen.drifts):
        yield "no drift (" + ", ".join(_figure(drift) for drift in seen.drifts) + ")"
    if rules.asserts and not seen.failed_assertions and not seen.missing:
        yield "every assertion holds"


def _too_little(standing: ServingVersions, seen: ModelObservations, rules: DueRules) -> str:
    """Returns why new data is too little, or "" if it is enough or was not counted."""
    then = _num_trained_on(standing)
    if not rules.min_new_samples or then is None or seen.num_samples is None:
        return ""
    grown = seen.num_samples - then
    if grown >= rules.min_new_samples:
        return ""
    return f"new data has {max(grown, 0)} more samples, and {rules.min_new_samples} are required"


def _num_trained_on(standing: ServingVersions) -> int | None:
    newest = standing.latest or standing.champion
    if newest is None:
        return None
    return next((data.num_rows for data in newest.datasets if data.context == "training"), None)


def _lost(*, latest_version: int) -> str:
    return f"no new data since version {latest_version} was trained, which was not promoted"


def _figure(drift: Drift) -> str:
    if drift.psi is not None:
        return f"{drift.feature} {drift.psi:.2f}"
    return drift.why if drift.p is None else f"{drift.feature} p {drift.p:.2g}"

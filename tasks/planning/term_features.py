"""What optional features add to the terms of plans.

The module `terms` of a feature lists its classes in `TERMS_FEATURES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Self

from ringmaster.codec import from_json, to_json
from ringmaster.features import listed
from ringmaster.findings import Finding
from ringmaster.tasks.planning.problems.problem import Problem


@dataclass(frozen=True, kw_only=True)
class DeviceUse:
    """Devices of a node that a segment has held.

    started_s, ended_s: seconds since the epoch; a segment that still runs ends now.
    """

    node: str
    num_devices: int
    started_s: float
    ended_s: float


PastUse = Callable[[], Sequence[DeviceUse]]
"""Returns what the jobs of the terms have held until now."""


class TermsFeature:
    """A feature's part of the terms of plans, the base of frozen dataclasses.

    key: its key in their JSON form. limits: the key in the JSON form of a problem under which it limits something.
    """

    key: ClassVar[str]
    limits: ClassVar[str] = ""

    def on(self, problem: Problem, *, now_s: float, past: PastUse) -> Problem:
        """Returns a problem under these terms.

        now_s: the problem's time 0, in seconds since the epoch by the wall clock.
        """
        return problem

    def findings(self, *, objective: str, of_pool: Self | None) -> Iterator[Finding]:
        """Yields why a batch cannot be planned by these terms, at places of its file.

        objective: that of the batch. of_pool: the pool's own terms; None where it has none, and without a pool.
        """
        yield from ()

    def node_findings(self, nodes: Mapping[str, str]) -> Iterator[Finding]:
        """Yields the faults of a batch's terms that name nodes that are not there. nodes: kinds of devices by name."""
        yield from ()

    def overrides(self, *, price_per_device_hour: float) -> Iterator[str]:
        """Yields what of a batch's own terms has no effect beside these of its pool, in sentences."""
        yield from ()

    def resuming(self, before: Self, *, now_s: float) -> Self:
        """Returns the terms with which a batch is resumed, whose files may have other values than `before`.

        now_s: seconds since the epoch.
        """
        return self

    def in_words(self) -> Iterator[str]:
        """Yields what the terms of a pool are, in sentences."""
        yield from ()

    @classmethod
    def worth_in_words(cls, problem: Problem) -> Iterator[str]:
        """Yields what more of what these terms limit would be worth in a plan's problem, in sentences."""
        yield from ()

    @classmethod
    def submitted(cls, own: Self | None, *, batch: str, max_devices: int | None) -> Self | None:
        """Returns the terms of a batch with which a pool takes it on.

        own: those that it has; None without any. batch: its id, to which jobs without a user belong.
        max_devices: the devices that it requests; None for all.
        """
        return own

    @classmethod
    def combined(cls, each: Sequence[Self | None], *, of_pool: Self | None) -> Self | None:
        """Returns the terms of one plan of several batches.

        each: those of each batch; None where it has none. of_pool: the pool's own; None where it has none.
        """
        raise NotImplementedError


@cache
def terms_kinds() -> tuple[type[TermsFeature], ...]:
    """Returns the classes of all features of terms."""
    return tuple(listed("terms", "TERMS_FEATURES"))


def terms_feature(key: str) -> type[TermsFeature] | None:
    """Returns the class of the feature with a key in the JSON form of terms; None where there is none."""
    return next((kind for kind in terms_kinds() if kind.key == key), None)


def terms_features(values: Mapping[str, Any]) -> tuple[TermsFeature, ...]:
    """Returns the features of terms whose JSON forms a mapping has by their keys."""
    kinds = ((terms_feature(key), value) for key, value in values.items())
    return tuple(from_json(kind, value) for kind, value in kinds if kind is not None)


def resumed_features(before: Mapping[str, Any], now: Mapping[str, Any], *, now_s: float) -> dict[str, Any]:
    """Returns the JSON forms of the features of the terms of a batch that is resumed. before: those that it had."""
    features = {feature.key: feature for feature in terms_features(before)}
    resumed = (each.resuming(features.get(each.key, each), now_s=now_s) for each in terms_features(now))
    return {**before, **{each.key: to_json(each) for each in resumed}}


def combined_features(
    each: Sequence[tuple[TermsFeature, ...]], *, of_pool: Sequence[TermsFeature] = ()
) -> tuple[TermsFeature, ...]:
    """Returns the features of one plan of several batches. each: those of each batch. of_pool: the pool's own."""
    kinds = dict.fromkeys(type(feature) for features in (of_pool, *each) for feature in features)
    made = (kind.combined([_of_kind(kind, own) for own in each], of_pool=_of_kind(kind, of_pool)) for kind in kinds)
    return tuple(feature for feature in made if feature is not None)


def submitted_features(
    features: Sequence[TermsFeature], *, batch: str, max_devices: int | None
) -> tuple[TermsFeature, ...]:
    """Returns the features of the terms of a batch with which a pool takes it on (`TermsFeature.submitted`)."""
    made = (kind.submitted(_of_kind(kind, features), batch=batch, max_devices=max_devices) for kind in terms_kinds())
    return tuple(feature for feature in made if feature is not None)


def has_limits(problem: Mapping[str, Any]) -> bool:
    """Returns whether a feature limits anything in the JSON form of a problem."""
    return any(kind.limits and problem.get(kind.limits) for kind in terms_kinds())


def worth_in_words(problem: Problem) -> list[str]:
    """Returns what more of what features limit would be worth in a plan's problem, in sentences."""
    return [line for kind in terms_kinds() for line in kind.worth_in_words(problem)]


def feature_findings(
    features: Sequence[TermsFeature], *, objective: str, of_pool: Sequence[TermsFeature] = ()
) -> Iterator[Finding]:
    """Yields why a batch with this objective and these features cannot be planned beside those of its pool."""
    for feature in features:
        yield from feature.findings(objective=objective, of_pool=_of_kind(type(feature), of_pool))


def _of_kind(kind: type[TermsFeature], features: Sequence[TermsFeature]) -> Any:
    return next((feature for feature in features if isinstance(feature, kind)), None)

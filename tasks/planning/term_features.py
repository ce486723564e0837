"""What optional features add to the terms of plans.

The module `terms` of a feature lists its classes in `TERMS_FEATURES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Self

from ringmaster.codec import from_json
from ringmaster.features import listed
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
    """A feature's part of the terms of plans, the base of frozen dataclasses. key: its key in their JSON form."""

    key: ClassVar[str]

    def on(self, problem: Problem, *, now_s: float, past: PastUse) -> Problem:
        """Returns a problem under these terms.

        now_s: the problem's time 0, in seconds since the epoch by the wall clock.
        """
        return problem

    @classmethod
    def combined(cls, each: Sequence[Self | None]) -> Self | None:
        """Returns the terms of one plan of several batches. each: those of each batch; None where it has none."""
        raise NotImplementedError


@cache
def terms_feature(key: str) -> type[TermsFeature] | None:
    """Returns the class of the feature with a key in the JSON form of terms; None where there is none."""
    return next((kind for kind in listed("terms", "TERMS_FEATURES") if kind.key == key), None)


def terms_features(values: Mapping[str, Any]) -> tuple[TermsFeature, ...]:
    """Returns the features of terms whose JSON forms a mapping has by their keys."""
    kinds = ((terms_feature(key), value) for key, value in values.items())
    return tuple(from_json(kind, value) for kind, value in kinds if kind is not None)


def combined_features(each: Sequence[tuple[TermsFeature, ...]]) -> tuple[TermsFeature, ...]:
    """Returns the features of one plan of several batches. each: those of each batch."""
    kinds = dict.fromkeys(type(feature) for features in each for feature in features)
    result = []
    for kind in kinds:
        own = [next((feature for feature in features if isinstance(feature, kind)), None) for features in each]
        if (feature := kind.combined(own)) is not None:
            result.append(feature)
    return tuple(result)

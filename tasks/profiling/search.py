"""Which configs of a technique are worth a trial: a search that needs a few of them, and none that is known already."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from techniques.profiles import Profile
from techniques.surveys import Candidate

MOST_TRIALS = 3  # of one technique on one number of devices
FAR_BEHIND = 1.15  # a technique slower than another by this is not refined: its next config would not make that up


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A trial that gave no profile: what happened, and whether another try could end otherwise."""

    kind: str
    message: str


Result = Profile | Failure


@dataclass(kw_only=True)
class Search:
    """The configs of one speed class under one technique on one number of devices, cheapest-looking first.

    A config that runs out of memory sends the search on to the next; one that is no faster than the best so far ends
    it: what follows it looks dearer still.
    """

    key: str
    job: str
    candidates: Sequence[Candidate]
    fingerprints: Sequence[str]
    results: dict[str, Result] = field(default_factory=dict)

    def next_trial(self, known: Mapping[str, Result]) -> tuple[str, Candidate] | None:
        """The fingerprint and candidate to try next, taking what is known already; None when the search has ended."""
        best_s = float("inf")
        num_profiles = 0
        for fingerprint, candidate in zip(self.fingerprints, self.candidates, strict=True):
            if num_profiles == MOST_TRIALS:
                return None
            result = self.results.get(fingerprint) or known.get(fingerprint)
            if result is None:
                return fingerprint, candidate
            self.results[fingerprint] = result
            if isinstance(result, Profile):
                num_profiles += 1
                if result.step_s >= best_s:
                    return None
                best_s = result.step_s
            elif result.kind != "out_of_memory":
                return None
        return None

    @property
    def num_devices(self) -> int:
        """The gang size that it is about."""
        return self.candidates[0].num_devices

    @property
    def best_s(self) -> float:
        """Seconds of a step under the fastest config so far; infinite before there is one."""
        return min((profile.step_s for profile in self.profiles), default=float("inf"))

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """What the search has found."""
        return tuple(result for result in self.results.values() if isinstance(result, Profile))

    @property
    def failures(self) -> tuple[Failure, ...]:
        """What did not work."""
        return tuple(result for result in self.results.values() if isinstance(result, Failure))


def worthwhile(searches: Iterable[Search]) -> list[Search]:
    """The searches whose next trial may still give an option worth having; in their order.

    Of the techniques that train a speed class on the same number of devices a plan takes the fastest (a slower one
    only where memory decides). So one whose first config is far behind another's best is not refined any further; and
    those not begun yet are tried one after another, until one is close to perfect scaling: with t the fastest step on
    m devices, the fewest measured, no option on n is expected to take less than t m / n.
    """
    every = list(searches)
    best_s: dict[tuple[str, int], float] = {}
    for search in every:
        group = search.key, search.num_devices
        best_s[group] = min(best_s.get(group, float("inf")), search.best_s)
    result, begun = [], set[tuple[str, int]]()
    for search in every:
        group = search.key, search.num_devices
        if search.results:
            if not search.profiles or search.best_s <= FAR_BEHIND * best_s[group]:
                result.append(search)
        elif _is_fewest(search, best_s) or (group not in begun and not _scales(group, best_s)):
            result.append(search)
            begun.add(group)
    return result


def _is_fewest(search: Search, best_s: Mapping[tuple[str, int], float]) -> bool:
    """Whether its speed class has options on no fewer devices than these."""
    return search.num_devices == min(size for key, size in best_s if key == search.key)


def _scales(group: tuple[str, int], best_s: Mapping[tuple[str, int], float]) -> bool:
    """Whether the fastest option of a group is close to what perfect scaling from the fewest devices gives."""
    key, num_devices = group
    measured = [
        size for other, size in best_s if other == key and size < num_devices and best_s[other, size] < math.inf
    ]
    if not measured:
        return False
    fewest = min(measured)
    return best_s[group] <= FAR_BEHIND * best_s[key, fewest] * fewest / num_devices

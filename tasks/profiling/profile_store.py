"""The store of measurements: what trials and running segments have measured, by the fingerprint of an option."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ringmaster.codec import from_json, to_json
from ringmaster.tasks.profiling.search import OUT_OF_MEMORY, Failure, Result
from ringmaster.techniques import Profile
from ringmaster.techniques.profile import ProfileKey

TRIAL_STEPS = 12  # the steps of a trial whose profile does not say over how many it was measured
MOST_STEPS = 200  # for which older measurements count: a machine may change


@dataclass(frozen=True, kw_only=True)
class ProfileStore:
    """Stored measurements, in the JSON forms of Profile and Failure.

    find: returns the stored measurements among some fingerprints.
    keep: stores a measurement under its fingerprint.
    newest: returns the profiles that were stored last, of any jobs.

    Profiles are stored with the load of the machine at which they were measured. What the methods return is as on a
    quiet machine. What a newer release has stored, and this one cannot read, is not known.
    """

    find: Callable[[Sequence[str]], Mapping[str, Mapping[str, Any]]] = lambda _: {}
    keep: Callable[[str, Mapping[str, Any]], None] = lambda *_: None
    newest: Callable[[], Sequence[Mapping[str, Any]]] = lambda: ()

    def results(self, fingerprints: Sequence[str]) -> dict[str, Result]:
        """Returns the known measurements, by fingerprint."""
        found = ((name, _result(data)) for name, data in self.find(fingerprints).items())
        return {name: result for name, result in found if result is not None}

    def newest_profiles(self) -> list[Profile]:
        """Returns the profiles that were stored last, of any jobs, the newest first; the newest one of each option.

        An option is stored several times while a batch runs, each time with all of its steps so far.
        """
        found: dict[ProfileKey | int, Profile] = {}
        for number, result in enumerate(map(_result, self.newest())):
            if isinstance(result, Profile):
                found.setdefault(result.key or number, result)
        return list(found.values())

    def add(self, fingerprint: str, result: Result) -> None:
        """Stores a measurement for later runs: a profile beside what is known of its option, or a lack of memory."""
        if isinstance(result, Failure):
            if result.kind == OUT_OF_MEMORY:
                self.keep(fingerprint, to_json(result))
            return
        known = self.results([fingerprint]).get(fingerprint)
        self.keep(fingerprint, to_json(combined(known, result) if isinstance(known, Profile) else result))


class MeasuredOptions:
    """What the segments of a batch measure, on its way into the store.

    Jobs of one speed measure the same option: it is stored at first, and then once its steps have doubled.
    """

    def __init__(self, store: ProfileStore) -> None:
        self._store = store
        self._taken: set[int] = set()
        self._waiting: dict[str, Profile] = {}
        self._num_stored: dict[str, int] = {}

    def add(self, profile: Profile, *, number: int) -> None:
        """Takes what the segment with a number has measured; once, if it is called again after the store failed."""
        if number not in self._taken and profile.key is not None and profile.num_measured_steps:
            name = profile.key.fingerprint
            known = self._waiting.get(name)
            self._waiting[name] = profile if known is None else combined(known, profile)
        self._taken.add(number)
        self._keep(n for n, p in self._waiting.items() if p.num_measured_steps >= self._num_stored.get(n, 0))

    def add_unfit(self, profile: Profile, *, message: str) -> None:
        """Takes an option that has run out of memory, which is not tried again."""
        if profile.key is not None:
            self._store.add(profile.key.fingerprint, Failure(kind=OUT_OF_MEMORY, message=message))

    def close(self) -> None:
        """Stores what waits."""
        self._keep(self._waiting)

    def _keep(self, names: Iterable[str]) -> None:
        for name in list(names):
            self._store.add(name, self._waiting[name])
            num_steps = self._waiting.pop(name).num_measured_steps
            self._num_stored[name] = self._num_stored.get(name, 0) + num_steps


def combined(old: Profile, new: Profile) -> Profile:
    """Returns a newer profile of an option whose step time is the mean of both, by the numbers of their steps."""
    num_old = min(old.num_measured_steps or TRIAL_STEPS, MOST_STEPS)
    num_new = new.num_measured_steps or TRIAL_STEPS
    share = num_new / (num_old + num_new)
    quiet = new.under_load(1.0)
    ratio = (old.under_load(1.0).step_s / quiet.step_s) ** (1 - share) if min(old.step_s, quiet.step_s) > 0 else 1.0
    spread = math.hypot(share * new.spread, (1 - share) * old.spread)
    mean = replace(quiet.at_pace(ratio), num_measured_steps=num_old + num_new, spread=spread)
    return mean.under_load(new.load)


def _result(data: Mapping[str, Any]) -> Result | None:
    try:
        return from_json(Failure, data) if "kind" in data else from_json(Profile, data).under_load(1.0)
    except ValueError:  # of another release, which shares the records
        return None

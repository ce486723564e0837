"""Trials of a profiling stage: they are made in waves, counted, repeated where they were killed, and stored."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ringmaster.tasks.profiling.budget import TrialBudget
from ringmaster.tasks.profiling.lending import DevicesBusy, DevicesWanted, Lend
from ringmaster.tasks.profiling.preflight import MAX_ATTEMPTS, Notice
from ringmaster.tasks.profiling.reference import CORRECTED
from ringmaster.tasks.profiling.search import (
    KILLED,
    ConfigSearch,
    Failure,
    Result,
    worthwhile,
)
from ringmaster.tasks.profiling.trials import Trial, TrialEnvironment, run_wave, waves
from ringmaster.techniques import Job, Profile
from ringmaster.techniques.interface.preflight import Preflight
from ringmaster.techniques.interface.values import from_json, to_json


@dataclass(frozen=True, kw_only=True)
class ProfileStore:
    """The store of earlier measurements, in JSON forms of Profile and Failure.

    find: returns the stored measurements among some fingerprints.
    keep: stores a new measurement under its fingerprint.
    passing: measurements of this process that are not stored, as the machine was busy with other work.
    """

    find: Callable[[Sequence[str]], Mapping[str, Mapping[str, Any]]] = lambda _: {}
    keep: Callable[[str, Mapping[str, Any]], None] = lambda *_: None
    passing: dict[str, Result] = field(default_factory=dict)

    def add(self, fingerprint: str, result: Result) -> None:
        """Stores a measurement that other batches may use; holds one of a busy machine for this process alone."""
        if isinstance(result, Profile) and result.source == CORRECTED:
            self.passing[fingerprint] = result
        elif isinstance(result, Profile) or result.kind == "out_of_memory":
            self.keep(fingerprint, to_json(result))

    def passing_json(self) -> dict[str, Any]:
        """Returns the measurements of a busy machine, for a run that is resumed by another process."""
        return {name: to_json(result) for name, result in self.passing.items()}

    def restore(self, passing: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes the measurements that an earlier process of the same run has made on a busy machine."""
        self.passing.update({name: _result(data) for name, data in passing.items()})

    def results(self, fingerprints: Sequence[str]) -> dict[str, Result]:
        """Returns the known measurements, by fingerprint."""
        passing = {name: self.passing[name] for name in fingerprints if name in self.passing}
        return passing | {name: _result(data) for name, data in self.find(fingerprints).items()}


class TrialRunner:
    """Makes and counts trials.

    num_trials: the number of trials that were made.
    spent_s: the seconds that trials took, without the waiting for devices.
    is_closed: whether no devices are available, so that no more trials are made.
    """

    def __init__(self, environment: TrialEnvironment, known: ProfileStore, notice: Notice, *, lend: Lend) -> None:
        self._environment, self._known, self._notice, self._lend = environment, known, notice, lend
        self.num_trials = 0
        self.spent_s = 0.0
        self.is_closed = False

    def measure(self, trials: Sequence[Trial]) -> dict[str, Result]:
        """Makes trials, smallest gangs first and several side by side; returns the results, by fingerprint."""
        found: dict[str, Result] = {}
        left = sorted(trials, key=lambda trial: trial.candidate.num_devices)
        while left and not self.is_closed:
            try:
                results = self._next_wave(left)
            except DevicesBusy as error:
                self._notice(f"{error}: what is left is planned by predictions")
                self.is_closed = True
                break
            found |= results
            left = [trial for trial in left if trial.fingerprint not in results]
        return found

    def _next_wave(self, left: Sequence[Trial]) -> dict[str, Result]:
        """Makes the first trials of equal size that fit on idle devices; stores results that other batches may use."""
        size = left[0].candidate.num_devices
        alike = [trial for trial in left if trial.candidate.num_devices == size]
        with self._lend(DevicesWanted(least=size, most=size * len(alike), fills=True)) as devices:
            wave = waves(alike, num_devices=len(devices))[0]
            names = ", ".join(str(trial) for trial in wave)
            self._notice(f"trying {names} (trials so far: {self.num_trials})")
            began_s = time.monotonic()
            results = self._outcomes(replace(self._environment, devices=devices), wave)
            self.spent_s += time.monotonic() - began_s
        for name, result in results.items():
            self._known.add(name, result)
        return results

    def _outcomes(self, environment: TrialEnvironment, wave: Sequence[Trial]) -> dict[str, Result]:
        """Makes the trials of a wave; repeats those that were killed from outside, which is not the job's fault."""
        found: dict[str, Result] = {}
        for attempt in range(1, MAX_ATTEMPTS + 1):
            found |= run_wave(environment, wave)
            self.num_trials += len(wave)
            wave = [trial for trial in wave if _was_killed(found[trial.fingerprint])]
            if not wave:
                break
            if attempt < MAX_ATTEMPTS:
                names = ", ".join(str(trial) for trial in wave)
                self._notice(f"trying again what was killed (attempt {attempt + 1} of {MAX_ATTEMPTS}): {names}")
        return found


def run_trials(
    searches: Mapping[str, ConfigSearch],
    found: dict[str, Result],
    jobs: Mapping[str, tuple[Job, Preflight]],
    *,
    bench: TrialRunner,
    budget: TrialBudget,
) -> None:
    """Makes trials in waves until no search wants one, or the budget allows no more."""
    while True:
        take_known(searches, found)  # for all searches, before they are compared
        trials = []
        for search in worthwhile(searches.values()):
            if (wanted := search.next_trial(found)) is not None:
                job, preflight = jobs[search.job]
                trials.append(Trial(fingerprint=wanted[0], job=job, data=preflight.data, candidate=wanted[1]))
        measured = {search.key for search in searches.values() if search.profiles}
        known = {search.job for search in searches.values() if search.key in measured}
        trials = budget.affordable(trials, measured=known)
        if not trials or bench.is_closed:
            return
        before_s = bench.spent_s
        found |= bench.measure(trials)
        budget.spend(bench.spent_s - before_s, trials)


def _was_killed(result: Result) -> bool:
    return isinstance(result, Failure) and result.kind == KILLED


def take_known(searches: Mapping[str, ConfigSearch], found: Mapping[str, Result]) -> None:
    """Lets all searches take the measurements that are known."""
    for search in searches.values():
        search.next_trial(found)


def _result(data: Mapping[str, Any]) -> Result:
    return from_json(Failure, data) if "kind" in data else from_json(Profile, data)

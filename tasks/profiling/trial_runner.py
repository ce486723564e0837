"""Trials of a profiling stage: those that are needed within limits, or a thorough search on request."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ringmaster.errors import DevicesBusy
from ringmaster.tasks.profiling.lending import DevicesWanted, Lend
from ringmaster.tasks.profiling.preflight import MAX_ATTEMPTS, Notice
from ringmaster.tasks.profiling.profile_store import ProfileStore
from ringmaster.tasks.profiling.search import KILLED, ConfigSearch, Failure, Result, worthwhile
from ringmaster.tasks.profiling.trials import Trial, TrialEnvironment, run_wave, waves
from ringmaster.techniques import Job, Profile
from ringmaster.techniques.preflight import Preflight

MOST_TRIAL_S = 20.0  # of one trial, from its start: then it is killed, and the prediction of its option stands
LEAST_TRIAL_S = 3.0  # of a trial of a small model; less time is not begun


@dataclass(frozen=True, kw_only=True)
class TrialLimits:
    """The limits of the trials of a batch.

    share: the share of the batch's predicted time that they may take, with all that belongs to them.
    batch_s: returns the batch's time as it is predicted now; None while nothing is known of one of its jobs.
    trial_s: the most seconds of a trial.
    """

    share: float
    batch_s: Callable[[], float | None]
    trial_s: float = MOST_TRIAL_S

    def left_s(self, *, spent_s: float) -> float:
        """Returns the seconds that the next trials may take; none where their share is 0."""
        if not self.share:
            return 0.0
        batch_s = self.batch_s()
        return self.trial_s if batch_s is None else min(self.trial_s, self.share * batch_s - spent_s)

    def __str__(self) -> str:
        """Returns the limits for people."""
        if not self.share:
            return "no time"
        batch_s = self.batch_s()
        share = "" if batch_s is None else f", and {self.share:.3g} of the predicted {batch_s:.0f} s in all"
        return f"at most {self.trial_s:.0f} s each{share}"


class TrialRunner:
    """Makes and counts trials.

    limits: None for no limits. With limits, a trial that is killed or takes too long says nothing.
    num_trials: the number of trials that were made.
    spent_s: the seconds that trials took, from the request of their devices to their return.
    is_closed: whether no devices are available, so that no more trials are made.
    """

    def __init__(
        self,
        environment: TrialEnvironment,
        known: ProfileStore,
        notice: Notice,
        *,
        lend: Lend,
        limits: TrialLimits | None = None,
    ) -> None:
        self._environment, self._known, self._notice, self._lend = environment, known, notice, lend
        self._limits = limits
        self.num_trials = 0
        self.spent_s = 0.0
        self.is_closed = False

    def measure(self, trials: Sequence[Trial]) -> dict[str, Result]:
        """Makes the trials that the limits allow, those of the smallest gangs first; returns results by fingerprint."""
        found: dict[str, Result] = {}
        left = sorted(trials, key=lambda trial: trial.candidate.num_devices)
        while left and not self.is_closed:
            limit_s = math.inf if self._limits is None else self._limits.left_s(spent_s=self.spent_s)
            if limit_s < LEAST_TRIAL_S:
                self._notice(f"not tried: {', '.join(map(str, left))} (trials take {self._limits})")
                break
            try:
                wave, results = self._next_wave(left, limit_s=limit_s)
            except DevicesBusy as error:
                self._notice(f"{error}: what is left is planned by predictions")
                self.is_closed = True
                break
            found |= results
            left = [trial for trial in left if trial not in wave]
        return found

    def _next_wave(self, left: Sequence[Trial], *, limit_s: float) -> tuple[list[Trial], dict[str, Result]]:
        """Makes the first trials of equal size that fit on idle devices; stores results that other batches may use."""
        size = left[0].candidate.num_devices
        alike = [trial for trial in left if trial.candidate.num_devices == size]
        began_s = time.monotonic()
        with self._lend(DevicesWanted(least=size, most=size * len(alike), fills=True)) as devices:
            wave = waves(alike, num_devices=len(devices))[0]
            limits = f"trials so far: {self.num_trials}" if self._limits is None else str(self._limits)
            self._notice(f"trying {', '.join(map(str, wave))} ({limits})")
            results = self._outcomes(replace(self._environment, devices=devices), wave, limit_s=limit_s)
        self.spent_s += time.monotonic() - began_s
        for name, result in results.items():
            self._known.add(name, result)
        found: dict[str, Result] = {}
        for trial in wave:
            result = results[trial.fingerprint]
            if isinstance(result, Profile):
                found[trial.fingerprint] = result.under_load(1.0)
            elif self._limits is None or not result.leaves_prediction:
                found[trial.fingerprint] = result
            else:
                self._notice(f"{trial}: its prediction stands: {result.message}")
        return wave, found

    def _outcomes(self, environment: TrialEnvironment, wave: Sequence[Trial], *, limit_s: float) -> dict[str, Result]:
        """Makes the trials of a wave. Without limits, repeats those that were killed from outside."""
        found: dict[str, Result] = {}
        for attempt in range(1, MAX_ATTEMPTS + 1):
            found |= run_wave(environment, wave, limit_s=limit_s)
            self.num_trials += len(wave)
            wave = [trial for trial in wave if _was_killed(found[trial.fingerprint])]
            if not wave or self._limits is not None:
                break
            if attempt < MAX_ATTEMPTS:
                names = ", ".join(str(trial) for trial in wave)
                self._notice(f"trying again what was killed (attempt {attempt + 1} of {MAX_ATTEMPTS}): {names}")
        return found


def search_thoroughly(
    searches: Mapping[str, ConfigSearch], jobs: Mapping[str, tuple[Job, Preflight]], *, runner: TrialRunner
) -> None:
    """Makes trials in waves until no search wants one."""
    while not runner.is_closed:
        wanted = ((search, search.next_trial()) for search in worthwhile(searches.values()))
        trials = [trial_of_config(search, each[0], jobs) for search, each in wanted if each is not None]
        if not trials:
            return
        found = runner.measure(trials)
        for search in searches.values():
            search.take(found)


def needed_trials(searches: Mapping[str, ConfigSearch], jobs: Mapping[str, tuple[Job, Preflight]]) -> list[Trial]:
    """Returns the trials without which nothing would be known of a job on some gang size: at most one for each size.

    A job that does not train is not tried, as a trial takes as long as the job.
    """
    groups: dict[tuple[str, int], list[ConfigSearch]] = {}
    for search in searches.values():
        groups.setdefault((search.key, search.num_devices), []).append(search)
    trials = []
    for group in groups.values():
        first = next((search for search in group if search.predicted_s is None and search.untried is not None), None)
        is_known = any(search.profiles or search.predicted_s is not None for search in group)
        if first is not None and not is_known and jobs[first.job][0].trains:
            assert first.untried is not None
            trials.append(trial_of_config(first, first.untried[0], jobs))
    return trials


def of_each_size(trials: Sequence[Trial]) -> list[list[Trial]]:
    """Divides trials by the size of their gangs, the smallest first."""
    by_size: dict[int, list[Trial]] = {}
    for trial in trials:
        by_size.setdefault(trial.candidate.num_devices, []).append(trial)
    return [by_size[size] for size in sorted(by_size)]


def predicted_batch_s(
    jobs: Sequence[Job], searches_of: Mapping[str, Sequence[ConfigSearch]], *, num_devices: int
) -> float | None:
    """Returns the seconds that the jobs take if they fill the devices; None if nothing is known of one of them.

    Each job counts with the option that takes the least device time, measured if possible, or else predicted. No batch
    ends before its longest job does under that job's fastest option.
    """
    total_s = longest_s = 0.0
    for job in jobs:
        options = [
            (search.num_devices, step_s)
            for search in searches_of[job.name]
            if (step_s := search.best_s if search.profiles else search.predicted_s) is not None
        ]
        if searches_of[job.name] and not options:
            return None
        total_s += min((size * step_s for size, step_s in options), default=0.0) * job.total_steps
        longest_s = max(longest_s, min((step_s for _, step_s in options), default=0.0) * job.total_steps)
    return max(total_s / num_devices, longest_s) if math.isfinite(total_s) else None


def trial_of_config(search: ConfigSearch, fingerprint: str, jobs: Mapping[str, tuple[Job, Preflight]]) -> Trial:
    """Returns the trial of a config of a search."""
    job, preflight = jobs[search.job]
    candidate = search.candidates[list(search.fingerprints).index(fingerprint)]
    return Trial(key=search.key_of(fingerprint), job=job, data=preflight.data, candidate=candidate)


def _was_killed(result: Result) -> bool:
    return isinstance(result, Failure) and result.kind == KILLED

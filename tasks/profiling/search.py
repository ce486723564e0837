"""The search for the fastest configs of a technique, which needs few trials and repeats none."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ringmaster.techniques.preflight import Candidate, Refusal
from ringmaster.techniques.profiles import Profile, ProfileKey

# A technique that is slower than another by this factor is not refined: its next config would not make up for that.
FAR_BEHIND = 1.15
# A technique that is predicted to be slower than the best by this factor is not tried. The factor is large because
# predictions have that error between techniques.
FAR_BEHIND_PREDICTED = 1.6
MOST_MISSES = 4  # configs in a row that are not faster than the best, after which a search ends
TRIED_SHARE, FEWEST_TRIALS = 1 / 4, 3  # the candidates of a gang size that are tried: their share, and at least so many
OUT_OF_MEMORY, FAILED, KILLED, TIMED_OUT = "out_of_memory", "failed", "killed", "timed_out"

MOST_REASONS = 3
MORE = "--verbose shows all that was left out"


@dataclass(frozen=True, kw_only=True)
class FailedTrial:
    """A trial that gave no profile.

    kind: "out_of_memory", which another attempt would repeat; "killed" from outside; "timed_out", as it took longer
        than a trial may; "failed" in any other way.
    """

    kind: str
    message: str

    @property
    def leaves_prediction(self) -> bool:
        """Whether it says nothing of the option: its prediction stands."""
        return self.kind in (KILLED, TIMED_OUT)


Result = Profile | FailedTrial


@dataclass(kw_only=True)
class ConfigSearch:
    """The configs of one speed class under one technique on one number of devices, fastest predicted first.

    A thorough search tries one after another. It passes over configs that run out of memory, and ends after a few
    configs that are not faster than the best so far, because those after them are predicted to be even slower.

    key: the speed class.
    job: one of its jobs, with which trials are made.
    device_kind: the kind of the devices.
    """

    key: str
    job: str
    candidates: Sequence[Candidate]
    fingerprints: Sequence[str]
    device_kind: str = ""
    results: dict[str, Result] = field(default_factory=dict)

    def next_trial(self) -> tuple[str, Candidate] | None:
        """Returns the fingerprint and candidate to try next; None if the search is over."""
        best_s, num_misses = math.inf, 0
        for fingerprint, candidate in zip(self.fingerprints, self.candidates, strict=True):
            result = self.results.get(fingerprint)
            if result is None:
                return fingerprint, candidate
            if isinstance(result, Profile):
                num_misses = num_misses + 1 if result.step_s >= best_s else 0
                if num_misses == MOST_MISSES:
                    return None
                best_s = min(best_s, result.step_s)
            elif result.kind != OUT_OF_MEMORY:
                return None
        return None

    def take(self, known: Mapping[str, Result]) -> None:
        """Takes all known results of its configs."""
        for fingerprint, candidate in zip(self.fingerprints, self.candidates, strict=True):
            if isinstance(result := known.get(fingerprint), Profile):  # an earlier release stored less
                key = self.key_of(fingerprint)
                self.results[fingerprint] = replace(result, key=key, predicted_step_s=candidate.step_s)
            elif result is not None:
                self.results[fingerprint] = result

    def key_of(self, fingerprint: str) -> ProfileKey:
        """Returns the key under which the profile of a config is stored."""
        return ProfileKey(fingerprint=fingerprint, speed_class=self.key, device_kind=self.device_kind)

    @property
    def untried(self) -> tuple[str, Candidate] | None:
        """The first config of which nothing is known; None if there is none, or a trial has found the job at fault."""
        if any(failure.kind == FAILED for failure in self.failures):
            return None
        every = zip(self.fingerprints, self.candidates, strict=True)
        return next(((f, c) for f, c in every if f not in self.results), None)

    @property
    def predicted_s(self) -> float | None:
        """The predicted seconds of a step under the first config that has not failed; None without a prediction."""
        for fingerprint, candidate in zip(self.fingerprints, self.candidates, strict=True):
            if not isinstance(self.results.get(fingerprint), FailedTrial):
                return candidate.step_s
        return None

    @property
    def best_predicted_s(self) -> float | None:
        """The predicted seconds of a step under the config that was measured as the fastest."""
        by_print = dict(zip(self.fingerprints, self.candidates, strict=True))
        measured = [(r.step_s, by_print[f].step_s) for f, r in self.results.items() if isinstance(r, Profile)]
        return min(measured, key=lambda pair: pair[0])[1] if measured else None

    @property
    def num_devices(self) -> int:
        """The gang size of the search."""
        return self.candidates[0].num_devices

    @property
    def best_s(self) -> float:
        """The seconds of a step under the fastest config so far; infinite if there is none."""
        return min((profile.step_s for profile in self.profiles), default=float("inf"))

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """The profiles that the search has found."""
        return tuple(result for result in self.results.values() if isinstance(result, Profile))

    @property
    def failures(self) -> tuple[FailedTrial, ...]:
        """The failures of the search's trials."""
        return tuple(result for result in self.results.values() if isinstance(result, FailedTrial))


def quickest_looking_first(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Sorts by predicted seconds of a step; keeps the technique's order if a candidate has no prediction."""
    if any(candidate.step_s is None for candidate in candidates):
        return list(candidates)
    return sorted(candidates, key=lambda candidate: candidate.step_s or 0.0)


def worthwhile(searches: Iterable[ConfigSearch]) -> list[ConfigSearch]:
    """Returns the searches whose next trial may still give a useful option, in their order.

    Among the techniques that train a speed class on the same number of devices, a plan uses the fastest one (a slower
    one only if memory requires it). So a search whose first config is far slower than another search's best is not
    continued, and one that is predicted to be far slower is not begun. If predictions exist, a quarter of the
    candidates of a gang size are tried at most, but three in any case.
    """
    every = list(searches)
    groups: dict[tuple[str, int], list[ConfigSearch]] = {}
    for search in every:
        groups.setdefault((search.key, search.num_devices), []).append(search)
    ended = {group for group, mine in groups.items() if _has_had_its_share(mine)}
    return [
        search
        for search in every
        if (group := (search.key, search.num_devices)) not in ended and _is_near(search, groups[group])
    ]


def _is_near(search: ConfigSearch, group: Sequence[ConfigSearch]) -> bool:
    """Returns whether a search is not far behind the best of its group, as measured or else as predicted."""
    if search.results:
        return not search.profiles or search.best_s <= FAR_BEHIND * min(other.best_s for other in group)
    return not _looks_far_behind(search, group)


def _has_had_its_share(group: Sequence[ConfigSearch]) -> bool:
    """Returns whether a quarter of the group's candidates were tried, and some of them could train."""
    candidates = [c for search in group for c in search.candidates]
    if any(c.step_s is None for c in candidates) or not any(search.profiles for search in group):
        return False
    return sum(len(search.results) for search in group) >= max(TRIED_SHARE * len(candidates), FEWEST_TRIALS)


def _looks_far_behind(search: ConfigSearch, group: Sequence[ConfigSearch]) -> bool:
    """Returns whether a search's first config is much slower than the best, by the ratio of their predictions."""
    best = min(group, key=lambda other: other.best_s)
    if search.predicted_s is None or best.best_predicted_s is None:
        return False
    return search.predicted_s > FAR_BEHIND_PREDICTED * best.best_predicted_s


def why_nothing_fits(refusals: Sequence[Refusal], failures: Sequence[FailedTrial]) -> str:
    """Returns why no technique can train a job: the failures of its trials, or without trials what was lacking."""
    if failures:
        return _why_trials_failed(failures)
    left_out = [refusal for refusal in refusals if refusal.config is None]
    too_large = [refusal for refusal in left_out if refusal.is_too_large]
    reasons = _by_reason(too_large or left_out)
    said = "; ".join(f"{reason} ({where})" for reason, where in list(reasons.items())[:MOST_REASONS])
    remedy = "larger devices, or a smaller model" if too_large else "let it use other gang sizes or techniques"
    said = said or "no number of devices in num_devices is there"
    return f"no technique can train it here: {said}. To fix: {remedy}; {MORE}"


def _why_trials_failed(failures: Sequence[FailedTrial]) -> str:
    """Returns the distinct errors of a job's trials; out of memory comes last, as it may be the smaller problem."""
    in_order = sorted(failures, key=lambda failure: failure.kind == "out_of_memory")
    causes = dict.fromkeys(failure.message for failure in in_order)
    said = "; ".join(list(causes)[:MOST_REASONS])
    return f"{said} (in its trial)" if len(failures) == 1 else f"{said} (in each of its {len(failures)} trials)"


def refusal_line(refused: Mapping[str, Iterable[Refusal]]) -> str:
    """Returns which techniques were left out for which jobs, and why, in one line; "" if none was.

    A reason stands there once, with all jobs and techniques that it concerns.
    """
    jobs: dict[tuple[str, str], list[str]] = {}
    for job, refusals in refused.items():
        for reason, where in _by_reason([refusal for refusal in refusals if refusal.config is None]).items():
            jobs.setdefault((reason, where), []).append(job)
    said = [f"{where}: {reason}{_for(names, of=len(refused))}" for (reason, where), names in jobs.items()]
    return f"left out: {'; '.join(said)}" if said else ""


def _for(names: Sequence[str], *, of: int) -> str:
    """Returns the jobs that a reason concerns, unless these are all."""
    first, *others = names
    if len(names) == of:
        return ""
    return f" (for {first} and {len(others)} more)" if others else f" (for {first})"


def _by_reason(refusals: Iterable[Refusal]) -> dict[str, str]:
    """Returns the techniques and sizes to which each reason applies, as text: "ddp, fsdp on 1; mesh on 2"."""
    where: dict[str, dict[int, list[str]]] = {}
    for refusal in refusals:
        where.setdefault(refusal.reason, {}).setdefault(refusal.num_devices, []).append(refusal.technique)
    return {
        reason: ", ".join(f"{', '.join(names)} on {num_devices}" for num_devices, names in sizes.items())
        for reason, sizes in where.items()
    }

"""Messages on why a job cannot be trained: the main cause first, and only as much as helps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ringmaster.tasks.profiling.search import Failure
from ringmaster.techniques.preflight import Refusal

MOST_REASONS = 3
MORE = "--verbose shows all that was left out"


def why_nothing_fits(refusals: Sequence[Refusal], failures: Sequence[Failure]) -> str:
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


def _why_trials_failed(failures: Sequence[Failure]) -> str:
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

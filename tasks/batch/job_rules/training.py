"""Validation of how a job trains: the options of its optimizer, its schedule, and what stays frozen."""

from collections.abc import Iterator, Mapping
from typing import Any

from ringmaster.tasks.batch.faults import Finding, got
from ringmaster.tasks.batch.job_rules.adaptations import is_rewriting
from ringmaster.tasks.batch.references import closest
from ringmaster.techniques.job import (
    DECAY_RATIO,
    OPTIMIZER_OPTIONS,
    PRUNED,
    SCHEDULES,
    OptimizerSpec,
    ScheduleSpec,
)

Raw = Mapping[str, Any]


def training_findings(job: Raw) -> Iterator[Finding]:
    """Yields the faults in the optimizer, the schedule and `freeze` of one job; places are relative to the job."""
    yield from _warmup(job)
    yield from _decay(_mapping(job.get("schedule")))
    yield from _options(_mapping(job.get("optimizer")))
    yield from _pruned(job)
    yield from _freeze(job)


def _warmup(job: Raw) -> Iterator[Finding]:
    schedule, steps = _mapping(job.get("schedule")), job.get("num_steps")
    warmup = schedule.get("warmup_steps")
    if isinstance(warmup, int) and isinstance(steps, int) and 0 < steps <= warmup:
        message = f"must be less than the {steps} steps of the job, {got(warmup)}"
        yield Finding(("schedule", "warmup_steps"), message, "warm up for fewer steps")
    if warmup and schedule.get("warmup_ratio") is not None:
        yield Finding(("schedule", "warmup_ratio"), "is given beside warmup_steps", "give one of the two")


def _decay(schedule: Raw) -> Iterator[Finding]:
    name = schedule.get("name", ScheduleSpec.name)
    if name not in SCHEDULES:
        return
    if name == "constant" and schedule.get("min_lr_ratio"):
        message = "is where a decay ends, and a constant schedule has none"
        yield Finding(("schedule", "min_lr_ratio"), message, "name the schedule linear, cosine or wsd, or remove it")
    decay = schedule.get("decay_ratio")
    if name != "wsd" and decay is not None:
        message = f"is for wsd, and this schedule is {name}"
        yield Finding(("schedule", "decay_ratio"), message, "name the schedule wsd, or remove it")
    together = _number(schedule.get("warmup_ratio")) + _number(DECAY_RATIO if decay is None else decay)
    if name == "wsd" and together > 1 and schedule.get("warmup_ratio") is not None:
        message = f"and decay_ratio are more than all steps together, {got(together)}"
        yield Finding(("schedule", "warmup_ratio"), message, "give shares whose sum is at most 1")


def _options(optimizer: Raw) -> Iterator[Finding]:
    name = optimizer.get("name", OptimizerSpec.name)
    if not isinstance(name, str) or name not in OPTIMIZER_OPTIONS:
        return
    known = OPTIMIZER_OPTIONS[name]
    for option in _mapping(optimizer.get("options")):
        if option not in known:
            remedy = closest(option, known, what="The options are")
            yield Finding(("optimizer", "options", option), "is an unknown option", remedy)


def _pruned(job: Raw) -> Iterator[Finding]:
    kind = _mapping(job.get("adaptation")).get("kind")
    if kind == PRUNED and _mapping(job.get("optimizer")).get("name") == "muon":
        message = "muon moves weights whose gradient is zero, and this job keeps pruned ones at zero"
        yield Finding(("optimizer", "name"), message, "take adamw")


def _freeze(job: Raw) -> Iterator[Finding]:
    if not job.get("freeze"):
        return
    place = ("freeze",)
    if job.get("adapter") is not None:
        yield Finding(place, "stands beside an adapter, which freezes all weights already", "leave one of the two out")
    if _mapping(job.get("model")).get("command") is not None:
        message = "names parameters of a model that only its command knows"
        yield Finding(place, message, "leave it out: the command chooses what it trains")
    if is_rewriting(job):
        yield Finding(place, "stands beside an adaptation that trains nothing", "leave it out")


def _number(value: Any) -> float:
    """Returns a number, or 0 in place of what is none, which the schema refuses."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else 0.0


def _mapping(raw: Any) -> Raw:
    return raw if isinstance(raw, Mapping) else {}

"""Expansion of a grid entry into jobs: a template, and every combination of lists of values."""

import copy
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from ringmaster.findings import Finding, Location, as_mapping, got
from ringmaster.tasks.batch.schema import section_at
from ringmaster.techniques import Job
from ringmaster.techniques.job_features import MAX_WHOLE

MAX_JOBS = 10_000
"""The most jobs of a batch, including those of its grids; more are a mistake that would fill the memory."""
MAX_VALUES = 2_000_000
"""The most values, such as numbers and texts, in all of these jobs together: 200 in each of 10,000 jobs."""
MAX_KEYS = 50
"""The most keys that one grid entry may vary."""


@dataclass(frozen=True)
class Combination:
    """A job of a grid entry: its plain values, and the place of each in the file."""

    raw: Mapping[str, Any]
    template: Mapping[str, Any]
    entry: Location
    choices: Mapping[str, int]

    def origin(self, place: Location) -> Location:
        """Returns the place in the file of the job's `place`: in `over` for varied values, else in the template."""
        for key, choice in self.choices.items():
            path = tuple(key.split("."))
            if place[: len(path)] == path:
                section = section_at(("jobs", *path[:-1]))
                if section is not None and path[-1] not in section.model_fields:
                    return (*self.entry, "over", key)
                return (*self.entry, "over", key, choice, *place[len(path) :])
            if place and place == path[: len(place)] and place[0] not in self.template:
                return (*self.entry, "over", key)
        return (*self.entry, "template", *place)


def num_jobs(over: Any) -> int:
    """Returns the number of jobs of a grid entry without creating them; 0 if its shape is invalid."""
    if not isinstance(over, Mapping):
        return 0
    return math.prod(len(values) if isinstance(values, list) else 0 for values in over.values())


def too_many(jobs: Sequence[Any], entries: Sequence[Any]) -> Finding | None:
    """Returns a fault if a batch of these jobs and grid entries would be too large, before it is created, else None."""
    grids = [entry for entry in entries if isinstance(entry, Mapping)]
    nums = [num_jobs(entry.get("over")) for entry in grids]
    if max(nums, default=0) > MAX_JOBS:
        return None  # the fault of that entry alone, which is reported at its place
    place: Location = ("grid",) if grids else ("jobs",)
    if (num := len(jobs) + sum(nums)) > MAX_JOBS:
        return Finding(place, f"makes a batch of {num:,} jobs", f"keep to {MAX_JOBS:,}, or divide it into several")
    values = sum(n * _num_values(entry.get("template")) for n, entry in zip(nums, grids, strict=True))
    if values > MAX_VALUES:
        message = f"makes jobs of {values:,} values together"
        return Finding(place, message, f"keep to {MAX_VALUES:,}: fewer combinations, or a smaller template")
    return None


def _num_values(value: Any) -> int:
    """Counts the values in nested lists and mappings."""
    if isinstance(value, Mapping):
        return 1 + sum(_num_values(item) for item in value.values())
    return 1 + sum(_num_values(item) for item in value) if isinstance(value, list) else 1


def combinations(entry: Mapping[str, Any], *, at: Location) -> tuple[list[Combination], list[Finding]]:
    """Returns the jobs of a grid entry of valid shape, and the faults that prevent its expansion."""
    template, over = entry["template"], entry["over"]
    findings = list(_findings(template, over, at=at))
    if findings:
        return [], findings
    jobs: list[Combination] = []
    taken = set()
    shorts = _short_keys(list(over))
    for choices in itertools.product(*(range(len(values)) for values in over.values())):
        picked = {key: over[key][choice] for key, choice in zip(over, choices, strict=True)}
        words = [_word(shorts[key], value, i) for (key, value), i in zip(picked.items(), choices, strict=True)]
        name = "-".join([template["name"], *words])
        if name in taken:
            name += f"-{len(jobs)}"
        taken.add(name)
        raw = in_rows(with_values(template, {"name": name, **picked}), template=template)
        jobs.append(Combination(raw, template, at, dict(zip(over, choices, strict=True))))
    return jobs, []


def _findings(template: Mapping[str, Any], over: Mapping[str, list[Any]], *, at: Location) -> Iterator[Finding]:
    if (num := num_jobs(over)) > MAX_JOBS:  # first, because the other checks compare the values with each other
        yield Finding((*at, "over"), f"makes {num:,} jobs", f"keep to {MAX_JOBS:,} combinations")
        return
    if len(over) > MAX_KEYS:
        yield Finding((*at, "over"), f"varies {len(over):,} keys", f"vary {MAX_KEYS} at the most")
        return
    if not isinstance(template.get("name"), str):
        remedy = "name the template: the names of its jobs start with it"
        yield Finding((*at, "template", "name"), "is missing", remedy)
    if "name" in over:
        yield Finding((*at, "over", "name"), "cannot be varied", "remove it: each job gets a name from its values")
    for key, values in over.items():
        for i, value in enumerate(values):
            if value in values[:i]:
                yield Finding((*at, "over", key, i), f"{value!r} occurs twice", "keep one of the two")
    yield from key_findings(template, over, at=(*at, "over"))


def key_findings(template: Mapping[str, Any], keys: Iterable[str], *, at: Location) -> Iterator[Finding]:
    """Yields the faults of dotted keys that `with_values` could not set, at places below `at`.

    They lie inside one another, or inside a value of the template that is not a mapping.
    """
    keys = list(dict.fromkeys(keys))
    for short, long in itertools.permutations(keys, 2):
        if long.startswith(f"{short}."):
            yield Finding((*at, long), f"lies inside {short}, which is given too", "give one of the two")
    for key in keys:
        parts = key.split(".")
        place: Any = _with_loss_mapping(template, parts)
        for i, part in enumerate(parts[:-1]):
            place = place.get(part)
            if place is None:
                break
            if not isinstance(place, Mapping):
                above = ".".join(parts[: i + 1])
                message = f"lies inside {above}, which has no keys, {got(place)}"
                yield Finding((*at, key), message, f"give {above} itself")
                break


def _with_loss_mapping(template: Mapping[str, Any], parts: Sequence[str]) -> Mapping[str, Any]:
    """Returns the template; with its loss as a mapping if a key leads into a loss that is given by its name alone."""
    loss = template.get("loss")
    is_inside = parts[0] == "loss" and len(parts) > 1 and isinstance(loss, str)
    return {**template, "loss": {"name": loss}} if is_inside else template


def with_values(template: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a job's plain values with others at some dotted keys.

    A loss that is given by its name alone becomes a mapping with that name. A key through any other value that is not a
    mapping is ignored: `key_findings` reports it.
    """
    raw = copy.deepcopy(dict(template))
    for key, value in values.items():
        *path, last = key.split(".")
        raw = dict(_with_loss_mapping(raw, [*path, last]))
        place: Any = raw
        for part in path:
            if isinstance(place, dict):
                place[part] = {} if place.get(part) is None else place[part]
                place = place[part]
        if isinstance(place, dict):
            place[last] = copy.deepcopy(value)
    return raw


def in_rows(raw: Mapping[str, Any], *, template: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """Returns a job's plain values, the limit of its evaluation in rows.

    `max_batches` are batches of the global batch size in `template`, the values that jobs of a sweep are made of, so
    that all of them are evaluated on the same rows; None for the job's own. Wrong values stay, for the schema.
    """
    spec, like = as_mapping(raw.get("evaluation")), raw if template is None else template
    most, size = spec.get("max_batches"), like.get("global_batch_size", Job.global_batch_size)
    if spec.get("max_rows") is not None or not all(
        type(each) is int and 0 < each <= MAX_WHOLE for each in (most, size)
    ):
        return raw
    left = {key: value for key, value in spec.items() if key != "max_batches"}
    return {**raw, "evaluation": {**left, "max_rows": min(most * size, MAX_WHOLE)}}


def _short_keys(keys: list[str]) -> dict[str, str]:
    """Returns the last part of each dotted key, with preceding parts if two keys end alike."""
    shorts = {}
    for key in keys:
        parts = key.split(".")
        others = [other.split(".") for other in keys if other != key]
        length = 1
        while length < len(parts) and any(other[-length:] == parts[-length:] for other in others):
            length += 1
        shorts[key] = "-".join(parts[-length:])
    return shorts


def _word(key: str, value: Any, position: int) -> str:
    """Returns the part of a job's name for one varied value: lr3e-4, seed0, exact-true, adamw, or a position."""
    match value:
        case bool():
            return f"{key}-{str(value).lower()}"
        case int() | float():
            return f"{key}{number_text(value)}"
        case str() if slug := re.sub(r"[^A-Za-z0-9._-]+", "-", value).strip("-"):
            return slug
    return f"{key}{position}"


def number_text(value: float) -> str:
    """Returns the shortest usual notation of a number: 3e-4, 0.1, 128."""
    if isinstance(value, int) or not math.isfinite(value):
        return str(value)
    scientific, plain = f"{Decimal(repr(value)).normalize():e}", repr(value)
    return scientific if len(scientific) < len(plain) else plain


# Keys that affect neither a trial's speed nor its size: one profile serves all of their values.
SAME_SHAPE = (
    "optimizer.lr",
    "optimizer.options",
    "schedule",
    "clip_grad_norm",
    "seed",
    "num_steps",
    "num_epochs",
    "loss.temperature",
    "loss.label_smoothing",
    "loss.gamma",
    "loss.epsilon",
    "loss.epsilon_high",
)

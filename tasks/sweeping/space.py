"""The search space of a sweep: values or ranges by dotted keys of a job, with all faults reported at once."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringmaster.extras import install_command, missing_packages
from ringmaster.findings import Finding, findings_where
from ringmaster.tasks.batch.grid import SAME_SHAPE
from ringmaster.text import enumerated

MAX_TRIALS = 1000
MAX_KEYS = 50
MAX_SHAPES = 16  # the most shapes that are profiled for a sweep whose trials are not all known at its start

Values = Mapping[str, Any]
"""A trial's values by dotted key."""


@dataclass(frozen=True, kw_only=True)
class SpaceKey:
    """A key of a search space.

    when: the values of other keys, in pairs of key and values, with which it exists; () for always.
    """

    key: str
    when: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    def exists(self, values: Values) -> bool:
        """Returns whether a trial with these values has the key. Keys that `when` names come before it."""
        return all(key in values and values[key] in allowed for key, allowed in self.when)


@dataclass(frozen=True, kw_only=True)
class CategoricalRange(SpaceKey):
    """One of these values."""

    values: tuple[Any, ...]

    def extremes(self) -> dict[str, Any]:
        """Returns the values to validate in a job, by their place."""
        return {f"values[{i}]": value for i, value in enumerate(self.values)}

    @property
    def num_values(self) -> int | None:
        """The number of values."""
        return len(self.values)

    def listed(self) -> tuple[Any, ...]:
        """Returns all values, for a grid."""
        return self.values


@dataclass(frozen=True, kw_only=True)
class Range(SpaceKey):
    """Any number from `low` to `high`, both included; in steps of `step` from `low` if that is given.

    is_log: sample uniformly on a logarithmic scale. is_integer: integers only.
    """

    low: float
    high: float
    is_log: bool = False
    step: float | None = None
    is_integer: bool = False

    def extremes(self) -> dict[str, Any]:
        """Returns the two ends, to validate in a job, without those that are not finite."""
        ends = {"low": self.low, "high": self.high}
        return {name: self.value(number) for name, number in ends.items() if math.isfinite(number)}

    def value(self, number: float) -> int | float:
        """Returns a number in the type that the job has."""
        return round(number) if self.is_integer else float(number)

    @property
    def num_values(self) -> int | None:
        """The number of values if it is finite, else None."""
        if self._step is None:
            return None
        steps = (self.high - self.low) / self._step + 1e-9
        return math.floor(steps) + 1 if math.isfinite(steps) else None

    def listed(self) -> tuple[Any, ...]:
        """Returns all values of a range with a step; `num_values` is their number, which may be large."""
        assert self._step is not None and self.num_values is not None, f"{self.key} cannot be listed"
        # Rounded to twelve digits, as 0.1 + 2 x 0.1 is not exactly 0.3 in floating point.
        numbers = (self.low + i * self._step for i in range(self.num_values))
        return tuple(self.value(float(f"{number:.12g}")) for number in numbers)

    @property
    def _step(self) -> float | None:
        """The distance of neighbouring values; None for a continuous range."""
        if self.is_log:
            return None
        return self.step or (1.0 if self.is_integer else None)


Parameter = CategoricalRange | Range


def in_order(space: Sequence[Parameter]) -> list[Parameter]:
    """Returns the parameters, each after those that its condition names; others keep their order.

    Parameters whose conditions name each other, or no key of the space, are left out.
    """
    if not any(parameter.when for parameter in space):
        return list(space)
    result: list[Parameter] = []
    while ready := [
        p for p in space if p not in result and all(any(key == r.key for r in result) for key, _ in p.when)
    ]:
        result.append(ready[0])
    return result


def _controls(space: Sequence[Parameter]) -> list[Parameter]:
    """Returns the parameters that conditions name."""
    named = {key for parameter in space for key, _ in parameter.when}
    return [parameter for parameter in space if parameter.key in named]


def num_combinations(space: Sequence[Parameter]) -> int | None:
    """Returns the number of distinct trials, or None if it is infinite."""
    controls = _controls(space)
    others, result = [parameter for parameter in space if parameter not in controls], 0
    for values in combinations(controls):
        sizes = [parameter.num_values for parameter in others if parameter.exists(values)]
        if None in sizes:
            return None
        result += math.prod(size for size in sizes if size is not None)
    return result


def combinations(space: Sequence[Parameter]) -> Iterator[Values]:
    """Yields every trial of a finite space, the last parameter changing fastest."""

    def completed(values: Values, left: Sequence[Parameter]) -> Iterator[Values]:
        if not left:
            yield values
        elif not left[0].exists(values):
            yield from completed(values, left[1:])
        else:
            for value in left[0].listed():
                yield from completed({**values, left[0].key: value}, left[1:])

    yield from completed({}, in_order(space))


def example(space: Sequence[Parameter], parameter: Parameter, value: Any) -> Values:
    """Returns a value of a parameter, with values of those that its condition names and of those that depend on it."""
    by_key, result, left = {each.key: each for each in space}, {parameter.key: value}, [parameter]
    while left:
        for key, allowed in left.pop().when:
            if key in by_key and key not in result and allowed:
                result[key] = allowed[0]
                left.append(by_key[key])
    for each in in_order(space):
        if each.when and each.exists(result) and (values := [*each.extremes().values()]):
            result.setdefault(each.key, values[0])
    return result


def changes_shape(parameter: Parameter) -> bool:
    """Whether trials may differ in speed or size by the parameter; then each of its values is profiled separately."""
    if parameter.key == "loss.beta":  # a loss may keep no reference where it is 0
        return 0 in parameter.extremes().values()
    return not any(parameter.key == key or parameter.key.startswith(f"{key}.") for key in SAME_SHAPE)


def shapes(space: Sequence[Parameter]) -> list[Values]:
    """Returns provisional trials, one for each shape in the space; all other parameters have their first value.

    A parameter that a condition names has each of its values, as another one that changes the shape may depend on it.
    """
    varied = {parameter.key for parameter in _shaping(space)}
    fixed = [
        CategoricalRange(key=p.key, when=p.when, values=p.values if p.key in varied else p.values[:1])
        if isinstance(p, CategoricalRange)
        else CategoricalRange(key=p.key, when=p.when, values=(p.value(p.low),))
        for p in space
    ]
    by_shape: dict[str, Values] = {}
    for values in combinations(fixed):
        by_shape.setdefault(repr(shape_of(space, values)), values)
    return list(by_shape.values())


def num_shapes(space: Sequence[Parameter]) -> int:
    """Returns the number of shapes in a space; where these are very many and some have conditions, a higher number."""
    most = math.prod(len(p.values) for p in _shaping(space) if isinstance(p, CategoricalRange))
    return len(shapes(space)) if most <= MAX_TRIALS else most


def _shaping(space: Sequence[Parameter]) -> list[Parameter]:
    """Returns the parameters that change the shape of a trial, or on which others depend."""
    controls = _controls(space)
    return [parameter for parameter in space if changes_shape(parameter) or parameter in controls]


def shape_of(space: Sequence[Parameter], values: Values) -> Values:
    """Returns the values of a trial that may affect its speed or size."""
    return {p.key: values[p.key] for p in space if p.key in values and changes_shape(p)}


def findings(space: Sequence[Parameter], *, sampler: str, num_trials: int | None) -> list[Finding]:
    """Returns the faults of a space for a sampler; places begin with ("space", KEY)."""
    if len(space) > MAX_KEYS:
        return [Finding(("space",), f"varies {len(space):,} keys", f"vary {MAX_KEYS} at the most")]
    keys = [parameter.key for parameter in space]
    result = [
        *(finding for parameter in space for finding in _of_one(parameter)),
        *(
            Finding(("space", key), "is there twice", "keep one of the two")
            for key in dict.fromkeys(key for i, key in enumerate(keys) if key in keys[:i])
        ),
    ]
    result = result or [*_of_conditions(space)]
    return result or [*_of_sampler(space, sampler=sampler, num_trials=num_trials)]


def _of_conditions(space: Sequence[Parameter]) -> Iterator[Finding]:
    """Yields the faults of the conditions of parameters."""
    by_key = {parameter.key: parameter for parameter in space}
    for parameter in space:
        place = ("space", parameter.key, "when")
        for key, allowed in parameter.when:
            control = by_key.get(key)
            if control is None:
                problem = f"names {key}, which the space does not have"
                others = enumerated([each for each in by_key if each != parameter.key])
                yield Finding(place, problem, f"name one of {others}" if others else f"add {key} with a list of values")
            elif isinstance(control, Range):
                yield Finding(place, f"names {key}, which is a range", f"give {key} a list of values")
            elif strange := [value for value in allowed if value not in control.values]:
                problem = f"names the value {strange[0]!r}, which {key} does not take"
                yield Finding(place, problem, f"name one of {enumerated([repr(v) for v in control.values])}")
            elif not allowed:
                yield Finding(place, f"names no value of {key}", "give one, or a list")
        is_known = all(key in by_key for key, _ in parameter.when)
        if is_known and parameter not in in_order(space):
            yield Finding(place, "depends on itself, by the conditions of others", "remove one of the conditions")
    num = math.prod(len(p.values) for p in _controls(space) if isinstance(p, CategoricalRange))
    if num > MAX_TRIALS:
        problem = f"has conditions on {num:,} combinations of values, of which no sweep tries more than {MAX_TRIALS:,}"
        yield Finding(("space",), problem, "list fewer values of the keys that conditions name")


def _of_one(parameter: Parameter) -> Iterator[Finding]:
    place = ("space", parameter.key)
    if parameter.key == "name":
        yield Finding(place, "cannot be varied", "remove it: each trial gets a name of its own")
    if isinstance(parameter, CategoricalRange):
        values, num = (*place, "values"), len(parameter.values)
        too_many = f"has {num:,} values, more than the {MAX_TRIALS:,} trials of any sweep"
        twice = [] if num > MAX_TRIALS else [i for i, v in enumerate(parameter.values) if v in parameter.values[:i]]
        yield from findings_where(
            (num > MAX_TRIALS, values, too_many, "list fewer, or give a range"),
            *((True, (*values, i), f"{parameter.values[i]!r} occurs twice", "keep one of the two") for i in twice),
        )
        return
    low, high, step = parameter.low, parameter.high, parameter.step
    if not (math.isfinite(low) and math.isfinite(high)):
        yield Finding(place, "must have finite ends", "give numbers for low and high")
        return
    ends = f"must be greater than low, got {low:g} and {high:g}"
    through_0 = f"a logarithmic range cannot go to or through 0, got {low:g}"
    in_steps = "goes with no logarithmic range"
    numbers = {"low": low, "high": high, "step": step or 0.0} if parameter.is_integer else {}
    yield from findings_where(
        (low >= high, (*place, "high"), ends, "give a greater one, or values instead"),
        (parameter.is_log and low <= 0, (*place, "low"), through_0, "begin above 0, such as at 1e-6, or leave out log"),
        (parameter.is_log and step is not None, (*place, "step"), in_steps, "leave out log or step, or give values"),
        (
            step is not None and not step > 0,
            (*place, "step"),
            f"must be greater than 0, got {step or 0:g}",
            "give a positive one",
        ),
        *(
            (n != round(n), (*place, name), f"must be a whole number, got {n:g}", "round it, or leave out integer")
            for name, n in numbers.items()
        ),
    )


def _of_sampler(space: Sequence[Parameter], *, sampler: str, num_trials: int | None) -> Iterator[Finding]:
    size = num_combinations(space)
    if sampler == "grid":
        most = min(num_trials or MAX_TRIALS, MAX_TRIALS)
        without_step = "is a range without a step, which a grid cannot list"
        ungridded = "give it a step or values, or another sampler than grid"
        yield from findings_where(
            *((p.num_values is None, ("space", p.key), without_step, ungridded) for p in space),
            (
                size is not None and size > most,
                ("space",),
                f"has {size or 0:,} combinations, more than the {most:,} trials",
                "raise num_trials, list fewer values, or let `random` draw some of them",
            ),
        )
        return
    missing = missing_packages("sweep")
    yield from findings_where(
        (missing, ("sampler",), f"{sampler} needs {missing}, not installed", install_command("sweep")),
        (
            size is not None and num_trials is not None and size < num_trials,
            ("num_trials",),
            f"is {num_trials}, and the space has only {size} combinations",
            f"lower num_trials to {size}, or widen the space",
        ),
    )
    if sampler != "tpe":
        return
    shaping = [parameter for parameter in space if changes_shape(parameter)]
    late = "cannot be searched by tpe, which proposes trials when it is known what an epoch is"
    unprofiled = "changes a trial's speed or size, and tpe proposes trials while others run, without profiling"
    yield from findings_where(
        *((p.key == "num_epochs", ("space", p.key), late, "search num_steps, or use random") for p in space),
        *(
            (True, ("space", p.key), unprofiled, "give values, which are profiled first, or use random")
            for p in shaping
            if isinstance(p, Range)
        ),
        (
            num_shapes(space) > MAX_SHAPES,
            ("space",),
            f"has {num_shapes(space)} different shapes, each to be profiled before the first trial",
            f"list fewer values, keep to {MAX_SHAPES} shapes, or use random",
        ),
    )

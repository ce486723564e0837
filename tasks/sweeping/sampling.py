"""Proposals of the trials of a sweep: a grid, random values, or the tree-structured Parzen estimator through Optuna.

A proposal is a function of only the seed, the trial's number and the results of the trials before it. No state is kept
between proposals, so a sweep that was killed proposes the same trials again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from ringmaster.codec import digest
from ringmaster.tasks.sweeping.space import CategoricalRange, Parameter, Values, combinations, in_order

RANDOM, GRID, TPE = "random", "grid", "tpe"
MAX_DRAWS = 100  # of one trial, until it differs from all earlier ones
NUM_STARTUP = 8  # random trials before TPE has enough data; a third of all trials if that is fewer


@dataclass(frozen=True, kw_only=True)
class ProposedTrial:
    """A trial that was proposed.

    targets: its result for each objective, higher is better; None while there is none.
    violations: by how much it breaks each constraint, by name; 0 or less where it keeps one.
    """

    values: Values
    targets: tuple[float, ...] | None = None
    violations: Mapping[str, float] = field(default_factory=dict)


def num_startup(num_trials: int) -> int:
    """Returns how many trials of a TPE sweep are drawn at random, and thus known at its start."""
    return min(num_trials, NUM_STARTUP, max(2, num_trials // 3))


def propose(
    space: Sequence[Parameter],
    *,
    sampler: str,
    number: int,
    earlier: Sequence[ProposedTrial],
    seed: int,
    num_trials: int,
    num_targets: int = 1,
    is_shuffled: bool = False,
) -> Values:
    """Returns the values of trial `number`, which counts from 0; `earlier` are those before it, in order.

    No trial is proposed twice, unless a hundred draws find no other. is_shuffled: whether a grid is tried in random
    order.
    """
    assert len(earlier) == number, "each trial is proposed after those before it"
    if sampler == GRID:
        if is_shuffled:
            number = Random(seed).sample(range(num_trials), num_trials)[number]
        return next(itertools.islice(combinations(space), number, None))
    draws = num_startup(num_trials)
    known = [each.values for each in earlier]
    values: Values = {}
    for draw in range(MAX_DRAWS):
        is_random = sampler == RANDOM or number < draws or draw > MAX_DRAWS // 2
        drawn_seed = int(digest([seed, number, draw]), 16) % 2**32
        values = _draw(space, earlier, is_random=is_random, seed=drawn_seed, num_targets=num_targets)
        if values not in known:
            break
    return values


def _draw(
    space: Sequence[Parameter], earlier: Sequence[ProposedTrial], *, is_random: bool, seed: int, num_targets: int
) -> Values:
    """Draws once with Optuna, from a study that exists only during this call."""
    import optuna

    # Running trials count as bad ones (constant_liar), so that proposals do not cluster.
    tpe = optuna.samplers.TPESampler(n_startup_trials=1, constant_liar=True, seed=seed)
    sampler = optuna.samplers.RandomSampler(seed=seed) if is_random else tpe
    study = study_of(space, () if is_random else earlier, sampler=sampler, num_targets=num_targets)
    trial, values = study.ask(), dict[str, Any]()
    for parameter in in_order(space):
        if parameter.exists(values):
            values[parameter.key] = _value(parameter, _suggested(trial, parameter))
    return values


def _suggested(trial: Any, parameter: Parameter) -> Any:
    distribution = _distribution(parameter)
    if isinstance(parameter, CategoricalRange):
        return trial.suggest_categorical(parameter.key, distribution.choices)
    suggest = trial.suggest_int if parameter.is_integer else trial.suggest_float
    return suggest(parameter.key, distribution.low, distribution.high, log=distribution.log, step=distribution.step)


def study_of(
    space: Sequence[Parameter], trials: Iterable[ProposedTrial], *, sampler: Any = None, num_targets: int = 1
) -> Any:
    """Returns an Optuna study in memory with these trials, which maximizes their targets."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=sampler, directions=["maximize"] * num_targets)
    distributions = {parameter.key: _distribution(parameter) for parameter in space}
    for each in trials:
        study.add_trial(_as_trial(space, each, distributions))
    return study


def _distribution(parameter: Parameter) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(parameter, CategoricalRange):  # by index: Optuna supports neither lists nor mappings
        return CategoricalDistribution(range(len(parameter.values)))
    if parameter.is_integer:
        return IntDistribution(
            round(parameter.low), round(parameter.high), log=parameter.is_log, step=round(parameter.step or 1)
        )
    return FloatDistribution(parameter.low, parameter.high, log=parameter.is_log, step=parameter.step)


def _value(parameter: Parameter, drawn: Any) -> Any:
    if isinstance(parameter, CategoricalRange):
        return parameter.values[drawn]
    # Six digits are readable, and more than matters; with a step, the value must match the grid to more digits.
    digits = 6 if parameter.step is None else 12
    value = drawn if parameter.is_integer else float(f"{drawn:.{digits}g}")
    return parameter.value(min(max(value, parameter.low), parameter.high))


def _as_trial(space: Sequence[Parameter], tried: ProposedTrial, distributions: Any) -> Any:
    import optuna

    has = [parameter for parameter in space if parameter.key in tried.values]
    params = {p.key: _optuna_value(p, tried.values[p.key], distributions[p.key]) for p in has}
    states = optuna.trial.TrialState
    is_finite = tried.targets is not None and all(map(math.isfinite, tried.targets))
    return optuna.trial.create_trial(
        state=states.RUNNING if tried.targets is None else states.COMPLETE if is_finite else states.FAIL,
        values=tried.targets if is_finite else None,
        constraints=dict(tried.violations),
        params=params,
        distributions={key: distributions[key] for key in params},
    )


def _optuna_value(parameter: Parameter, value: Any, distribution: Any) -> Any:
    """Returns a value exactly as Optuna draws it: Optuna refuses values that rounding moved off the steps."""
    if isinstance(parameter, CategoricalRange):
        return parameter.values.index(value)
    if parameter.step is None or parameter.is_integer:
        return value
    num_steps = round((value - parameter.low) / parameter.step)
    return min(parameter.low + num_steps * parameter.step, distribution.high)

"""Samplers of a sweep: grid, random, or the tree-structured Parzen estimator through Optuna.

A proposal is a function of only the seed, the trial's number and the results of the trials before it. No state is kept
between proposals, so a sweep that was killed proposes the same trials again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ringmaster.codec import digest
from ringmaster.tasks.sweeping.space import Choice, Parameter, Values, combinations

RANDOM, GRID, TPE = "random", "grid", "tpe"
MOST_DRAWS = 100  # of one trial, until it differs from all earlier ones
NUM_STARTUP = 8  # random trials before TPE has enough data; a third of all trials if that is fewer


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A trial that was proposed. score: higher is better; None while there is no result."""

    values: Values
    score: float | None = None


def num_startup(num_trials: int) -> int:
    """Returns how many trials of a TPE sweep are drawn at random, and thus known at its start."""
    return min(num_trials, NUM_STARTUP, max(2, num_trials // 3))


def propose(
    space: Sequence[Parameter], *, sampler: str, number: int, earlier: Sequence[Tried], seed: int, num_trials: int
) -> Values:
    """Returns the values of trial `number`, which counts from 0; `earlier` are those before it, in order.

    No trial is proposed twice, unless a hundred draws find no other.
    """
    assert len(earlier) == number, "each trial is proposed after those before it"
    if sampler == GRID:
        return next(itertools.islice(combinations(space), number, None))
    draws = num_startup(num_trials)
    known = [each.values for each in earlier]
    values: Values = {}
    for draw in range(MOST_DRAWS):
        is_random = sampler == RANDOM or number < draws or draw > MOST_DRAWS // 2
        values = _draw(space, earlier, is_random=is_random, seed=int(digest([seed, number, draw]), 16) % 2**32)
        if values not in known:
            break
    return values


def _draw(space: Sequence[Parameter], earlier: Sequence[Tried], *, is_random: bool, seed: int) -> Values:
    """Draws once with Optuna, from a study that exists only during this call."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    # Running trials count as bad ones (constant_liar), so that proposals do not cluster.
    tpe = optuna.samplers.TPESampler(n_startup_trials=1, constant_liar=True, seed=seed)
    study = optuna.create_study(
        sampler=optuna.samplers.RandomSampler(seed=seed) if is_random else tpe, direction="maximize"
    )
    distributions = {parameter.key: _distribution(parameter) for parameter in space}
    if not is_random:
        for each in earlier:
            study.add_trial(_as_trial(space, each, distributions))
    params = study.ask(distributions).params
    return {parameter.key: _value(parameter, params[parameter.key]) for parameter in space}


def _distribution(parameter: Parameter) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(parameter, Choice):  # by index: Optuna supports neither lists nor mappings
        return CategoricalDistribution(range(len(parameter.values)))
    if parameter.is_integer:
        return IntDistribution(
            round(parameter.low), round(parameter.high), log=parameter.is_log, step=round(parameter.step or 1)
        )
    return FloatDistribution(parameter.low, parameter.high, log=parameter.is_log, step=parameter.step)


def _value(parameter: Parameter, drawn: Any) -> Any:
    if isinstance(parameter, Choice):
        return parameter.values[drawn]
    # Six digits are readable, and more than matters; with a step, the value must match the grid to more digits.
    digits = 6 if parameter.step is None else 12
    value = drawn if parameter.is_integer else float(f"{drawn:.{digits}g}")
    return parameter.value(min(max(value, parameter.low), parameter.high))


def _as_trial(space: Sequence[Parameter], tried: Tried, distributions: Any) -> Any:
    from optuna.trial import TrialState, create_trial

    params = {p.key: _told_to_optuna(p, tried.values[p.key], distributions[p.key]) for p in space}
    if tried.score is None:
        return create_trial(state=TrialState.RUNNING, params=params, distributions=distributions)
    is_finite = math.isfinite(tried.score)
    return create_trial(
        state=TrialState.COMPLETE if is_finite else TrialState.FAIL,
        value=tried.score if is_finite else None,
        params=params,
        distributions=distributions,
    )


def _told_to_optuna(parameter: Parameter, value: Any, distribution: Any) -> Any:
    """Returns a value exactly as Optuna draws it: Optuna refuses values that rounding moved off the steps."""
    if isinstance(parameter, Choice):
        return parameter.values.index(value)
    if parameter.step is None or parameter.is_integer:
        return value
    num_steps = round((value - parameter.low) / parameter.step)
    return min(parameter.low + num_steps * parameter.step, distribution.high)

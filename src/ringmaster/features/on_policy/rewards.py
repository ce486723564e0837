"""Rewards of completions: a user's functions, called as TRL's trainers call them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ringmaster.features.on_policy.loss import Generation
from ringmaster.registry import resolve

Reward = Callable[..., Any]


class Rewards:
    """The weighted sum of the rewards of several functions. Raises ValueError where one of them is not found."""

    def __init__(self, generation: Generation) -> None:
        self._functions = [(name, resolve(name)) for name in generation.rewards]
        self._weights = generation.weights

    def check_without_training(self) -> None:
        """Raises ValueError where a function needs what is there in training alone, as its attribute says."""
        for _, function in self._functions:
            if reason := getattr(function, "why_in_training_alone", ""):
                raise ValueError(f"loss.rewards: {reason}")

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        *,
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
    ) -> Tensor:
        """Returns the reward of each completion, [completions] in fp32; NaN where every function returned None.

        prompts, completions: texts, or lists of messages. completion_ids: the completions' tokens.
        columns: the other columns of the prompts' rows, by name; all of them have a value for each completion.
        """
        known = {**columns, "prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        every = torch.tensor(
            [rewards_by(name, function, known, number=len(completions)) for name, function in self._functions]
        )
        summed = (every * torch.tensor(self._weights)[:, None]).nansum(0)
        return summed.masked_fill(every.isnan().all(0), math.nan)


def rewards_by(name: str, function: Reward, known: Mapping[str, Any], *, number: int) -> list[float]:
    """Returns the rewards of one function; NaN for None. Raises ValueError where it returns anything else.

    known: the arguments, by name; those that the function does not take are left out.
    """
    returned = function(**_taken(name, function, known))
    remedy = "To fix: return a list with a number, or None, for each completion"
    if inspect.isawaitable(returned):
        raise ValueError(f"loss.rewards: {name} is asynchronous. To fix: define it without async")
    if not isinstance(returned, (list, tuple)) and not hasattr(returned, "tolist"):
        raise ValueError(f"loss.rewards: {name} returned {type(returned).__name__}. {remedy}")
    values = returned if isinstance(returned, (list, tuple)) else returned.tolist()
    if not isinstance(values, (list, tuple)) or len(values) != number:
        shown = f"{len(values)} values" if isinstance(values, (list, tuple)) else repr(values)
        raise ValueError(f"loss.rewards: {name} returned {shown} for {number} completions. {remedy}")
    return [_number(name, value, remedy) for value in values]


def _number(name: str, value: Any, remedy: str) -> float:
    if value is None:
        return math.nan
    try:
        number = float(value) if not isinstance(value, str) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"loss.rewards: {name} returned {value!r:.60} for a completion. {remedy}")
    return number


def _taken(name: str, function: Reward, known: Mapping[str, Any]) -> dict[str, Any]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a C function, whose arguments cannot be inspected
        return dict(known)
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return dict(known)
    missing = [each.name for each in parameters if each.default is inspect.Parameter.empty and each.name not in known]
    if missing:
        raise ValueError(
            f"loss.rewards: {name} expects {', '.join(missing)}; available columns: {', '.join(sorted(known))}. "
            "To fix: use columns of the data, prompts, completions or completion_ids"
        )
    return {each.name: known[each.name] for each in parameters if each.name in known}

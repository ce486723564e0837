"""The call of a user's reward functions, and what they may return."""

import math

import numpy as np
import pytest
import torch

from ringmaster.features.on_policy.loss import Generation
from ringmaster.features.on_policy.rewards import Rewards, rewards_by

KNOWN = {"prompts": ["p"] * 3, "completions": ["a", "ab", ""], "completion_ids": [[1], [2], [3]], "wish": [1, 2, 3]}


def called(function):
    return rewards_by("mine:f", function, KNOWN, number=3)


@pytest.mark.parametrize(
    "function",
    [
        lambda completions: [len(text) for text in completions],
        lambda completions, **columns: torch.tensor([float(len(text)) for text in completions]),
        lambda prompts, completions, wish: np.array([len(text) for text in completions]),
        lambda completions, unknown=1: [1.0, np.float32(2), True * 0],
    ],
)
def test_functions_take_what_they_name(function):
    assert called(function) == [1.0, 2.0, 0.0]


def test_none_is_no_reward():
    found = called(lambda completions: [1.0, None, 2.0])
    assert math.isnan(found[1])
    assert (found[0], found[2]) == (1.0, 2.0)


async def _later(completions):
    return [0.0] * 3


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda completions: [1.0], "returned 1 values for 3 completions"),
        (lambda completions: 1.0, "returned float"),
        (lambda completions: ["good"] * 3, "returned 'good' for a completion"),
        (lambda completions: [math.nan] * 3, "returned nan for a completion"),
        (lambda completions: [[1.0]] * 3, r"returned \[1.0\] for a completion"),
        (
            lambda completions, target: [1.0] * 3,
            "expects target; available columns: completion_ids, completions, prompts",
        ),
        (_later, "is asynchronous"),
    ],
)
@pytest.mark.filterwarnings("ignore:coroutine")
def test_wrong_returns_have_a_remedy(function, said):
    with pytest.raises(ValueError, match=f"mine:f .*{said}.* To fix: "):
        called(function)


def test_a_function_that_is_listed_twice_counts_twice():
    names = [f"{__name__}:{each}" for each in ("_lengths", "_ones", "_lengths")]
    generation = Generation(
        rewards=tuple(names), weights=(1.0, 10.0, 100.0), num_generations=2, max_new_tokens=1, temperature=1.0
    )
    found = Rewards(generation)(["p"] * 3, ["a", "ab", ""], completion_ids=[[1], [2], [3]], columns={})
    assert found.tolist() == [111.0, 212.0, 10.0]


def _lengths(completions):
    return [len(text) for text in completions]


def _ones(completions):
    return [1.0] * len(completions)

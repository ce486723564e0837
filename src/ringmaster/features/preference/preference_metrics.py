"""Metrics of pairs of answers: the share of them that are in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ringmaster.techniques.metric import Metric, Outputs

if TYPE_CHECKING:
    from torch import Tensor


class PreferenceAccuracy(Metric):
    """The share of pairs whose chosen answer has the larger reward; equal rewards do not count as right.

    The job's loss defines the rewards (Rafailov et al., Direct Preference Optimization, 2023, section 5). Of single
    completions, those count as right whose reward is above 0 if they are desirable, and below 0 if they are not.
    """

    name = "preference_accuracy"
    higher_is_better = True
    sums = ("preferred_pairs", "pairs")
    needs = "a loss over pairs of a chosen and a rejected answer, or over desirable and other completions"
    share_of = "pairs"
    reads_whole_rows = True

    def compute_sums(self, outputs: Outputs) -> Mapping[str, Tensor] | None:
        """Returns whether each pair is in order, [rows]; None where the loss has no rewards."""
        rewards = outputs.rewards
        if rewards is None:
            return None
        in_order = rewards[:, 0] > rewards[:, 1]
        return {"preferred_pairs": in_order, "pairs": in_order | True}


class RewardAccuracy(PreferenceAccuracy):
    """The share of pairs to whose chosen answer a reward model gives the larger reward; equal ones are not right."""

    name = "reward_accuracy"
    needs = "the loss bradley-terry of a reward model"

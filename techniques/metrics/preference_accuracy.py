"""The accuracy of a model's rewards on pairs of answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ringmaster.techniques.metric import Metric, Outputs

if TYPE_CHECKING:
    from torch import Tensor

    from ringmaster.techniques.metric import Values


class PreferenceAccuracy(Metric):
    """The share of pairs whose chosen answer has the larger reward; equal rewards do not count as right.

    The job's loss defines the rewards (Rafailov et al., Direct Preference Optimization, 2023, section 5).
    """

    name = "preference_accuracy"
    higher_is_better = True
    sums = ("preferred_pairs", "pairs")
    needs = "a loss over pairs of a chosen and a rejected answer"
    share_of = "pairs"
    reads_whole_rows = True

    def compute_sums(self, outputs: Outputs) -> Mapping[str, Tensor] | None:
        """Returns whether each pair is in order, [rows]; None where the loss has no rewards."""
        rewards = outputs.rewards
        if rewards is None:
            return None
        in_order = rewards[:, 0] > rewards[:, 1]
        return {"preferred_pairs": in_order, "pairs": in_order | True}

    def value(self, sums: Mapping[str, Values]) -> Values:
        """Returns the share."""
        return sums["preferred_pairs"] / sums["pairs"]

"""The mean reward of completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ringmaster.features.on_policy.loss import REWARDS
from ringmaster.techniques.metric import Metric, Outputs

if TYPE_CHECKING:
    from torch import Tensor


class Reward(Metric):
    """The mean reward of completions that the model samples to held-out prompts, by the functions of the job's loss.

    Completions for which every function returned None do not count.
    """

    name = "reward"
    higher_is_better = True
    sums = ("reward_sums", "rewarded")
    needs = "a loss that generates completions, such as grpo"
    reads_whole_rows = True

    def compute_sums(self, outputs: Outputs) -> Mapping[str, Tensor] | None:
        """Returns the rewards of each prompt's completions and their number, [rows]; None without completions."""
        rewards = outputs.batch.get(REWARDS)
        if rewards is None:
            return None
        return {"reward_sums": rewards.nansum(-1), "rewarded": (~rewards.isnan()).sum(-1)}

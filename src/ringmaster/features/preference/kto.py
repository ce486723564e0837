"""Kahneman-Tversky optimization: a model learns from single completions, each of which is desirable or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ringmaster.features.preference.preference_losses import PreferenceLoss
from ringmaster.features.preference.preference_rows import DESIRABLE
from ringmaster.techniques import loss
from ringmaster.techniques.metric import IGNORED

if TYPE_CHECKING:
    from torch import Tensor

ROWS, DIVERGENCE = "rows", "divergence"
LOSS_TYPES = ("kto", "apo_zero_unpaired")


@dataclass(frozen=True, kw_only=True)
class Kto(PreferenceLoss):
    """A mean over completions, whose values saturate on both sides of a baseline as those of gains and losses do.

    With the reference p_ref, the weight w of desirable (undesirable) completions, and y'_i the completion of the row
    before row i in the global batch (of the last one for the first row), which does not answer x_i:

        r_i = log p(y_i | x_i) - log p_ref(y_i | x_i)
        z = max(0, mean over i of log p(y'_i | x_i) - log p_ref(y'_i | x_i)), an estimate of KL(p || p_ref)
        kto:                w_d (1 - sigmoid(beta (r_i - z))) or w_u (1 - sigmoid(beta (z - r_i)))
        apo_zero_unpaired:  the same with z = 0

    No gradient flows through z. It is one number for the global batch, whose forward precedes all others of a step.
    Sources: Ethayarajh et al. (arXiv:2402.01306), equations 7 and 8; D'Oosterlinck et al., APO (arXiv:2408.06266),
    equation 7, for single completions as in TRL. A completion's reward is beta r_i. A row that is scored or evaluated
    alone has z = 0, as there are no other completions; a step has two rows at least.
    """

    name: ClassVar[str] = "kto"
    in_pairs: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = (DESIRABLE,)
    total_names: ClassVar[tuple[str, ...]] = (ROWS, DIVERGENCE)

    beta: float = loss.option(0.1, loss.Values(above=0))
    desirable_weight: float = loss.option(1.0, loss.Values(least=0))
    undesirable_weight: float = loss.option(1.0, loss.Values(least=0))
    loss_type: str = loss.option("kto", loss.Values(among=LOSS_TYPES))

    def conflicts(self) -> Iterator[loss.OptionFault]:
        """Yields weights of which none is above 0."""
        if not self.desirable_weight and not self.undesirable_weight:
            problem = "is 0, and undesirable_weight too, so that nothing is learnt"
            yield loss.OptionFault(option="desirable_weight", problem=problem, remedy="give one of them above 0")

    @property
    def min_rows(self) -> int:
        """Two rows, where the baseline is made of completions of other rows."""
        return 2 if self.loss_type == "kto" else 1

    def row_sums(self, inputs: loss.LossInputs) -> tuple[Tensor, Tensor]:
        """Returns the loss of each completion, and ones."""
        import torch

        gains, desirable = self._signed(inputs, self.log_ratios(inputs) - self._baseline(inputs))
        weights = torch.where(desirable, self.desirable_weight, self.undesirable_weight)
        losses = weights * (1 - torch.sigmoid(self.beta * gains))
        return losses, torch.ones_like(losses)

    def totals(self, labels: Tensor) -> Mapping[str, Tensor]:
        """Returns ones, and zeros for what the first pass adds."""
        import torch

        rows = torch.ones(len(labels), device=labels.device)
        return {ROWS: rows, DIVERGENCE: torch.zeros_like(rows)}

    def first_pass(self, batch: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        """Returns the prompts with the completions of the rows before them, cut at the width of the batch."""
        if self.loss_type != "kto":
            return None
        return {**batch, **_mismatched(batch, before)}

    def first_totals(self, inputs: loss.LossInputs) -> Mapping[str, Tensor]:
        """Returns the summands of the divergence."""
        return {DIVERGENCE: self.log_ratios(inputs)}

    def rewards_of(self, inputs: loss.LossInputs) -> Tensor:
        """Returns beta r and 0, the reward of the reference, of each row; the greater one should be the first."""
        import torch

        gains, _ = self._signed(inputs, self.beta * self.log_ratios(inputs))
        return torch.stack([gains, torch.zeros_like(gains)], dim=-1)

    def _baseline(self, inputs: loss.LossInputs) -> Tensor | float:
        mean = inputs.totals[DIVERGENCE] / inputs.totals[ROWS]
        return max(mean, 0.0) if isinstance(mean, float) else mean.clamp(min=0)

    def _signed(self, inputs: loss.LossInputs, values: Tensor) -> tuple[Tensor, Tensor]:
        """Returns values of completions, with the other sign for undesirable ones; and which ones are desirable."""
        import torch

        if DESIRABLE not in inputs.batch:
            raise ValueError(
                f"loss kto: the samples have no {DESIRABLE}. To fix: give rows with a prompt, a completion and a "
                "label (data.kind: unpaired-preference)"
            )
        desirable = inputs.batch[DESIRABLE].bool()
        return torch.where(desirable, values, -values), desirable


def _mismatched(batch: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tokens of each prompt of `batch` with the completion of the same row of `before`, and its labels.

    A completion begins with the first label of a row, and ends with the last one.
    """
    import torch

    labels, others = batch["labels"], before["labels"]
    width = labels.shape[1]
    places = torch.arange(width, device=labels.device)
    first, first_of_other = (_first(each != IGNORED).unsqueeze(1) for each in (labels, others))
    end_of_other = width - _first((others != IGNORED).flip(-1)).unsqueeze(1)
    sources = places - first + first_of_other
    is_completion = (places >= first) & (sources < end_of_other)
    at = sources.clamp(0, width - 1)
    prompts = batch["input_ids"].masked_fill(places >= first, 0)  # what follows a completion is not read
    result = {
        "input_ids": torch.where(is_completion, before["input_ids"].gather(1, at), prompts),
        "labels": torch.where(is_completion, others.gather(1, at), IGNORED),
    }
    if "attention_mask" in batch:
        result["attention_mask"] = ((places < first) | is_completion).to(batch["attention_mask"].dtype)
    return result


def _first(is_there: Tensor) -> Tensor:
    """Returns the first place of each row that is there, [rows]; the width where none is."""
    return (is_there.cumsum(-1) == 0).sum(-1)

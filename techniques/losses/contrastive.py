"""Contrastive loss of embeddings with in-batch negatives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ringmaster.techniques.loss import LossFunction, LossInputs, Values, YesOrNo, option

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Contrastive(LossFunction):
    """InfoNCE: each anchor must find its positive among the positives of the whole global batch.

    An embedding e is the mean of the last hidden state over the attention mask, divided by its L2 norm. With n pairs
    (a_i, p_i) and temperature t:

        mean over i of -log(exp(a_i . p_i / t) / sum over j of exp(a_i . p_j / t))

    With hard negatives a sample is a triplet (a_i, p_i, n_i), and the sum over j has exp(a_i . n_j / t) too.

    Sources: van den Oord et al. (arXiv:1807.03748), equation 4; Henderson et al. (arXiv:1705.00652), section 4.4, as
    MultipleNegativesRankingLoss of sentence-transformers, whose scale is 1 / t = 20.
    """

    name: ClassVar[str] = "contrastive"
    in_pairs: ClassVar[bool] = True
    mixes_rows: ClassVar[bool] = True

    temperature: float = option(0.05, Values(above=0))
    hard_negatives: bool = option(False, YesOrNo())

    @property
    def num_sequences(self) -> int:
        """The anchor, the positive and perhaps the hard negative of a sample."""
        return 3 if self.hard_negatives else 2

    def each(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """Returns the loss of each anchor, and ones."""
        import torch
        from torch.nn.functional import cross_entropy

        found = embeddings(inputs.output, inputs.batch)
        candidates = found[:, 1:].transpose(0, 1).flatten(0, 1)  # all positives, and then all hard negatives
        similarities = found[:, 0] @ candidates.T / self.temperature
        losses = cross_entropy(similarities, torch.arange(len(found), device=found.device), reduction="none")
        return losses, torch.ones_like(losses)


def embeddings(output: Any, batch: Any) -> Tensor:
    """Returns normalised embeddings of each sample's sequences, [rows, sequences, features], in fp32.

    output: of the model, for the sequences of all samples one after another.
    batch: with attention_mask [rows, sequences, tokens].

    Raises ValueError where the model or the samples do not suit.
    """
    from torch.nn.functional import normalize

    hidden = getattr(output, "last_hidden_state", None)
    if hidden is None:
        raise ValueError(
            f"loss contrastive: the model returns {type(output).__name__}, which has no last_hidden_state. To fix: "
            "train a model without a head, such as BertModel"
        )
    if "attention_mask" not in batch:
        raise ValueError(
            "loss contrastive: the samples have no attention_mask, over which hidden states are averaged. To fix: give "
            "each sample an attention_mask [2, tokens]"
        )
    mask = batch["attention_mask"].unsqueeze(-1).float()
    states = hidden.float().reshape(*mask.shape[:-1], -1)
    pooled = (states * mask).sum(2) / mask.sum(2).clamp(min=1e-9)
    return normalize(pooled, dim=-1)

"""Contrastive loss of embeddings with in-batch negatives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ringmaster.techniques.interface.loss import LossFunction, LossInputs, Values, option

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Contrastive(LossFunction):
    """InfoNCE: each anchor must find its positive among the positives of the whole global batch.

    An embedding e is the mean of the last hidden state over the attention mask, divided by its L2 norm. With n pairs
    (a_i, p_i) and temperature t:

        mean over i of -log(exp(a_i . p_i / t) / sum over j of exp(a_i . p_j / t))

    Sources: van den Oord et al. (arXiv:1807.03748), equation 4; Henderson et al. (arXiv:1705.00652), section 4.4, as
    MultipleNegativesRankingLoss of sentence-transformers, whose scale is 1 / t = 20.
    """

    name: ClassVar[str] = "contrastive"
    in_pairs: ClassVar[bool] = True
    mixes_rows: ClassVar[bool] = True

    temperature: float = option(0.05, Values(above=0))

    def each(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """Returns the loss of each anchor, and ones."""
        import torch
        from torch.nn.functional import cross_entropy

        pairs = embeddings(inputs.output, inputs.batch)
        similarities = pairs[:, 0] @ pairs[:, 1].T / self.temperature
        losses = cross_entropy(similarities, torch.arange(len(pairs), device=pairs.device), reduction="none")
        return losses, torch.ones_like(losses)


def embeddings(output: Any, batch: Any) -> Tensor:
    """Returns normalised embeddings of anchor and positive, [rows, 2, features], in fp32. Raises ValueError.

    output: of the model, for the sequences of all pairs one after another.
    batch: with attention_mask [rows, 2, tokens].
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

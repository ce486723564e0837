"""Contrastive loss of embeddings with in-batch negatives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ringmaster.techniques.loss import LossFunction, LossInputs, Values, YesOrNo, option
from ringmaster.techniques.models.sentence_embeddings import embeddings, last_hidden_state, pooling_of

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Contrastive(LossFunction):
    """InfoNCE: each anchor must find its positive among the positives of the whole global batch.

    An embedding is the mean of the last hidden state over the attention mask, divided by its L2 norm; of a base of
    Sentence-Transformers it is pooled and normalized as the base does. With n pairs (a_i, p_i) and temperature t:

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

        result = self._embeddings(inputs)
        candidates = result[:, 1:].transpose(0, 1).flatten(0, 1)  # all positives, and then all hard negatives
        similarities = result[:, 0] @ candidates.T / self.temperature
        losses = cross_entropy(similarities, torch.arange(len(result), device=result.device), reduction="none")
        return losses, torch.ones_like(losses)

    def _embeddings(self, inputs: LossInputs) -> Tensor:
        """Returns the embeddings in fp32, [rows, sequences, features]. Raises ValueError where there are none."""
        hidden, mask = last_hidden_state(inputs.output), inputs.batch.get("attention_mask")
        if hidden is None:
            raise ValueError(
                f"loss contrastive: the model returns {type(inputs.output).__name__}, which has no last_hidden_state. "
                "To fix: train a model without a head, such as BertModel"
            )
        if mask is None:
            raise ValueError(
                "loss contrastive: the samples have no attention_mask, over which hidden states are averaged. To fix: "
                "give each sample an attention_mask [2, tokens]"
            )
        result = embeddings(hidden.float(), mask.flatten(0, 1), pooling_of(inputs.base))
        return result.reshape(*mask.shape[:2], -1)

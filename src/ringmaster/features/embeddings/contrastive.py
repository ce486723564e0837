"""Contrastive losses with in-batch negatives: of embeddings, and of the token vectors of late interaction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ringmaster.features.embeddings.embedding_rows import NEGATIVE, Embedding
from ringmaster.techniques.data.inference import columns_of_saved
from ringmaster.techniques.data.row_source import retriever_of
from ringmaster.techniques.job_specs import DataSpec
from ringmaster.techniques.loss import LossFunction, LossInputs, Values, WholeNumbers, option
from ringmaster.techniques.models.sentence_embeddings import embeddings, last_hidden_state, pooling_of

if TYPE_CHECKING:
    from torch import Tensor

HARD_NEGATIVES = "hard_negatives"


@dataclass(frozen=True, kw_only=True)
class NumNegatives(WholeNumbers):
    """The number of hard negatives of a sample; false for none, true for one."""

    def allow(self, value: Any) -> bool:
        """Returns whether `value` is a number of negatives, or whether there is one."""
        return isinstance(value, bool) or super().allow(value)

    def __str__(self) -> str:
        return "true, false or a whole number of hard negatives"


@dataclass(frozen=True, kw_only=True)
class Contrastive(LossFunction):
    """InfoNCE: each anchor must find its positive among the positives of the whole global batch.

    An embedding is the mean of the last hidden state over the attention mask, divided by its L2 norm; of a base of
    Sentence-Transformers it is pooled and normalized as the base does. With n pairs (a_i, p_i) and temperature t:

        mean over i of -log(exp(a_i . p_i / t) / sum over j of exp(a_i . p_j / t))

    With hard negatives a sample is a triplet (a_i, p_i, n_i), and the sum over j has exp(a_i . n_j / t) too. There may
    be several hard negatives, which are all candidates of every anchor.

    Sources: van den Oord et al. (arXiv:1807.03748), equation 4; Henderson et al. (arXiv:1705.00652), section 4.4, as
    MultipleNegativesRankingLoss of sentence-transformers, whose scale is 1 / t = 20.
    """

    name: ClassVar[str] = "contrastive"
    in_pairs: ClassVar[bool] = True
    mixes_rows: ClassVar[bool] = True

    temperature: float = option(0.05, Values(above=0))
    hard_negatives: int = option(False, NumNegatives(least=0))

    @classmethod
    def options_of_data(cls, spec: DataSpec) -> Mapping[str, Any]:
        """Returns how many hard negatives the data has, where its columns are known; None for none.

        Raises ValueError where the data cannot be read.
        """
        if spec.kind != Embedding.name or (spec.path is None and not columns_of_saved(spec)):
            return {}
        there = None if spec.path is not None else columns_of_saved(spec)
        retriever = retriever_of(spec)
        negatives = [role for role in Embedding().columns(spec, there).columns if role.startswith(NEGATIVE)]
        return {HARD_NEGATIVES: len(negatives) + (0 if retriever is None else retriever.k) or None}

    def sequences_remedy(self, number: int) -> str:
        """Returns what to do with samples of another number of sequences."""
        remedy = super().sequences_remedy(number)
        return f"set {HARD_NEGATIVES}: {number - 2} in the loss, or {remedy}" if number > 1 else remedy

    @property
    def num_sequences(self) -> int:
        """The anchor, the positive and the hard negatives of a sample."""
        return 2 + self.hard_negatives

    def row_sums(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """Returns the loss of each anchor, and ones."""
        import torch
        from torch.nn.functional import cross_entropy

        similarities = self._similarities(inputs).flatten(1) / self.temperature
        own = torch.arange(len(similarities), device=similarities.device)
        losses = cross_entropy(similarities, own, reduction="none")
        return losses, torch.ones_like(losses)

    def rewards_of(self, inputs: LossInputs) -> Tensor | None:
        """Returns the similarity of each anchor to its positive and to its own hard negatives, [rows, 1 + negatives].

        Returns None without hard negatives.
        """
        if not self.hard_negatives:
            return None
        return self._similarities(inputs).diagonal(dim1=0, dim2=2).T

    def _similarities(self, inputs: LossInputs) -> Tensor:
        """Returns those of each anchor to the positives and hard negatives of all rows, [rows, 1 + negatives, rows]."""
        import torch

        vectors, mask = self._states(inputs)
        result = embeddings(vectors.flatten(0, 1), mask.flatten(0, 1), pooling_of(inputs.base))
        result = result.reshape(*mask.shape[:2], -1)
        return torch.einsum("ad,csd->asc", result[:, 0], result[:, 1:])

    def _states(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """Returns the last hidden states in fp32, [rows, sequences, tokens, features], and their mask without features.

        Raises ValueError where there are none.
        """
        hidden, mask = last_hidden_state(inputs.output), inputs.batch.get("attention_mask")
        if hidden is None:
            raise ValueError(
                f"loss {self.name}: the model returns {type(inputs.output).__name__}, which has no last_hidden_state. "
                "To fix: train a model without a head, such as BertModel"
            )
        if mask is None:
            raise ValueError(
                f"loss {self.name}: the samples have no attention_mask, which marks padding. To fix: give each "
                "sample an attention_mask [2, tokens]"
            )
        return hidden.float().reshape(*mask.shape, -1), mask


@dataclass(frozen=True, kw_only=True)
class LateInteraction(Contrastive):
    """InfoNCE as `Contrastive`, of the similarity that ColBERT computes of the vectors of single tokens.

    With q_t and p_s the last hidden states of the tokens of a question and of a passage, divided by their L2 norms:

        similarity(q, p) = sum over t of the maximum over s of q_t . p_s

    Padding counts on neither side. The paper's linear projection, its markers of questions and passages, and its
    filling up of questions with [MASK] are left to the model and the data.

    Source: Khattab and Zaharia, ColBERT (arXiv:2004.12832), equation 3; in-batch negatives as in ColBERTv2
    (arXiv:2112.01488), section 3.2.
    """

    name: ClassVar[str] = "late-interaction"

    temperature: float = option(1.0, Values(above=0))

    def _similarities(self, inputs: LossInputs) -> Tensor:
        import torch
        from torch.nn.functional import normalize

        states, mask = self._states(inputs)
        vectors, is_token = normalize(states, dim=-1), mask.bool()
        best = []
        for vector, counts in zip(vectors[:, 0], is_token[:, 0], strict=True):  # one at a time, for the sake of memory
            cosines = torch.einsum("td,csud->tscu", vector, vectors[:, 1:])
            cosines = cosines.masked_fill(~is_token[:, 1:].transpose(0, 1), -torch.inf).amax(-1)
            best.append((cosines * counts[:, None, None]).sum(0))
        return torch.stack(best)

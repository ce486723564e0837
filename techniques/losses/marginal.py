"""The marginal likelihood of answers over the passages that a retriever found for their questions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ringmaster.techniques.loss import CAUSAL, PASSAGE_SCORES, LossFunction, LossInputs, WholeNumbers, option
from ringmaster.techniques.losses.preferences import log_probabilities

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RagSequence(LossFunction):
    """RAG-Sequence: a latent passage z explains the whole answer y to a question x, and is summed out.

    With s(z) the retriever's score of the passages z of the best k:

        p(z | x) = exp(s(z)) / sum over z' of exp(s(z'))
        loss = mean over rows of -log sum over z of p(z | x) * product over i of p(y_i | x, z, y_1 ... y_(i-1))

    The scores are those of the data, found when it was prepared: the generator is trained, and the retriever is not.

    Source: Lewis et al., Retrieval-Augmented Generation for Knowledge-Intensive NLP Tasks (arXiv:2005.11401), section
    2.1, whose document encoder and index are frozen too.
    """

    name: ClassVar[str] = "rag-sequence"
    kinds: ClassVar[tuple[str, ...]] = (CAUSAL,)
    in_pairs: ClassVar[bool] = True

    num_passages: int = option(5, WholeNumbers(least=1))

    @property
    def num_sequences(self) -> int:
        """The question and its answer behind each of the passages."""
        return self.num_passages

    def each(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """Returns the negative log-likelihood of each answer, and ones."""
        import torch

        scores = inputs.batch.get(PASSAGE_SCORES)
        if scores is None or inputs.logits is None or inputs.labels is None:
            raise ValueError(
                f"loss {self.name}: the samples have no {PASSAGE_SCORES} and labels. To fix: train a causal language "
                "model on samples with both (docs/losses.md)"
            )
        answers = log_probabilities(inputs.logits, inputs.labels)
        losses = -(scores.float().log_softmax(-1) + answers).logsumexp(-1)
        return losses, torch.ones_like(losses)

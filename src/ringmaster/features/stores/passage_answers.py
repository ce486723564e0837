"""Retrieval-augmented generation with each passage by itself: answers behind passages, and the loss RAG-Sequence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ringmaster.techniques import loss
from ringmaster.techniques.data.row_source import RowSource, SampleContext, retriever_of, text_of
from ringmaster.techniques.data.sources import chat
from ringmaster.techniques.data.sources.completion import Completion, aligned, answered, prompt_with_context
from ringmaster.techniques.job_specs import DataSpec
from ringmaster.techniques.losses.supervised import log_probabilities

if TYPE_CHECKING:
    from torch import Tensor

PASSAGE_SCORES = "passage_scores"
"""The entry [rows, passages] of a batch with the retriever's scores of the passages of each row, the best first."""


class Rag(Completion):
    """A row of tokens for each passage that is found for the prompt, [passages, tokens], and their scores.

    Each has one passage, the prompt and the completion, as the loss rag-sequence wants them. Only the completion has
    labels.
    """

    name = "rag"
    reference = RowSource.reference  # a sample has several rows, with the passages that were found
    packs = False
    version = 1

    def check(self, spec: DataSpec) -> None:
        """Raises ValueError where there is no retriever."""
        super().check(spec)
        if retriever_of(spec) is None:
            raise ValueError("data: kind rag reads passages. To fix: set retriever, such as {store: NAME@champion}")

    def with_passages(self, rows: Sequence[Mapping[str, Any]], *, context: SampleContext) -> list[Mapping[str, Any]]:
        """Returns rows with a prompt for each passage, and the scores of the passages."""
        retriever = context.retriever
        assert retriever is not None, "as checked"
        questions = [str(prompt_with_context(row)) for row in rows]
        return [
            {
                **row,
                "prompts": [retriever.prompt([each.text], question) for each in passages],
                PASSAGE_SCORES: [each.score for each in passages],
            }
            for row, question, passages in zip(rows, questions, context.find_passages(questions), strict=True)
        ]

    def texts(self, row: Mapping[str, Any], *, context: SampleContext) -> Iterable[str]:
        """Returns the prompts, with and without the completion."""
        prompts = row.get("prompts", [row["prompt"]])
        return [text for prompt in prompts for text in (prompt, f"{prompt}{row['completion']}")]

    def sample(self, row: Mapping[str, Any], *, context: SampleContext) -> Mapping[str, Any]:
        """Returns the tokens and labels behind each passage, shorter ones filled up, and the scores."""
        chat.refuse_tools(row)
        text_of(row, "prompt")
        answer = text_of(row, "completion", may_be_blank=True)
        rows = aligned([answered(prompt, [answer], context)[0] for prompt in row["prompts"]], context)
        return {**rows, PASSAGE_SCORES: np.array(row[PASSAGE_SCORES], np.float32)}


@dataclass(frozen=True, kw_only=True)
class RagSequence(loss.LossFunction):
    """RAG-Sequence: a latent passage z explains the whole answer y to a question x, and is summed out.

    With s(z) the retriever's score of the passages z of the best k:

        p(z | x) = exp(s(z)) / sum over z' of exp(s(z'))
        loss = mean over rows of -log sum over z of p(z | x) * product over i of p(y_i | x, z, y_1 ... y_(i-1))

    The scores are those of the data, found when it was prepared: the generator is trained, and the retriever is not.

    Source: Lewis et al., Retrieval-Augmented Generation for Knowledge-Intensive NLP Tasks (arXiv:2005.11401), section
    2.1, whose document encoder and index are frozen too.
    """

    name: ClassVar[str] = "rag-sequence"
    kinds: ClassVar[tuple[str, ...]] = (loss.CAUSAL,)
    in_pairs: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = (PASSAGE_SCORES,)

    num_passages: int = loss.option(5, loss.WholeNumbers(least=1))

    @property
    def num_sequences(self) -> int:
        """The question and its answer behind each of the passages."""
        return self.num_passages

    def row_sums(self, inputs: loss.LossInputs) -> tuple[Tensor, Tensor]:
        """Returns the negative log-likelihood of each answer, and ones."""
        import torch

        scores = inputs.batch.get(PASSAGE_SCORES)
        if scores is None or inputs.logits is None or inputs.labels is None:
            raise ValueError(
                f"loss {self.name}: the samples have no {PASSAGE_SCORES} and labels. To fix: train a causal "
                "language model on samples with both (docs/losses.md)"
            )
        answers = log_probabilities(inputs.logits, inputs.labels)
        losses = -(scores.float().log_softmax(-1) + answers).logsumexp(-1)
        return losses, torch.ones_like(losses)

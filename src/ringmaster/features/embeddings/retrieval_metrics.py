"""Metrics of retrieval: the recall of embeddings, and the ranks of right passages among candidates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ringmaster.techniques.metric import GatheredMetric, Metric, Outputs
from ringmaster.techniques.models.sentence_embeddings import embeddings, last_hidden_state, pooling_of

if TYPE_CHECKING:
    from torch import Tensor

    from ringmaster.techniques.metric import Values


NUM_ANCHORS = 1024  # compared with all positives at a time
NUM_DECIMALS = 6  # of similarities: what differs less differs by the rounding of fp32, and is a tie


class RecallAt1(GatheredMetric):
    """The share of anchors to which their own positive is more similar than the positives of all other rows.

    A row has two sequences, anchor and positive; a third one, such as a hard negative, is left out. The embedding of a
    sequence is the mean of the last hidden states of its tokens, divided by its length, and the similarity is the
    cosine (Reimers & Gurevych, Sentence-BERT, 2019), unless a base of Sentence-Transformers defines another one. The
    order of positives that are equally similar is drawn, and the expected share is returned: if all embeddings are
    equal, it is k / rows. A sample, or a slice, is one of anchors; the positives are always those of all rows.
    """

    name = "recall_at_1"
    higher_is_better = True
    sums = ("anchors", "positives", "embedded_pairs")
    needs = "last_hidden_state [2 * rows, tokens, features], and an attention_mask [rows, 2, tokens] of pairs"
    share_of = "embedded_pairs"
    num_best: ClassVar[int] = 1

    def compute_sums(self, outputs: Outputs) -> Mapping[str, Tensor] | None:
        """Returns the embeddings of anchors and positives, [rows, features] each."""
        states, mask = last_hidden_state(outputs.output), outputs.batch.get("attention_mask")
        if states is None or mask is None or states.ndim != 3 or mask.ndim != 3 or mask.shape[1] < 2:
            return None
        if states.shape[:2] != mask.flatten(0, 1).shape:
            return None
        pairs = (
            embeddings(states.double(), mask.flatten(0, 1), pooling_of(outputs.base)).reshape(*mask.shape[:2], -1).cpu()
        )
        return {"anchors": pairs[:, 0], "positives": pairs[:, 1], "embedded_pairs": pairs[:, 0, 0] * 0 + 1}

    def relate(self, rows: Mapping[str, Values]) -> Mapping[str, Values]:
        """Returns whether each anchor's positive is found, and that it counts, [rows] each."""
        result = self._values(rows["anchors"], rows["positives"])
        return {"found_pairs": result, "embedded_pairs": rows["embedded_pairs"]}

    def value_of_rows(self, rows: Mapping[str, Values], counts: Values) -> Values:
        """Returns the recall of samples of anchors."""
        return np.asarray((counts @ rows["found_pairs"]) / (counts @ rows["embedded_pairs"]))

    def _values(self, anchors: Values, positives: Values) -> Values:
        """Returns the probability that the positive of each anchor is among the k most similar ones, [rows]."""
        result = [np.zeros(0)]
        for first in range(0, len(anchors), NUM_ANCHORS):
            similarity = np.round(anchors[first : first + NUM_ANCHORS] @ positives.T, NUM_DECIMALS)
            own = similarity[np.arange(len(similarity)), first + np.arange(len(similarity))][:, None]
            num_better, num_equal = (similarity > own).sum(1), (similarity == own).sum(1)
            result.append(np.clip((self.num_best - num_better) / num_equal, 0.0, 1.0))
        return np.concatenate(result)


class RecallAt5(RecallAt1):
    """The share of anchors whose own positive is among the five most similar positives."""

    name = "recall_at_5"
    num_best = 5


class HitAt1(Metric):
    """The share of rows whose right passage is ranked before the row's other candidates, its hard negatives.

    With negatives that were mined in a store, these are the passages that a retriever found, and the model ranks them
    again. Candidates of equal scores count as ranked before the right one.
    """

    name = "hit_at_1"
    higher_is_better = True
    sums = ("hits_at_1", "ranked_rows")
    needs = "a loss that scores candidates, such as late-interaction with hard_negatives"
    share_of: ClassVar[str | None] = "ranked_rows"
    reads_whole_rows = True

    def compute_sums(self, outputs: Outputs) -> Mapping[str, Tensor] | None:
        """Returns what the rank of the right candidate adds to each metric of ranks, [rows]; None without scores."""
        rewards = outputs.rewards
        if rewards is None:
            return None
        rank = 1 + (rewards[:, 1:] >= rewards[:, :1]).sum(-1)
        hits = {f"hits_at_{k}": rank <= k for k in (1, 5)}
        return {**hits, "reciprocal_ranks": 1 / rank.double(), "ranked_rows": rank > 0}


class HitAt5(HitAt1):
    """The share of rows whose right passage is among the first five of the row's candidates."""

    name = "hit_at_5"
    sums = ("hits_at_5", "ranked_rows")


class MeanReciprocalRank(HitAt1):
    """The mean of 1 / the rank of the right passage among the row's candidates."""

    name = "mrr"
    sums = ("reciprocal_ranks", "ranked_rows")
    share_of = None

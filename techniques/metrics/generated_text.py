"""Metrics of the text that a model writes to the prompts of held-out rows: ROUGE and exact match.

A row's prompt is what precedes its first label (an encoder-decoder's is its input), and its answer is the first run of
labels. The model writes greedily, at most `evaluation.max_new_tokens` tokens. Rows without labels do not count.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from ringmaster.techniques.metric import IGNORED, Metric, Outputs
from ringmaster.techniques.metrics.token_sequences import f_measure, text_of, words_of

if TYPE_CHECKING:
    from torch import Tensor


class GeneratedText(Metric):
    """The mean over rows of how much what the model writes is like the answer."""

    higher_is_better = True
    needs = "rows of a prompt and an answer, such as of data.kind completion, chat or seq2seq, and a model that writes"
    generates = True
    reads_whole_rows = True

    def compute_sums(self, outputs: Outputs) -> Mapping[str, Tensor] | None:
        """Returns how alike the texts of each row are, and whether it has an answer, [rows]."""
        import torch

        written, labels = outputs.written, outputs.labels
        if written is None or labels is None or labels.ndim != 2:
            return None
        true = [answer_of(row) for row in labels.tolist()]
        alike = [self.likeness(*pair, outputs) if pair[1] else 0.0 for pair in zip(written, true, strict=True)]
        values = torch.tensor([alike, [float(bool(each)) for each in true]], dtype=torch.float64)
        return dict(zip(self.sums, values, strict=True))

    @abstractmethod
    def likeness(self, written: Sequence[int], answer: Sequence[int], outputs: Outputs) -> float:
        """Returns a number from 0 to 1 for two texts, given as tokens."""


class GeneratedExactMatch(GeneratedText):
    """The share of rows of which the model writes exactly the answer, without special tokens and outer spaces."""

    name = "generated_exact_match"
    sums = ("generated_exact", "generated_rows")
    share_of = "generated_rows"

    def likeness(self, written: Sequence[int], answer: Sequence[int], outputs: Outputs) -> float:
        """Returns 1 where both texts are equal, else 0."""
        return float(text_of(written, outputs.tokenizer_dir) == text_of(answer, outputs.tokenizer_dir))


class GeneratedRouge1(GeneratedText):
    """The mean F-measure of common words (Lin, ROUGE, 2004, section 2), which are as those of `rouge_l`."""

    name = "generated_rouge_1"
    sums = ("generated_rouge_1_sums", "generated_rouge_1_rows")
    num_words = 1

    def likeness(self, written: Sequence[int], answer: Sequence[int], outputs: Outputs) -> float:
        """Returns 2 P R / (P + R) of the runs of `num_words` words."""
        one, other = (Counter(self._runs(words_of(each, outputs.tokenizer_dir))) for each in (written, answer))
        total = one.total() + other.total()
        return 2 * (one & other).total() / total if total else 0.0

    def _runs(self, words: Sequence[Hashable]) -> Iterator[tuple[Hashable, ...]]:
        return zip(*(words[first:] for first in range(self.num_words)), strict=False)


class GeneratedRouge2(GeneratedRouge1):
    """The mean F-measure of common pairs of neighbouring words."""

    name = "generated_rouge_2"
    sums = ("generated_rouge_2_sums", "generated_rouge_2_rows")
    num_words = 2


class GeneratedRougeL(GeneratedText):
    """The mean F-measure of the longest common subsequence of words (section 3)."""

    name = "generated_rouge_l"
    sums = ("generated_rouge_l_sums", "generated_rouge_l_rows")

    def likeness(self, written: Sequence[int], answer: Sequence[int], outputs: Outputs) -> float:
        """Returns 2 LCS / (length + length)."""
        return f_measure(*(words_of(each, outputs.tokenizer_dir) for each in (written, answer)))


def answer_of(labels: Sequence[int]) -> list[int]:
    """Returns the first run of labels of a row."""
    first = next((place for place, label in enumerate(labels) if label != IGNORED), len(labels))
    return list(takewhile(lambda label: label != IGNORED, labels[first:]))

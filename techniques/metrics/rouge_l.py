"""ROUGE-L, under teacher forcing."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringmaster.techniques.metric import Metric, Outputs
from ringmaster.techniques.metrics.tokens import NEEDS, answers, most_likely

if TYPE_CHECKING:
    from torch import Tensor

    from ringmaster.techniques.metric import Values


class RougeL(Metric):
    """The mean over rows of the F-measure of the longest common subsequence of words (Lin, ROUGE, 2004, section 3).

    It compares the labelled tokens of a row with the most likely tokens at their positions, given the true tokens
    before each. It is therefore usually higher than ROUGE-L of generated text, in which an error affects what follows.
    Words are runs of letters and digits, in lower case, without stemming. Without a tokenizer, tokens take the place of
    words. Rows without labels do not count.
    """

    name = "rouge_l"
    higher_is_better = True
    sums = ("rouge_l_sums", "rouge_l_rows")
    needs = NEEDS
    reads_whole_rows = True

    def compute_sums(self, outputs: Outputs) -> Mapping[str, Tensor] | None:
        """Returns the F-measure of each row, and whether it has labels, [rows]."""
        import torch

        predicted, labels = most_likely(outputs), outputs.labels
        if predicted is None or labels is None:
            return None
        found, counted = [], []
        for own, true in answers(predicted, labels):
            counted.append(float(bool(true)))
            found.append(f_measure(*(_words(each, outputs.tokenizer_dir) for each in (own, true))))
        values = labels.new_tensor([found, counted], dtype=torch.float64)
        return dict(zip(self.sums, values, strict=True))

    def value(self, sums: Mapping[str, Values]) -> Values:
        """Returns the mean."""
        return sums["rouge_l_sums"] / sums["rouge_l_rows"]


def f_measure(candidate: Sequence[Hashable], reference: Sequence[Hashable]) -> float:
    """Returns 2 P R / (P + R) = 2 LCS / (length + length); 0 where nothing is common."""
    length = len(candidate) + len(reference)
    return 2 * common_subsequence(candidate, reference) / length if length else 0.0


def common_subsequence(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    """Returns the length of the longest common subsequence.

    One bit for each item of `one`, as in Hyyrö, Bit-parallel LCS-length computation revisited (2004): after each item
    of `other`, the zeros are where a row of the table of dynamic programming increases.
    """
    places: dict[Hashable, int] = {}
    for i, item in enumerate(one):
        places[item] = places.get(item, 0) | 1 << i
    every = (1 << len(one)) - 1
    row = every
    for item in other:
        matched = row & places.get(item, 0)
        row = ((row + matched) | (row - matched)) & every
    return len(one) - row.bit_count()


def words(text: str) -> list[str]:
    """Returns the runs of letters and digits of a text, in lower case."""
    return re.findall(r"[^\W_]+", text.lower())


def _words(tokens: Iterable[int], folder: Path | None) -> Sequence[Hashable]:
    ids = list(tokens)
    return ids if folder is None else words(_tokenizer(folder).decode(ids, skip_special_tokens=True))


@cache
def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)

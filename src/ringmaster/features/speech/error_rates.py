"""Word and character error rates of what a model of speech writes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringmaster.techniques.metric import IGNORED, Metric, Outputs

if TYPE_CHECKING:
    from torch import Tensor


class ErrorRate(Metric):
    """The edit distance between the texts that a model writes and the true ones, by the length of the latter.

    Both are sums over rows, as in jiwer and `evaluate`: a row counts by its length. Texts are compared as the tokenizer
    decodes them, without its special tokens; case and punctuation count. What is written depends on no other row.
    """

    higher_is_better = False
    needs = "recordings with their texts, such as of data.kind speech-text, and a model that writes them"
    generates = True
    reads_whole_rows = True
    undefined_where = "no evaluated row has a text"

    def compute_sums(self, outputs: Outputs) -> Mapping[str, Tensor] | None:
        """Returns the edits of each row, and the length of its text, [rows]."""
        import torch

        written, labels, folder = outputs.written, outputs.labels, outputs.tokenizer_dir
        if written is None or labels is None or labels.ndim != 2 or folder is None:
            return None
        texts = [decoded([label for label in row if label != IGNORED], folder) for row in labels.tolist()]
        pairs = [(self.parts(decoded(own, folder)), self.parts(text)) for own, text in zip(written, texts, strict=True)]
        counts = [[edit_distance(*pair) for pair in pairs], [len(true) for _, true in pairs]]
        return dict(zip(self.sums, torch.tensor(counts, dtype=torch.float64), strict=True))

    @abstractmethod
    def parts(self, text: str) -> Sequence[Hashable]:
        """Returns what is counted of a text."""


class WordErrorRate(ErrorRate):
    """The word error rate (WER): words are what blanks separate."""

    name = "word_error_rate"
    sums = ("word_errors", "words")

    def parts(self, text: str) -> Sequence[Hashable]:
        """Returns the words."""
        return text.split()


class CharacterErrorRate(ErrorRate):
    """The character error rate (CER): blanks between words count, those around the text do not."""

    name = "character_error_rate"
    sums = ("character_errors", "characters")

    def parts(self, text: str) -> Sequence[Hashable]:
        """Returns the characters."""
        return text.strip()


def edit_distance(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    """Returns the fewest insertions, deletions and substitutions of items that make one sequence the other one.

    Source: Levenshtein (Soviet Physics Doklady 10, 1966), by rows of the table of Wagner and Fischer (1974).
    """
    before: list[int] = [*range(len(other) + 1)]
    for row, item in enumerate(one, start=1):
        here = [row]
        for place, (above_left, above, wanted) in enumerate(zip(before, before[1:], other, strict=False)):
            here.append(min(above + 1, here[place] + 1, above_left + (item != wanted)))
        before = here
    return before[-1]


def decoded(tokens: Sequence[int], folder: Path) -> str:
    """Returns the text of tokens, by the tokenizer in a folder.

    The tokens of a CTC model are joined already, so that equal neighbours are two letters; a token of unknown text is
    written, as in transformers' examples.
    """
    tokenizer, joins = _tokenizer(folder)
    return str(
        tokenizer.decode(tokens, group_tokens=False) if joins else tokenizer.decode(tokens, skip_special_tokens=True)
    )


@cache
def _tokenizer(folder: Path) -> tuple[Any, bool]:
    """The tokenizer in a folder, and whether it joins equal neighbours, as those of CTC models do."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return tokenizer, hasattr(tokenizer, "word_delimiter_token")

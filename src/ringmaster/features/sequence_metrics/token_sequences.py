"""Metrics of whole rows of tokens: exact match, ROUGE and entities.

Under teacher forcing, the labelled tokens of a row are compared with the tokens that the model finds most likely at
their positions, given the true tokens before them.

Those of generated text compare the answer of a row, the first run of labels, with what the model writes to the prompt,
which is what precedes the first label (an encoder-decoder's is its input): greedily, at most
`evaluation.max_new_tokens` tokens. Rows without labels do not count.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringmaster.techniques.metric import IGNORED, Metric, Outputs, answer_of
from ringmaster.techniques.metrics.classification import ratio

if TYPE_CHECKING:
    from torch import Tensor

    from ringmaster.techniques.metric import Values


NEEDS = "a label and a logit for each token: a language model and samples with labels"


def most_likely(outputs: Outputs) -> Tensor | None:
    """Returns the most likely token at each position, [rows, tokens]; None unless each position has a label."""
    logits, labels = outputs.logits, outputs.labels
    if logits is None or labels is None or labels.ndim != 2 or logits.shape[:-1] != labels.shape:
        return None
    return None if logits.shape[-1] == 1 or labels.is_floating_point() else logits.argmax(-1)


def answers(predicted: Tensor, labels: Tensor) -> Iterator[tuple[list[int], list[int]]]:
    """Yields the predicted and the true tokens at the labelled positions of each row."""
    for row, of in zip(predicted.cpu(), labels.cpu(), strict=True):
        counted = of != IGNORED
        yield row[counted].tolist(), of[counted].tolist()


class ExactMatch(Metric):
    """The share of rows of which every labelled token is the most likely one, given the true tokens before it.

    This is the share of rows whose labelled tokens greedy decoding would generate: it generates them all if and only if
    each is the most likely one after the true tokens before it. Rows without labels do not count.
    """

    name = "exact_match"
    higher_is_better = True
    sums = ("exact_rows", "labelled_rows")
    needs = NEEDS
    share_of = "labelled_rows"
    reads_whole_rows = True

    def compute_sums(self, outputs: Outputs) -> Mapping[str, Tensor] | None:
        """Returns whether each row matches, and whether it has labels, [rows]."""
        predicted, labels = most_likely(outputs), outputs.labels
        if predicted is None or labels is None:
            return None
        counted = labels != IGNORED
        labelled = counted.any(1)
        return {"exact_rows": ((predicted == labels) | ~counted).all(1) & labelled, "labelled_rows": labelled}


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
        result, counted = [], []
        for own, true in answers(predicted, labels):
            counted.append(float(bool(true)))
            result.append(f_measure(*(words_of(each, outputs.tokenizer_dir) for each in (own, true))))
        return dict(zip(self.sums, labels.new_tensor([result, counted], dtype=torch.float64), strict=True))


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


def words_of(tokens: Sequence[int], folder: Path | None) -> Sequence[Hashable]:
    """Returns the words of tokens; the tokens themselves where there is no folder of a tokenizer."""
    return list(tokens) if folder is None else words(str(text_of(tokens, folder)))


def text_of(tokens: Sequence[int], folder: Path | None) -> Hashable:
    """Returns the text of tokens without special tokens and outer spaces; without a tokenizer the tokens."""
    return tuple(tokens) if folder is None else _tokenizer(folder).decode(tokens, skip_special_tokens=True).strip()


@cache
def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


OUTSIDE = "O"
TAG = re.compile(r"O|[BIES]-.+")


class EntityF1(Metric):
    """The harmonic mean of precision and recall of entities of all types together, as of CoNLL-2003 and seqeval.

    An entity is right where its first token, its last token and its type are (Tjong Kim Sang and De Meulder,
    arXiv:cs/0306050, section 2.3). The classes are tags: O, and B-TYPE, I-TYPE, E-TYPE and S-TYPE.
    """

    name = "entity_f1"
    higher_is_better = True
    sums = ("entity_hits", "entities_predicted", "entities_labelled")
    needs = "a label for each token, and the names of the classes: O, and B-TYPE, I-TYPE, E-TYPE or S-TYPE"
    reads_whole_rows = True

    def compute_sums(self, outputs: Outputs) -> Mapping[str, Tensor] | None:
        """Returns how many entities of each row are right, are predicted and are labelled, [rows] each."""
        import torch

        predicted, labels, names = most_likely(outputs), outputs.labels, outputs.class_names
        if predicted is None or labels is None or outputs.logits is None or len(names) != outputs.logits.shape[-1]:
            return None
        if not all(TAG.fullmatch(name) for name in names):
            return None
        counts = []
        for row in answers(predicted, labels):
            own, true = (entities([names[number] for number in tags]) for tags in row)
            counts.append((len(own & true), len(own), len(true)))
        columns = torch.tensor(counts, device=labels.device).reshape(-1, 3).unbind(1)
        return dict(zip(self.sums, columns, strict=True))

    def value(self, sums: Mapping[str, Values]) -> Values:
        """Returns 2 hits / (predicted + labelled)."""
        hits, predicted, labelled = (sums[name] for name in self.sums)
        return ratio(2 * hits, predicted + labelled)


class EntityPrecision(EntityF1):
    """The share of predicted entities that are right."""

    name = "entity_precision"

    def value(self, sums: Mapping[str, Values]) -> Values:
        """Returns hits / predicted."""
        return ratio(sums["entity_hits"], sums["entities_predicted"])


class EntityRecall(EntityF1):
    """The share of labelled entities that are found."""

    name = "entity_recall"

    def value(self, sums: Mapping[str, Values]) -> Values:
        """Returns hits / labelled."""
        return ratio(sums["entity_hits"], sums["entities_labelled"])


def entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """Returns the entities of a row as (type, first token, last token).

    As the script conlleval, it takes wrong sequences: an I-TYPE after O or after another type begins an entity.
    """
    result: set[tuple[str, int, int]] = set()
    first, before = None, OUTSIDE
    for place, tag in enumerate([*tags, OUTSIDE]):
        is_joined = before[0] in "BI" and tag[0] in "IE" and before[2:] == tag[2:]
        if first is not None and not is_joined:
            result.add((before[2:], first, place - 1))
            first = None
        if first is None and tag != OUTSIDE:
            first = place
        before = tag
    return result


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

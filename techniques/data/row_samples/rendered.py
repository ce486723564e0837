"""The tokens of rendered conversations, and which of them lie in given parts of the text.

A tokenizer first finds its special tokens in a text, and encodes what is between them alone. So the ids of these
pieces, joined, are those of the whole, and pieces are encoded word by word (`WordEncoder`), which is faster than by the
tokenizer. A span may begin or end at a special token, or within a piece behind the end of a line (`CutRule.ends_line`).
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmaster.techniques.data.encoding.text_encoder import TextEncoder

Ids = NDArray[np.int64]
Marks = NDArray[np.bool_]

SAMPLE = "user\nA sample,  isn't it? naïve 日本\n\n{0}\nassistant\n  Yes. {1}{0} \n {1}\n"


@dataclass(frozen=True, kw_only=True)
class Span:
    """A part of a text: the characters from `first` up to `end`, without it."""

    first: int
    end: int


class RenderedEncoder:
    """Encodes texts in which special tokens are special, without adding any.

    tokenizer: one of transformers. encoder: encodes texts by it in which special tokens are plain text.
    """

    def __init__(self, tokenizer: Any, encoder: TextEncoder) -> None:
        self._tokenizer, self._encoder = tokenizer, encoder
        self._special: dict[str, NDArray[np.uint32]] = {}
        self._pieces: re.Pattern[str] | None = None
        added = getattr(tokenizer, "added_tokens_decoder", {})
        if encoder.words is None or not all(map(_is_plain, added.values())):
            return
        self._special = {str(token): np.array([number], dtype=np.uint32) for number, token in added.items()}
        # The longest of those that begin at one place is found, as by the tokenizer.
        longest_first = sorted(self._special, key=len, reverse=True)
        self._pieces = re.compile(f"({'|'.join(map(re.escape, longest_first))})" if longest_first else "(?!)()")
        sample = SAMPLE.format(*(longest_first * 2 or ["", ""]))
        if not np.array_equal(self(sample, [])[0], self._by_tokenizer(sample, [])[0]):
            self._pieces = None

    def __call__(self, text: str, spans: Sequence[Span]) -> tuple[Ids, Marks]:
        """Returns the token ids of a text, and which tokens have a part in one of the spans: [tokens] each.

        spans: in order, apart from one another.
        """
        found = self._by_pieces(text, spans) if self._pieces is not None else None
        return self._by_tokenizer(text, spans) if found is None else found

    def _by_tokenizer(self, text: str, spans: Sequence[Span]) -> tuple[Ids, Marks]:
        if not spans:
            ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            return np.asarray(ids, dtype=np.int64), np.zeros(len(ids), dtype=bool)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        places = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        starts, ends = places[:, 0], np.maximum(places[:, 1], places[:, 0] + 1)
        marks = np.zeros(len(starts), dtype=bool)
        for span in spans:
            marks |= (span.first < ends) & (starts < span.end)
        return np.asarray(encoded["input_ids"], dtype=np.int64), marks

    def _by_pieces(self, text: str, spans: Sequence[Span]) -> tuple[Ids, Marks] | None:
        """As `__call__`; None where a span begins or ends where its piece may not be divided."""
        assert self._pieces is not None
        assert self._encoder.words is not None
        rule = self._encoder.words.rule
        edges = [edge for span in spans for edge in (span.first, span.end)]
        parts: list[str] = []
        is_marked: list[bool] = []
        start = 0
        for number, piece in enumerate(self._pieces.split(text)):
            end = start + len(piece)
            inner = edges[bisect_right(edges, start) : bisect_left(edges, end)]
            if inner and (number % 2 or not all(rule.ends_line(piece, edge - start) for edge in inner)):
                return None
            for first, last in pairwise([start, *inner, end]):
                if first < last:
                    parts.append(text[first:last])
                    is_marked.append(bisect_right(edges, first) % 2 == 1)
            start = end
        return self._joined(parts, is_marked)

    def _joined(self, parts: Sequence[str], is_marked: Sequence[bool]) -> tuple[Ids, Marks]:
        """The ids of parts, each a special token or a text without one, and the mark of each token."""
        if not parts:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=bool)
        encoded = iter(self._encoder([part for part in parts if part not in self._special]))
        ids = [next(encoded) if (special := self._special.get(part)) is None else special for part in parts]
        return np.concatenate(ids).astype(np.int64), np.repeat(is_marked, [len(each) for each in ids])


def _is_plain(token: Any) -> bool:
    """Whether an added token is found as it is written, wherever it stands."""
    return not (token.lstrip or token.rstrip or token.single_word or token.normalized)

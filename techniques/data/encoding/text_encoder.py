"""The ids of texts under a tokenizer of transformers, by the quickest way that is known to give them."""

from __future__ import annotations

import json
from typing import Any, cast

import numpy as np

from ringmaster.techniques.data.encoding.cuts import rule_of
from ringmaster.techniques.data.encoding.words import Ids, WordEncoder

SAMPLE = " A sample, isn't it?\n\n  Of 3 lines: naïve \u00e9\u0301 日本 <|endoftext|> <s> </s>\t\r\n"


class TextEncoder:
    """Encodes texts without special tokens; special tokens in a text are plain text.

    Word by word where the ids of words are known to be those of the text, else by the tokenizer's backend in Rust,
    which then computes no offsets, and else by the tokenizer itself.

    words: encodes text in parts that give the ids of the whole; None where text is only encoded whole.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer: Any = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        # A tokenizer in Python may do more than its backend.
        if self._backend is not None and self._by_backend([SAMPLE]) != self._by_tokenizer([SAMPLE]):
            self._backend = None
        rule = None if self._backend is None else rule_of(json.loads(self._backend.to_str()))
        self.words = None if rule is None else WordEncoder(rule=rule, encode=self._by_backend)

    def __call__(self, texts: list[str]) -> list[Ids]:
        """Returns the ids of each text [tokens]."""
        if self.words is not None:
            return self.words(texts)
        encode = self._by_tokenizer if self._backend is None else self._by_backend
        return [np.asarray(ids, dtype=np.uint32) for ids in encode(texts)]

    def _by_backend(self, texts: list[str]) -> list[list[int]]:
        # Each time, as other calls of the tokenizer set them.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True
        return [found.ids for found in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def _by_tokenizer(self, texts: list[str]) -> list[list[int]]:
        encoded = self._tokenizer(texts, add_special_tokens=False, split_special_tokens=True, verbose=False)
        return cast("list[list[int]]", encoded["input_ids"])

"""The special tokens of a tokenizer: where it puts them around texts, and which ones stay plain text in a text."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any, cast

import numpy as np

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
NUM_OWN_TOKENS = 64


def ids_of(tokenizer: Any, texts: Sequence[str], **settings: Any) -> list[list[int]]:
    """Returns the ids of texts by the tokenizer's own call, without special tokens around them."""
    if not texts:
        return []
    return cast(
        "list[list[int]]", tokenizer([*texts], add_special_tokens=False, verbose=False, **settings)["input_ids"]
    )


def own_texts(backend: Any) -> list[str]:
    """Returns texts of the tokens of a backend in Rust, evenly spaced over its vocabulary: each alone, and joined."""
    size = backend.get_vocab_size(with_added_tokens=True)
    ids = dict.fromkeys(np.linspace(0, size - 1, min(size, NUM_OWN_TOKENS)).astype(int).tolist())
    tokens = [token for number in ids if (token := backend.id_to_token(number)) is not None]
    texts = [text for number in ids if (text := backend.decode([number], skip_special_tokens=False))]
    return [*texts, *tokens, "".join(tokens), " ".join(tokens), "".join(texts), " ".join(texts)]


class WrittenTokens:
    """The special tokens of a tokenizer where a text has them: they are plain text, so that no text ends what is read.

    Two sorts are left to the tokenizer, as it cannot read them as text: those whose characters give the token itself,
    as in `EsmTokenizer` and where a Unigram model knows them; and those without a role (such as BOS) whose characters
    are unknown, as a tokenizer may have letters as special tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        roles = {str(token) for name in ROLES if (token := getattr(tokenizer, name, None)) is not None}
        flagged = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        special = [*dict.fromkeys([*flagged, *tokenizer.all_special_tokens])]
        plain, left = list[str](), list[str]()
        for text, ids in zip(special, ids_of(tokenizer, special, split_special_tokens=True), strict=True):
            is_unknown = text not in roles and (not ids or tokenizer.unk_token_id in ids)
            (left if is_unknown or tokenizer.convert_tokens_to_ids(text) in ids else plain).append(text)
        self._plain, self._left = _any_of(plain), _any_of(left)

    def are_plain_in(self, text: str) -> bool:
        """Returns whether a text has one that is plain text."""
        return self._plain is not None and self._plain.search(text) is not None

    def are_left_in(self, text: str) -> bool:
        """Returns whether a text has one that is left to the tokenizer."""
        return self._left is not None and self._left.search(text) is not None

    def split(self, text: str) -> list[tuple[str, bool]]:
        """Returns a text in pieces, each with whether it is a special token that is plain text."""
        pieces = [text] if self._plain is None else self._plain.split(text)
        return [(piece, place % 2 == 1) for place, piece in enumerate(pieces) if piece]


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    """An expression for the longest of some texts that begin at one place; None where there are none."""
    longest_first = sorted(filter(None, texts), key=lambda text: (-len(text), text))
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None


@dataclass(frozen=True, kw_only=True)
class TemplatePiece:
    """Tokens of one type: special ones with their ids, or those of a text, by its number."""

    text: int | None
    ids: tuple[int, ...]
    type: int


def layout_of(tokenizer: Any, *, num_texts: int) -> list[TemplatePiece]:
    """Returns what a tokenizer makes of a text, or of a pair: its special tokens, and the places of the texts.

    It is found with texts of the tokenizer's own tokens. Raises ValueError where the tokenizer takes no pairs.
    """
    if tokenizer.is_fast:
        probes = ("a", *own_texts(tokenizer.backend_tokenizer))
        probe = next((text for text, ids in zip(probes, ids_of(tokenizer, probes), strict=True) if ids), None)
        if probe is None:
            raise ValueError("the tokenizer encodes none of its own tokens. To fix: give another data.tokenizer")
        whole = tokenizer(*[probe] * num_texts, return_token_type_ids=True, verbose=False)
        texts = whole.sequence_ids(0)
    else:
        special = {*tokenizer.all_special_ids}
        numbers = [*islice((number for number in range(len(tokenizer)) if number not in special), num_texts)]
        contents = ([number] for number in numbers)
        whole = tokenizer.prepare_for_model(*contents, return_token_type_ids=True, verbose=False)
        texts = [numbers.index(number) if number in numbers else None for number in whole["input_ids"]]
    tokens = zip(texts, whole["input_ids"], whole["token_type_ids"], strict=True)
    groups = groupby(tokens, key=lambda token: (token[0], token[2]))
    return [TemplatePiece(text=text, ids=tuple(each[1] for each in group), type=kind) for (text, kind), group in groups]


def kept_of(lengths: Sequence[int], most: int, *, is_fast: bool, is_left: bool) -> list[range]:
    """Returns which tokens of a text, or of a pair, are kept where `most` are, as a tokenizer's `longest_first` cuts.

    The longer text of a pair is cut first, and then both. Of an odd number, the longer text keeps one token more (of
    equal ones the second), and with a tokenizer in Python the first text.

    is_fast: whether the tokenizer is one in Rust. is_left: whether it cuts the beginnings of texts.
    """
    if sum(lengths) <= most:
        kept = list(lengths)
    elif len(lengths) == 1:
        kept = [most]
    else:
        one, two = lengths
        half = most // 2 if is_fast and one <= two else most - most // 2
        first = min(one, max(most - two, half))
        kept = [first, most - first]
    return [range(each - num, each) if is_left else range(num) for each, num in zip(lengths, kept, strict=True)]

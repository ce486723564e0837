r"""The ids of texts under a tokenizer, by the quickest way known to give them: word by word where that is exact.

A byte-level BPE first splits text into words by a regular expression (Radford et al., "Language Models are
Unsupervised Multitask Learners", 2019), and then encodes each word alone. Two parts therefore have the ids of the whole
where the cut is between two words, and the expression finds the same words in each part. The expression of GPT-2 is

    's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+

Only its last two alternatives match white space after the first character, and only white space. So no word continues
from a visible character to a blank. It looks ahead by one character, after white space only, and never back. A cut
between a visible character and a blank is therefore exact. Expressions of newer models let line ends follow signs
(`[^\s\p{L}\p{N}]+[\r\n]*`). With these, a cut is exact between a visible character and a space.
"""

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmaster.techniques.data.row_files import FileText
from ringmaster.techniques.data.special_tokens import WrittenTokens, ids_of, own_texts

logger = logging.getLogger(__name__)

# Whatever might count as white space in some version of Unicode or of an engine; everything else is visible.
BLANK = r"\s\x1c-\x1f\x7f-\xa0\xad\u1680\u180e\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3000\ufeff"
_BLANK = re.compile(f"[{BLANK}]")
# Characters without a shape of their own: controls, fillers, and those that choose the form of the one before them.
_SHAPELESS = r"\x00-\x1f\u061c\u115f\u1160\u2800\u3164\uffa0\ufe00-\ufe0f\U000e0000-\U000e0fff"
VISIBLE = re.compile(f"[^{BLANK}{_SHAPELESS}]")


@dataclass(frozen=True, kw_only=True)
class CutRule:
    """Where text may be cut: after a visible character, before one of some blanks.

    before: these blanks.
    words: an expression whose matches, one after another, are all of a text; each may be encoded alone.
    one_line_end: whether `ends_line` holds behind a single line end only, and not behind several.
    """

    before: str
    words: re.Pattern[str]
    one_line_end: bool = False

    @cached_property
    def _cut(self) -> re.Pattern[str]:
        return re.compile(rf"(?s:.*)(?<=[^{BLANK}])([{self.before}])")  # the last one, as `.*` takes all it can

    def ends_line(self, text: str, place: int) -> bool:
        """Returns whether a line end is before a place, and a visible character behind it: a cut there is exact.

        No word continues from a line end to a visible character. With the expression of GPT-2, white space before a
        visible character is two words, the last character alone, and at the end of a text one.
        """
        if place < 1 or text[place - 1] != "\n" or _BLANK.match(text, place) or place == len(text):
            return False
        return not (self.one_line_end and place > 1 and _BLANK.match(text, place - 2))

    def last_cut(self, text: str) -> int:
        """Returns the last place where `text` may be cut, 0 if there is none."""
        match = self._cut.match(text)
        return 0 if match is None else match.start(1)


def _between_cuts(before: str) -> str:
    """An expression for the text up to the next cut, whatever characters it has."""
    return rf"[{BLANK}]*[^{BLANK}]+(?:(?![{before}])[{BLANK}]+[^{BLANK}]*)*|[{BLANK}]+"


def _words_of_gpt2() -> str:
    """The expression of GPT-2 for ASCII; a word next to another character continues to the next cut.

    Classes of other characters differ between versions of Unicode. `++` keeps a match from giving characters back.
    """
    space, then_ascii = r"\t-\r ", r"(?![^\x00-\x7f])"
    signs = rf"[^{space}A-Za-z0-9\x80-\U0010ffff]"
    spaces = rf"(?=[{space}]++{then_ascii})(?:[{space}]+(?![^{space}])|[\t-\r])"
    ascii_words = (rf" ?{kind}++{then_ascii}" for kind in ("[A-Za-z]", "[0-9]", signs))
    return "|".join(("'(?:[stmd]|re|ve|ll)", *ascii_words, spaces, _between_cuts(r" \n\t")))


GPT2 = CutRule(before=r" \n\t", words=re.compile(_words_of_gpt2()), one_line_end=True)
SPACES = CutRule(before=" ", words=re.compile(_between_cuts(" ")))

_NUMBERS = (r"\p{N}", r"\p{N}{1,3}")
# The expressions of Qwen 2 and 3, and of Llama 3 and GPT-4.
KNOWN_EXPRESSIONS = frozenset(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    + numbers
    + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for numbers in _NUMBERS
)


def rule_of(tokenizer: Mapping[str, Any]) -> CutRule | None:
    """Returns the rule of a tokenizer, given as the content of its `tokenizer.json`; None where no cut is known exact.

    The text of special tokens must be encoded as any other text. Tokens that were added to these, normalizers other
    than NFC, and dropout in the BPE may reach across a cut.
    """
    normalizer, splitting = tokenizer.get("normalizer"), tokenizer.get("pre_tokenizer") or {}
    may_reach_across = (
        (normalizer is not None and normalizer.get("type") != "NFC")
        or any(not token.get("special") for token in tokenizer.get("added_tokens") or ())
        or tokenizer.get("model", {}).get("dropout")
    )
    if may_reach_across:
        return None
    if _is_byte_level(splitting, use_regex=True):
        return GPT2
    parts = list(splitting.get("pretokenizers") or []) if splitting.get("type") == "Sequence" else []
    if len(parts) == 2 and _is_known_split(parts[0]) and _is_byte_level(parts[1], use_regex=False):
        return SPACES
    return None


def _is_byte_level(part: Mapping[str, Any], *, use_regex: bool) -> bool:
    is_given = part.get("type") == "ByteLevel" and part.get("add_prefix_space") is False
    return is_given and part.get("use_regex", True) is use_regex


def puts_no_space(backend: Any) -> bool:
    """Returns whether a backend is byte-level, and puts no space before a text."""
    splitting = json.loads(backend.to_str()).get("pre_tokenizer") or {}
    parts = splitting.get("pretokenizers") or [splitting]
    return any(part.get("type") == "ByteLevel" and part.get("add_prefix_space") is False for part in parts)


def _is_known_split(part: Mapping[str, Any]) -> bool:
    is_plain = part.get("type") == "Split" and part.get("behavior") == "Isolated" and not part.get("invert")
    return is_plain and part.get("pattern", {}).get("Regex") in KNOWN_EXPRESSIONS


Ids = NDArray[np.uint32]

MIN_OF_A_BATCH = 32
# Of each of two generations, which together take about 100 MB.
MAX_WORDS, MAX_CHARACTERS = 200_000, 8_000_000


class WordEncoder:
    """Encodes text by the words of a rule, about three times as fast as the tokenizer on one core.

    encode: the ids of texts, without special tokens. The ids of words, joined, must be the ids of the text.
    """

    def __init__(self, *, rule: CutRule, encode: Callable[[list[str]], list[list[int]]]) -> None:
        self.rule = rule
        self._encode = encode
        # The ids of words as bytes. A word that was not used for a generation is forgotten.
        self._ids: dict[str, bytes] = {}
        self._older: dict[str, bytes] = {}
        self._num_characters = 0

    def __call__(self, texts: Sequence[str]) -> list[Ids]:
        """Returns the ids of each text [tokens]."""
        find, unknown = self.rule.words.findall, dict[int, list[str]]()
        ids: list[bytes] = []
        for place, text in enumerate(texts):
            words = find(text)
            try:  # as all words of most short texts are known
                ids.append(b"".join(map(self._ids.__getitem__, words)))
            except KeyError:
                unknown[place] = words
                ids.append(b"")
        if unknown:
            self._learn(set(chain.from_iterable(unknown.values())))
        for place, words in unknown.items():
            ids[place] = b"".join(map(self._ids.__getitem__, words))
        return [np.frombuffer(each, dtype=np.uint32) for each in ids]

    def _learn(self, used: set[str]) -> None:
        """Encodes those of some words that are unknown."""
        unknown = used.difference(self._ids)
        if len(self._ids) > MAX_WORDS or self._num_characters > MAX_CHARACTERS:
            self._older, self._ids, self._num_characters = self._ids, {}, 0
            unknown = used
        self._num_characters += sum(map(len, unknown))
        remembered = unknown.intersection(self._older)
        self._ids.update((word, self._older[word]) for word in remembered)
        new = list(unknown - remembered)
        for word, ids in zip(new, self._encode(new), strict=True):
            self._ids[word] = np.asarray(ids, dtype=np.uint32).tobytes()


SAMPLE = " A sample, isn't it?\n\n  Of 3 lines: naïve \u00e9\u0301 日本 <|endoftext|> <s> </s>\t\r\n"


class TextEncoder:
    """Encodes texts without special tokens around them, as the tokenizer's own call does.

    Special tokens that are written in a text are plain text, see `WrittenTokens`. A text is encoded word by word where
    the ids of words are known to be those of the text, else by the tokenizer's backend in Rust, which then computes no
    offsets, and else by the tokenizer itself. Both shorter ways must agree with it on texts of its own tokens.

    words: encodes text in parts that give the ids of the whole; None where text is only encoded whole.
    written: the special tokens that are plain text where they are written.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer: Any = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self.written = WrittenTokens(tokenizer)
        self.words: WordEncoder | None = None
        if self._backend is None:
            return
        samples = [text for text in (SAMPLE, *own_texts(self._backend)) if not self.written.are_left_in(text)]
        expected = self._by_tokenizer(samples)
        # A tokenizer in Python may do more than its backend.
        if self._by_backend(samples) != expected:
            self._backend = None
            return
        if (rule := rule_of(json.loads(self._backend.to_str()))) is not None:
            words = WordEncoder(rule=rule, encode=self._by_backend)
            self.words = words if [each.tolist() for each in words(samples)] == expected else None

    def __call__(self, texts: Sequence[str]) -> list[Ids]:
        """Returns the ids of each text [tokens]."""
        is_left = [self._backend is None or self.written.are_left_in(text) for text in texts]
        others = [text for text, left in zip(texts, is_left, strict=True) if not left]
        read = iter(self._by_tokenizer([text for text, left in zip(texts, is_left, strict=True) if left]))
        quick = iter(self.words(others) if self.words is not None else self._by_backend(others) if others else ())
        return [np.asarray(next(read if left else quick), dtype=np.uint32) for left in is_left]

    def _by_backend(self, texts: Sequence[str]) -> list[list[int]]:
        # Each time, as other calls of the tokenizer set them.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True
        # A batch wakes all threads of the backend, which takes longer than some words.
        if len(texts) < MIN_OF_A_BATCH:
            return [self._backend.encode(text, add_special_tokens=False).ids for text in texts]
        return [result.ids for result in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def _by_tokenizer(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids by the tokenizer's own call; special tokens that are written in a text are plain text.

        A tokenizer in Rust encodes them together with the text around them; else they are encoded apart from it.
        """
        parts: list[tuple[int, str, bool]] = []  # the place of the text, and whether special tokens are plain text
        for place, text in enumerate(texts):
            if self._tokenizer.is_fast and not self.written.are_left_in(text):
                parts.append((place, text, self.written.are_plain_in(text)))
            else:
                parts += [(place, *piece) for piece in self.written.split(text)]
        read, plain = ([piece for _, piece, is_plain in parts if is_plain is each] for each in (False, True))
        ids = {
            False: iter(ids_of(self._tokenizer, read)),
            True: iter(ids_of(self._tokenizer, plain, split_special_tokens=True)),
        }
        result: list[list[int]] = [[] for _ in texts]
        for place, _, is_plain in parts:
            result[place] += next(ids[is_plain])
        return result


PIECE_CHARACTERS = 1 << 16
# Encoding takes up to 200 bytes of memory a character.
MAX_CHARACTERS_AT_ONCE = 32_000_000


def in_pieces(text: str | FileText, *, rule: CutRule | None) -> Iterator[tuple[str, bool]]:
    """Yields a text in pieces of about `PIECE_CHARACTERS`, each with whether the text ends with it.

    They are cut by a rule, and are longer where it finds no cut; without a rule, the text is one piece. Raises
    ValueError where a text is too long to be encoded whole.
    """
    if isinstance(text, str) and len(text) <= PIECE_CHARACTERS:
        yield text, True
        return
    parts: Iterable[str]
    if isinstance(text, str):
        parts = (text[start : start + PIECE_CHARACTERS] for start in range(0, len(text), PIECE_CHARACTERS))
    else:
        parts = text.pieces()
    kept: list[str] = []
    for part in parts:
        place = 0 if rule is None else rule.last_cut(part)
        if place:
            yield "".join((*kept, part[:place])), False
            kept = []
        kept.append(part[place:])
        _check_length(kept, rule)
    yield "".join(kept), True


def _check_length(kept: list[str], rule: CutRule | None) -> None:
    length = sum(map(len, kept))
    if not MAX_CHARACTERS_AT_ONCE <= length < MAX_CHARACTERS_AT_ONCE + len(kept[-1]):
        return
    if rule is None:
        raise ValueError(
            f"a text has more than {MAX_CHARACTERS_AT_ONCE:,} characters, and the given tokenizer encodes text only "
            f"whole. To fix: divide it into shorter documents, e.g. one JSONL row for each paragraph, or leave out the "
            f"tokenizer to train one"
        )
    logger.warning(
        "more than %s characters of a text are without a space after a word: they are encoded at once, which takes "
        "about %s GB of memory for each further 100 million",
        f"{MAX_CHARACTERS_AT_ONCE:,}",
        20,
    )

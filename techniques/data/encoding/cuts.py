r"""Places where text may be cut so that the ids of its parts, joined, are the ids of the whole.

A byte-level BPE first splits text into words by a regular expression (Radford et al., "Language Models are
Unsupervised Multitask Learners", 2019), and then encodes each word alone. Two parts therefore have the ids of the whole
where the cut is between two words, and the expression finds the same words in each part. The expression of GPT-2 is

    's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+

Only its last two alternatives match white space after the first character, and only white space. So no word goes on
from a visible character to a blank. It looks ahead by one character, after white space only, and never back. A cut
between a visible character and a blank is therefore exact. Expressions of newer models let line ends follow signs
(`[^\s\p{L}\p{N}]+[\r\n]*`). With these, a cut is exact between a visible character and a space.

`tests/unit/runtime/data/encoding/test_cuts.py` compares parts with wholes on drawn text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Whatever might count as white space in some version of Unicode or of an engine; everything else is visible.
BLANK = r"\s\x1c-\x1f\x7f-\xa0\xad\u1680\u180e\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3000\ufeff"
_BLANK = re.compile(f"[{BLANK}]")
# Characters that are searched for a cut at first; four times as many at each further attempt.
FIRST_SEARCH = 256


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
    _cut: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Compiles what finds a cut."""
        object.__setattr__(self, "_cut", re.compile(rf"(?<=[^{BLANK}])[{self.before}]"))

    def ends_line(self, text: str, place: int) -> bool:
        """Returns whether a line end is before a place, and a visible character behind it: a cut there is exact.

        No word goes on from a line end to a visible character. With the expression of GPT-2, white space before a
        visible character is two words, the last character alone, and at the end of a text one.
        """
        if place < 1 or text[place - 1] != "\n" or _BLANK.match(text, place) or place == len(text):
            return False
        return not (self.one_line_end and place > 1 and _BLANK.match(text, place - 2))

    def last_cut(self, text: str) -> int:
        """Returns the last place where `text` may be cut, 0 if there is none."""
        length = FIRST_SEARCH
        while True:
            start = max(len(text) - length, 0)
            places = [match.start() for match in self._cut.finditer(text, start)]
            if places or start == 0:
                return places[-1] if places else 0
            length *= 4


def _between_cuts(before: str) -> str:
    """An expression for the text up to the next cut, whatever characters it has."""
    return rf"[{BLANK}]*[^{BLANK}]+(?:(?![{before}])[{BLANK}]+[^{BLANK}]*)*|[{BLANK}]+"


def _words_of_gpt2() -> str:
    """The expression of GPT-2 for ASCII; a word beside another character goes on to the next cut.

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

    The text of special tokens must be encoded as any other text. Tokens that were added beside these, normalizers other
    than NFC, and dropout in the BPE may reach across a cut.
    """
    normalizer, splitting = tokenizer.get("normalizer"), tokenizer.get("pre_tokenizer") or {}
    if normalizer is not None and normalizer.get("type") != "NFC":
        return None
    if any(not token.get("special") for token in tokenizer.get("added_tokens") or ()):
        return None
    if tokenizer.get("model", {}).get("dropout"):
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


def _is_known_split(part: Mapping[str, Any]) -> bool:
    is_plain = part.get("type") == "Split" and part.get("behavior") == "Isolated" and not part.get("invert")
    return is_plain and part.get("pattern", {}).get("Regex") in KNOWN_EXPRESSIONS

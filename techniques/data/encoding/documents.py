"""Documents, and their division into pieces that are encoded one at a time."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ringmaster.techniques.data.encoding.cuts import CutRule
from ringmaster.techniques.data.rows import FileText
from ringmaster.techniques.interface.data_source import Row

logger = logging.getLogger(__name__)

PIECE_CHARACTERS = 1 << 16
# Encoding takes up to 200 bytes of memory a character.
MOST_CHARACTERS_AT_ONCE = 32_000_000


@dataclass(frozen=True, kw_only=True)
class Document:
    """A text, or the token ids of a text that is already tokenised.

    held_out: whether it is excluded from training.
    ends: whether the text ends with this content; if not, the next document goes on with it.
    """

    content: str | Sequence[int]
    held_out: bool
    ends: bool = True


def documents_of(rows: Iterable[Row]) -> Iterator[Document]:
    """Yields the documents of rows; those of text files in pieces. Raises ValueError where text and ids are mixed."""
    kind: str | None = None
    for row in rows:
        content: FileText | str | list[int] = row.content
        found = "token ids" if isinstance(content, list) else "text"
        kind = kind or found
        if found != kind:
            raise ValueError(
                f"{row.file}, line {row.number} has {found}, and the rows before it have {kind}. To fix: give all rows "
                f"as one of the two"
            )
        if isinstance(content, FileText):
            for piece in content.pieces():
                yield Document(content=piece, held_out=row.held_out, ends=False)
            content = ""
        yield Document(content=content, held_out=row.held_out)


def in_pieces(documents: Iterable[Document], *, rule: CutRule | None) -> Iterator[Document]:
    """Yields the same texts in pieces of about `PIECE_CHARACTERS`, cut by a rule; without one, every text whole.

    A piece is longer where the rule finds no cut. Raises ValueError where a text is too long to be encoded whole.
    """
    kept: list[str] = []
    for document in documents:
        assert isinstance(document.content, str)
        if document.ends and not kept and len(document.content) <= PIECE_CHARACTERS:
            yield document
            continue
        for part, ends in _parts(document.content, ends=document.ends):
            place = len(part) if ends else 0 if rule is None else rule.last_cut(part)
            if place or ends:
                yield Document(content="".join((*kept, part[:place])), held_out=document.held_out, ends=ends)
                kept = [] if ends else [part[place:]]
            else:
                kept.append(part)
                _check_length(kept, rule)


def _parts(text: str, *, ends: bool) -> Iterator[tuple[str, bool]]:
    if len(text) <= PIECE_CHARACTERS:
        yield text, ends
        return
    for start in range(0, len(text), PIECE_CHARACTERS):
        yield text[start : start + PIECE_CHARACTERS], ends and start + PIECE_CHARACTERS >= len(text)


def _check_length(kept: list[str], rule: CutRule | None) -> None:
    length = sum(map(len, kept))
    if not MOST_CHARACTERS_AT_ONCE <= length < MOST_CHARACTERS_AT_ONCE + len(kept[-1]):
        return
    if rule is None:
        raise ValueError(
            f"a text has more than {MOST_CHARACTERS_AT_ONCE:,} characters, and the given tokenizer encodes text only "
            f"whole. To fix: divide it into shorter documents, e.g. one JSONL row for each paragraph, or leave out the "
            f"tokenizer to train one"
        )
    logger.warning(
        "more than %s characters of a text are without a space after a word: they are encoded at once, which takes "
        "about %s GB of memory for each further 100 million",
        f"{MOST_CHARACTERS_AT_ONCE:,}",
        20,
    )

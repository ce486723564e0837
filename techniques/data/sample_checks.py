"""Whether samples have the content of their rows: compared with the library's own calls, and counted where it was
lost."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringmaster.techniques.data.arrow_files import LABELS, MASK, SPLITS, TOKENS, Array, Table, values_of
from ringmaster.techniques.data.encoded_rows import EncodedBlock
from ringmaster.techniques.data.row_files import hash_bytes
from ringmaster.techniques.data.row_kind import IMAGE
from ringmaster.techniques.data.row_tokenizer import RowTokenizer

PIXELS = "pixel_values"
OF_TOKENS = frozenset({TOKENS, MASK, LABELS, "token_type_ids"})
"""The columns of samples that are known by their tokens."""
FACTS = ("loss", "sample_hash", "source_hash")
"""What is known of each sample: its `ContentLoss`, a hash of what a model reads of it, and one of its row's values."""
MAX_LOST_SHARE = 0.5
"""Above this share of samples that have lost their rows' content, no model is trained on them."""
EQUAL_REMEDY = (
    "raise seq_len where the rows differ only behind what is cut off; or set a data.tokenizer or data.processor that "
    "distinguishes them, or other columns"
)
FIRST_COMPARED = 32
"""Rows of a file that are compared in its first rows that are read together; half as many in the next ones, and so on
down to one."""
MAX_SHOWN_VALUES = 6
ROUNDING = 1e-5
"""How far normalised pixels may differ, as the order of operations does."""


class ContentLoss(IntEnum):
    """How the sample of a row has lost the row's content."""

    NONE = 0
    EMPTY = 1
    UNKNOWN = 2
    ONE_COLOUR = 3
    SAME_ANSWERS = 4


class LossDescription(NamedTuple):
    """A kind of lost content, described for users: what the samples are, and what to do."""

    what: str
    remedy: str


DESCRIPTIONS = {
    ContentLoss.EMPTY: LossDescription(
        "have no token but special ones", "name another column, or remove these rows; or set another data.tokenizer"
    ),
    ContentLoss.UNKNOWN: LossDescription(
        "consist of the unknown token alone", "set data.tokenizer to one that knows the characters of these rows"
    ),
    ContentLoss.ONE_COLOUR: LossDescription("are of one colour", "check the files of these images, or remove them"),
    ContentLoss.SAME_ANSWERS: LossDescription(
        "have one text as both answers",
        "give answers that differ, or remove these rows; name other columns of answers, or raise seq_len where they "
        "differ only behind what is cut off",
    ),
}


def compared_places(num_rows: int, *, num_before: int) -> list[int]:
    """Returns which of some rows are compared with the library's own call, evenly spread.

    num_before: how many such groups of rows were read before.
    """
    number = min(max(FIRST_COMPARED >> num_before, 1), num_rows)
    return [place * num_rows // number for place in range(number)]


def check_equal(sample: Mapping[str, Any], reference: Mapping[str, Any], *, max_length: int) -> None:
    """Raises ValueError where an array of a sample differs from what the library's own call gives for its row.

    A sample may leave out types of tokens that are all 0, as models read them where there are none.

    max_length: the number of tokens to which samples are cut.
    """
    for name, expected in reference.items():
        wanted = np.asarray(expected)
        values = np.asarray(sample.get(name, np.zeros_like(wanted)))
        if name != PIXELS and wanted.dtype.kind != "f":
            values, wanted = (each[..., :max_length] if each.ndim else each for each in (values, wanted))
        tolerance = ROUNDING if wanted.dtype.kind == "f" else 0.0
        if values.shape == wanted.shape and np.allclose(values, wanted, rtol=tolerance, atol=tolerance):
            continue
        raise ValueError(
            f"its {name} are {_shown_from(values, wanted)} and the library's own call gives "
            f"{_shown_from(wanted, values)}. To fix: set data.tokenizer or data.processor to one that gives the same "
            "in both ways, or give the rows as input_ids"
        )


def _shown_from(values: Array, others: Array) -> str:
    """Some values of an array, from the first one on that another array does not have there."""
    one, two = values.reshape(-1), others.reshape(-1)
    common = min(len(one), len(two))
    differing = np.flatnonzero(one[:common] != two[:common])
    start = int(differing[0]) if len(differing) else common
    some = ", ".join(map(str, one[start : start + MAX_SHOWN_VALUES].tolist()))
    return f"[{some}{', ...' if start + MAX_SHOWN_VALUES < len(one) else ''}] from place {start} of {len(one)}"


def content_facts(
    table: Table, sources: Sequence[Mapping[str, Any]], *, tokenizer: RowTokenizer | None
) -> dict[str, NDArray[Any]]:
    """Returns what is known of the content of samples, as columns: see `FACTS`.

    sources: the values of which each sample was made, by role. tokenizer: None where samples are not of text.
    """
    losses, hashes = np.zeros(table.num_rows, np.uint8), np.zeros(table.num_rows, np.uint64)
    sources_are_read = False
    if TOKENS in table.column_names and tokenizer is not None:
        values, lengths = values_of(table[TOKENS])
        if lengths is not None and len(lengths):
            losses = _losses_of_tokens(values, lengths, tokenizer)
            if values.shape[1:] == (2,) and {*table.column_names} == {TOKENS, LABELS}:  # two answers
                are_same = _sums(values[:, 0] != values[:, 1], lengths) == 0
                losses[are_same & (losses == ContentLoss.NONE)] = ContentLoss.SAME_ANSWERS
            # Samples with further columns, such as those of a prompt that rewards read, are not equal by their tokens.
            if OF_TOKENS.issuperset(table.column_names):
                hashes, sources_are_read = _hashes(np.split(values, np.cumsum(lengths)[:-1])), True
    elif PIXELS in table.column_names:
        images, _ = values_of(table[PIXELS])
        losses = np.where(_are_of_one_colour(images), ContentLoss.ONE_COLOUR, ContentLoss.NONE).astype(np.uint8)
        hashes, sources_are_read = _hashes(images), True
    known = map(_source_hash, sources) if sources_are_read else (0 for _ in sources)
    return dict(zip(FACTS, (losses, hashes, np.fromiter(known, np.uint64, count=len(sources))), strict=True))


def _hashes(samples: Iterable[Array]) -> NDArray[np.uint64]:
    hashes = (hashlib.blake2b(np.ascontiguousarray(each).data, digest_size=8).digest() for each in samples)
    return np.frombuffer(b"".join(hashes), dtype=">u8").astype(np.uint64)


def _losses_of_tokens(values: Array, lengths: NDArray[np.int64], tokenizer: RowTokenizer) -> NDArray[np.uint8]:
    """How the samples of tokens, [all lengths, ...], have lost their content: [samples]."""
    unknown = tokenizer.unknown_content_id
    special = [token for token in tokenizer.special_token_ids if token != unknown]
    is_content = ~np.isin(values, special)
    num_content = _sums(is_content, lengths)
    num_known = num_content if unknown is None else _sums(is_content & (values != unknown), lengths)
    losses = np.where(num_content == 0, ContentLoss.EMPTY, np.where(num_known == 0, ContentLoss.UNKNOWN, 0))
    return np.asarray(losses.reshape(len(lengths), -1).max(-1, initial=0), np.uint8)


def _sums(flags: Array, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """The sums of flags [all lengths, ...] over each row: [rows, ...]."""
    before = np.concatenate([np.zeros_like(flags[:1], np.int64), np.cumsum(flags, axis=0, dtype=np.int64)])
    ends = np.cumsum(lengths)
    return np.asarray(before[ends] - before[ends - lengths])


def _are_of_one_colour(images: Array) -> NDArray[np.bool_]:
    """Whether all pixels of an image are equal: [images]."""
    return np.asarray((images == images[..., :1, :1]).reshape(len(images), -1).all(-1))


def _source_hash(source: Mapping[str, Any]) -> int:
    """A hash of what a sample was made of; that of an image's file is of its bytes."""
    plain = {role: value if value is None else _comparable(role, value) for role, value in source.items()}
    return int.from_bytes(hash_bytes(plain))


def _comparable(role: str, value: Any) -> Any:
    """A value of a row as JSON, which is equal for equal contents."""
    is_image = role.startswith(IMAGE)
    if isinstance(value, str) and not is_image:
        return value
    if is_image:
        if hasattr(value, "getbands"):
            return [value.mode, hashlib.sha256(value.tobytes()).hexdigest()]
        if isinstance(value, Mapping):
            value = value["bytes"] if value.get("bytes") is not None else value.get("path")
        if isinstance(value, str) and "://" not in value:
            value = Path(value).read_bytes()
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    return value if isinstance(value, (str, int, float, list, dict, type(None))) else repr(value)


class SplitContent:
    """What is known of the content of the samples of a split.

    losses, samples, sources: the columns of `content_facts` of all rows that are read, [rows].
    """

    def __init__(self, blocks: Sequence[EncodedBlock], *, split: str) -> None:
        self._blocks = blocks
        self._rows = [np.flatnonzero(each.split(split) & (each.column("has_sample") != 0)) for each in blocks]
        self.losses, self.samples, self.sources = map(self._column, FACTS)

    def _column(self, name: str) -> NDArray[Any]:
        columns = (block.column(name)[rows] for block, rows in zip(self._blocks, self._rows, strict=True))
        return np.concatenate([*columns])

    def place(self, number: int) -> str:
        """Returns the file and the row of a sample."""
        for block, rows in zip(self._blocks, self._rows, strict=True):
            if number < len(rows):
                file, row = block.place(int(rows[number]))
                return f"{Path(file).name}, row {row}"
            number -= len(rows)
        raise AssertionError("a sample is of one of the parts")

    def problems(self) -> Iterator[tuple[str, str, float]]:
        """Yields what happened to some samples, what to do, and the share of the samples to which it happened."""
        total = len(self.losses)
        for loss, (what, remedy) in DESCRIPTIONS.items():
            if len(lost := np.flatnonzero(self.losses == loss)):
                yield f"{len(lost):,} of {total:,} {what}, such as {self.place(lost[0])}", remedy, len(lost) / total
        sources, first = np.unique(self.sources, return_index=True)
        same, counts = np.unique(self.samples[first], return_counts=True)
        if num_merged := len(sources) - len(same):
            one, two = first[self.samples[first] == same[np.argmax(counts > 1)]][:2]
            yield (
                (
                    f"{num_merged:,} of {len(sources):,} different rows became the same as another one, such as "
                    f"{self.place(two)} and {self.place(one)}"
                ),
                EQUAL_REMEDY,
                num_merged / len(sources),
            )


def notes_and_faults(blocks: Sequence[EncodedBlock]) -> tuple[list[str], list[str]]:
    """Returns what users should know of samples that lost their rows' content, and why no model is trained on them."""
    notes, faults = list[str](), list[str]()
    for split in SPLITS:
        for what, remedy, share in SplitContent(blocks, split=split).problems():
            notes.append(f"{'' if split == 'training' else 'held out: '}{what}")
            if share > MAX_LOST_SHARE:
                faults.append(f"{notes[-1]}. To fix: {remedy}")
    return notes, faults


def notes_on_unknown(num_unknown: Mapping[str, int], num_tokens: Mapping[str, int]) -> tuple[list[str], list[str]]:
    """Returns what users should know of unknown tokens of each split, and why no model is trained on them."""
    notes, faults = list[str](), list[str]()
    for split in SPLITS:
        if num_unknown[split]:
            of = "" if split == "training" else "held out: "
            notes.append(f"{of}{num_unknown[split]:,} of {num_tokens[split]:,} tokens are the unknown token")
            if num_unknown[split] > MAX_LOST_SHARE * num_tokens[split]:
                faults.append(f"{notes[-1]}. To fix: {DESCRIPTIONS[ContentLoss.UNKNOWN].remedy}")
    return notes, faults

"""Passages of a knowledge store: texts with ids, or parts of them."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np

from ringmaster.features.stores.job import StoreSettings
from ringmaster.techniques.data.arrow_files import TOKENS, Table, open_split, values_of
from ringmaster.techniques.data.row_files import content_hash
from ringmaster.techniques.data.row_source import RowSource, SampleContext, text_of
from ringmaster.techniques.data_source import DataOptions, Row, column
from ringmaster.techniques.job_features import Description
from ringmaster.techniques.job_specs import DataSpec
from ringmaster.techniques.models.model_folders import few

PASSAGE = "passage"
"""The column of a sample with its id and text as JSON in UTF-8: [bytes]."""


@dataclass(frozen=True, kw_only=True)
class PassageOptions(DataOptions):
    """The columns of a text and of its id, which is a hash of the text where rows have none.

    words, overlap: as in `StoreSettings`.
    """

    text_column: str | None = column("text", "passage", "contents", "document")
    id_column: Annotated[str | None, Description("the column that holds the id of a passage, such as url")] = column(
        "id", "passage_id", "docid", is_optional=True
    )
    words: int | None = None
    overlap: int = 0


class Passages(RowSource):
    """The tokens of a passage, with its id and text. All rows are passages: none is held out."""

    name = "passages"
    options_class = PassageOptions
    reads = ("path",)
    needs_tokenizer = True
    copies_labels = False
    keeps_files = False
    padding: ClassVar[Mapping[str, int]] = {TOKENS: 0, PASSAGE: 0}
    uncut: ClassVar[frozenset[str]] = frozenset({PASSAGE})

    def check(self, spec: DataSpec) -> None:
        """Raises ValueError where the passages overlap by all their words, or some are held out."""
        super().check(spec)
        options = self.options(spec)
        if options.words is not None and not 0 <= options.overlap < options.words:
            raise ValueError("data: overlap is not below words. To fix: give fewer words to overlap, such as 20")
        if spec.held_out or spec.held_out_path:
            raise ValueError("data: a store holds no passage out. To fix: set held_out to 0, without a held_out_path")

    def rows_of_path(self, spec: DataSpec) -> Iterator[Row]:
        """Yields a row for each passage; that of a divided text has the text's id with "#" and a number.

        Equal texts without ids are one passage.
        """
        columns, options = self.columns(spec).columns, self.options(spec)
        seen = set[str]()
        for row in super().rows_of_path(spec):
            text = row.content[columns["text"]]
            parts = _parts(text, options) if options.words is not None and isinstance(text, str) else [text]
            name = row.content.get(columns.get("id", ""))
            for number, part in enumerate(parts):
                if name is None and (key := content_hash(part)) in seen:
                    continue
                if name is None:
                    seen.add(key)
                own = {} if name is None or len(parts) == 1 else {columns["id"]: f"{name}#{number}"}
                yield replace(row, content={**row.content, columns["text"]: part, **own})

    def texts(self, row: Mapping[str, Any], *, context: SampleContext) -> Iterable[str]:
        """Returns the text."""
        return (row["text"],)

    def sample(self, row: Mapping[str, Any], *, context: SampleContext) -> Mapping[str, Any]:
        """Returns the tokens with special tokens, and the id and text as bytes."""
        tokenizer, (name, text) = context.tokenizer, _id_and_text(row)
        return {
            TOKENS: tokenizer.with_special(tokenizer.encode(text), at_most=context.max_length).tokens,
            PASSAGE: np.frombuffer(json.dumps([name, text]).encode(), dtype=np.uint8),
        }

    def training_faults(self, folder: Path) -> Iterable[str]:
        """Returns which ids are there twice."""
        counts = Counter(name for name, _ in ids_and_texts(open_split(folder, "training")))
        if repeated := [f"{name!r} {number} times" for name, number in counts.items() if number > 1]:
            yield f"the ids of passages repeat: {few(repeated)}. To fix: give each passage an id of its own"


def read_passages(path: str, settings: StoreSettings) -> list[tuple[str, str]]:
    """Returns the ids and texts of the passages in files. Raises ValueError where they cannot be read."""
    source, options = Passages(), {"words": settings.words, "overlap": settings.overlap}
    spec = DataSpec(kind=source.name, path=path, held_out=0.0, kwargs=options)
    source.check(spec)
    columns = source.columns(spec)
    return [_id_and_text(columns.by_role(row.content)) for row in source.rows_of_path(spec)]


def _id_and_text(row: Mapping[str, Any]) -> tuple[str, str]:
    text = text_of(row, "text")
    return content_hash(text) if row["id"] is None else str(row["id"]), text


def ids_and_texts(table: Table) -> Iterator[tuple[str, str]]:
    """Yields the id and the text of each passage in a table of samples."""
    values, lengths = values_of(table[PASSAGE])
    assert lengths is not None
    content, end = values.tobytes(), 0
    for length in lengths.tolist():
        end += length
        name, text = json.loads(content[end - length : end])
        yield name, text


def _parts(text: str, options: PassageOptions) -> list[str]:
    words, size = text.split(), options.words or 1
    return [
        " ".join(words[first : first + size])
        for first in range(0, max(len(words) - options.overlap, 1), size - options.overlap)
    ]

"""Text as token samples: documents become one stream of tokens, which is cut into samples."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np

from ringmaster.techniques.data import arrow_files, encoded_rows, sample_checks
from ringmaster.techniques.data.file_rows import RowReading, data_files, rows_of_files
from ringmaster.techniques.data.row_files import (
    FileText,
    RowError,
    RowErrors,
    format_of,
    rows_and_errors,
)
from ringmaster.techniques.data.row_tokenizer import RowTokenizer
from ringmaster.techniques.data.samples import ArraySamples, Collate
from ringmaster.techniques.data.stored_source import StoredSource, TextProgress, described, note_on_unread
from ringmaster.techniques.data.text_encoder import Ids, in_pieces
from ringmaster.techniques.data.tokenizer_folders import save_tokenizer
from ringmaster.techniques.data_source import DataOptions, Dataset, PreparedData, Row, data_source_named
from ringmaster.techniques.job_features import Description
from ringmaster.techniques.job_specs import DataSpec

# What is encoded in one call of a tokenizer, which takes up to 200 bytes of memory a character.
DOCUMENTS_PER_CALL, CHARACTERS_PER_CALL = 512, 1 << 18


@dataclass(frozen=True, kw_only=True)
class TextOptions(DataOptions):
    """The field or column that holds the text of a document."""

    text_column: Annotated[str, Description("the column that holds the text, such as text")] = "text"


def write_text(
    folder: Path,
    *,
    spec: DataSpec,
    rows: Callable[[], Iterator[Row]],
    where: str,
    column: str = TextOptions.text_column,
    cache_dir: Path | None = None,
    blocks: Callable[[], Iterator[encoded_rows.RowBlock]] | None = None,
) -> PreparedData:
    """Writes token samples of `spec.seq_len` into `folder`, and the manifest of named data; returns the description.

    The content of a row is a text, a `FileText`, or token ids. Texts are concatenated, with an end-of-text token after
    each; token ids get none. Memory does not grow with the text, except for the different words on which a tokenizer is
    trained, and some bytes a row.

    rows: returns the rows, each time it is called. where: the data, in messages. column: that of the text.
    cache_dir, parts: where the tokens of single files are kept, if text is encoded by a given tokenizer, and what
        returns the rows in parts.
    """
    first = next(rows(), None)
    if first is None:
        raise _no_text(column, where=where)
    is_text = not isinstance(first.content, list)
    if spec.seq_len is None and is_text:
        raise _no_length(where)
    tokenizer = None
    if is_text:
        trained_on = (row.content for row in _of_one_form(rows(), has_ids=False) if not row.held_out)
        save_tokenizer(folder / "tokenizer", spec, trained_on)
        tokenizer = RowTokenizer(folder / "tokenizer")
    is_kept = blocks is not None and is_text and spec.tokenizer is not None
    settings = {"kind": "tokens", "column": column, "tokenizer": encoded_rows.content_of(folder / "tokenizer")}
    writer = _TokenWriter(spec, tokenizer, seq_len=spec.seq_len or len(first.content), where=where)
    chosen = blocks() if blocks is not None and is_kept else iter([encoded_rows.RowBlock(rows=rows)])
    with encoded_rows.encoded_blocks(
        chosen, spec, writer.encode, folder=folder, cache_dir=cache_dir if is_kept else None, settings=settings
    ) as selected:
        if not any(each.wanted.any() for each in selected):
            raise _no_text(column, where=where)
        return writer.write(folder, selected)


# A text, a part of one, or the token ids of one, with the row that ends with it.
Piece = tuple[str | list[int], Row | None]


class _TokenWriter:
    """Encodes texts, and cuts their tokens into samples. tokenizer: None where rows have token ids."""

    def __init__(self, spec: DataSpec, tokenizer: RowTokenizer | None, *, seq_len: int, where: str) -> None:
        self._spec, self._tokenizer, self._seq_len, self._where = spec, tokenizer, seq_len, where
        self._progress = TextProgress("encoding")
        self._largest = 0 if tokenizer is None else tokenizer.vocab_size - 1
        self._num_compared = 0

    @property
    def _dtype(self) -> np.dtype[Any]:
        return np.dtype(np.uint16 if self._largest < MAX_SMALL_IDS else np.uint32)

    def encode(self, folder: Path, block: encoded_rows.RowBlock) -> None:
        """Writes the tokens of rows in pieces, each with the place of its row, and what is known of the rows."""
        num_rows = 0
        with (
            arrow_files.ArrowWriter(folder / encoded_rows.SAMPLES) as pieces,
            arrow_files.ArrowWriter(folder / encoded_rows.ROWS) as known,
        ):
            known.write(self._facts([], block, []))
            is_written = False  # of the row that a piece belongs to
            for batch in _batches(self._pieces(block.rows())):
                ids = self._encoded(batch)
                ends = np.array([row is not None for _, row in batch])
                place = num_rows + np.cumsum(ends) - ends
                num_rows += int(ends.sum())
                lengths = np.fromiter(map(len, ids), np.int64, count=len(ids))
                dtype = np.uint32 if self._tokenizer is None else self._dtype
                values = np.concatenate(ids).astype(dtype, copy=False)
                pieces.write(arrow_files.table_of({COLUMN: arrow_files.column_of(values, lengths), "row": place}))
                are_written: list[bool] = []  # of the rows that end here
                for content, row in batch:
                    is_written |= isinstance(content, str) and self._are_special_in(content)
                    if row is not None:
                        are_written.append(is_written)
                        is_written = False
                known.write(self._facts([row for _, row in batch if row is not None], block, are_written))

    def _are_special_in(self, text: str) -> bool:
        return self._tokenizer is not None and self._tokenizer.encoder.written.are_plain_in(text)

    def _facts(self, rows: Sequence[Row], block: encoded_rows.RowBlock, are_written: Sequence[bool]) -> Any:
        """What is known of rows, as a table."""
        known = encoded_rows.row_facts(rows, block, self._spec)
        return arrow_files.table_of({**known, encoded_rows.WRITTEN: np.array(are_written, dtype=np.uint8)})

    def write(self, folder: Path, blocks: Sequence[encoded_rows.EncodedBlock]) -> PreparedData:
        """Writes the samples of both splits; returns the description. Raises ValueError where a split is too short."""
        num_tokens, num_unknown = (dict.fromkeys(arrow_files.SPLITS, 0) for _ in range(2))
        unknown = None if self._tokenizer is None else self._tokenizer.unknown_content_id
        rests = dict.fromkeys(arrow_files.SPLITS, np.empty(0, self._dtype))
        with ExitStack() as files:
            writers = {
                split: files.enter_context(arrow_files.ArrowWriter(arrow_files.split_file(folder, split)))
                for split in arrow_files.SPLITS
            }
            for each in blocks:
                chosen = {split: each.split(split) for split in arrow_files.SPLITS}
                for pieces in arrow_files.read_tables(each.folder / encoded_rows.SAMPLES):
                    rows = pieces["row"].to_numpy()
                    for split in arrow_files.SPLITS:
                        if not (mask := chosen[split][rows]).any():
                            continue
                        tokens = arrow_files.values_of(pieces[COLUMN].filter(mask))[0].astype(self._dtype, copy=False)
                        num_tokens[split] += len(tokens)
                        num_unknown[split] += 0 if unknown is None else int((tokens == unknown).sum())
                        tokens = np.concatenate([rests[split], tokens])
                        end = len(tokens) // self._seq_len * self._seq_len
                        writers[split].write(
                            arrow_files.table_of(
                                {COLUMN: arrow_files.column_of(tokens[:end].reshape(-1, self._seq_len))}
                            )
                        )
                        rests[split] = tokens[end:]
        self._check_sizes(num_tokens)
        end_of_text_id = None if self._tokenizer is None else self._tokenizer.end_id
        prepared = described(folder, vocab_size=self._largest + 1, end_of_text_id=end_of_text_id)
        notes, faults = sample_checks.notes_on_unknown(num_unknown, num_tokens)
        return replace(
            prepared,
            notes=(*prepared.notes, *encoded_rows.notes_on_written(blocks), *notes),
            training_faults=(*prepared.training_faults, *faults),
        )

    def _pieces(self, rows: Iterable[Row]) -> Iterator[Piece]:
        """Yields texts in pieces, or token ids."""
        rule = None if self._tokenizer is None else self._tokenizer.rule
        for row in _of_one_form(rows, has_ids=self._tokenizer is None):
            if isinstance(row.content, list):
                yield row.content, row
            else:
                yield from ((piece, row if ends else None) for piece, ends in in_pieces(row.content, rule=rule))

    def _encoded(self, batch: Sequence[Piece]) -> list[Ids]:
        """Returns the ids of each piece; the end-of-text token follows each text."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            return [self._as_given(cast("list[int]", content)) for content, _ in batch]
        for content, row in batch:
            self._progress.add(len(content), num_texts=row is not None)
        ids = tokenizer.encoder([cast(str, content) for content, _ in batch])
        for (content, row), each in zip(batch, ids, strict=True):
            if row is not None and row.content == content and self._num_compared < sample_checks.FIRST_COMPARED:
                self._compare(tokenizer, row, each)
        tail = np.asarray([] if tokenizer.end_id is None else [tokenizer.end_id], dtype=np.uint32)
        return [
            each if row is None else np.concatenate((each, tail)) for each, (_, row) in zip(ids, batch, strict=True)
        ]

    def _compare(self, tokenizer: RowTokenizer, row: Row, ids: Ids) -> None:
        """Compares the ids of a text with the tokenizer's own call. Raises RowErrors where they differ."""
        self._num_compared += 1
        if (whole := tokenizer.own_call(row.content)) is None:
            return
        end = len(whole["input_ids"]) - tokenizer.num_end_ids
        try:
            reference = {COLUMN: whole["input_ids"][len(tokenizer.start_ids) : end]}
            sample_checks.check_equal({COLUMN: ids}, reference, max_length=len(row.content))
        except ValueError as error:
            problem, _, remedy = str(error).partition(". To fix: ")
            raise RowErrors([RowError(f"{row.file}, row {row.number}:", problem, remedy)]) from error

    def _as_given(self, content: list[int]) -> Ids:
        if self._spec.seq_len is None and len(content) != self._seq_len:
            raise _no_length(self._where)
        if min(content, default=0) < 0:
            raise ValueError(f"{self._where} has token ids below 0. To fix: leave labels and padding to a data factory")
        self._largest = max(self._largest, *content) if content else self._largest
        if self._largest >= 1 << 32:
            raise ValueError(f"{self._where} has token ids of more than 32 bits. To fix: check the column of ids")
        return np.asarray(content, dtype=np.uint32)

    def _check_sizes(self, num_tokens: Mapping[str, int]) -> None:
        spec = self._spec
        wanted = ["training"] + ["held_out"] * (spec.held_out > 0 or spec.held_out_split is not None)
        for split in wanted:
            if num_tokens[split] < self._seq_len:
                more = "" if split == "training" else f", raise held_out {spec.held_out} (or set it to 0)"
                raise ValueError(
                    f"{self._where}: the {split} part has {num_tokens[split]} tokens, fewer than one sample of seq_len "
                    f"{self._seq_len}. To fix: lower seq_len{more}, or give more text"
                )


def _of_one_form(rows: Iterable[Row], *, has_ids: bool) -> Iterator[Row]:
    """Yields rows. Raises ValueError where text and ids are mixed."""
    for row in rows:
        if isinstance(row.content, list) is not has_ids:
            result, others = ("text", "token ids") if has_ids else ("token ids", "text")
            raise ValueError(
                f"{row.file}, line {row.number} has {result}, and the rows before it have {others}. To fix: give all "
                "rows as one of the two"
            )
        yield row


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    num_characters = 0
    for piece in pieces:
        if batch and (len(batch) == DOCUMENTS_PER_CALL or num_characters + len(piece[0]) > CHARACTERS_PER_CALL):
            yield batch
            batch, num_characters = [], 0
        batch.append(piece)
        num_characters += len(piece[0])
    if batch:
        yield batch


def _no_length(where: str) -> ValueError:
    return ValueError(f"{where}: seq_len is missing. To fix: set the number of tokens of a sample, e.g. seq_len: 128")


def _no_text(column: str, *, where: str) -> ValueError:
    return ValueError(f"{where} holds no text. To fix: check the path and text_column {column!r}")


COLUMN = "input_ids"
# A column has 16 bits a token up to this many ids, and else 32.
MAX_SMALL_IDS = 1 << 16


TOKENIZED = "tokenized"
"""The kind of rows of token ids with labels."""
LOSS_MASKS = ("completion_mask", "assistant_masks", "loss_mask")
LABEL_COLUMNS = frozenset({arrow_files.LABELS, "assistant_mask", *LOSS_MASKS})
"""Columns that define which tokens of a row are learnt. Rows with one of them are samples by themselves."""
OTHER_LABEL_COLUMNS = frozenset(
    {"label_ids", "target_ids", "label_mask", "labels_mask", "target_mask", "response_mask", "prompt_mask"}
    | {"assistant_tokens_mask", "train_mask", "token_weights", "loss_weights"}
)
"""Columns of other programs that define which tokens are learnt, and that are not read."""
NOT_LEARNT = (
    "which seems to mark what is learnt, and is not read. To fix: give it as labels, with -100 for what is not learnt, "
    "or as completion_mask, with 1 for what is"
)


def tokenized_source(spec: DataSpec, there: Collection[str]) -> StoredSource | None:
    """Returns the kind of rows of token ids with labels, where rows have these columns; else None.

    A `text_column` that the spec names is read in their place.
    """
    is_named = spec.options.get("text_column", TextOptions.text_column) != TextOptions.text_column
    ignored = spec.options.get("ignored_columns", ())
    has_labels = COLUMN in there and any(name in there for name in LABEL_COLUMNS.difference(ignored))
    if not has_labels or is_named:
        return None
    result = data_source_named(TOKENIZED)
    assert isinstance(result, StoredSource)
    return result


def as_tokenized(spec: DataSpec) -> DataSpec:
    """Returns the spec of rows of token ids with labels, which the options of text do not concern."""
    return replace(spec, kind=TOKENIZED, options={})


Content = str | FileText | list[int]


def refuse_labels(names: Collection[str], where: str) -> None:
    """Raises ValueError where token ids that become a stream have labels, which a stream would lose."""
    if others := sorted(OTHER_LABEL_COLUMNS & set(names)):
        ignored = f"or set data.ignored_columns: [{others[0]}]"
        raise ValueError(f"{where} has token ids and a column {others[0]!r}, {NOT_LEARNT}; {ignored}")
    if lost := sorted((LABEL_COLUMNS | {"label"}) & set(names)):
        remedy = (
            "give all rows labels for their tokens, or none"
            if lost != ["label"]
            else (
                "give the text of the rows, for kind text-classification, or rows of equal length in a saved data set, "
                "without seq_len"
            )
        )
        raise ValueError(
            f"{where} has token ids and a column {lost[0]!r}, which a stream of tokens loses. To fix: {remedy}; or "
            f"set data.ignored_columns: [{lost[0]}]"
        )


def attended(ids: list[int], mask: Any, where: str) -> list[int]:
    """Returns token ids without padding. mask: of attention, None for all. Raises ValueError where it does not fit."""
    if mask is None:
        return ids
    if not isinstance(mask, list) or len(mask) != len(ids):
        raise ValueError(
            f"{where} has {len(ids)} token ids, and an {arrow_files.MASK} that is not as long. To fix: correct it"
        )
    return ids if all(mask) else list(compress(ids, mask))


class TextFiles(StoredSource):
    """The documents in all files that `spec.path` and, if given, `spec.held_out_path` match.

    A text file is one document. In other files each row is one: its `text_column` has text or token ids (or its
    `input_ids`, if there is no such column). Rows of token ids with labels, or masks of what is learnt, are samples as
    of kind `tokenized`.
    """

    name = "language-modeling"
    options_class = TextOptions
    reads = ("path",)

    def rows(self, spec: DataSpec) -> Iterator[Row]:
        """Yields every row before tokenisation; its content is its text, a `FileText` or its token ids."""
        if (tokenized := self._tokenized(spec)) is not None:
            return tokenized.rows(as_tokenized(spec)) or iter(())
        return rows_of_files(spec, self._reading(spec))

    def _tokenized(self, spec: DataSpec) -> StoredSource | None:
        """The kind of the rows where they have labels, by the first one."""
        return tokenized_source(spec, self._there(spec))

    def _there(self, spec: DataSpec) -> tuple[str, ...]:
        """The columns of the first row; () for text files."""
        for file in data_files(spec)[0]:
            if format_of(file.path, spec.format) == "text":
                return ()
            rows = (row for _, row in rows_and_errors(file.path, format=spec.format))
            if (first := next((row for row in rows if isinstance(row, Mapping)), None)) is not None:
                return tuple(first)
        return ()

    def _reading(self, spec: DataSpec) -> RowReading:
        column = self.options(spec).text_column
        columns = (column, COLUMN, arrow_files.MASK, "label", *LABEL_COLUMNS, *OTHER_LABEL_COLUMNS)
        return RowReading(
            columns=columns, content=partial(_content, column=column, ignored=self.options(spec).ignored_columns)
        )

    def samples(self, table: arrow_files.Table, prepared: PreparedData) -> Dataset:
        """Returns the samples in the rows of a table."""
        return samples_of(table, prepared, collate=self.collate)

    def write(self, folder: Path, spec: DataSpec, *, where: str, cache_dir: Path) -> PreparedData:
        """Writes the documents as one stream of tokens, cut into samples."""
        if (tokenized := self._tokenized(spec)) is not None:
            return tokenized.write(folder, as_tokenized(spec), where=where, cache_dir=cache_dir)
        column, there = self.options(spec).text_column, self._there(spec)
        prepared = write_text(
            folder,
            spec=spec,
            rows=partial(self.rows, spec),
            where=where,
            column=column,
            cache_dir=cache_dir,
            blocks=partial(encoded_rows.blocks_of_files, spec, self._reading(spec)),
        )
        note = note_on_unread(there, read=[column] if column in there else [COLUMN, arrow_files.MASK], spec=spec)
        return replace(prepared, notes=(*prepared.notes, *note))


def samples_of(table: arrow_files.Table, prepared: PreparedData, *, collate: Collate) -> Dataset:
    """Returns the samples of a stream of tokens, or those of rows with labels."""
    is_stream = not any(tensor.name == arrow_files.LABELS for tensor in prepared.tensors)
    if is_stream:
        return ArraySamples(table, collate=collate)
    tokenized = data_source_named(TOKENIZED)
    assert isinstance(tokenized, StoredSource)
    return tokenized.samples(table, prepared)


def _content(row: Any, where: str, *, column: str, ignored: Sequence[str] = ()) -> Content:
    """The text or the token ids of a row."""
    content: Content | None = row if isinstance(row, FileText) else row.get(column, row.get("input_ids"))
    if isinstance(content, (str, FileText)):
        return content
    if isinstance(content, list) and {int}.issuperset(map(type, content)):  # also not true and false
        refuse_labels({name for name, value in row.items() if value is not None}.difference(ignored), where)
        return attended(content, row.get(arrow_files.MASK), where)
    if column not in row and "input_ids" not in row:
        what = f"has no text (nor input_ids) in column {column!r}; it has {sorted(row)}"
        raise ValueError(f"{where} {what}. To fix: set text_column, or data.kind to one of such rows (docs/data.md)")
    read = column if column in row else "input_ids"
    text = "it is null" if content is None else f"it is of type {type(content).__name__}"
    raise ValueError(f"{where} has no text in column {read!r}: {text}. To fix: give it a text, or remove the row")

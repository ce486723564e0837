"""Text as token samples: documents, a trained or given tokenizer, and one stream of tokens cut into samples."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np

from ringmaster.techniques.data.arrow_files import (
    SPLITS,
    ArrowWriter,
    column_of,
    read_tables,
    split_file,
    table_of,
    values_of,
)
from ringmaster.techniques.data.encoded_rows import (
    ROWS,
    SAMPLES,
    EncodedPart,
    RowsPart,
    content_of,
    encoded_parts,
    parts_of_files,
    row_facts,
)
from ringmaster.techniques.data.file_rows import RowReading, rows_of_files
from ringmaster.techniques.data.row_files import FileText, check_tokenizer
from ringmaster.techniques.data.stored_source import StoredSource, TextProgress, described
from ringmaster.techniques.data.text_encoder import GPT2, CutRule, Ids, TextEncoder, WordEncoder
from ringmaster.techniques.data_source import DataOptions, PreparedData, Row
from ringmaster.techniques.job import DataSpec

logger = logging.getLogger(__name__)

PIECE_CHARACTERS = 1 << 16
# Encoding takes up to 200 bytes of memory a character.
MOST_CHARACTERS_AT_ONCE = 32_000_000


@dataclass(frozen=True, kw_only=True)
class TextDocument:
    """A text, or the token ids of a text that is already tokenised.

    held_out: whether it is excluded from training.
    ends: whether the text ends with this content; if not, the next document goes on with it.
    """

    content: str | Sequence[int]
    held_out: bool
    ends: bool = True


def documents_of(rows: Iterable[Row], *, has_ids: bool = False) -> Iterator[TextDocument]:
    """Yields the documents of rows; those of text files in pieces. Raises ValueError where text and ids are mixed."""
    for row in rows:
        content: FileText | str | list[int] = row.content
        if isinstance(content, list) is not has_ids:
            result, others = ("text", "token ids") if has_ids else ("token ids", "text")
            raise ValueError(
                f"{row.file}, line {row.number} has {result}, and the rows before it have {others}. To fix: give all "
                "rows as one of the two"
            )
        if isinstance(content, FileText):
            for piece in content.pieces():
                yield TextDocument(content=piece, held_out=row.held_out, ends=False)
            content = ""
        yield TextDocument(content=content, held_out=row.held_out)


def in_pieces(documents: Iterable[TextDocument], *, rule: CutRule | None) -> Iterator[TextDocument]:
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
                yield TextDocument(content="".join((*kept, part[:place])), held_out=document.held_out, ends=ends)
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


END_OF_TEXT = "<|endoftext|>"
# Merges hardly change beyond this much text, and training time grows with it. The document in which it is reached is
# read to its end, or to the second limit.
MAX_TRAINING_CHARACTERS = 64_000_000
MAX_CHARACTERS_OF_A_DOCUMENT = 256_000_000


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """A tokenizer in the form that the stream needs; `save` writes what `AutoTokenizer` loads.

    ids: the ids of texts as arrays [tokens], without special tokens.
    rule: where text may be cut so that the ids of its parts are those of the whole; None where it is encoded whole.
    """

    ids: Callable[[list[str]], list[Ids]]
    vocab_size: int
    end_of_text_id: int | None
    save: Callable[[Path], None]
    rule: CutRule | None = None


def encoder_of(spec: DataSpec, documents: Iterable[TextDocument]) -> Encoder:
    """Returns the tokenizer that the spec names, or else one that is trained on the training documents."""
    return _given(spec.tokenizer) if spec.tokenizer else _trained(documents, spec.vocab_size)


def _trained(documents: Iterable[TextDocument], vocab_size: int) -> Encoder:
    """A byte-level BPE of `vocab_size`, trained on the training documents, which can encode any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size <= len(alphabet):
        raise ValueError(
            f"vocab_size {vocab_size} is too small for a byte-level BPE. To fix: give more than {len(alphabet)}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_training_texts(documents, TextProgress("training a tokenizer")), trainer)

    def save(folder: Path) -> None:
        folder.mkdir(parents=True)
        tokenizer.save(str(folder / "tokenizer.json"))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT),
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))

    tokenizer.encode_special_tokens = True  # text that contains the end-of-text token does not end there
    words = WordEncoder(rule=GPT2, encode=lambda texts: [result.ids for result in tokenizer.encode_batch_fast(texts)])
    return Encoder(
        ids=words,
        vocab_size=tokenizer.get_vocab_size(),
        end_of_text_id=tokenizer.token_to_id(END_OF_TEXT),
        save=save,
        rule=GPT2,
    )


def _training_texts(documents: Iterable[TextDocument], progress: TextProgress) -> Iterator[str]:
    """The training documents in pieces that have the words of the whole, up to the limits."""
    left, num_of_this = MAX_TRAINING_CHARACTERS, 0
    for document in in_pieces((each for each in documents if not each.held_out), rule=GPT2):
        text = cast(str, document.content)
        progress.add(len(text), num_texts=document.ends)
        if num_of_this < MAX_CHARACTERS_OF_A_DOCUMENT:
            yield text
        left, num_of_this = left - len(text), num_of_this + len(text)
        if left <= 0 and (document.ends or num_of_this >= MAX_CHARACTERS_OF_A_DOCUMENT):
            return
        if document.ends:
            num_of_this = 0


def _given(name: str) -> Encoder:
    from transformers import AutoTokenizer

    is_local = Path(name).is_dir()
    if is_local:
        check_tokenizer(Path(name))
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(name, local_files_only=is_local)
    except Exception as error:  # of a damaged file, the library raises Exception itself, and KeyError
        reason = " ".join(str(error).split()) if isinstance(error, (OSError, ValueError)) else repr(error)
        raise ValueError(
            f"tokenizer {name!r} cannot be loaded: {reason}. To fix: give a folder that save_pretrained "
            f"wrote, or a hub name, or leave it out to train one"
        ) from error

    def save(folder: Path) -> None:
        tokenizer.save_pretrained(str(folder))

    encode = TextEncoder(tokenizer)
    return Encoder(
        ids=encode,
        vocab_size=len(tokenizer),
        end_of_text_id=tokenizer.eos_token_id,
        save=save,
        rule=None if encode.words is None else encode.words.rule,
    )


# What is encoded in one call of a tokenizer, which takes up to 200 bytes of memory a character.
DOCUMENTS_PER_CALL, CHARACTERS_PER_CALL = 512, 1 << 18


@dataclass(frozen=True, kw_only=True)
class TextOptions(DataOptions):
    """The field or column that holds the text of a document."""

    text_column: str = "text"


def write_text(
    folder: Path,
    *,
    spec: DataSpec,
    rows: Callable[[], Iterator[Row]],
    where: str,
    column: str = TextOptions.text_column,
    cache_dir: Path | None = None,
    parts: Callable[[], Iterator[RowsPart]] | None = None,
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
    encoder = None
    if is_text:
        encoder = encoder_of(spec, documents_of(rows()) if spec.tokenizer is None else ())
        encoder.save(folder / "tokenizer")
    is_kept = parts is not None and encoder is not None and spec.tokenizer is not None
    settings = {"kind": "tokens", "column": column, "tokenizer": content_of(folder / "tokenizer")}
    writer = _TokenWriter(spec, encoder, seq_len=spec.seq_len or len(first.content), where=where)
    chosen = parts() if parts is not None and is_kept else iter([RowsPart(rows=rows)])
    with encoded_parts(
        chosen, spec, writer.encode, folder=folder, cache_dir=cache_dir if is_kept else None, settings=settings
    ) as selected:
        if not any(each.wanted.any() for each in selected):
            raise _no_text(column, where=where)
        return writer.write(folder, selected)


class _TokenWriter:
    """Encodes texts, and cuts their tokens into samples. encoder: None where rows have token ids."""

    def __init__(self, spec: DataSpec, encoder: Encoder | None, *, seq_len: int, where: str) -> None:
        self._spec, self._encoder, self._seq_len, self._where = spec, encoder, seq_len, where
        self._progress = TextProgress("encoding")
        self._largest = 0 if encoder is None else encoder.vocab_size - 1

    @property
    def _dtype(self) -> np.dtype[Any]:
        return np.dtype(np.uint16 if self._largest < MAX_SMALL_IDS else np.uint32)

    def encode(self, folder: Path, part: RowsPart) -> None:
        """Writes the tokens of rows in pieces, each with the place of its row, and what is known of the rows."""
        rows: list[Row] = []
        num_rows = 0
        documents_of_rows = documents_of(_recorded(part.rows(), rows), has_ids=self._encoder is None)
        with ArrowWriter(folder / SAMPLES) as pieces, ArrowWriter(folder / ROWS) as known:
            for documents, ids in self._encoded(documents_of_rows):
                lengths = np.fromiter(map(len, ids), np.int64, count=len(ids))
                ends = np.array([document.ends for document in documents])
                row = num_rows + np.cumsum(ends) - ends
                num_rows += int(ends.sum())
                dtype = np.uint32 if self._encoder is None else self._dtype
                values = np.concatenate(ids).astype(dtype, copy=False)
                pieces.write(table_of({COLUMN: column_of(values, lengths), "row": row}))
                known.write(table_of(row_facts(rows, part, self._spec)))
                rows.clear()
            known.write(table_of(row_facts(rows, part, self._spec)))

    def write(self, folder: Path, parts: Sequence[EncodedPart]) -> PreparedData:
        """Writes the samples of both splits; returns the description. Raises ValueError where a split is too short."""
        num_tokens = dict.fromkeys(SPLITS, 0)
        rests = dict.fromkeys(SPLITS, np.empty(0, self._dtype))
        with ExitStack() as files:
            writers = {split: files.enter_context(ArrowWriter(split_file(folder, split))) for split in SPLITS}
            for each in parts:
                chosen = {split: each.split(split) for split in SPLITS}
                for pieces in read_tables(each.folder / SAMPLES):
                    rows = pieces["row"].to_numpy()
                    for split in SPLITS:
                        if not (mask := chosen[split][rows]).any():
                            continue
                        tokens = values_of(pieces[COLUMN].filter(mask))[0].astype(self._dtype, copy=False)
                        num_tokens[split] += len(tokens)
                        tokens = np.concatenate([rests[split], tokens])
                        end = len(tokens) // self._seq_len * self._seq_len
                        writers[split].write(table_of({COLUMN: column_of(tokens[:end].reshape(-1, self._seq_len))}))
                        rests[split] = tokens[end:]
        self._check_sizes(num_tokens)
        end_of_text_id = None if self._encoder is None else self._encoder.end_of_text_id
        return described(folder, vocab_size=self._largest + 1, end_of_text_id=end_of_text_id)

    def _encoded(self, documents: Iterator[TextDocument]) -> Iterator[tuple[list[TextDocument], list[Ids]]]:
        """Yields texts, some pieces at a time, with the ids of each; the end-of-text token follows each text."""
        encoder = self._encoder
        if encoder is None:
            while batch := list(islice(documents, DOCUMENTS_PER_CALL)):
                yield batch, list(map(self._as_given, batch))
            return
        tail = np.asarray([] if encoder.end_of_text_id is None else [encoder.end_of_text_id], dtype=np.uint32)
        for batch in _batches(in_pieces(documents, rule=encoder.rule)):
            result = encoder.ids([cast(str, each.content) for each in batch])
            for document in batch:
                self._progress.add(len(document.content), num_texts=document.ends)
            yield (
                batch,
                [np.concatenate((ids, tail)) if each.ends else ids for each, ids in zip(batch, result, strict=True)],
            )

    def _as_given(self, document: TextDocument) -> Ids:
        ids = np.asarray(document.content, dtype=np.int64)
        if self._spec.seq_len is None and len(ids) != self._seq_len:
            raise _no_length(self._where)
        if ids.min(initial=0) < 0:
            raise ValueError(f"{self._where} has token ids below 0. To fix: leave labels and padding to a data factory")
        if ids.max(initial=0) >= 1 << 32:
            raise ValueError(f"{self._where} has token ids of more than 32 bits. To fix: check the column of ids")
        self._largest = max(self._largest, int(ids.max(initial=0)))
        return ids.astype(np.uint32)

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


def _recorded(rows: Iterable[Row], read: list[Row]) -> Iterator[Row]:
    for row in rows:
        read.append(row)
        yield row


def _batches(pieces: Iterator[TextDocument]) -> Iterator[list[TextDocument]]:
    batch: list[TextDocument] = []
    num_characters = 0
    for piece in pieces:
        if batch and (len(batch) == DOCUMENTS_PER_CALL or num_characters + len(piece.content) > CHARACTERS_PER_CALL):
            yield batch
            batch, num_characters = [], 0
        batch.append(piece)
        num_characters += len(piece.content)
    if batch:
        yield batch


def _no_length(where: str) -> ValueError:
    return ValueError(f"{where}: seq_len is missing. To fix: say how many tokens a sample has, e.g. seq_len: 128")


def _no_text(column: str, *, where: str) -> ValueError:
    return ValueError(f"{where} holds no text. To fix: check the path and text_column {column!r}")


COLUMN = "input_ids"
# A column has 16 bits a token up to this many ids, and else 32.
MAX_SMALL_IDS = 1 << 16


TOKENIZER = "tokenizer.json"


def have_other_tokens(one: Path | None, other: Path | None) -> bool:
    """Returns whether the tokenizers in two folders give tokens other numbers; False where one is not known."""
    if one is None or other is None:
        return False
    files = [folder / TOKENIZER for folder in (one, other)]
    if not all(file.is_file() for file in files):
        return False
    return bool(_vocabulary(files[0]) != _vocabulary(files[1]))


def _vocabulary(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8")).get("model", {}).get("vocab")


Content = str | FileText | list[int]
KTO_COLUMNS = frozenset({"prompt", "completion", "label"})
NO_KTO = (
    "has a prompt, a completion and a label, as for KTO, a loss that there is not. To fix: keep the rows whose label "
    "is true, and set data.kind to completion; or make rows of prompt, chosen and rejected, for dpo, orpo or simpo"
)


class TextFiles(StoredSource):
    """The documents in all files that `spec.path` and, if given, `spec.held_out_path` match.

    A text file is one document. In other files each row is one: its `text_column` has text or token ids (or its
    `input_ids`, if there is no such column).
    """

    name = "language-modeling"
    options_class = TextOptions
    reads = ("path",)

    def rows(self, spec: DataSpec) -> Iterator[Row]:
        """Yields every row before tokenisation; its content is its text, a `FileText` or its token ids."""
        return rows_of_files(spec, self._reading(spec))

    def _reading(self, spec: DataSpec) -> RowReading:
        column = self.options(spec).text_column
        return RowReading(columns=(column, "input_ids"), content=partial(_content, column=column))

    def write(self, folder: Path, spec: DataSpec, *, where: str, cache_dir: Path) -> PreparedData:
        """Writes the documents as one stream of tokens, cut into samples."""
        return write_text(
            folder,
            spec=spec,
            rows=partial(self.rows, spec),
            where=where,
            column=self.options(spec).text_column,
            cache_dir=cache_dir,
            parts=partial(parts_of_files, spec, self._reading(spec)),
        )


def _content(row: Any, where: str, *, column: str) -> Content:
    """The text or the token ids of a row."""
    content: Content | None = row if isinstance(row, FileText) else row.get(column, row.get("input_ids"))
    if isinstance(content, (str, FileText)):
        return content
    if isinstance(content, list) and all(isinstance(token, int) for token in content):
        return content
    if column not in row and "input_ids" not in row:
        if row.keys() >= KTO_COLUMNS:
            raise ValueError(f"{where} {NO_KTO}")
        what = f"has no text (nor input_ids) in column {column!r}; it has {sorted(row)}"
        raise ValueError(f"{where} {what}. To fix: set text_column")
    read = column if column in row else "input_ids"
    text = "it is null" if content is None else f"it is of type {type(content).__name__}"
    raise ValueError(f"{where} has no text in column {read!r}: {text}. To fix: give it a text, or remove the row")

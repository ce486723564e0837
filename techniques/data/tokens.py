"""Text as token samples: documents, a trained or given tokenizer, and one stream of tokens cut into samples."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ringmaster.techniques.data.arrays import SPLITS, ColumnWriter, fingerprint
from ringmaster.techniques.data.manifest import ManifestBuilder
from ringmaster.techniques.data.row_files import FileText, check_tokenizer
from ringmaster.techniques.data.stored_source import TextProgress
from ringmaster.techniques.data.text_encoder import GPT2, CutRule, Ids, TextEncoder, WordEncoder
from ringmaster.techniques.data_source import PreparedData, Row
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


def documents_of(rows: Iterable[Row]) -> Iterator[TextDocument]:
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
    words = WordEncoder(rule=GPT2, encode=lambda texts: [found.ids for found in tokenizer.encode_batch_fast(texts)])
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
        progress.add(len(text), ends=document.ends)
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


def write_tokens(
    folder: Path,
    *,
    spec: DataSpec,
    documents: Callable[[], Iterator[TextDocument]],
    where: str,
    with_manifest: bool = False,
) -> PreparedData:
    """Writes token samples of `spec.seq_len` into `folder`.

    Documents are concatenated, with an end-of-text token after each. Documents that came as token ids get none.
    `documents` is iterated over to its end once, and before that, as far as needed, where a tokenizer is trained.
    Memory does not grow with the text, except for the different words on which a tokenizer is trained, and 8 bytes a
    document for the manifest.

    with_manifest: whether the hashes of the documents' contents are stored as well.
    """
    first = next(documents(), None)
    if first is None:
        raise no_text(spec, where=where)
    manifest = ManifestBuilder() if with_manifest else None

    def alike() -> Iterator[TextDocument]:
        return _alike(documents(), first, seq_len=spec.seq_len, where=where)

    with ColumnWriter(folder) as columns:
        if isinstance(first.content, str):
            if spec.seq_len is None:
                raise _no_length(where)
            encoder = encoder_of(spec, alike())
            encoder.save(folder / "tokenizer")
            writer = TokenWriter(
                columns, seq_len=spec.seq_len, vocab_size=encoder.vocab_size, end_of_text_id=encoder.end_of_text_id
            )
            stream = encoded(_recorded(alike(), manifest), encoder, TextProgress("encoding"))
        else:
            writer = TokenWriter(columns, seq_len=spec.seq_len or len(first.content))
            stream = _as_given(_recorded(alike(), manifest), where=where)
        for document, ids in stream:
            writer.append(ids, held_out=document.held_out)
        writer.flush()
    if manifest is not None:
        manifest.built().write(folder)
    return writer.described(folder, spec=spec, where=where)


def encoded(
    documents: Iterable[TextDocument], encoder: Encoder, progress: TextProgress
) -> Iterator[tuple[TextDocument, Ids]]:
    """Yields texts, piece by piece, with the ids of each piece; the end-of-text token follows each text."""
    tail = np.asarray([] if encoder.end_of_text_id is None else [encoder.end_of_text_id], dtype=np.uint32)
    for batch in _batches(in_pieces(documents, rule=encoder.rule)):
        for document, ids in zip(batch, encoder.ids([cast(str, each.content) for each in batch]), strict=True):
            progress.add(len(document.content), ends=document.ends)
            yield document, np.concatenate((ids, tail)) if document.ends else ids


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


def _as_given(documents: Iterator[TextDocument], *, where: str) -> Iterator[tuple[TextDocument, Ids]]:
    for document in documents:
        ids = np.asarray(document.content, dtype=np.int64)
        if ids.min(initial=0) < 0:
            raise ValueError(f"{where} has token ids below 0. To fix: leave labels and padding to a data factory")
        if ids.max(initial=0) >= 1 << 32:
            raise ValueError(f"{where} has token ids of more than 32 bits. To fix: check the column of ids")
        yield document, ids.astype(np.uint32)


def _recorded(documents: Iterator[TextDocument], manifest: ManifestBuilder | None) -> Iterator[TextDocument]:
    for document in documents:
        if manifest is not None:
            manifest.add(document.content, held_out=document.held_out, ends=document.ends)
        yield document


def _alike(
    documents: Iterator[TextDocument], first: TextDocument, *, seq_len: int | None, where: str
) -> Iterator[TextDocument]:
    """The documents, which must all be text or all be ids; without a length of samples, all of one length."""
    is_text = isinstance(first.content, str)
    for document in documents:
        if isinstance(document.content, str) is not is_text:
            raise ValueError(f"{where} has both text and token ids. To fix: give all rows as one of the two")
        if seq_len is None and len(document.content) != len(first.content):
            raise _no_length(where)
        yield document


def _no_length(where: str) -> ValueError:
    return ValueError(f"{where}: seq_len is missing. To fix: say how many tokens a sample has, e.g. seq_len: 128")


def no_text(spec: DataSpec, *, where: str) -> ValueError:
    """Returns what is to be raised for data without a document."""
    return ValueError(f"{where} holds no text. To fix: check the path and text_column {spec.text_column!r}")


COLUMN = "input_ids"
# A column has 16 bits a token up to this many ids, and else 32.
MAX_SMALL_IDS = 1 << 16
TOKENS_PER_WRITE = 1 << 18


class TokenWriter:
    """Appends tokens to the stream of a split, in a column of `columns` that is cut into samples of `seq_len`.

    vocab_size: number of token ids; None where it is one more than the largest id that is appended.
    """

    def __init__(
        self, columns: ColumnWriter, *, seq_len: int, vocab_size: int | None = None, end_of_text_id: int | None = None
    ) -> None:
        self._columns, self._seq_len = columns, seq_len
        self._vocab_size, self._end_of_text_id = vocab_size, end_of_text_id
        self._largest = 0 if vocab_size is None else vocab_size - 1
        self._dtype = self._needed()
        self._num_tokens = dict.fromkeys(SPLITS, 0)
        self._waiting: dict[str, list[NDArray[Any]]] = {split: [] for split in SPLITS}
        self._num_waiting = 0

    def append(self, ids: NDArray[Any], *, held_out: bool) -> None:
        """Appends tokens to a split. ids: [tokens], at least 0. They are written by `flush` at the latest."""
        split = "held_out" if held_out else "training"
        self._num_tokens[split] += len(ids)
        self._waiting[split].append(ids)
        self._num_waiting += len(ids)
        if self._num_waiting >= TOKENS_PER_WRITE:
            self.flush()

    def flush(self) -> None:
        """Writes what was appended, before the columns are closed."""
        for split, waiting in self._waiting.items():
            if not waiting:
                continue
            ids = np.concatenate(waiting)
            waiting.clear()
            if self._vocab_size is None:
                self._largest = max(self._largest, int(ids.max(initial=0)))
                if self._needed() != self._dtype:
                    self._dtype = self._needed()
                    self._columns.convert(COLUMN, self._dtype)
            self._columns.append_stream(split, COLUMN, ids.astype(self._dtype, copy=False), row_len=self._seq_len)
        self._num_waiting = 0

    def described(self, folder: Path, *, spec: DataSpec, where: str) -> PreparedData:
        """Returns the description of the columns, which are closed by now. Raises ValueError where a split is short."""
        self._check_sizes(spec, where=where)
        num_samples, num_held_out = (self._columns.num_rows(split) for split in self._num_tokens)
        return PreparedData(
            name="",
            source="",
            digest=fingerprint(folder),
            kind="tokens",
            vocab_size=self._largest + 1,
            seq_len=self._seq_len,
            num_samples=num_samples,
            num_held_out=num_held_out,
            end_of_text_id=self._end_of_text_id,
        )

    def _needed(self) -> np.dtype[Any]:
        return np.dtype(np.uint16 if self._largest < MAX_SMALL_IDS else np.uint32)

    def _check_sizes(self, spec: DataSpec, *, where: str) -> None:
        wanted = ["training"] + ["held_out"] * (spec.held_out > 0 or spec.held_out_split is not None)
        for split in wanted:
            if self._num_tokens[split] < self._seq_len:
                more = "" if split == "training" else f", raise held_out {spec.held_out} (or set it to 0)"
                raise ValueError(
                    f"{where}: the {split} part has {self._num_tokens[split]} tokens, fewer than one sample of seq_len "
                    f"{self._seq_len}. To fix: lower seq_len{more}, or give more text"
                )


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

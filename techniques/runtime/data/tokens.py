"""Converts text into token samples: a trained or given tokenizer, and one flat stream cut into samples."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np

from ringmaster.techniques.interface.data_source import PreparedData
from ringmaster.techniques.interface.job import DataSpec
from ringmaster.techniques.runtime.data.arrays import ColumnWriter, fingerprint

END_OF_TEXT = "<|endoftext|>"
# Merges hardly change beyond this much text, and training time grows with it.
MAX_TRAINING_CHARACTERS = 64_000_000
DOCUMENTS_PER_CALL = 64


@dataclass(frozen=True, kw_only=True)
class Document:
    """A text, or the token ids of a text that is already tokenised.

    held_out: whether it is excluded from training.
    """

    content: str | Sequence[int]
    held_out: bool


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """A tokenizer in the form that the stream needs; `save` writes what `AutoTokenizer` loads."""

    encode: Callable[[list[str]], list[list[int]]]
    vocab_size: int
    end_of_text_id: int | None
    save: Callable[[Path], None]


def write_tokens(
    folder: Path, *, spec: DataSpec, documents: Callable[[], Iterator[Document]], where: str
) -> PreparedData:
    """Writes token samples of `spec.seq_len` into `folder`. `documents` is iterated over up to three times.

    Documents are concatenated, with an end-of-text token after each. Documents that came as token ids get none.
    """
    first = next(documents(), None)
    if first is None:
        raise ValueError(f"{where} holds no text. To fix: check the path and text_column {spec.text_column!r}")
    seq_len = spec.seq_len or _common_length(first, documents(), where=where)
    if isinstance(first.content, str):
        encoder = encoder_of(spec, documents())
        stream, vocab_size = _encoded(documents(), encoder), encoder.vocab_size
        encoder.save(folder / "tokenizer")
        end_of_text_id = encoder.end_of_text_id
    else:
        stream, end_of_text_id = _as_given(documents()), None
        vocab_size = _num_ids(documents(), where=where)
    dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
    num_tokens = {"training": 0, "held_out": 0}
    with ColumnWriter(folder) as writer:
        for split, ids in stream:
            num_tokens[split] += len(ids)
            writer.append_stream(split, "input_ids", ids.astype(dtype), row_len=seq_len)
    num_samples, num_held_out = (writer.num_rows(split) for split in num_tokens)
    _check_sizes(num_tokens, spec=spec, seq_len=seq_len, where=where)
    return PreparedData(
        name="",
        source="",
        digest=fingerprint(folder),
        kind="tokens",
        vocab_size=vocab_size,
        seq_len=seq_len,
        num_samples=num_samples,
        num_held_out=num_held_out,
        end_of_text_id=end_of_text_id,
    )


def encoder_of(spec: DataSpec, documents: Iterable[Document]) -> Encoder:
    """Returns the tokenizer that the spec names, or else one that is trained on the training documents."""
    return _given(spec.tokenizer) if spec.tokenizer else _trained(documents, spec.vocab_size)


def _trained(documents: Iterable[Document], vocab_size: int) -> Encoder:
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
    tokenizer.train_from_iterator(_training_texts(documents), trainer)

    def save(folder: Path) -> None:
        folder.mkdir(parents=True)
        tokenizer.save(str(folder / "tokenizer.json"))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT),
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))

    tokenizer.encode_special_tokens = True  # text that contains the end-of-text token does not end there
    return Encoder(
        encode=lambda texts: [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)],
        vocab_size=tokenizer.get_vocab_size(),
        end_of_text_id=tokenizer.token_to_id(END_OF_TEXT),
        save=save,
    )


def _training_texts(documents: Iterable[Document]) -> Iterator[str]:
    left = MAX_TRAINING_CHARACTERS
    for document in documents:
        if left <= 0:
            return
        if not document.held_out:
            text = cast(str, document.content)
            left -= len(text)
            yield text


def _given(name: str) -> Encoder:
    from transformers import AutoTokenizer

    is_local = Path(name).is_dir()
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(name, local_files_only=is_local)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"tokenizer {name!r} cannot be loaded: {error}. To fix: give a folder that save_pretrained "
            f"wrote, or a hub name, or leave it out to train one"
        ) from error

    def encode(texts: list[str]) -> list[list[int]]:
        encoded = tokenizer(texts, add_special_tokens=False, split_special_tokens=True, verbose=False)
        return cast("list[list[int]]", encoded["input_ids"])

    def save(folder: Path) -> None:
        tokenizer.save_pretrained(str(folder))

    return Encoder(encode=encode, vocab_size=len(tokenizer), end_of_text_id=tokenizer.eos_token_id, save=save)


def _encoded(documents: Iterator[Document], encoder: Encoder) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    tail = [] if encoder.end_of_text_id is None else [encoder.end_of_text_id]
    while batch := list(islice(documents, DOCUMENTS_PER_CALL)):
        encoded = encoder.encode([cast(str, document.content) for document in batch])
        for document, ids in zip(batch, encoded, strict=True):
            yield _split(document), np.asarray([*ids, *tail], dtype=np.int64)


def _as_given(documents: Iterator[Document]) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    for document in documents:
        yield _split(document), np.asarray(document.content, dtype=np.int64)


def _num_ids(documents: Iterator[Document], *, where: str) -> int:
    """The smallest vocabulary size for ids that came without a tokenizer."""
    largest = 0
    for _, ids in _as_given(documents):
        if ids.min(initial=0) < 0:
            raise ValueError(f"{where} has token ids below 0. To fix: leave labels and padding to a data factory")
        largest = max(largest, int(ids.max(initial=0)))
    return largest + 1


def _split(document: Document) -> str:
    return "held_out" if document.held_out else "training"


def _common_length(first: Document, documents: Iterable[Document], *, where: str) -> int:
    length = len(first.content)
    if isinstance(first.content, str) or any(len(document.content) != length for document in documents):
        raise ValueError(f"{where}: seq_len is missing. To fix: say how many tokens a sample has, e.g. seq_len: 128")
    return length


def _check_sizes(num_tokens: dict[str, int], *, spec: DataSpec, seq_len: int, where: str) -> None:
    wanted = ["training"] + ["held_out"] * (spec.held_out > 0 or spec.held_out_split is not None)
    for split in wanted:
        if num_tokens[split] < seq_len:
            more = "" if split == "training" else f", raise held_out {spec.held_out} (or set it to 0)"
            raise ValueError(
                f"{where}: the {split} part has {num_tokens[split]} tokens, fewer than one sample of seq_len "
                f"{seq_len}. To fix: lower seq_len{more}, or give more text"
            )

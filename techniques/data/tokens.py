"""Converts text into token samples: a trained or given tokenizer, and one flat stream cut into samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import cast

import numpy as np

from ringmaster.techniques.data.arrays import ColumnWriter
from ringmaster.techniques.data.encoding.documents import Document, in_pieces
from ringmaster.techniques.data.encoding.encoders import END_OF_TEXT, Encoder, encoder_of
from ringmaster.techniques.data.encoding.progress import Progress
from ringmaster.techniques.data.encoding.token_writer import TokenWriter
from ringmaster.techniques.data.encoding.words import Ids
from ringmaster.techniques.data.manifest import ManifestBuilder
from ringmaster.techniques.interface.data_source import PreparedData
from ringmaster.techniques.interface.job import DataSpec

__all__ = ["END_OF_TEXT", "Document", "Encoder", "encoded", "encoder_of", "write_tokens"]

# What is encoded in one call of a tokenizer, which takes up to 200 bytes of memory a character.
DOCUMENTS_PER_CALL, CHARACTERS_PER_CALL = 512, 1 << 18


def write_tokens(
    folder: Path,
    *,
    spec: DataSpec,
    documents: Callable[[], Iterator[Document]],
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

    def alike() -> Iterator[Document]:
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
            stream = encoded(_recorded(alike(), manifest), encoder, Progress("encoding"))
        else:
            writer = TokenWriter(columns, seq_len=spec.seq_len or len(first.content))
            stream = _as_given(_recorded(alike(), manifest), where=where)
        for document, ids in stream:
            writer.append(ids, held_out=document.held_out)
        writer.flush()
    if manifest is not None:
        manifest.built().write(folder)
    return writer.described(folder, spec=spec, where=where)


def encoded(documents: Iterable[Document], encoder: Encoder, progress: Progress) -> Iterator[tuple[Document, Ids]]:
    """Yields texts, piece by piece, with the ids of each piece; the end-of-text token follows each text."""
    tail = np.asarray([] if encoder.end_of_text_id is None else [encoder.end_of_text_id], dtype=np.uint32)
    for batch in _batches(in_pieces(documents, rule=encoder.rule)):
        for document, ids in zip(batch, encoder.ids([cast(str, each.content) for each in batch]), strict=True):
            progress.add(len(document.content), ends=document.ends)
            yield document, np.concatenate((ids, tail)) if document.ends else ids


def _batches(pieces: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    num_characters = 0
    for piece in pieces:
        if batch and (len(batch) == DOCUMENTS_PER_CALL or num_characters + len(piece.content) > CHARACTERS_PER_CALL):
            yield batch
            batch, num_characters = [], 0
        batch.append(piece)
        num_characters += len(piece.content)
    if batch:
        yield batch


def _as_given(documents: Iterator[Document], *, where: str) -> Iterator[tuple[Document, Ids]]:
    for document in documents:
        ids = np.asarray(document.content, dtype=np.int64)
        if ids.min(initial=0) < 0:
            raise ValueError(f"{where} has token ids below 0. To fix: leave labels and padding to a data factory")
        if ids.max(initial=0) >= 1 << 32:
            raise ValueError(f"{where} has token ids of more than 32 bits. To fix: check the column of ids")
        yield document, ids.astype(np.uint32)


def _recorded(documents: Iterator[Document], manifest: ManifestBuilder | None) -> Iterator[Document]:
    for document in documents:
        if manifest is not None:
            manifest.add(document.content, held_out=document.held_out, ends=document.ends)
        yield document


def _alike(documents: Iterator[Document], first: Document, *, seq_len: int | None, where: str) -> Iterator[Document]:
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

"""Embeddings of texts by the encoder of a knowledge store, in batches that the texts alone determine.

The bits of an embedding depend on the batch that it is computed in: widths and numbers of rows select other kernels.
Therefore texts are divided in one way only, whoever encodes them: by their number of tokens, into batches of a fixed
size. Sorted batches also have hardly any padding.
"""

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ringmaster.compat.transformers import MODEL_CONSTRUCTION
from ringmaster.files import sha256_of
from ringmaster.techniques.data.row_tokenizer import RowTokenizer
from ringmaster.techniques.model_facts import num_positions
from ringmaster.techniques.models.build import no_progress_bar
from ringmaster.techniques.models.export import PROCESSOR_FILES
from ringmaster.techniques.models.model_folders import CONFIG, INDEX, has_weights
from ringmaster.techniques.models.sentence_embeddings import (
    FILES,
    embeddings,
    last_hidden_state,
    max_length_of,
    pooling_of,
)

Vectors = NDArray[np.float32]
Tokens = Sequence[int] | NDArray[Any]
ENCODER_FILES = (CONFIG, "*.safetensors", INDEX, *PROCESSOR_FILES, *FILES)
"""Patterns of the files that determine an encoder's embeddings."""
TOKENIZED_TEXTS = 8192
"""The texts whose words are encoded together."""


class PassageEncoder:
    """The transformer, tokenizer and pooling in a folder.

    Args:
        folder: what `save_pretrained` or a job has written: safetensors of a model with a last hidden state, its
            tokenizer, and perhaps the modules of Sentence-Transformers. Without these, the mean is normalized.
        batch_size: the texts of a forward pass.
        max_length: the tokens to which a text is cut, special ones included.

    Raises ValueError where the folder has no such model.
    """

    def __init__(self, folder: Path, *, batch_size: int, max_length: int, device: torch.device | None = None) -> None:
        from transformers import AutoModel

        if not (folder / CONFIG).is_file() or not has_weights(folder):
            raise ValueError(
                f"{folder} holds no encoder with all its weights. To fix: give the folder of a model that a job has "
                "exported or `save_pretrained` has written, without an adapter"
            )
        self.pooling = pooling_of(str(folder))
        self._batch_size, self._device = batch_size, device or torch.device("cpu")
        with MODEL_CONSTRUCTION, no_progress_bar():
            model: Any = AutoModel.from_pretrained(
                str(folder), dtype=torch.float32, local_files_only=True, use_safetensors=True, trust_remote_code=False
            )
        self.model = model.eval().to(self._device)
        limits = (num_positions(model.config), max_length_of(str(folder)))
        self._max_length = min([max_length, *(each for each in limits if each is not None)])
        self._tokenizer = RowTokenizer(folder)

    def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the tokens of each text, with special tokens, cut to the maximum length."""
        result: list[list[int]] = []
        for first in range(0, len(texts), TOKENIZED_TEXTS):
            part = texts[first : first + TOKENIZED_TEXTS]
            self._tokenizer.prefetch(part)
            encode, around = self._tokenizer.encode, self._tokenizer.with_special
            result += [around(encode(text), at_most=self._max_length).tokens for text in part]
        return result

    def batches(self, tokens: Sequence[Tokens]) -> Iterator[NDArray[np.int64]]:
        """Yields the numbers of the texts of each batch: a function of the lengths of all texts."""
        order = np.argsort([len(each) for each in tokens], kind="stable")
        yield from (order[first : first + self._batch_size] for first in range(0, len(order), self._batch_size))

    @torch.inference_mode()
    def encode_batch(self, tokens: Sequence[Tokens]) -> Vectors:
        """Returns the embeddings of one batch, [rows, features]."""
        lengths = np.array([len(each) for each in tokens])
        is_token = np.arange(max(lengths.max(), 1)) < lengths[:, None]
        padded = np.full(is_token.shape, self._tokenizer.pad_id, np.int64)
        padded[is_token] = np.concatenate(tokens)
        ids, mask = (torch.from_numpy(each).to(self._device) for each in (padded, is_token.astype(np.int64)))
        states = last_hidden_state(self.model(input_ids=ids, attention_mask=mask))
        if states is None:
            raise ValueError(
                f"{type(self.model).__name__} has no last hidden state, so that no embedding can be made. To fix: "
                "give an encoder"
            )
        vectors: Vectors = embeddings(states, mask, self.pooling).float().cpu().numpy()
        return vectors

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Returns the embeddings of texts, [texts, features]."""
        tokens = self.tokens(texts)
        result: Vectors | None = None
        for numbers in self.batches(tokens):
            vectors = self.encode_batch([tokens[number] for number in numbers])
            result = np.empty((len(texts), vectors.shape[1]), np.float32) if result is None else result
            result[numbers] = vectors
        return np.empty((0, 0), np.float32) if result is None else result


def encoder_files(folder: Path) -> list[Path]:
    """Returns the files of an encoder: config, weights, tokenizer, pooling."""
    return sorted({file for pattern in ENCODER_FILES for file in folder.glob(pattern) if file.is_file()})


def encoder_digest(folder: Path) -> str:
    """Returns a digest of the files of an encoder."""
    sha = hashlib.sha256()
    for file in encoder_files(folder):
        sha.update(f"{file.relative_to(folder)} {sha256_of(file)}\n".encode())
    return sha.hexdigest()[:16]


def copy_encoder(source: Path, target: Path, *, as_links: bool) -> None:
    """Copies the files of an encoder to a folder. as_links: as hard links, of files that never change."""
    for file in encoder_files(source):
        copy = target / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if as_links:
            copy.hardlink_to(file)
        else:
            shutil.copyfile(file, copy)

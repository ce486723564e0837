"""Tokenizers: one that is given, or a byte-level BPE that is trained on the text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ringmaster.techniques.data.encoding.cuts import GPT2, CutRule
from ringmaster.techniques.data.encoding.documents import Document, in_pieces
from ringmaster.techniques.data.encoding.progress import Progress
from ringmaster.techniques.data.encoding.text_encoder import TextEncoder
from ringmaster.techniques.data.encoding.words import Ids, WordEncoder
from ringmaster.techniques.data.limits import check_tokenizer
from ringmaster.techniques.interface.job import DataSpec

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
    tokenizer.train_from_iterator(_training_texts(documents, Progress("training a tokenizer")), trainer)

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


def _training_texts(documents: Iterable[Document], progress: Progress) -> Iterator[str]:
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
        said = " ".join(str(error).split()) if isinstance(error, (OSError, ValueError)) else repr(error)
        raise ValueError(
            f"tokenizer {name!r} cannot be loaded: {said}. To fix: give a folder that save_pretrained "
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

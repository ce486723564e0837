"""A small encoder of words, as `save_pretrained` writes it."""

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from ringmaster.features.stores.knowledge_store import encoder_in, write_store

WORDS = [f"{kind}{number}" for kind in ("city", "river", "person", "color") for number in range(60)]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def save_encoder(folder: Path, *, seed: int = 0, **sizes: int) -> Path:
    """Writes a BERT with fresh weights and a tokenizer of `WORDS`; returns its folder. sizes: of its config."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
    config = transformers.BertConfig(vocab_size=len(names), max_position_embeddings=64, **{**SIZES, **sizes})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        transformers.BertModel(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
    return folder


def build_store(folder, *, passages, encoder, settings):
    """Encodes passages and writes their store to a folder."""
    vectors = encoder_in(encoder, settings).encode([each.text for each in passages])
    return write_store(folder, passages=passages, vectors=vectors, encoder=encoder, settings=settings)

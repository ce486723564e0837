"""Tiny causal models of the architectures that GGUF has, with tokenizers of the kinds that it has."""

import json

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GemmaTokenizer,
    LlamaTokenizer,
    PreTrainedTokenizerFast,
)
from transformers.tokenization_utils_base import generate_merges

from ringmaster.features.foreign_models.gguf_tokenizer import LLAMA3, QWEN2

VOCABULARY = 512
TEXTS = ["The cat sat on the mat, didn't it?", "In 2024 there were 12345 cats.", "été — 東京  two spaces\nline"]
TEMPLATE = "{% for each in messages %}<|turn|>{{ each['content'] }}{% endfor %}"
COMMON = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
COMMON |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
GEMMA = COMMON | {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 8}
CONFIGS = {
    "llama": COMMON | {"rope_theta": 5e5, "tie_word_embeddings": False, "rms_norm_eps": 1e-5},
    "llama-tied": COMMON | {"model_type": "llama", "head_dim": 32, "tie_word_embeddings": True},
    "qwen2": COMMON | {"tie_word_embeddings": False, "rope_theta": 1e6},
    "qwen3": COMMON | {"head_dim": 128, "tie_word_embeddings": True, "rope_theta": 1e6},
    "gemma2": GEMMA,
    "gemma3_text": GEMMA | {"num_hidden_layers": 7},
}
"""By model type. transformers reads no head_dim of a Qwen 3 and no query_pre_attn_scalar, but has these as defaults."""


def model_of(name, **fields):
    """A model whose norms and biases are random, too."""
    config = {"model_type": name, **CONFIGS[name], **fields}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=0.5, std=0.2)
        else:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def save(folder, name, *, tokenizer=None, **fields):
    """Saves a model with a tokenizer that suits it."""
    model = model_of(name, **fields)
    model.save_pretrained(folder)
    if tokenizer is None:
        tokenizer = {"llama": sentence_pieces, "gemma2": gemma_pieces, "gemma3_text": gemma_pieces}.get(
            name, byte_pairs
        )()
    tokenizer.save_pretrained(folder)
    return model


def byte_pairs(regex=QWEN2, *, adds_bos=False, ignores_merges=False):
    """A byte-level tokenizer, with a token between turns and one that is no special token."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignores_merges))
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex == "")]
    if regex:
        steps.insert(0, pre_tokenizers.Split(_regex(regex), behavior="isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    special = ["<|begin|>", "<|end|>", "<|turn|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.add_tokens(["<think>"])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", tokenizer.token_to_id("<|begin|>"))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|end|>", chat_template=TEMPLATE
    )


def _regex(pattern):
    from tokenizers import Regex

    return Regex(pattern)


def _pieces(special):
    """Tokens of SentencePiece in the order of their scores, and the merges that these imply."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=150, show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    learnt = json.loads(tokenizer.to_str())["model"]["vocab"]
    words = sorted((each for each in learnt if len(each) > 1), key=learnt.__getitem__)
    characters = [each for each in learnt if len(each) == 1]
    tokens = [*special, *(f"<0x{i:02X}>" for i in range(256)), *words, *characters]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    skipped = [*special, *(f"<0x{i:02X}>" for i in range(256))]
    merges = generate_merges(vocabulary, {token: -i for token, i in vocabulary.items()}, skipped)
    return {"vocab": vocabulary, "merges": merges}


def sentence_pieces():
    """A tokenizer as that of Llama 2, which begins a text with a space."""
    return LlamaTokenizer(**_pieces(["<unk>", "<s>", "</s>"]), chat_template=TEMPLATE)


def gemma_pieces():
    """A tokenizer as those of Gemma."""
    return GemmaTokenizer(**_pieces(["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]), chat_template=TEMPLATE)


def logits_of(model):
    """Logits of some tokens, more than a window has."""
    tokens = torch.arange(3, 23).reshape(1, -1) * 7 % VOCABULARY
    with torch.no_grad():
        return model(tokens).logits


LLAMA3_TOKENIZER = {"regex": LLAMA3, "adds_bos": True, "ignores_merges": True}

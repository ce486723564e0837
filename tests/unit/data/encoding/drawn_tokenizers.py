"""Tokenizers of many classes, made here of drawn text, for tests that compare tokens with the library's own."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

WORDS = [
    "the",
    "model",
    "learns",
    "a",
    "token",
    "from",
    "each",
    "row",
    "of",
    "data",
    "and",
    "forgets",
    "none,",
    "it's",
    "what",
    "they'd",
    "hoped",
    "for;",
    "don't",
]
FOREIGN = ["naïve", "Straße", "cafe\u0301", "日本語", "Ωμέγα", "привет", "🙂", "l’été", "İstanbul"]
NUMBERS = ["7", "42", "1984", "3.14", "1,000,000", "2026-11-28", "x2"]
SPACES = [*[" "] * 12, "  ", "   ", "\n", "\n\n", "\t", " \n", "\u00a0"]
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN = LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
BERT_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ROBERTA_TOKENS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
LINES = pre_tokenizers.Split(Regex(r"[\n\t]"), "isolated")  # as SentencePiece's, no token has an end of a line and more
AMINO_ACIDS = "LAGVSERTIDPKQNFYMHWC"


def prose(draw: Random, *, most: int = 14) -> str:
    """Returns drawn words, numbers and text of other scripts, with spaces and ends of lines of several kinds."""
    parts = draw.choices(WORDS * 3 + FOREIGN + NUMBERS, k=draw.randint(2, most))
    return "".join(part + draw.choice(SPACES) for part in parts[:-1]) + parts[-1]


def letters(alphabet: str) -> Callable[[Random], str]:
    """Returns a function that draws texts of letters, such as genomes."""
    return lambda draw: "".join(draw.choices(alphabet, k=draw.randint(6, 40)))


@dataclass(frozen=True, kw_only=True)
class DrawnTokenizer:
    """make: makes it. text: draws a text that it knows. kinds: of data, that it may be drawn for."""

    make: Callable[[], Any]
    kinds: tuple[str, ...]
    text: Callable[[Random], str] = prose


def corpus(text: Callable[[Random], str]) -> Iterator[str]:
    draw = Random(7)
    return (text(draw) for _ in range(400))


def trained(
    model: Any, trainer: Any, *, pre_tokenizer: Any = None, normalizer: Any = None, text: Any = prose
) -> Tokenizer:
    inner = Tokenizer(model)
    if pre_tokenizer is not None:
        inner.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        inner.normalizer = normalizer
    inner.train_from_iterator(corpus(text), trainer)
    return inner


def model_of(inner: Tokenizer) -> dict[str, Any]:
    return json.loads(inner.to_str())["model"]


def byte_level(pre_tokenizer: Any, special: list[str]) -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    inner = trained(models.BPE(), trainer, pre_tokenizer=pre_tokenizer)
    inner.decoder = decoders.ByteLevel()
    return inner


def split_bytes(*expressions: str) -> Any:
    splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in expressions]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def generic_byte_level(*expressions: str, bos: bool) -> Any:
    """A byte-level tokenizer of the generic class, as those of Llama 3 and DeepSeek are."""
    inner = byte_level(split_bytes(*expressions), ["<|begin|>", "<|end|>"])
    if bos:
        inner.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(
                    single="<|begin|> $A", pair="<|begin|> $A <|begin|>:1 $B:1", special_tokens=[("<|begin|>", 0)]
                ),
            ]
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<|begin|>", eos_token="<|end|>", pad_token="<|end|>"
    )


def bpe_files(special: list[str], *, add_prefix_space: bool = False) -> dict[str, Any]:
    parts = model_of(byte_level(pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space), special))
    return {"vocab": parts["vocab"], "merges": [tuple(pair) for pair in parts["merges"]]}


def metaspace_bpe(special: list[str]) -> dict[str, Any]:
    trainer = trainers.BpeTrainer(
        vocab_size=620, special_tokens=[*special, *(f"<0x{number:02X}>" for number in range(256))], show_progress=False
    )
    inner = trained(models.BPE(), trainer, pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), LINES]))
    parts = model_of(inner)
    return {"vocab": parts["vocab"], "merges": [tuple(pair) for pair in parts["merges"]]}


def pieces(special: list[str], *, unk: str = "<unk>") -> list[tuple[str, float]]:
    """The pieces of a Unigram model with their scores, special tokens first."""
    trainer = trainers.UnigramTrainer(
        vocab_size=260, special_tokens=special, unk_token=unk, show_progress=False, max_piece_length=8
    )
    inner = trained(models.Unigram(), trainer, pre_tokenizer=pre_tokenizers.Metaspace())
    return [(piece, score) for piece, score in model_of(inner)["vocab"]]


def word_pieces(special: Sequence[str] = BERT_TOKENS) -> dict[str, int]:
    trainer = trainers.WordPieceTrainer(vocab_size=260, special_tokens=list(special), show_progress=False)
    inner = trained(
        models.WordPiece(unk_token="[UNK]"),
        trainer,
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
        normalizer=normalizers.BertNormalizer(lowercase=True),
    )
    return inner.get_vocab()


def around(inner: Tokenizer, first: str, last: str) -> Tokenizer:
    ids = [(each, inner.token_to_id(each)) for each in (first, last)]
    inner.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}", pair=f"{first} $A {last} $B:1 {last}:1", special_tokens=ids
    )
    return inner


def generic(inner: Tokenizer, **names: str) -> Any:
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **names)


def genome() -> Any:
    """A BPE over four letters without an unknown token: a text of other letters has no tokens."""
    trainer = trainers.BpeTrainer(vocab_size=40, special_tokens=["[CLS]", "[SEP]", "[PAD]"], show_progress=False)
    inner = trained(models.BPE(), trainer, text=letters("ACGT"))
    return generic(around(inner, "[CLS]", "[SEP]"), cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]")


def words_alone() -> Any:
    trainer = trainers.WordLevelTrainer(special_tokens=["[UNK]", "[PAD]"], show_progress=False)
    inner = trained(models.WordLevel(unk_token="[UNK]"), trainer, pre_tokenizer=pre_tokenizers.Whitespace())
    return generic(inner, unk_token="[UNK]", pad_token="[PAD]")


def prepending() -> Any:
    """A tokenizer of the generic class whose normalizer marks the beginning of a text, as of Llama 2 and Mistral."""
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner = trained(models.BPE(unk_token="<unk>"), trainer, normalizer=normalizer, pre_tokenizer=LINES)
    inner.pre_tokenizer = None
    return generic(inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>")


def amino_acids() -> Any:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "vocab.txt"
        file.write_text("\n".join(["<cls>", "<pad>", "<eos>", "<unk>", *AMINO_ACIDS, "<mask>"]))
        return transformers.EsmTokenizer(str(file))


def translating(name: str) -> Any:
    """Tokenizers whose special tokens name the language of a text: of the source, and others of the target."""
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    if name == "nllb":
        codes, files = {"src_lang": "eng_Latn", "tgt_lang": "fra_Latn"}, metaspace_bpe(special)
        return transformers.NllbTokenizer(**files, **codes)
    return transformers.MBartTokenizer(vocab=pieces(special), src_lang="en_XX", tgt_lang="fr_XX")


CLASSES, PAIRS, WORD_CLASSES = "text-classification", "text-pairs", "token-classification"
TARGETS, COMPLETION, CHAT, PREFERENCE = "seq2seq", "completion", "chat", "preference"
EMBEDDING, TEXT = "embedding", "language-modeling"
ENCODERS, DECODERS = (CLASSES, PAIRS, EMBEDDING), (COMPLETION, CHAT, PREFERENCE, TEXT)
TOKENIZERS = {
    "bert": DrawnTokenizer(
        make=lambda: transformers.BertTokenizer(vocab=word_pieces()), kinds=(*ENCODERS, WORD_CLASSES)
    ),
    "bert-cased": DrawnTokenizer(
        make=lambda: transformers.BertTokenizer(vocab=word_pieces(), do_lower_case=False),
        kinds=(*ENCODERS, WORD_CLASSES),
    ),
    "mpnet": DrawnTokenizer(
        make=lambda: transformers.MPNetTokenizer(vocab=word_pieces(["<s>", "<pad>", "</s>", "[UNK]", "<mask>"])),
        kinds=(*ENCODERS, WORD_CLASSES),
    ),
    "roberta": DrawnTokenizer(make=lambda: transformers.RobertaTokenizer(**bpe_files(ROBERTA_TOKENS)), kinds=ENCODERS),
    "roberta-spaced": DrawnTokenizer(
        make=lambda: transformers.RobertaTokenizer(
            **bpe_files(ROBERTA_TOKENS, add_prefix_space=True), add_prefix_space=True
        ),
        kinds=(*ENCODERS, WORD_CLASSES),
    ),
    "xlm-roberta": DrawnTokenizer(
        make=lambda: transformers.XLMRobertaTokenizer(vocab=pieces(["<s>", "<pad>", "</s>", "<unk>"])),
        kinds=(*ENCODERS, WORD_CLASSES),
    ),
    "albert": DrawnTokenizer(
        make=lambda: transformers.AlbertTokenizer(vocab=pieces(["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"])),
        kinds=(*ENCODERS, WORD_CLASSES),
    ),
    "deberta-v2": DrawnTokenizer(
        make=lambda: transformers.DebertaV2Tokenizer(vocab=pieces(["[PAD]", "[UNK]", "[CLS]", "[SEP]"], unk="[UNK]")),
        kinds=(*ENCODERS, WORD_CLASSES),
    ),
    "esm": DrawnTokenizer(make=amino_acids, kinds=ENCODERS, text=letters(AMINO_ACIDS)),
    "genome": DrawnTokenizer(make=genome, kinds=ENCODERS, text=letters("ACGT")),
    "canine": DrawnTokenizer(make=transformers.CanineTokenizer, kinds=ENCODERS),
    "words": DrawnTokenizer(make=words_alone, kinds=(*ENCODERS, WORD_CLASSES)),
    "prepending": DrawnTokenizer(make=prepending, kinds=(WORD_CLASSES, *DECODERS)),
    "gpt2": DrawnTokenizer(
        make=lambda: transformers.GPT2Tokenizer(**bpe_files(["<|endoftext|>"]), pad_token="<|endoftext|>"),
        kinds=DECODERS,
    ),
    "qwen2": DrawnTokenizer(make=lambda: transformers.Qwen2Tokenizer(**bpe_files(["<|endoftext|>"])), kinds=DECODERS),
    "llama-3": DrawnTokenizer(make=lambda: generic_byte_level(LLAMA_3, bos=True), kinds=DECODERS),
    "deepseek": DrawnTokenizer(
        make=lambda: generic_byte_level(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", QWEN, bos=True), kinds=DECODERS
    ),
    "no-bos": DrawnTokenizer(make=lambda: generic_byte_level(QWEN, bos=False), kinds=DECODERS),
    "llama": DrawnTokenizer(
        make=lambda: transformers.LlamaTokenizer(**metaspace_bpe(["<unk>", "<s>", "</s>"])), kinds=DECODERS
    ),
    "llama-legacy": DrawnTokenizer(
        make=lambda: transformers.LlamaTokenizer(**metaspace_bpe(["<unk>", "<s>", "</s>"]), legacy=True), kinds=DECODERS
    ),
    "gemma": DrawnTokenizer(
        make=lambda: transformers.GemmaTokenizer(**metaspace_bpe(["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"])),
        kinds=DECODERS,
    ),
    "t5": DrawnTokenizer(
        make=lambda: transformers.T5Tokenizer(vocab=pieces(["<pad>", "</s>", "<unk>"]), extra_ids=4),
        kinds=(TARGETS, EMBEDDING),
    ),
    "byt5": DrawnTokenizer(make=transformers.ByT5Tokenizer, kinds=(TARGETS, CLASSES)),
    "bart": DrawnTokenizer(
        make=lambda: transformers.BartTokenizer(**bpe_files(ROBERTA_TOKENS)), kinds=(TARGETS, CLASSES)
    ),
    "nllb": DrawnTokenizer(make=lambda: translating("nllb"), kinds=(TARGETS,)),
    "mbart": DrawnTokenizer(make=lambda: translating("mbart"), kinds=(TARGETS,)),
}

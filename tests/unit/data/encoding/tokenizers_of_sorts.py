"""Small tokenizers of many sorts, each with what a text for it consists of."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import ByT5Tokenizer, CanineTokenizer, EsmTokenizer, PreTrainedTokenizerFast

PROSE = ["one", "two", "three", "what", "naïve", "x9!", "it's", "日本"]
ACIDS, BASES = list("LAGVSERTID"), list("ACGT")
TYPES = ["input_ids", "token_type_ids", "attention_mask"]


def _bpe(splitting, *, special, texts=(" ".join(PROSE),), alphabet=(), unknown=None, normalizer=None):
    inner = Tokenizer(models.BPE(unk_token=unknown))
    inner.pre_tokenizer, inner.normalizer = splitting, normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=310, special_tokens=special, initial_alphabet=list(alphabet), show_progress=False
    )
    inner.train_from_iterator(list(texts) * 9, trainer)
    return inner


def _around(inner, single, pair, *tokens):
    numbers = [(token, inner.token_to_id(token)) for token in tokens]
    inner.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=numbers)
    return inner


def _esm(folder):
    """A tokenizer in Python that finds its words itself."""
    file = folder / "vocab.txt"
    file.write_text("\n".join(["<cls>", "<pad>", "<eos>", "<unk>", *ACIDS, "<mask>"]))
    return EsmTokenizer(str(file))


def _bases(folder):
    """Knows neither other characters nor a token for them."""
    inner = _bpe(pre_tokenizers.WhitespaceSplit(), special=["<s>", "</s>"], texts=["ACGTACCA GGT"])
    _around(inner, "<s> $A </s>", "<s> $A </s> $B:1 </s>:1", "<s>", "</s>")
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="</s>")


def _special_letters(folder):
    """Its letters are special tokens without a role."""
    inner = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "[CLS]": 2}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(BASES)
    _around(inner, "[CLS] $A", "[CLS] $A [CLS] $B", "[CLS]")
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, additional_special_tokens=BASES, **names)


def _types(folder):
    """As XLNet's: types also of a single text, and padding and cuts on the left."""
    inner = _bpe(pre_tokenizers.Metaspace(), special=["[PAD]", "[UNK]", "[SEP]", "[CLS]"], unknown="[UNK]")
    _around(inner, "$A:0 [SEP]:0 [CLS]:2", "$A:0 [SEP]:0 $B:1 [SEP]:1 [CLS]:2", "[SEP]", "[CLS]")
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "sep_token": "[SEP]", "cls_token": "[CLS]"}
    sides = {"padding_side": "left", "truncation_side": "left"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, model_input_names=TYPES, **names, **sides)


def _second_first(folder):
    inner = _bpe(pre_tokenizers.Whitespace(), special=["[UNK]", "<s>", "</s>"], unknown="[UNK]")
    _around(inner, "</s> $A", "<s> $B:1 </s> $A:0 <s>", "<s>", "</s>")
    names = {"pad_token": "</s>", "unk_token": "[UNK]"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, model_input_names=TYPES, **names)


def _prepending(folder):
    """Puts a mark before each text by its normalizer, as Llama 2's."""
    marks = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner = _bpe(None, special=["<unk>", "<s>"], unknown="<unk>", normalizer=marks)
    _around(inner, "<s> $A", "<s> $A <s>:1 $B:1", "<s>")
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", pad_token="<unk>")


def _byte_level(folder):
    """As RoBERTa's with a space before each text, and a special token that takes blanks in."""
    splitting = pre_tokenizers.ByteLevel(add_prefix_space=True)
    inner = _bpe(splitting, special=["<s>", "</s>", "<pad>"], alphabet=pre_tokenizers.ByteLevel.alphabet())
    inner.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, mask_token=AddedToken("<mask>", lstrip=True), **names)


def _unigram(folder):
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), ("▁one", -3.0), ("▁two", -3.0)]
    pieces += [(letter, -6.0) for letter in sorted(set("".join(PROSE[:4])))]
    inner = Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=False))
    inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    _around(inner, "$A </s>", "$A </s> $B </s>", "</s>")
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="</s>", pad_token="<pad>")


SORTS = {
    "esm": (_esm, ACIDS),
    "bases": (_bases, BASES),
    "special letters": (_special_letters, BASES),
    "types": (_types, PROSE),
    "second first": (_second_first, PROSE),
    "prepending": (_prepending, PROSE),
    "byte-level": (_byte_level, PROSE),
    "unigram": (_unigram, PROSE),
    "bytes": (lambda folder: ByT5Tokenizer(), PROSE),
    "characters": (lambda folder: CanineTokenizer(), PROSE),
}


def saved(sort: str, folder: Path) -> str:
    """Saves a tokenizer, and returns its folder."""
    folder.mkdir()
    SORTS[sort][0](folder).save_pretrained(folder)
    return str(folder)

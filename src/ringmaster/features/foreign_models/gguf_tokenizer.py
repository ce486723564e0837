"""A tokenizer of Hugging Face as the metadata of a GGUF file, by which llama.cpp tokenizes.

Two kinds have a form there, both pair encodings (BPE):

- byte-level ("gpt2"): tokens in the alphabet of bytes, the merges, and the name of the expression that splits a text;
- SentencePiece's ("llama"): tokens with "▁" for a space and bytes as `<0x0A>`, of which the one of the highest score is
  merged first. The scores are those of the order of the merges.

What a tokenizer does beyond that is refused, as llama.cpp would make other tokens of a text than the model has learnt.
Unicode normalization is an exception: no GGUF file of a Qwen has its NFC, which changes no composed text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
from tokenizers import Tokenizer

from ringmaster.errors import raise_faults

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
TEMPLATE, GENERATION = "chat_template.jinja", "generation_config.json"
BYTE_LEVEL, SENTENCE_PIECE = "gpt2", "llama"
SPACE = "▁"
PROBE = "a"
SPECIAL = ("bos", "eos", "unk", "pad")
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3, QWEN2 = (f"{CONTRACTIONS}|{WORDS}|{digits}|{REST}" for digits in (r"\p{N}{1,3}", r"\p{N}"))
GPT2, DIGITS = "", "Digits"
"""The expression of ByteLevel itself; the same after single digits are split off."""
SPLITS: Mapping[tuple[str, bool], str] = {
    (LLAMA3, True): "llama-bpe",
    (LLAMA3, False): "smaug-bpe",
    (QWEN2, False): "qwen2",
    (GPT2, False): "gpt-2",
    (DIGITS, False): "smollm",
}
"""The names in llama.cpp by expression, and by whether a word that is a token is kept whole (`ignore_merges`)."""


@dataclass(frozen=True, kw_only=True)
class GgufTokenizer:
    """The tokenizer of a model's folder. content: of tokenizer.json; options: of tokenizer_config.json."""

    content: Mapping[str, Any]
    options: Mapping[str, Any]
    chat_template: str | None
    eos_token_ids: tuple[int, ...] = ()

    @staticmethod
    def read(files: Sequence[Path], *, num_embeddings: int) -> GgufTokenizer:
        """Returns the tokenizer in files. Raises InputError with all that GGUF cannot hold of it.

        num_embeddings: the number of tokens that the model has embeddings for.
        """
        by_name = {file.name: file for file in files}
        if TOKENIZER not in by_name:
            raise_faults(
                [f"the model has no {TOKENIZER}. To fix: save its tokenizer there, by AutoTokenizer of transformers"]
            )
        read = {name: _json_of(by_name.get(name)) for name in (TOKENIZER, TOKENIZER_CONFIG, GENERATION)}
        template = read[TOKENIZER_CONFIG].get("chat_template")
        if TEMPLATE in by_name:
            template = by_name[TEMPLATE].read_text(encoding="utf-8")
        ends = read[GENERATION].get("eos_token_id")
        tokenizer = GgufTokenizer(
            content=read[TOKENIZER],
            options=read[TOKENIZER_CONFIG],
            chat_template=template if isinstance(template, str) else None,
            eos_token_ids=tuple(ends) if isinstance(ends, list) else (),
        )
        faults = [*tokenizer._faults(num_embeddings)]
        raise_faults([f"{by_name[TOKENIZER]} cannot be written as GGUF: {fault}" for fault in faults])
        return tokenizer

    @property
    def model(self) -> Mapping[str, Any]:
        """The part of the content that has the vocabulary and the merges."""
        return dict(self.content.get("model") or {})

    @property
    def kind(self) -> str:
        """The kind in GGUF."""
        return SENTENCE_PIECE if self.model.get("byte_fallback") else BYTE_LEVEL

    @cached_property
    def added(self) -> Mapping[str, Mapping[str, Any]]:
        """The added tokens by their text."""
        return {each["content"]: each for each in self.content.get("added_tokens") or ()}

    @cached_property
    def ids(self) -> Mapping[str, int]:
        """All tokens with their ids."""
        return {**self.model.get("vocab", {}), **{text: each["id"] for text, each in self.added.items()}}

    @cached_property
    def merges(self) -> Sequence[tuple[str, str]]:
        """The pairs of tokens that are merged, those that come first before the others."""
        pairs = (each.split(" ", 1) if isinstance(each, str) else each for each in self.model["merges"])
        return [(left, right) for left, right in pairs]

    @property
    def steps(self) -> Sequence[Mapping[str, Any]]:
        """The steps in which a text is split, before the merges."""
        step = self.content.get("pre_tokenizer") or {}
        return [*step["pretokenizers"]] if step.get("type") == "Sequence" else [step] if step else []

    @property
    def split(self) -> str | None:
        """The name in llama.cpp of how a byte-level tokenizer splits a text; None: it has none."""
        *before, last = self.steps or [{}]
        if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
            return None
        expression: str | None = None
        match before, last.get("use_regex", True):
            case [], True:
                expression = GPT2
            case [{"type": "Digits", "individual_digits": True}], True:
                expression = DIGITS
            case [{"type": "Split", "behavior": "Isolated", "pattern": {"Regex": str(regex)}}], False:
                expression = regex
        return None if expression is None else SPLITS.get((expression, bool(self.model.get("ignore_merges"))))

    @property
    def adds_space(self) -> bool:
        """Whether a SentencePiece tokenizer begins a text with a space."""
        return '"Prepend"' in json.dumps(self.content.get("normalizer")) or any(
            step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never" for step in self.steps
        )

    def special_id(self, kind: str) -> int | None:
        """Returns the id of the special token of a kind, such as "eos"."""
        token = self.options.get(f"{kind}_token")
        text = token.get("content") if isinstance(token, dict) else token
        return self.ids.get(text) if isinstance(text, str) else None

    @cached_property
    def added_around(self) -> tuple[list[int], list[int]]:
        """The ids that the tokenizer adds before and after a text."""
        tokenizer = Tokenizer.from_str(json.dumps({**self.content, "truncation": None, "padding": None}))
        bare = tokenizer.encode(PROBE, add_special_tokens=False).ids
        whole = tokenizer.encode(PROBE).ids
        start = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
        return whole[:start], whole[start + len(bare) :]

    def describe(self, writer: gguf.GGUFWriter, *, num_embeddings: int) -> None:
        """Adds the tokenizer to a file; ids without a token get one that is never used."""
        tokens, types = zip(*self._tokens(num_embeddings), strict=True)
        writer.add_tokenizer_model(self.kind)
        writer.add_token_list(tokens)
        writer.add_token_types([int(each) for each in types])
        if self.kind == SENTENCE_PIECE:
            writer.add_tokenizer_pre("default")
            writer.add_token_scores(self._scores(num_embeddings))
            writer.add_add_space_prefix(self.adds_space)
        else:
            assert self.split is not None
            writer.add_tokenizer_pre(self.split)
            writer.add_token_merges([" ".join(pair) for pair in self.merges])
        for kind in SPECIAL:
            if (id := self.special_id(kind)) is not None:
                getattr(writer, f"add_{kind}_token_id")(id)
        before, after = self.added_around
        writer.add_add_bos_token(bool(before))
        writer.add_add_eos_token(bool(after))
        of_turn = [id for id in self.eos_token_ids if id != self.special_id("eos")]
        if of_turn:
            writer.add_eot_token_id(of_turn[-1])
        if self.chat_template:
            writer.add_chat_template(self.chat_template)

    def _tokens(self, num_embeddings: int) -> Iterator[tuple[str, gguf.TokenType]]:
        by_id = {id: text for text, id in self.ids.items()}
        unknown = self.special_id("unk")
        is_piece = self.kind == SENTENCE_PIECE
        for id in range(num_embeddings):
            text = by_id.get(id)
            if text is None:
                yield f"[PAD{id}]", gguf.TokenType.UNUSED
            elif is_piece and id == unknown:
                yield text, gguf.TokenType.UNKNOWN
            elif text in self.added and self.added[text].get("special"):
                yield text, gguf.TokenType.CONTROL
            elif text in self.added:  # llama.cpp looks for it in the text itself, where a space is one
                yield text.replace(SPACE, " ") if is_piece else text, gguf.TokenType.USER_DEFINED
            elif is_piece and text.startswith("<0x") and text.endswith(">") and len(text) == len("<0x00>"):
                yield text, gguf.TokenType.BYTE
            else:
                yield text, gguf.TokenType.NORMAL

    def _scores(self, num_embeddings: int) -> list[float]:
        """Returns the scores of the tokens, of which a merge of an earlier pair has a higher one; others have 0."""
        scores = [0.0] * num_embeddings
        for rank, (left, right) in enumerate(self.merges, start=1):
            id = self.ids.get(left + right)
            if id is not None and not scores[id]:
                scores[id] = -float(rank)
        return scores

    def _faults(self, num_embeddings: int) -> Iterator[str]:
        if self.model.get("type") != "BPE":
            yield f"its model is {self.model.get('type')}, and GGUF has BPE. To fix: give a model with such a tokenizer"
            return
        if (last := max(self.ids.values(), default=0)) >= num_embeddings:
            yield f"it has a token {last}, and the model embeddings of {num_embeddings}. To fix: save both again"
        if any(self.model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")):
            yield "its merges have dropout, a prefix or a suffix. To fix: give a tokenizer without"
        yield from self._piece_faults() if self.kind == SENTENCE_PIECE else self._byte_faults()
        before, after = self.added_around
        known = [[id] for id in (self.special_id("bos"), self.special_id("eos")) if id is not None]
        for place, ids, which in (("before", before, "bos"), ("after", after, "eos")):
            if ids and ids != [self.special_id(which)]:
                text = f"it adds the tokens {ids} {place} a text, and GGUF can add {known}"
                yield f"{text}. To fix: change its post-processor"

    def _byte_faults(self) -> Iterator[str]:
        if (self.content.get("normalizer") or {}).get("type") not in (None, "NFC"):
            yield f"it has a normalizer, {self.content['normalizer']['type']}. To fix: give a tokenizer without"
        if self.split is None:
            kinds = ", ".join(sorted(set(SPLITS.values())))
            yield f"it splits a text in none of the ways of {kinds}. To fix: give a tokenizer of one of these models"

    def _piece_faults(self) -> Iterator[str]:
        text = json.dumps([self.content.get("normalizer"), self.content.get("pre_tokenizer")], ensure_ascii=False)
        if SPACE not in text:
            yield f"its spaces are not written {SPACE}. To fix: give a tokenizer of a Llama or a Gemma"


def _json_of(file: Path | None) -> Mapping[str, Any]:
    if file is None:
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}. To fix: save the tokenizer again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} is not a JSON object. To fix: save the tokenizer again")
    return content

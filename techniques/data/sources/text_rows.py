"""Texts with classes or numbers, words with a class each, inputs with targets, and texts whose embeddings are alike."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Annotated, Any, ClassVar

import numpy as np

from ringmaster.techniques.data.arrow_files import Array
from ringmaster.techniques.data.class_labels import as_list, read_number
from ringmaster.techniques.data.row_kind import MEDIA
from ringmaster.techniques.data.row_source import Columns, RowSource, SampleContext, text_of
from ringmaster.techniques.data.text_encoder import VISIBLE
from ringmaster.techniques.data_source import DataOptions, PreparedData, column, shown
from ringmaster.techniques.job_features import Description, Distinct
from ringmaster.techniques.job_specs import DataSpec
from ringmaster.techniques.metric import IGNORED


@dataclass(frozen=True, kw_only=True)
class TextRegressionOptions(DataOptions):
    """The columns of a text, or of a pair, and of its label."""

    text_column: str | None = column("text", "sentence", "sentence1", "premise", "question1")
    text_pair_column: Annotated[
        str | None, Description("the column that holds the second text of a pair, such as question2")
    ] = column("text_pair", "sentence2", "hypothesis", "question2", is_optional=True)
    label_column: Annotated[
        str | None, Description("the column that holds the class, or the number to predict, such as stars")
    ] = column("label", "labels", "class")


@dataclass(frozen=True, kw_only=True)
class TextClassificationOptions(TextRegressionOptions):
    """The same; labels: the classes, in the order of their numbers, () for those found in the data."""

    labels: Annotated[
        tuple[str, ...],
        Distinct(),
        Description("the classes, in the order of their numbers, such as [negative, positive]"),
    ] = ()


OTHER_TEXTS = dict.fromkeys(
    (
        *("sentence", "sentence1", "sentence2", "question", "question1", "question2", "premise", "hypothesis"),
        *("text_pair", "text2", "text_b", "sentence_b", "passage", "context", "query"),
    ),
    "which may be a second text, and is not read. To fix: set text_column and text_pair_column to both texts",
)


class TextClassification(RowSource):
    """The tokens of a text, or of a pair, with the number of its class.

    Where labels are lists, a text may have several classes: its label is 1 for each of them and 0 for the others. The
    number of the class then follows the order of `labels` in the same way.
    """

    name = "text-classification"
    version = 3
    decisive = OTHER_TEXTS
    options_class: ClassVar[type[DataOptions]] = TextClassificationOptions
    needs_tokenizer = True

    def columns(self, spec: DataSpec, available: Sequence[str] | None = None) -> Columns:
        """Returns the columns; where there is one of second texts, every row has one.

        Where the options name the column of the text, no other one is a second text.
        """
        result = super().columns(spec, available)
        return (result if self.options(spec).text_column is None else replace(result, decisive={})).in_all_rows()

    def texts(self, row: Mapping[str, Any], *, context: SampleContext) -> Iterable[str]:
        """Returns the text, and the second one of a pair."""
        return row["text"], row["text_pair"]

    def sample(self, row: Mapping[str, Any], *, context: SampleContext) -> Mapping[str, Any]:
        """Returns tokens with the tokenizer's special tokens, and the label."""
        return {**encoded_texts(row, context), "labels": context.labels.encode(as_list(row["label"]))}

    def reference(self, row: Mapping[str, Any], *, context: SampleContext) -> Mapping[str, Any] | None:
        """Returns the tokens, and their types, that the tokenizer's own call gives."""
        whole = context.tokenizer.own_call(row["text"], row["text_pair"], at_most=context.max_length)
        names = ("input_ids", "token_type_ids")
        return None if whole is None else {name: whole[name] for name in names if name in whole}


def encoded_texts(row: Mapping[str, Any], context: SampleContext) -> dict[str, Any]:
    """Returns the tensors of a row's text, or of a pair of texts."""
    tokenizer = context.tokenizer
    ids, pair = (None if row[role] is None else tokenizer.encode(text_of(row, role)) for role in ("text", "text_pair"))
    assert ids is not None
    marked = tokenizer.with_special(ids, pair, at_most=context.max_length)
    segments = {} if marked.segments is None else {"token_type_ids": marked.segments}
    return {"input_ids": marked.tokens, **segments}


def filled(rows: Sequence[Sequence[int]], value: int) -> Array:
    """Returns rows of tokens as an array [rows, tokens], the shorter ones filled up."""
    width = max(map(len, rows))
    return np.array([[*row, *[value] * (width - len(row))] for row in rows])


ROUNDED = "the label is a whole number of more digits than 32 bits hold, and is rounded; subtract a constant from all"
NUMBER_OF_NONE = f"the label {IGNORED} is learnt as a number; remove the row where it means no label"
LARGEST = float(np.finfo(np.float32).max)


class TextRegression(TextClassification):
    """The tokens of a text, or of a pair, with a number, which a model with one output predicts."""

    name = "text-regression"
    version = 4
    options_class = TextRegressionOptions

    def sample(self, row: Mapping[str, Any], *, context: SampleContext) -> Mapping[str, Any]:
        """Returns tokens with the tokenizer's special tokens, and the number."""
        number = read_number(row["label"])
        if not abs(number) <= LARGEST:  # also of NaN
            raise ValueError(
                f"label {row['label']!r} is not a finite number of 32 bits. To fix: correct it, or name another "
                "label_column"
            )
        return {**encoded_texts(row, context), "labels": np.float32(number)}

    def remark(self, row: Mapping[str, Any], *, context: SampleContext) -> str | None:
        """Returns the note on a number that means no label elsewhere, or on a whole one that is rounded."""
        number = read_number(row["label"])
        if number == IGNORED:
            return NUMBER_OF_NONE
        return ROUNDED if number.is_integer() and number != float(np.float32(number)) else None

    def described(self, prepared: PreparedData) -> PreparedData:
        """Returns the description with one output."""
        return replace(prepared, num_labels=1)


@dataclass(frozen=True, kw_only=True)
class TokenClassificationOptions(DataOptions):
    """The columns of words and of their classes. labels: as for texts."""

    tokens_column: Annotated[str | None, Description("the column that holds a list of words, such as words")] = column(
        "tokens", "words"
    )
    label_column: str | None = column("labels", "tags", "ner_tags", "pos_tags", "label")
    labels: tuple[str, ...] = ()


class TokenClassification(RowSource):
    """The tokens of a row's words, with a label for the first token of each word.

    A word whose label is -100, as transformers writes it, has none. The other tokens of a word, and special tokens, do
    not count. Words are encoded as by `is_split_into_words`, see `RowTokenizer.word_texts`.
    """

    name = "token-classification"
    version = 3
    options_class = TokenClassificationOptions
    needs_tokenizer = True

    def texts(self, row: Mapping[str, Any], *, context: SampleContext) -> Iterable[str]:
        """Returns the words as they are encoded; where a tokenizer is trained, with the spaces that it will read."""
        words = as_list(row["tokens"])
        if not isinstance(words, list):
            return []
        if context.spec.tokenizer is None:
            return [f" {word}" if place else str(word) for place, word in enumerate(words)]
        return context.tokenizer.word_texts([*map(str, words)])

    def classes(self, value: Any) -> Iterable[Any]:
        """Returns the classes of the words that have one."""
        return [each for each in super().classes(value) if not _is_unlabelled(each)]

    def sample(self, row: Mapping[str, Any], *, context: SampleContext) -> Mapping[str, Any]:
        """Returns tokens with special tokens, and the label of each."""
        words, classes = as_list(row["tokens"]), as_list(row["label"])
        for name, value in (("tokens", words), ("label", classes)):
            if not isinstance(value, list):
                raise ValueError(f"{name} are {type(value).__name__}, not a list. To fix: name another {name}_column")
        if len(words) != len(classes):
            raise ValueError(f"there are {len(words)} tokens and {len(classes)} labels. To fix: give a label for each")
        for place, word in enumerate(words, start=1):
            if not isinstance(word, str) and (not isinstance(word, int) or isinstance(word, bool)):
                what = "null" if word is None else f"{word!r}, which is not text"
                raise ValueError(f"token {place} is {what}. To fix: give it a text, or remove it and its label")
        encoded = [context.tokenizer.encode(word) for word in context.tokenizer.word_texts([*map(str, words)])]
        marked = context.tokenizer.with_special([*chain.from_iterable(encoded)], at_most=context.max_length)
        kept = [place for place, ids in enumerate(encoded) for _ in ids][marked.kept.start : marked.kept.stop]
        places: list[int | None] = [None] * len(marked.tokens)
        places[marked.start : marked.start + len(kept)] = kept
        segments = {} if marked.segments is None else {"token_type_ids": marked.segments}
        return {"input_ids": marked.tokens, **segments, "labels": _labels_at(places, classes, context)}

    def remark(self, row: Mapping[str, Any], *, context: SampleContext) -> str | None:
        """Returns the note on a label that may be lost, as many tokenizers have no token for its word."""
        pairs = zip(as_list(row["tokens"]), as_list(row["label"]), strict=True)
        is_lost = any(not _is_unlabelled(label) and not VISIBLE.search(str(word)) for word, label in pairs)
        return (
            "a word without a visible character has a label; tokenizers may have no token for it" if is_lost else None
        )

    def reference(self, row: Mapping[str, Any], *, context: SampleContext) -> Mapping[str, Any] | None:
        """Returns the tokens by the tokenizer's own call, and the label of the first one of each word."""
        words = context.tokenizer.word_texts([*map(str, as_list(row["tokens"]))])
        whole = context.tokenizer.own_call(words, at_most=context.max_length)
        if whole is None or not whole.is_fast:  # a tokenizer in Python does not map tokens to words
            return None if whole is None else {"input_ids": whole["input_ids"]}
        labels = _labels_at(whole.word_ids(), as_list(row["label"]), context)
        return {"input_ids": whole["input_ids"], "labels": labels}


def _labels_at(places: Sequence[int | None], classes: Sequence[Any], context: SampleContext) -> list[int]:
    """The label of each token. places: the word of each token, None for special ones. classes: of all words."""
    numbers = [IGNORED if _is_unlabelled(value) else context.labels.number(value) for value in classes]
    pairs = pairwise([None, *places])
    return [IGNORED if place is None or place == before else numbers[place] for before, place in pairs]


def _is_unlabelled(value: Any) -> bool:
    return not isinstance(value, str) and bool(value == IGNORED)


@dataclass(frozen=True, kw_only=True)
class Seq2SeqOptions(DataOptions):
    """The columns of an input and its target.

    prefix: what is put before each input. source_language, target_language: the codes of the languages, for tokenizers
        that mark texts with these; None for those that the tokenizer's files name.
    """

    input_column: Annotated[
        str | None, Description("the column that holds the text that an encoder-decoder reads, such as article")
    ] = column("input", "source", "document", "article")
    target_column: Annotated[
        str | None, Description("the column that holds the text that an encoder-decoder writes, such as summary")
    ] = column("target", "output", "summary", "highlights")
    prefix: str = ""
    source_language: Annotated[
        str | None, Description("the code of the language that a translation model reads, such as eng_Latn")
    ] = None
    target_language: Annotated[
        str | None, Description("the code of the language that a translation model writes, such as fra_Latn")
    ] = None


class Seq2Seq(RowSource):
    """The tokens of an input and, as labels, those of its target, each with the tokenizer's special tokens.

    The target is encoded as a target (`text_target`), as some tokenizers have other pieces for it, or mark its language
    with another code. Both have the tokenizer's end of text. The option `prefix` is put before each input, such as
    "summarize: ".
    """

    name = "seq2seq"
    version = 2
    decisive: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("instruction", "question", "prompt", "context", "passage"),
            "which is not read. To fix: put it into the input",
        ),
        **dict.fromkeys(
            ("history", "system", "prefix"), "which is not read. To fix: put it into the input, or set data.prefix"
        ),
        **dict.fromkeys(
            ("src_lang", "tgt_lang", "source_lang", "target_lang", "source_language", "target_language"),
            "and all rows are marked with the same languages. To fix: train on the rows of one pair of languages, set "
            "data.source_language and data.target_language, and leave the column out",
        ),
        **MEDIA,
    }
    options_class = Seq2SeqOptions
    needs_tokenizer = True
    has_targets = True

    def texts(self, row: Mapping[str, Any], *, context: SampleContext) -> Iterable[str]:
        """Returns the input with its prefix; also the target where a tokenizer is trained on them."""
        text = f"{context.options.prefix}{row['input']}"
        return (text,) if context.spec.tokenizer is not None else (text, row["target"])

    def set_up_tokenizer(self, tokenizer: Any, *, options: Any) -> None:
        """Sets the languages. Raises ValueError where it marks languages and one of them is not known."""
        name = type(tokenizer).__name__
        given = {"src_lang": options.source_language, "tgt_lang": options.target_language}
        if not hasattr(tokenizer, "tgt_lang"):
            if any(given.values()):
                raise ValueError(
                    f"data: {name} marks no languages. To fix: remove source_language and target_language; write what "
                    "the model reads before a text as prefix"
                )
            return
        for attribute, language in given.items():
            language = language or getattr(tokenizer, attribute, None)
            key = "source_language" if attribute == "src_lang" else "target_language"
            if language is None:
                raise ValueError(
                    f"data: {name} marks texts with their language, and neither its files nor {key} name it. To fix: "
                    f"set data.{key} to its code"
                )
            try:
                setattr(tokenizer, attribute, language)
                marks = tokenizer(text="") if attribute == "src_lang" else tokenizer(text_target="")
            except KeyError:
                marks = {"input_ids": [tokenizer.unk_token_id]}
            if not {tokenizer.unk_token_id, None}.isdisjoint(marks["input_ids"]):
                named = tokenizer.special_tokens_map.values()
                codes = [token for token in tokenizer.all_special_tokens if token not in named]
                raise ValueError(
                    f"data: {name} has no token for the language {language!r}. To fix: set data.{key} to one of its "
                    f"codes: {shown(codes)}"
                )

    def sample(self, row: Mapping[str, Any], *, context: SampleContext) -> Mapping[str, Any]:
        """Returns the tokens of the input, and those of the target as labels."""
        tokenizer = context.tokenizer
        text = tokenizer.encode(f"{context.options.prefix}{text_of(row, 'input')}")
        tokens = tokenizer.with_special(text, at_most=context.max_length).tokens
        labels = tokenizer.target(text_of(row, "target"), at_most=context.max_length)
        return {"input_ids": _ended(tokens, context), "labels": _ended(labels, context)}

    def reference(self, row: Mapping[str, Any], *, context: SampleContext) -> Mapping[str, Any] | None:
        """Returns what `tokenizer(text, text_target=target)` gives; None where that is longer than a sample."""
        text = f"{context.options.prefix}{row['input']}"
        result = context.tokenizer.own_call(text, target=row["target"])
        if result is None or max(map(len, result.values())) >= context.max_length:
            return None
        return {name: _ended(result[name], context) for name in ("input_ids", "labels")}


def _ended(tokens: Sequence[int], context: SampleContext) -> list[int]:
    """Tokens with special ones, with an end of text also where the tokenizer adds none."""
    end_id = context.tokenizer.end_id
    if end_id is None or end_id in tokens[-2:]:  # the last one may be the code of a language
        return [*tokens]
    return [*tokens[: context.max_length - 1], end_id]

"""Pairs of texts that belong together, and texts that do not belong to them, of which a model learns embeddings."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from ringmaster.techniques.data.class_labels import are_samples_equal
from ringmaster.techniques.data.row_source import Columns, RowSource, SampleContext, text_of
from ringmaster.techniques.data.sources.text_rows import filled
from ringmaster.techniques.data_source import DataOptions, column
from ringmaster.techniques.job_features import Description
from ringmaster.techniques.job_specs import DataSpec
from ringmaster.techniques.models.sentence_embeddings import LENGTH_KEY, max_length_of


@dataclass(frozen=True, kw_only=True)
class EmbeddingOptions(DataOptions):
    """The columns of a text, of one that belongs to it, and of one that does not.

    retriever: the settings of the `Retriever` that finds further texts that do not belong to it.
    """

    anchor_column: Annotated[str | None, Description("the column that holds the text to embed, such as query")] = (
        column("anchor", "query", "question", "sentence1")
    )
    positive_column: Annotated[
        str | None, Description("the column that holds the text that belongs to it, such as passage")
    ] = column("positive", "document", "answer", "sentence2")
    negative_column: Annotated[
        str | None, Description("the column that holds a similar text that does not belong to it, such as other")
    ] = column("negative", "hard_negative", is_optional=True)
    retriever: Mapping[str, Any] | None = None


PAIR_LABELS = dict.fromkeys(
    (
        *("label", "labels", "gold_label", "gold", "is_duplicate", "duplicate", "is_paraphrase", "paraphrase"),
        *("score", "scores", "similarity_score", "similarity", "similar", "is_similar", "relevance", "is_relevant"),
        *("relatedness_score", "relatedness", "entailment", "is_match", "match", "target", "human_score", "margin"),
    ),
    "which marks whether texts are alike, and losses of embeddings take every pair as alike. To fix: keep the pairs "
    "that belong together, without the column; or train a model ...ForSequenceClassification on the pairs",
)
NEGATIVE = "negative"
NUMBERED = re.compile(r"(?:hard_)?negative_?(\d+)")


class Embedding(RowSource):
    """Two rows of tokens, [2, tokens], with their masks: an anchor, and the text that belongs to it.

    Files with a `negative` have three, [3, tokens]: a similar text that does not belong to it; those with `negative_1`,
    `negative_2`, ... have more. A retriever adds k of these: the passages of a store that are most similar to the
    anchor, without those that hold the positive.
    """

    name = "embedding"
    version = 3
    options_class = EmbeddingOptions
    decisive: ClassVar[Mapping[str, str]] = {
        **PAIR_LABELS,
        **dict.fromkeys(
            ("negatives", "hard_negatives", "neg", "negs"),
            "which is not read. To fix: give each its own column, negative_1, negative_2, ...",
        ),
    }
    needs_tokenizer = True
    usual_loss = "contrastive"
    copies_labels = False  # the other pairs of a batch are the negatives

    def columns(self, spec: DataSpec, available: Sequence[str] | None = None) -> Columns:
        """Returns the columns, with those of numbered negatives; where there is one of negatives, every row has one."""
        result = super().columns(spec, available).in_all_rows()
        numbered = {int(match[1]): name for name in result.unread if (match := NUMBERED.fullmatch(name))}
        more = {f"{NEGATIVE} {number}": numbered[number] for number in sorted(numbered)}
        return replace(
            result,
            columns={**result.columns, **more},
            roles=(*result.roles, *more),
            unread=tuple(name for name in result.unread if name not in more.values()),
        )

    def with_passages(self, rows: Sequence[Mapping[str, Any]], *, context: SampleContext) -> list[Mapping[str, Any]]:
        """Returns rows with hard negatives that are mined in the store: they are as new roles."""
        if context.retriever is None:
            return list(rows)
        anchors, positives = ([str(row[role]) for row in rows] for role in ("anchor", "positive"))
        return [
            {**row, **{f"mined {place}": each.text for place, each in enumerate(passages)}}
            for row, passages in zip(rows, context.find_passages(anchors, but=positives), strict=True)
        ]

    def most_tokens(self, spec: DataSpec) -> tuple[int, str] | None:
        """Returns the most tokens that Sentence-Transformers reads."""
        most = None if spec.tokenizer is None else max_length_of(spec.tokenizer)
        name = f"{spec.tokenizer} ({LENGTH_KEY})"
        return None if most is None else (most, f"Sentence-Transformers reads {most:,} with {name}")

    def texts(self, row: Mapping[str, Any], *, context: SampleContext) -> Iterable[str]:
        """Returns the texts."""
        return (text for text in row.values() if text is not None)

    def sample(self, row: Mapping[str, Any], *, context: SampleContext) -> Mapping[str, Any]:
        """Returns the tokens of the texts with special tokens, shorter ones filled up, and their masks."""
        tokenizer = context.tokenizer
        texts = [
            tokenizer.with_special(tokenizer.encode(text_of(row, role)), at_most=context.max_length).tokens
            for role in row
            if row[role] is not None or role != NEGATIVE
        ]
        masks = filled([[1] * len(tokens) for tokens in texts], 0)
        return {"input_ids": filled(texts, tokenizer.pad_id), "attention_mask": masks}

    def reference(self, row: Mapping[str, Any], *, context: SampleContext) -> Mapping[str, Any] | None:
        """Returns what the tokenizer's own call gives for each text."""
        tokenizer = context.tokenizer
        results = [tokenizer.own_call(text, at_most=context.max_length) for text in row.values() if text is not None]
        if None in results:
            return None
        texts = [result["input_ids"] for result in results]
        return {
            "input_ids": filled(texts, tokenizer.pad_id),
            "attention_mask": filled([[1] * len(tokens) for tokens in texts], 0),
        }

    def remark(self, row: Mapping[str, Any], *, context: SampleContext) -> str | None:
        """Returns what to know of a row that has one text twice."""
        if row["positive"] in [text for role, text in row.items() if role.startswith(NEGATIVE)]:
            return "the positive is also a negative, so that both are pulled towards the anchor and pushed away"
        return "the anchor is its own positive" if row["anchor"] == row["positive"] else None

    def training_faults(self, folder: Path) -> Iterable[str]:
        """Returns what is wrong where no two texts differ."""
        if are_samples_equal(folder):
            yield (
                "all rows to train on are the same, so that there is nothing to learn. To fix: give texts that differ, "
                "or name other columns by anchor_column and positive_column"
            )

"""Rows of token ids whose labels or masks define what is learnt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ringmaster.techniques.data.arrow_files import LABELS, MASK, POSITIONS, TOKENS, Array
from ringmaster.techniques.data.row_source import Columns, RowSource, SampleContext
from ringmaster.techniques.data.tokens import LOSS_MASKS, NOT_LEARNT, OTHER_LABEL_COLUMNS
from ringmaster.techniques.data_source import DataOptions, column
from ringmaster.techniques.job_specs import DataSpec
from ringmaster.techniques.metric import IGNORED

SEGMENTS = "token_type_ids"


@dataclass(frozen=True, kw_only=True)
class TokenizedOptions(DataOptions):
    """The columns have the names that transformers and TRL give them."""

    input_ids_column: str | None = column(TOKENS)
    labels_column: str | None = column(LABELS, is_optional=True)
    attention_mask_column: str | None = column(MASK, is_optional=True)
    completion_mask_column: str | None = column("completion_mask", is_optional=True)
    assistant_masks_column: str | None = column("assistant_masks", "assistant_mask", is_optional=True)
    loss_mask_column: str | None = column("loss_mask", is_optional=True)
    position_ids_column: str | None = column(POSITIONS, is_optional=True)
    token_type_ids_column: str | None = column(SEGMENTS, is_optional=True)


class Tokenized(RowSource):
    """The token ids of a row, with its labels; those where a mask of what is learnt is 0 do not count.

    Without labels, the tokens are their own. The loss of a language model shifts them. Padding, where the attention
    mask is 0 at the start or the end, is left out.
    """

    name = "tokenized"
    decisive: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(OTHER_LABEL_COLUMNS, NOT_LEARNT),
        "seq_lengths": (
            "by which TRL marks several samples in a row, and a row is one. To fix: give each sample a row, and "
            "set packing"
        ),
    }
    options_class = TokenizedOptions
    is_causal = True
    packs = True

    def columns(self, spec: DataSpec, available: Sequence[str] | None = None) -> Columns:
        """Returns the columns; where the first row has one, every row has it."""
        result = super().columns(spec, available)
        return replace(result, optional=result.optional - result.columns.keys())

    def sample(self, row: Mapping[str, Any], *, context: SampleContext) -> Mapping[str, Any]:
        """Returns tokens and labels; also a mask where the row has one, as models that are not causal need it."""
        arrays = {name: _numbers(value, name) for name, value in row.items() if value is not None}
        tokens = arrays[TOKENS]
        for name, values in arrays.items():
            if len(values) != len(tokens):
                raise ValueError(
                    f"there are {len(tokens)} {TOKENS} and {len(values)} {name}. To fix: give one for each token"
                    + (", or texts of kind seq2seq for an encoder-decoder" if name == LABELS else "")
                )
        masks = [name for name in (MASK, *LOSS_MASKS) if name in arrays]
        if wrong := next((name for name in masks if not np.isin(arrays[name], (0, 1)).all()), None):
            raise ValueError(f"{wrong} has other values than 0 and 1. To fix: correct it")
        kept = np.flatnonzero(arrays.get(MASK, np.ones_like(tokens)))
        if len(kept) and len(kept) != kept[-1] - kept[0] + 1:
            raise ValueError(f"{MASK} has a 0 between two tokens. To fix: give the row without those tokens")
        arrays = {name: values[kept] for name, values in arrays.items()}
        tokens, labels = arrays[TOKENS], arrays.get(LABELS, arrays[TOKENS]).copy()
        if tokens.min(initial=0) < 0 or labels.min(initial=0) < IGNORED or ((labels < 0) & (labels != IGNORED)).any():
            raise ValueError(f"{TOKENS} or {LABELS} are below 0. To fix: give {IGNORED} for what is not learnt")
        if POSITIONS in arrays and not np.array_equal(arrays[POSITIONS], np.arange(len(tokens))):
            raise ValueError(
                f"{POSITIONS} do not count from 0, as of several samples in a row. To fix: give each sample a row, "
                "and set packing"
            )
        if SEGMENTS in arrays and arrays[SEGMENTS].any():
            raise ValueError(f"{SEGMENTS} are not 0, and not read. To fix: give texts, with kind text-classification")
        counted = labels != IGNORED
        if _is_shifted(tokens, labels, counted):
            raise ValueError(
                f"each of the {LABELS} is the next token, and the loss shifts them. To fix: give each token itself as "
                "its label"
            )
        for name in LOSS_MASKS:
            counted &= arrays.get(name, tokens * 0 + 1) == 1
        sample = {TOKENS: tokens, LABELS: np.where(counted, labels, IGNORED)}
        if row["attention_mask"] is None or context.spec.packing:
            return sample
        return {**sample, MASK: np.ones(len(tokens), np.uint8)}


MAX_TOKEN = 2**31 - 1


def _numbers(value: Any, name: str) -> Array:
    """A list of whole numbers as an array. Raises ValueError where it is another value."""
    if not isinstance(value, list):
        what = f"is {value!r:.30}, not a list"
        more = " (a class of a whole row is read without seq_len and masks)" if name == LABELS else ""
        raise ValueError(f"{name} {what}. To fix: give a number for each token{more}")
    types = {int, bool} if name in (MASK, *LOSS_MASKS) else {int}
    if not types.issuperset(map(type, value)):
        raise ValueError(f"{name} has values that are not whole numbers. To fix: give a number for each token")
    if max(value, default=0) > MAX_TOKEN or min(value, default=0) < -MAX_TOKEN:
        raise ValueError(f"{name} has numbers of more than 32 bits. To fix: check the column of ids")
    return np.array(value, dtype=np.int64)


def _is_shifted(tokens: Array, labels: Array, counted: Array) -> bool:
    """Whether labels are those of the next tokens, and not the tokens themselves."""
    is_next = labels[:-1][counted[:-1]] == tokens[1:][counted[:-1]]
    return len(is_next) > 1 and bool(is_next.all()) and bool((labels[counted] != tokens[counted]).any())

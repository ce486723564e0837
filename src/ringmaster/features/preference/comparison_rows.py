"""Two answers to a prompt of which one is better, as reward models read them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import numpy as np

from ringmaster.features.preference.preference_rows import Preference, PreferenceOptions
from ringmaster.techniques.data import row_source
from ringmaster.techniques.data.class_labels import read_number
from ringmaster.techniques.data.sources.text_rows import LARGEST, filled
from ringmaster.techniques.data_source import DataOptions, PreparedData, column
from ringmaster.techniques.job_features import Description

MARGIN = "margin"
"""The entry [rows] of a batch with how much greater the reward of the chosen answer should be than the other's."""


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions(PreferenceOptions):
    """The columns of two answers, of which one is better."""

    margin_column: Annotated[
        str | None, Description("the column that says how much better the chosen answer is, such as score_difference")
    ] = column("margin", is_optional=True)


class Comparison(Preference):
    """Two rows of tokens, [2, tokens], as of kind preference, with their mask and the margin; 0 without one."""

    name = "comparison"
    usual_loss = "bradley-terry"
    options_class: ClassVar[type[DataOptions]] = ComparisonOptions
    is_causal = False
    copies_labels = False
    version = 1

    def sample(self, row: Mapping[str, Any], *, context: row_source.SampleContext) -> Mapping[str, Any]:
        """Returns the tokens and the mask of both answers, the shorter one filled up, and the margin."""
        tokens = [answer["input_ids"] for answer in self.pair(row, context=context)]
        margin = 0.0 if row[MARGIN] in (None, "") else read_number(row[MARGIN])
        if not abs(margin) <= LARGEST:  # also of NaN
            raise ValueError(
                f"the margin is {row[MARGIN]!r:.40}, and not a finite number of 32 bits. To fix: correct it, or name "
                "another margin_column"
            )
        return {
            "input_ids": filled(tokens, context.tokenizer.pad_id),
            "attention_mask": filled([[1] * len(each) for each in tokens], 0),
            MARGIN: np.float32(margin),
        }

    def reference(self, row: Mapping[str, Any], *, context: row_source.SampleContext) -> Mapping[str, Any] | None:
        """Returns the tokens of the tokenizer's own calls, as of kind preference."""
        known = super().reference(row, context=context)
        return None if known is None else {"input_ids": known["input_ids"]}

    def described(self, prepared: PreparedData) -> PreparedData:
        """Returns the description with one output."""
        return replace(prepared, num_labels=1)

"""Prompts with single completions, each of which is marked as desirable or not."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np

from ringmaster.techniques.data import row_source
from ringmaster.techniques.data.row_kind import LABEL
from ringmaster.techniques.data.sources.completion import Completion, CompletionOptions
from ringmaster.techniques.data_source import DataOptions, column
from ringmaster.techniques.job_features import Description

DESIRABLE = "desirable"
"""The entry [rows] of a batch with 1 for completions that are desirable, and 0 for others."""

FLAGS = {"true": 1, "1": 1, "false": 0, "0": 0}
"""The marks of completions as they are written in files."""


@dataclass(frozen=True, kw_only=True)
class UnpairedPreferenceOptions(CompletionOptions):
    """The columns of a prompt, its completion, and the mark of the completion."""

    label_column: Annotated[
        str | None, Description("the column that says whether the completion is desirable, such as liked")
    ] = column("label")


class UnpairedPreference(Completion):
    """The tokens of a prompt and of its completion, as of kind completion, and whether the completion is desirable."""

    name = "unpaired-preference"
    options_class: ClassVar[type[DataOptions]] = UnpairedPreferenceOptions
    packs = False
    version = 1

    def sample(self, row: Mapping[str, Any], *, context: row_source.SampleContext) -> Mapping[str, Any]:
        """Returns the tokens, labels for those of the completion, and 1 for a desirable completion, else 0."""
        flag = FLAGS.get(str(row[LABEL]).strip().lower())
        if flag is None:
            raise ValueError(
                f"the label is {row[LABEL]!r:.40}, and neither true nor false. To fix: say whether the completion is "
                "desirable, name another label_column, or set data.kind to completion and data.ignored_columns to "
                "[label]"
            )
        return {**super().sample(row, context=context), DESIRABLE: np.int64(flag)}

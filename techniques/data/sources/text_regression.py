"""Texts, or pairs of texts, with a number each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ringmaster.techniques.data.row_samples.row_source import SampleContext
from ringmaster.techniques.data.sources.text_classification import TextClassification, encoded_texts
from ringmaster.techniques.interface.data_source import PreparedData

LARGEST = float(np.finfo(np.float32).max)


class TextRegression(TextClassification):
    """The tokens of a text, or of a pair, with a number, which a model with one output predicts."""

    name = "text-regression"
    label_role = None

    def sample(self, row: Mapping[str, Any], *, context: SampleContext) -> Mapping[str, Any]:
        """Returns tokens with the tokenizer's special tokens, and the number."""
        try:
            number = float(row["label"])
        except (TypeError, ValueError):
            number = math.nan
        if not abs(number) <= LARGEST:  # also of NaN
            raise ValueError(
                f"label {row['label']!r} is no finite number of 32 bits. To fix: correct it, or name another "
                "label_column"
            )
        return {**encoded_texts(row, context), "labels": np.float32(number)}

    def described(self, prepared: PreparedData) -> PreparedData:
        """Returns the description with one output."""
        return replace(prepared, num_labels=1)

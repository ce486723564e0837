"""Compares the vocabularies of tokenizers in folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TOKENIZER = "tokenizer.json"


def have_other_tokens(one: Path | None, other: Path | None) -> bool:
    """Returns whether the tokenizers in two folders give tokens other numbers; False where one is not known."""
    if one is None or other is None:
        return False
    files = [folder / TOKENIZER for folder in (one, other)]
    if not all(file.is_file() for file in files):
        return False
    return bool(_vocabulary(files[0]) != _vocabulary(files[1]))


def _vocabulary(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8")).get("model", {}).get("vocab")

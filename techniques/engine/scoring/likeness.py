"""What models in folders have in common: their base, and how they read. Imports no torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ringmaster.techniques.adapters.peft_format import base_of, is_adapter, read_adapter, read_config

FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def base_key(folder: Path) -> str | None:
    """On which base a folder's model can be asked together with others; None where it is to be asked alone.

    Of an adapter the name of its base, whether that is a folder or on the hub; of a whole model its own folder.
    """
    if not is_adapter(folder):
        return str(folder.resolve())
    try:
        read_adapter(folder)
        base = base_of(folder)
    except ValueError:  # told where it is asked alone
        return None
    return str(base.resolve()) if base is not None else str(read_config(folder)["base_model_name_or_path"])


def tokenizer_of(folder: Path) -> str:
    """Where the tokenizer of the model in `folder` is: there, or with the base of an adapter that brings none."""
    if not is_adapter(folder) or (folder / "tokenizer.json").is_file():
        return str(folder)
    try:
        base = base_of(folder)
    except ValueError:  # told where the weights are loaded
        return str(folder)
    return str(base) if base is not None else str(read_config(folder)["base_model_name_or_path"])


def tokenizer_digest(name: str) -> str:
    """Of how the tokenizer in a folder reads: those whose files are equal read alike. Of a hub name, the name."""
    folder, digest = Path(name), hashlib.sha256()
    if not folder.is_dir():
        return name
    for file in (folder / each for each in FILES):
        if file.is_file():
            digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()

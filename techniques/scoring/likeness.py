"""Keys for what models in folders have in common: their base and their tokenizer. Imports no torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ringmaster.techniques.models.adapters.peft_format import base_of, is_adapter, read_adapter, read_config

FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def base_key(folder: Path) -> str | None:
    """A key that is equal for models that can be computed over one base; None for a model that must run alone.

    The key of an adapter is its base's folder or hub name; that of a full model is its own folder.
    """
    if not is_adapter(folder):
        return str(folder.resolve())
    try:
        read_adapter(folder)
        base = base_of(folder)
    except ValueError:  # reported when the model runs alone
        return None
    return str(base.resolve()) if base is not None else str(read_config(folder)["base_model_name_or_path"])


def tokenizer_of(folder: Path) -> str:
    """The folder or hub name of the tokenizer of the model in `folder`.

    An adapter without a tokenizer of its own uses its base's.
    """
    if not is_adapter(folder) or (folder / "tokenizer.json").is_file():
        return str(folder)
    try:
        base = base_of(folder)
    except ValueError:  # reported when the weights are loaded
        return str(folder)
    return str(base) if base is not None else str(read_config(folder)["base_model_name_or_path"])


def tokenizer_digest(name: str) -> str:
    """A digest of the tokenizer files in a folder, equal for equal tokenizers; a hub name is returned unchanged."""
    folder, digest = Path(name), hashlib.sha256()
    if not folder.is_dir():
        return name
    for file in (folder / each for each in FILES):
        if file.is_file():
            digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()

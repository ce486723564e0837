"""Model cards as Hugging Face's hub has them: a README.md whose first lines say in YAML what a model was made from.

Source: https://huggingface.co/docs/hub/model-cards (`base_model`, `base_model_relation`, `datasets`, `model-index`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from model_lineage.records import ModelRecord

CARD = "README.md"
_FENCE = "---"
RELATIONS = {
    "fine-tuned": "finetune",
    "distilled": "finetune",
    "pruned": "finetune",
    "lora": "adapter",
    "prefix-tuned": "adapter",
    "ia3": "adapter",
    "quantized": "quantized",
    "merged": "merge",
}
"""The hub knows four relations; each kind of adaptation is one of them."""


@dataclass(frozen=True, kw_only=True)
class CardMetadata:
    """What a card says of a model's origin. base_models: hub names or folders. relation: a word of the hub."""

    base_models: tuple[str, ...] = ()
    relation: str | None = None
    datasets: tuple[str, ...] = ()


def hub_card(
    record: ModelRecord,
    *,
    base_models: Sequence[str],
    metrics: Mapping[str, float] | None = None,
    params: Mapping[str, Any] | None = None,
) -> str:
    """The card of a model. base_models: the names of its parents, as the hub or this registry has them."""
    relation = record.origin.relation or RELATIONS.get(record.kind)
    head: dict[str, Any] = {"library_name": "transformers", "tags": ["ringmaster", record.kind]}
    if base_models:
        head["base_model"] = base_models[0] if len(base_models) == 1 else list(base_models)
        if relation is not None:
            head["base_model_relation"] = relation
    if names := list(dict.fromkeys(dataset.name for dataset in record.datasets)):
        head["datasets"] = names
    title = record.registered_name + ("" if record.version is None else f" version {record.version}")
    said = [f"# {title}", f"{record.kind.capitalize()}{_from(base_models)}, recorded as `{record.model_id}`."]
    if record.datasets:
        said.append("\n".join(f"- {d.context}: {d.name}, digest `{d.digest}`" for d in record.datasets))
    for name, values in (("Held-out metrics", metrics), ("Hyperparameters", params)):
        if values:
            said += [f"## {name}", "\n".join(f"- {key}: {value}" for key, value in values.items())]
    return f"{_FENCE}\n{yaml.safe_dump(head, sort_keys=False)}{_FENCE}\n\n" + "\n\n".join(said) + "\n"


def read_card(folder: Path) -> CardMetadata:
    """What the card in a model's folder says; nothing where there is none. Raises ValueError on one that is wrong."""
    try:
        text = (folder / CARD).read_text(encoding="utf-8")
    except FileNotFoundError:
        return CardMetadata()
    except UnicodeDecodeError as error:
        raise ValueError(f"{folder / CARD} is not UTF-8 ({error}). To fix: save it as UTF-8, or remove it") from error
    found = re.match(r"---\n(.*?)^---", text, re.DOTALL | re.MULTILINE)
    if found is None:
        return CardMetadata()
    try:
        head = yaml.safe_load(found[1]) or {}
    except yaml.YAMLError as error:
        raise ValueError(
            f"{folder / CARD} begins with no valid YAML ({' '.join(str(error).split())}). To fix: mend it, or remove it"
        ) from error
    if not isinstance(head, dict):
        raise ValueError(f"{folder / CARD} begins with YAML that names nothing. To fix: mend it, or remove it")
    relation = head.get("base_model_relation")
    return CardMetadata(
        base_models=_texts(head.get("base_model")),
        relation=relation if isinstance(relation, str) else None,
        datasets=_texts(head.get("datasets")),
    )


def _from(base_models: Sequence[str]) -> str:
    return f" from {', '.join(f'`{name}`' for name in base_models)}" if base_models else ""


def _texts(value: Any) -> tuple[str, ...]:
    """One or several names, as YAML has them."""
    values = value if isinstance(value, list) else [value]
    return tuple(each for each in values if isinstance(each, str) and each)

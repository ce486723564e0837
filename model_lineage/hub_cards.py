"""Reading and writing of model cards for Hugging Face's hub: a README.md that begins with metadata in YAML.

Source: https://huggingface.co/docs/hub/model-cards (`base_model`, `base_model_relation`, `datasets`, `model-index`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ringmaster.model_lineage.records import ModelRecord
from ringmaster.text import code_span, markdown, storable_values

CARD = "README.md"
_FENCE = "---"
MOST_CARD_BYTES = 5_000_000  # cards of models with results on many benchmarks have two
RELATIONS = {
    "fine-tuned": "finetune",
    "distilled": "finetune",
    "pruned": "finetune",
    "lora": "adapter",
    "prefix-tuned": "adapter",
    "prompt-tuned": "adapter",
    "ia3": "adapter",
    "quantized": "quantized",
    "merged": "merge",
}
"""The relation on the hub for each kind of adaptation; the hub has four relations."""


@dataclass(frozen=True, kw_only=True)
class CardMetadata:
    """A model's origin according to its card. base_models: hub names or folders. relation: a relation of the hub."""

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
    """Returns the card of a model. base_models: the names of its parents on the hub or in this registry."""
    relation = record.origin.relation or RELATIONS.get(record.kind)
    head: dict[str, Any] = {"library_name": "transformers", "tags": ["ringmaster", record.kind]}
    if base_models:
        head["base_model"] = base_models[0] if len(base_models) == 1 else list(base_models)
        if relation is not None:
            head["base_model_relation"] = relation
    if names := list(dict.fromkeys(dataset.name for dataset in record.datasets)):
        head["datasets"] = names
    title = record.registered_name + ("" if record.version is None else f" version {record.version}")
    lines = [
        f"# {markdown(title)}",
        f"{markdown(record.kind.capitalize())}{_from(base_models)}, recorded as `{record.model_id}`.",
    ]
    if record.datasets:
        lines.append(
            "\n".join(
                f"- {markdown(d.context)}: {markdown(d.name)}, digest {code_span(d.digest)}" for d in record.datasets
            )
        )
    for name, values in (("Held-out metrics", metrics), ("Hyperparameters", params)):
        if values:
            lines += [
                f"## {name}",
                "\n".join(f"- {markdown(key)}: {markdown(str(value))}" for key, value in values.items()),
            ]
    return f"{_FENCE}\n{yaml.safe_dump(storable_values(head), sort_keys=False)}{_FENCE}\n\n" + "\n\n".join(lines) + "\n"


def read_card(folder: Path) -> CardMetadata:
    """Returns the metadata of the card in a model's folder, or empty metadata. Raises ValueError on an invalid card."""
    text = card_text(folder)
    result = re.match(r"---\n(.*?)^---", text, re.DOTALL | re.MULTILINE)
    if result is None:
        return CardMetadata()
    try:
        head = yaml.load(result[1], Loader=_NoAliasLoader) or {}
    except (yaml.YAMLError, ValueError, RecursionError) as error:
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


def card_text(folder: Path) -> str:
    """Returns the text of the card in a model's folder, or "" without a card. Raises ValueError if it is not text."""
    path = folder / CARD
    if not path.is_file():
        return ""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_CARD_BYTES + 1)
        if len(content) > MOST_CARD_BYTES:
            raise ValueError(
                f"{path} has more than {MOST_CARD_BYTES // 1_000_000} MB. To fix: shorten it, or remove it"
            )
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}). To fix: save it as UTF-8, or remove it") from error


class _NoAliasLoader(yaml.SafeLoader):
    """A YAML loader without aliases, with which a short text could expand to fill the memory."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Composes a node as yaml does, and raises on an alias."""
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, "it has an alias (*)", event.start_mark)
        return super().compose_node(parent, index)


def _from(base_models: Sequence[str]) -> str:
    return f" from {', '.join(code_span(name) for name in base_models)}" if base_models else ""


def _texts(value: Any) -> tuple[str, ...]:
    """Returns one or several names from a YAML value as a tuple."""
    values = value if isinstance(value, list) else [value]
    return tuple(each for each in values if isinstance(each, str) and each and each.isprintable())

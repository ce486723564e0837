"""The card of a model for a hub, written from its lineage, with metadata in the hub's own format.

Names that only this registry knows are in the text; the metadata have those that the hub can resolve.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ringmaster.model_lineage.model_pages import RELATIONS, card_text, hub_card, read_card
from ringmaster.model_lineage.records import DatasetInput
from ringmaster.model_lineage.snapshot import LineageNode, Snapshot
from ringmaster.techniques.models.model_folders import CONFIG, read_json
from ringmaster.techniques.models.peft_format import ADAPTER_CONFIG, NAMED, is_adapter

HUB_DATA = "hf://"
"""What the source of a data set of the hub begins with; its revision comes after an @."""
TASKS = {
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMaskedLM": "fill-mask",
    "ForImageClassification": "image-classification",
    "ForImageTextToText": "image-text-to-text",
    "CAUSAL_LM": "text-generation",
    "SEQ_CLS": "text-classification",
    "TOKEN_CLS": "token-classification",
    "QUESTION_ANS": "question-answering",
    "FEATURE_EXTRACTION": "feature-extraction",
}
"""The hub's names of tasks, by how the names of model classes end, and by peft's tasks."""
UNKNOWN_LICENSE = "unknown: no card of its bases states one"


def is_hub_name(name: object) -> bool:
    """Whether a name is one of the hub, OWNER/NAME, and not a path on this machine."""
    return isinstance(name, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not Path(name).exists()


def public_name(node: LineageNode) -> str:
    """Returns the name of a model on the hub, else the one in this registry; never a folder of this machine."""
    source = node.record.origin.source
    return str(source) if is_hub_name(source) else node.label


def license_of(
    snapshot: Snapshot, node: LineageNode, cards: Callable[[LineageNode], Path | None]
) -> tuple[Mapping[str, str], str]:
    """Returns the keys of the licence that binds a model, and the name of the model whose card states it.

    It is that of the nearest ancestor whose card states one: first the model itself, then its parents, and so on; ({},
    "") where none does.

    cards: returns a folder with the card of an ancestor, or None.
    """
    for each in (node, *snapshot.existing(snapshot.ancestors(node.id))):
        folder = cards(each)
        stated = {} if folder is None else read_card(folder).license
        if stated:
            return stated, public_name(each)
    return {}, ""


def card_of_model(
    snapshot: Snapshot,
    node: LineageNode,
    *,
    folder: Path,
    measured: Sequence[Mapping[str, Any]],
    license: tuple[Mapping[str, str], str],
) -> str:
    """Returns the card of a recorded model.

    folder: its files, as they are published. measured: its metrics with intervals, as `ringmaster evaluate` records
    them. license: of its base, and the model that states it.
    """
    datasets, origin = tuple(map(_without_folder, node.record.datasets)), node.record.origin
    record = replace(node.record, datasets=datasets)
    bases = [public_name(snapshot.nodes[id]) if id in snapshot.nodes else id for id in record.parents]
    keys, of_model = license
    stated = f"{keys.get('license_name') or keys.get('license')}, of {of_model}" if keys else UNKNOWN_LICENSE
    training = {
        "technique": origin.technique,
        "steps": origin.num_steps,
        "seed": origin.seed,
        "code": origin.code_version,
        "base quantized to": origin.quantized_base,
    }
    text = hub_card(
        record,
        base_models=bases,
        sections={
            "Licence": {"licence": stated},
            "Training": {key: value for key, value in training.items() if value is not None},
        },
        metrics={row["metric"]: _with_interval(row) for row in measured} or node.metrics,
        params={key: value for key, value in node.params.items() if "/" not in value},  # no place of this machine
    )
    card = ModelCard(text)
    head = _completed(card, folder=folder, bases=bases, kind=record.kind)
    for key, value in keys.items():
        head[key] = value
    head.datasets = [name for data in record.datasets if (name := _hub_data(data))] or None
    head.model_name = record.registered_name
    rows = measured or [{"metric": key, "value": value} for key, value in node.metrics.items()]
    head.eval_results = _results(datasets, rows, task=head.pipeline_tag) or None
    return str(card)


def card_of_folder(folder: Path, *, name: str) -> str:
    """Returns the card of a model that the lineage does not know: its own, else what its files tell."""
    if text := card_text(folder):
        return text
    card = ModelCard(f"---\nlibrary_name: transformers\ntags: [ringmaster]\n---\n\n# {name}\n")
    base = read_json(folder / ADAPTER_CONFIG).get(NAMED)
    _completed(card, folder=folder, bases=[base] if base else [], kind="lora" if is_adapter(folder) else "")
    return str(card)


def _completed(card: ModelCard, *, folder: Path, bases: Sequence[str], kind: str) -> ModelCardData:
    """Returns a card's metadata, with what the files and the bases determine: library, task, bases on the hub."""
    head = card.data
    assert isinstance(head, ModelCardData)
    head["library_name"] = "peft" if is_adapter(folder) else "transformers"
    head.pipeline_tag = _task_of(folder)
    known = [base for base in bases if is_hub_name(base)]
    head.base_model = known[0] if len(known) == 1 else known or None
    relation = RELATIONS.get(kind)
    is_merged = relation == "adapter" and not is_adapter(folder)
    head["base_model_relation"] = None if not known else "finetune" if is_merged else relation
    return head


def _task_of(folder: Path) -> str | None:
    """Returns the hub's name of the task of a model, by its class or by peft's name; None where it has none."""
    classes = read_json(folder / CONFIG).get("architectures") or [read_json(folder / ADAPTER_CONFIG).get("task_type")]
    return next((task for end, task in TASKS.items() if str(classes[0]).endswith(end)), None)


def _hub_data(data: DatasetInput) -> str | None:
    """Returns the name on the hub of a data set, or None."""
    name, _, _ = data.source.removeprefix(HUB_DATA).partition("@")
    return name if data.source.startswith(HUB_DATA) else None


def _with_interval(row: Mapping[str, Any]) -> str:
    interval = f"{row['level']:.0%} interval {row['low']:.4g} to {row['high']:.4g}"
    return f"{row['value']:.4g} ({interval}, {row['num_rows']} rows)"


def _without_folder(data: DatasetInput) -> DatasetInput:
    """Returns a data set that is named by files of this machine with the last two parts of their path as its name."""
    return replace(data, name="/".join(Path(data.name).parts[-2:])) if data.name.startswith("/") else data


def _results(
    datasets: Sequence[DatasetInput], rows: Sequence[Mapping[str, Any]], *, task: str | None
) -> list[EvalResult]:
    """Returns metrics as the hub's index of models lists them: of the data that were held out, else of the training."""
    held_out = [each for each in datasets if each.context != "training"]
    data = next(iter([*held_out, *datasets]), None)
    if data is None:
        return []
    return [
        EvalResult(
            task_type=task or "other",
            dataset_type=_hub_data(data) or data.name,
            dataset_name=data.label,
            dataset_split=data.split,
            dataset_revision=data.digest,
            metric_type=row["metric"],
            metric_name=row["metric"],
            metric_value=row["value"],
            metric_args={key: row[key] for key in ("low", "high", "level", "num_rows") if key in row} or None,
        )
        for row in rows
    ]

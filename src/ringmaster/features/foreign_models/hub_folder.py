"""What a model's folder needs before it is published: a card of its lineage, and no places of this machine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from ringmaster.errors import InputError, LedgerError
from ringmaster.features.foreign_models.model_card import (
    UNKNOWN_LICENSE,
    card_of_folder,
    card_of_model,
    is_hub_name,
    license_of,
)
from ringmaster.flows.lineage.home import LineageHome
from ringmaster.flows.retraining.examine import EvaluatedModel
from ringmaster.model_lineage.model_pages import CARD
from ringmaster.model_lineage.records import IMPORTED
from ringmaster.model_lineage.snapshot import LineageNode
from ringmaster.techniques.loss import compares
from ringmaster.techniques.models.model_folders import LOSS, REFERENCE, read_json
from ringmaster.techniques.models.peft_format import ADAPTER_CONFIG, NAMED, is_adapter

MEASURED, ALL = "evaluation/metrics.json", "all"
"""The table of a run in which `ringmaster evaluate` records metrics with intervals, and its slice of all rows."""


def complete_folder(folder: Path, model: EvaluatedModel, home: LineageHome) -> list[str]:
    """Writes the card into a folder that was exported, and names of the hub for bases; returns what to tell the user.

    Raises InputError where an adapter is on a base that the hub does not have.
    """
    node = home.snapshot.nodes.get(model.record.model_id) if model.record is not None else None
    _name_bases(folder, model, home, node)
    if node is None:
        text, notices = card_of_folder(folder, name=Path(model.label).name), []
    else:
        license = license_of(home.snapshot, node, _card_folder)
        text = card_of_model(home.snapshot, node, folder=folder, measured=_measured(node, home), license=license)
        notices = (
            [] if license[0] or not node.record.parents else [f"the card states no licence: it is {UNKNOWN_LICENSE}"]
        )
    (folder / CARD).write_text(text, encoding="utf-8")
    return notices


def _name_bases(folder: Path, model: EvaluatedModel, home: LineageHome, node: LineageNode | None) -> None:
    """Replaces folders of this machine, as which files name the base, by its name on the hub."""
    parent = home.snapshot.nodes.get(node.record.weights_from or "") if node is not None else None
    on_hub = None if parent is None else parent.record.origin.source
    if is_adapter(folder):
        config = read_json(folder / ADAPTER_CONFIG)
        base = config.get(NAMED)
        if not is_hub_name(base):
            if not is_hub_name(on_hub):
                text = f"{model.label} is an adapter on {base}, which the hub does not have"
                raise InputError([f"{text}. To fix: --merge publishes one model of both"])
            content = json.dumps({**config, NAMED: on_hub}, indent=2, sort_keys=True)
            (folder / ADAPTER_CONFIG).write_text(content)
    loss = read_json(folder / LOSS)
    if loss.get(REFERENCE) is not None and not is_hub_name(loss[REFERENCE]):
        if is_hub_name(on_hub) and compares(loss["loss"], loss["loss_options"]):  # else a teacher
            (folder / LOSS).write_text(json.dumps({**loss, REFERENCE: on_hub}))
        else:
            (folder / LOSS).unlink()  # it compares with weights that nobody else has


def _card_folder(node: LineageNode) -> Path | None:
    """Returns the folder of this machine that has the card of an imported model, else one with that of the hub."""
    if node.record.kind != IMPORTED:
        return None  # its card is this project's own
    source = node.record.origin.source
    for place in (Path(unquote(urlsplit(node.location).path)), Path(source or ".nowhere")):
        if (place / CARD).is_file():
            return place
    if not is_hub_name(source):
        return None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(hf_hub_download(str(source), CARD)).parent
    except (OSError, ValueError, HfHubHTTPError):
        return None


def _measured(node: LineageNode, home: LineageHome) -> Sequence[Mapping[str, Any]]:
    """Returns the metrics of all rows with their intervals, as far as they were evaluated."""
    if node.record.run_id is None:
        return []
    try:
        return [row for row in home.ledger.read_table(node.record.run_id, MEASURED) if row["slice"] == ALL]
    except LedgerError:
        return []  # it was never evaluated by itself

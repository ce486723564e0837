"""The commands of the lineage: questions, and the stores of models.

They need no torch.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ringmaster.errors import InputError, UnknownModel, input_errors
from ringmaster.flows.commands import stored_models
from ringmaster.flows.lineage.home import LineageHome, Model, Refresh, lineage_home
from ringmaster.flows.output import (
    AsJson,
    message,
    notice,
    output_console,
    print_json,
    print_result,
    write_document,
    write_file,
)
from ringmaster.model_lineage.records import INDEXED

if TYPE_CHECKING:
    from ringmaster.model_lineage.snapshot import LineageNode
    from ringmaster.model_lineage.tensors.comparison import WeightTensor


def as_of(
    date: Annotated[str, typer.Argument(help="Day, or time such as 2026-11-26T06:00; UTC without a time zone.")],
    as_json: AsJson = False,
) -> None:
    """Print which version of each registered model was in use at a time, since when, who decided it, and why."""
    from datetime import UTC, datetime, timedelta

    from ringmaster.tasks.retraining.promotion import all_decisions, served_at

    with input_errors(about=f"{date!r} is not a valid time: ", remedy="write it as 2026-11-26 or 2026-11-26T06:00"):
        at = datetime.fromisoformat(date)
    at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    until = at + timedelta(days=1) if len(date) == len("2026-11-26") else at
    with lineage_home() as home:
        serving = served_at(all_decisions(home.ledger), until)
    lines = [
        f"{each.model}/{each.version} since {each.decision.at}, {each.decision.outcome} by {each.decision.who}: "
        f"{'; '.join(each.decision.reasons)}"
        for each in serving
    ]
    print_result({"at": date, "serving": [asdict(each) for each in serving]}, map(message, lines), as_json=as_json)
    if not (serving or as_json):
        notice(f"nothing had been promoted by {date}")


class GraphFormat(StrEnum):
    """What `export` writes."""

    json = "json"
    graphml = "graphml"
    cards = "cards"
    svg = "svg"


def show(
    model: Model,
    every: Annotated[bool, typer.Option("--all", help="Every ancestor and descendant, however many.")] = False,
    refresh: Refresh = False,
    as_json: AsJson = False,
) -> None:
    """Show a model: what it came from, up to its bases, what became of it, its data, plan and aliases."""
    from ringmaster.flows.lineage.views import MAX_LINES, print_view, show_view
    from ringmaster.model_lineage.exporting import node_json

    with lineage_home(is_fresh=refresh) as home:
        node, snapshot = home.find(model), home.snapshot
        if not as_json:
            print_view(show_view(snapshot, node, most=len(snapshot.nodes) if every else MAX_LINES), output_console())
            return
        relatives = {"ancestors": snapshot.ancestors(node.id), "descendants": snapshot.reached_from([node.id])}
        known = {
            key: [node_json(snapshot.nodes[id]) if id in snapshot.nodes else {"id": id, "deleted": True} for id in ids]
            for key, ids in relatives.items()
        }
        print_json({"model": node_json(node), **known, "components": list(node.record.components)})


def diff(
    first: Model,
    second: Model,
    tensors: Annotated[bool, typer.Option(help="Compare the weights too.")] = True,
    most: Annotated[int, typer.Option(help="Number of tensors to list.", min=0)] = 20,
    refresh: Refresh = False,
    as_json: AsJson = False,
) -> None:
    """Compare two models: tensors and by how much they differ, data, hyperparameters, metrics, behaviour."""
    from ringmaster.flows.lineage.views import diff_view, print_view
    from ringmaster.model_lineage.snapshot import record_differences
    from ringmaster.model_lineage.tensors.comparison import tensor_changes

    with lineage_home(is_fresh=refresh) as home:
        one, other = home.find(first), home.find(second)
        changes = tensor_changes(_tensors(home, one), _tensors(home, other)) if tensors else None
        records = record_differences(one, other)
        if not as_json:
            print_view(diff_view(one, other, changes, records, most=most), output_console())
            return
        lines = None if changes is None else [asdict(change) for change in changes]
        print_json({"first": one.id, "second": other.id, "tensors": lines, "records": records})


def impact(
    what: Annotated[
        str,
        typer.Argument(help="Model, component, data set (name or digest), or passage of stores (id or text)."),
    ],
    data: Annotated[
        bool, typer.Option("--data", help="Take WHAT for a data set, though a model has its name.")
    ] = False,
    alias: Annotated[str, typer.Option(help="Alias that production serves.")] = "champion",
    refresh: Refresh = False,
    as_json: AsJson = False,
) -> None:
    """List every model that came from a model, a data set or a passage of a store, and which are in production."""
    from ringmaster.flows.lineage.views import impact_view, print_view
    from ringmaster.model_lineage.exporting import node_json

    with lineage_home(is_fresh=refresh) as home:
        snapshot = home.snapshot
        label, nodes = _reached(home, what, is_data=data)
        if as_json:
            serving = [result.label for node in nodes if (result := node.carrying(alias)) is not None]
            models = [node_json(node) for node in nodes]
            print_json({"of": label, "num_models": len(nodes), "in_production": serving, "models": models})
        else:
            print_view(impact_view(snapshot, label, nodes, alias=alias), output_console())


def export(
    model: Annotated[
        str | None, typer.Argument(help="Model to write, with its ancestors and descendants; default: all.")
    ] = None,
    kind: Annotated[
        GraphFormat, typer.Option("--format", help="JSON, GraphML, Hugging Face model cards, or a picture.")
    ] = GraphFormat.json,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write, or for cards a folder; default: stdout.")
    ] = None,
    refresh: Refresh = False,
) -> None:
    """Write the graph as JSON, GraphML or a picture, or a card with base_model and its relation for each model."""
    from ringmaster.model_lineage.exporting import card_of, drawing, graph_json, graphml

    with lineage_home(is_fresh=refresh) as home:
        snapshot = home.snapshot
        nodes, ids = snapshot.models, None
        if model is not None:
            node = home.find(model)
            nodes = (node,)
            ids = frozenset([node.id, *snapshot.ancestors(node.id), *snapshot.reached_from([node.id])])
        files: dict[Path | None, str]
        match kind:
            case GraphFormat.cards if output is not None:
                files = {output / each.label / "README.md": card_of(snapshot, each) for each in nodes}
            case GraphFormat.cards:
                if len(nodes) != 1:
                    raise InputError([f"there are {len(nodes)} cards. To fix: name a model, or a folder by --output"])
                files = {None: card_of(snapshot, nodes[0])}
            case GraphFormat.svg:
                with input_errors():
                    files = {output: drawing(snapshot, ids, focus=model and nodes[0].id)}
            case GraphFormat.graphml:
                files = {output: graphml(snapshot, ids)}
            case GraphFormat.json:
                files = {output: json.dumps(graph_json(snapshot, ids)) + "\n"}
    for file, text in files.items():
        if file is None:
            write_document(text)
        else:
            write_file(file, text)
            notice(f"written: {file}")


def _tensors(home: LineageHome, node: LineageNode) -> dict[str, WeightTensor]:
    """A model's tensors: from the store, which knows which are equal without reading, else from its files."""
    from ringmaster.model_lineage.tensors.comparison import tensors_of_folder, tensors_of_store

    id = node.record.tensors_id
    if id is not None and id in home.store.ids():
        return tensors_of_store(home.store, id)
    with input_errors(about=f"{node.label} cannot be compared: "):
        return tensors_of_folder(home.model_dir(node))


def _reached(home: LineageHome, what: str, *, is_data: bool) -> tuple[str, list[LineageNode]]:
    """(what is meant, the models that it reached)."""
    from ringmaster.model_lineage.snapshot import close_names

    snapshot, node = home.snapshot, None
    trained, fault = snapshot.trained_on(what), f"no model was trained on data {what!r}."
    if not is_data:
        try:
            node = snapshot.find(what)
        except UnknownModel as error:
            fault = f"{error} And no model was trained on data of that name or digest."
    if node is not None:
        if trained:
            notice(f"{what} is a model here; with --data the data set of that name is meant")
        return node.label, snapshot.existing(snapshot.reached_from([node.id]))
    if trained:
        below = snapshot.reached_from([each.id for each in trained])
        return f"data {what}", [*trained, *snapshot.existing(below)]
    if not is_data and (holding := _stores_with(home, what)):
        children = snapshot.existing(child for each in holding for child in snapshot.graph.children(each.id))
        readers = [child.id for child in children if child.record.kind != INDEXED]
        reached = snapshot.existing(dict.fromkeys([*readers, *snapshot.reached_from(readers)]))
        return f"passage {what}", [*holding, *reached]
    raise InputError([f"{fault} {close_names(what, snapshot.dataset_names())}"])


def _stores_with(home: LineageHome, passage: str) -> list[LineageNode]:
    """The stores that have a passage of that id or text."""
    from ringmaster.techniques.data.arrow_files import read_table
    from ringmaster.techniques.data.row_kind import PASSAGES_FILE

    result = []
    for node in home.snapshot.models:
        if node.record.kind == INDEXED:
            table = read_table(home.model_dir(node) / PASSAGES_FILE)
            if passage in table["id"].to_pylist() or passage in table["text"].to_pylist():
                result.append(node)
    return result


app = typer.Typer(no_args_is_help=True, help="Query which model came from which, and find where an error entered.")
for command in (
    show,
    diff,
    impact,
    as_of,
    export,
    stored_models.store,
    stored_models.restore,
    stored_models.gc,
    stored_models.fsck,
):
    app.command()(command)

"""The commands that ask the lineage: what came from what, what differs, what a fault reached. They need no torch."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ringmaster.errors import InputError, input_errors
from ringmaster.flows.commands.lineage import bisecting, keeping
from ringmaster.flows.lineage.home import LineageHome, Model, Refresh, lineage_home
from ringmaster.flows.output import AsJson, error_console, output_console, print_json, write_document

if TYPE_CHECKING:
    from ringmaster.model_lineage.snapshot import Node
    from ringmaster.model_lineage.tensors.comparison import WeightTensor


class Format(StrEnum):
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
    from ringmaster.flows.lineage.views import MOST_LINES, print_view, show_view
    from ringmaster.model_lineage.exporting import node_json

    with lineage_home(is_fresh=refresh) as home:
        node, snapshot = home.find(model), home.snapshot
        if not as_json:
            print_view(show_view(snapshot, node, most=len(snapshot.nodes) if every else MOST_LINES), output_console())
            return
        relatives: dict[str, list[str]] = {"ancestors": [], "descendants": list(snapshot.reached_from([node.id]))}
        if node.id in snapshot.graph:
            relatives["ancestors"] = list(snapshot.graph.ancestors(node.id))
        known = {
            key: [node_json(snapshot.nodes[id]) if id in snapshot.nodes else {"id": id, "deleted": True} for id in ids]
            for key, ids in relatives.items()
        }
        print_json({"model": node_json(node), **known, "components": list(node.record.components)})


def diff(
    first: Model,
    second: Model,
    tensors: Annotated[bool, typer.Option(help="Whether to compare the weights too.")] = True,
    most: Annotated[int, typer.Option(help="How many tensors to list.", min=0)] = 20,
    refresh: Refresh = False,
    as_json: AsJson = False,
) -> None:
    """Say what differs between two models: tensors and by how much, data, hyperparameters, metrics, behaviour."""
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
        said = None if changes is None else [asdict(change) for change in changes]
        print_json({"first": one.id, "second": other.id, "tensors": said, "records": records})


def impact(
    what: Annotated[str, typer.Argument(help="A model, a component, or a data set by its name or digest.")],
    data: Annotated[bool, typer.Option("--data", help="A data set is meant, though a model has its name.")] = False,
    alias: Annotated[str, typer.Option(help="The alias that production serves.")] = "champion",
    refresh: Refresh = False,
    as_json: AsJson = False,
) -> None:
    """List every model that came from a model or was trained on a data set, and which of them are in production."""
    from ringmaster.flows.lineage.views import impact_view, print_view
    from ringmaster.model_lineage.exporting import node_json

    with lineage_home(is_fresh=refresh) as home:
        snapshot = home.snapshot
        label, nodes = _reached(home, what, is_data=data)
        if as_json:
            serving = [found.label for node in nodes if (found := node.carrying(alias)) is not None]
            models = [node_json(node) for node in nodes]
            print_json({"of": label, "num_models": len(nodes), "in_production": serving, "models": models})
        else:
            print_view(impact_view(snapshot, label, nodes, alias=alias), output_console())


def export(
    model: Annotated[
        str | None, typer.Argument(help="This model, its ancestors and descendants; by default all.")
    ] = None,
    kind: Annotated[
        Format, typer.Option("--format", help="JSON, GraphML, Hugging Face model cards, or a picture.")
    ] = Format.json,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A file, or for cards a folder; by default stdout.")
    ] = None,
    refresh: Refresh = False,
) -> None:
    """Write the graph as JSON, GraphML or a picture, or a card with base_model and its relation for each model."""
    from ringmaster.model_lineage.exporting import card_of, drawing, graph_json, graphml

    with lineage_home(is_fresh=refresh) as home:
        snapshot = home.snapshot
        node = None if model is None else home.find(model)
        ids = None
        if node is not None:
            ancestors = snapshot.graph.ancestors(node.id) if node.id in snapshot.graph else ()
            ids = frozenset([node.id, *ancestors, *snapshot.reached_from([node.id])])
        if kind is Format.cards:
            nodes = [node] if node is not None else list(snapshot.models)
            _write_cards({each.label: card_of(snapshot, each) for each in nodes}, output)
            return
        if kind is Format.svg:
            with input_errors():
                _write(drawing(snapshot, ids, focus=model and home.find(model).id), output)
            return
        text = graphml(snapshot, ids) if kind is Format.graphml else json.dumps(graph_json(snapshot, ids)) + "\n"
        _write(text, output)


def _tensors(home: LineageHome, node: Node) -> dict[str, WeightTensor]:
    """A model's tensors: from the store, which knows which are equal without reading, else from its files."""
    from ringmaster.model_lineage.tensors.comparison import tensors_of_folder, tensors_of_store

    id = node.record.tensors_id
    if id is not None and id in home.store.ids():
        return tensors_of_store(home.store, id)
    try:
        return tensors_of_folder(home.model_dir(node))
    except ValueError as error:
        raise InputError([f"{node.label} cannot be compared: {error}"]) from error


def _reached(home: LineageHome, what: str, *, is_data: bool) -> tuple[str, list[Node]]:
    """(what is meant, the models that it reached)."""
    from ringmaster.errors import UnknownModel
    from ringmaster.model_lineage.snapshot import close_names

    snapshot = home.snapshot
    trained = snapshot.trained_on(what)
    try:
        node = None if is_data else snapshot.find(what)
    except UnknownModel as error:
        if not trained:
            sets = close_names(what, snapshot.dataset_names())
            raise InputError([f"{error} And no model was trained on data of that name or digest. {sets}"]) from error
        node = None
    if node is not None:
        if trained:
            error_console().print(f"{what} is a model here; with --data the data set of that name is meant")
        ids = list(snapshot.reached_from([node.id]))
        return node.label, [snapshot.nodes[id] for id in ids if id in snapshot.nodes]
    if not trained:
        raise InputError([f"no model was trained on data {what!r}. {close_names(what, snapshot.dataset_names())}"])
    below = snapshot.reached_from([each.id for each in trained])
    return f"data {what}", [*trained, *(snapshot.nodes[id] for id in below if id in snapshot.nodes)]


def _write_cards(cards: dict[str, str], output: Path | None) -> None:
    """Each card as FOLDER/NAME/VERSION/README.md; a single one also to stdout."""
    if output is None:
        if len(cards) != 1:
            raise InputError([f"there are {len(cards)} cards. To fix: name a model, or a folder by --output"])
        _write(next(iter(cards.values())), None)
        return
    for label, text in cards.items():
        _write(text, output / label / "README.md")


def _write(text: str, output: Path | None) -> None:
    if output is None:
        write_document(text)
        return
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError([f"{output} cannot be written: {error}. To fix: name another place by --output"]) from error
    error_console().print(f"written: {output}")


app = typer.Typer(no_args_is_help=True, help="Ask which model came from which, and find where a fault entered.")
for command in (
    show,
    diff,
    impact,
    bisecting.bisect,
    export,
    keeping.import_,
    keeping.store,
    keeping.restore,
    keeping.gc,
    keeping.fsck,
):
    app.command(command.__name__.rstrip("_"))(command)

"""Export of a lineage as JSON, GraphML, a picture, or model cards for Hugging Face's hub."""

from collections.abc import Iterator, Mapping
from typing import Any

from ringmaster.model_lineage.model_pages import Relative, family_svg, hub_card
from ringmaster.model_lineage.records import COMPONENT
from ringmaster.model_lineage.snapshot import LineageNode, Snapshot
from ringmaster.text import MAX_IN_LINES, page_template

PART_OF = "part-of"  # the kind of an edge from a component to a model that contains it
MAX_DRAWN = 120  # the most models in one picture
GRAPHML = """\
<?xml version='1.0' encoding='utf-8'?>
<graphml xmlns="http://graphml.graphdrawing.org/xmlns">
{% for key in ("name", "version", "kind", "aliases", "run", "job", "seed", "code_version", "datasets") %}
  <key id="{{ key }}" for="node" attr.name="{{ key }}" attr.type="string"/>
{% endfor %}
  <key id="adaptation" for="edge" attr.name="kind" attr.type="string"/>
  <graph id="lineage" edgedefault="directed">
{% for id, texts in nodes.items() %}
    <node id="{{ id | xml }}">
{% for key, text in texts.items() %}
      <data key="{{ key }}">{{ text | xml(limit=limit) }}</data>
{% endfor %}
    </node>
{% endfor %}
{% for edge in edges %}
    <edge source="{{ edge.parent | xml }}" target="{{ edge.child | xml }}">
      <data key="adaptation">{{ edge.kind | xml }}</data>
    </edge>
{% endfor %}
  </graph>
</graphml>
"""


def node_json(node: LineageNode) -> dict[str, Any]:
    """Returns all fields of a node as JSON values."""
    record = node.record
    return {
        "id": node.id,
        "label": node.label,
        "name": record.registered_name,
        "version": record.version,
        "uri": record.uri,
        "kind": record.kind,
        "aliases": list(node.aliases),
        "also": [{"label": other.label, "aliases": list(other.aliases)} for other in node.others],
        "parents": list(record.parents),
        "components": list(record.components),
        "datasets": [dict(vars(dataset)) for dataset in record.datasets],
        "run": record.run_id,
        "origin": {key: value for key, value in vars(record.origin).items() if value is not None},
        "tensors_id": record.tensors_id,
        "metrics": dict(node.metrics),
        "metric": node.metric,
        "states": list(node.states),
        "params": dict(node.params),
        "created_ms": node.created_ms,
        "culprit_by": node.culprit_by or None,
    }


def graph_json(snapshot: Snapshot, ids: frozenset[str] | None = None) -> dict[str, Any]:
    """Returns `nodes`, and `edges` from a parent to a child or from a component to a model that contains it.

    ids: the ids of the nodes to include; None means all.
    """
    nodes = [node for id, node in snapshot.nodes.items() if ids is None or id in ids]
    edges = [edge for edge in _edges(nodes) if ids is None or edge["parent"] in ids]
    return {"nodes": [node_json(node) for node in nodes], "edges": edges}


def graphml(snapshot: Snapshot, ids: frozenset[str] | None = None) -> str:
    """Returns the graph of `graph_json` as GraphML, which Gephi, yEd and networkx read.

    Source: http://graphml.graphdrawing.org.
    """
    text = graph_json(snapshot, ids)
    nodes = {node["id"]: _texts(node) for node in text["nodes"]}
    gone: dict[str, dict[str, str]] = {edge["parent"]: {} for edge in text["edges"] if edge["parent"] not in nodes}
    return page_template(GRAPHML).render(nodes={**nodes, **gone}, edges=text["edges"], limit=MAX_IN_LINES) + "\n"


def drawing(snapshot: Snapshot, ids: frozenset[str] | None = None, *, focus: str | None = None) -> str:
    """Returns the graph as a picture (SVG): each model below its parents, with its main metric and its data.

    Marks show the states of models, the models with which faults began, and what they reached.

    focus: the id of the model to highlight. Raises ValueError if there are no models, or too many for a picture.
    """
    nodes = [node for node in snapshot.models if ids is None or node.id in ids]
    if not 0 < len(nodes) <= MAX_DRAWN:
        raise ValueError(
            f"a picture of {len(nodes)} models is not readable: it has space for {MAX_DRAWN}. "
            "To fix: name a model, whose relatives are drawn, or export another form"
        )
    relatives = [
        Relative(
            id=node.id,
            title=node.label.replace("/", " v"),
            kind=node.record.kind,
            detail=next((f"@{alias}" for alias in node.aliases if alias not in node.states), ""),
            metric=node.metric,
            data=", ".join(each.short_label for each in node.record.datasets if each.context == "training"),
            states=node.states,
            is_culprit=bool(node.culprit_by),
        )
        for node in nodes
    ]
    known = {node.id for node in nodes}
    gone = dict.fromkeys(parent for node in nodes for parent in node.record.parents if parent not in snapshot.nodes)
    relatives += [Relative(id=id, title=id, kind="deleted") for id in gone]
    edges = [(parent, node.id) for node in nodes for parent in node.record.parents if parent in known | set(gone)]
    return family_svg(relatives, edges, focus=focus or "")


def card_of(snapshot: Snapshot, node: LineageNode) -> str:
    """Returns a model's card, as a README.md for the hub, with its parents as base models."""
    records = [(id, snapshot.nodes[id].record if id in snapshot.nodes else None) for id in node.record.parents]
    bases = [id if record is None else record.origin.source or record.registered_name for id, record in records]
    return hub_card(node.record, base_models=bases, metrics=node.metrics, params=node.params)


def _edges(nodes: list[LineageNode]) -> Iterator[dict[str, str]]:
    for node in nodes:
        if node.record.kind != COMPONENT:
            for parent in node.record.parents:
                yield {"parent": parent, "child": node.id, "kind": node.record.relation_to(parent)}
            for component in node.record.components:
                yield {"parent": component, "child": node.id, "kind": PART_OF}


def _texts(node: Mapping[str, Any]) -> dict[str, str]:
    """Returns the attributes of a node in GraphML as strings; empty ones are left out."""
    values = {
        **{key: node[key] for key in ("name", "version", "kind", "run")},
        **{key: node["origin"].get(key) for key in ("job", "seed", "code_version")},
        "aliases": ", ".join(node["aliases"]),
        "datasets": ", ".join(f"{dataset['name']}@{dataset['digest']}" for dataset in node["datasets"]),
    }
    return {key: str(value) for key, value in values.items() if value not in (None, "")}

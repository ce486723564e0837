"""The pages of a model in MLflow and on Hugging Face's hub, and the picture of its family.

A page in MLflow is markdown whose names are links, so that users can browse the lineage. MLflow's UI routes behind
"#", so a link without a host works on whatever address the server has. Without `workflowType` the page would open in
the layout for language-model applications, where runs are hard to find.

The cards of the hub are a README.md that begins with metadata in YAML (https://huggingface.co/docs/hub/model-cards:
`base_model`, `base_model_relation`, `datasets`, `model-index`). The picture (SVG) draws each model of a family below
its parents, the subject highlighted.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from ringmaster.model_lineage.records import CHALLENGER, CHAMPION, FAILED, ModelRecord
from ringmaster.text import code_span, markdown, page_template, storable, storable_values

CARD = "README.md"
HUB_CARD = """\
---
{{ head }}---

# {{ title | markdown }}

{{ record.kind.capitalize() | markdown }}{% if bases %} from {{ bases | map("code_span") | join(", ") }}{% endif %}, \
recorded as `{{ record.model_id }}`.
{% if record.datasets %}

{% for data in record.datasets %}
- {{ data.context | markdown }}: {{ data.name | markdown }}, digest {{ data.digest | code_span }}
{% endfor %}
{% endif %}
{% for heading, values in sections.items() if values %}

## {{ heading }}

{% for key, value in values.items() %}
- {{ key | markdown }}: {{ value | string | markdown }}
{% endfor %}
{% endfor %}
"""
LICENSE_KEYS = ("license", "license_name", "license_link")
MAX_CARD_BYTES = 5_000_000  # cards of models with results on many benchmarks have two
RELATIONS = {
    "fine-tuned": "finetune",
    "distilled": "finetune",
    "pruned": "finetune",
    "quantization-aware": "finetune",
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
    """A model's origin according to its card.

    base_models: hub names or folders. relation: a relation of the hub.
    license: the keys that state its licence: `license`, `license_name` and `license_link`.
    """

    base_models: tuple[str, ...] = ()
    relation: str | None = None
    license: Mapping[str, str] = field(default_factory=dict)


def hub_card(
    record: ModelRecord,
    *,
    base_models: Sequence[str],
    metrics: Mapping[str, Any] | None = None,
    params: Mapping[str, Any] | None = None,
    sections: Mapping[str, Mapping[str, Any]] | None = None,
) -> str:
    """Returns the card of a model.

    base_models: the names of its parents on the hub or in this registry. sections: further ones, which come first.
    """
    relation = record.origin.relation or RELATIONS.get(record.kind)
    head: dict[str, Any] = {"library_name": "transformers", "tags": ["ringmaster", record.kind]}
    if base_models:
        head["base_model"] = base_models[0] if len(base_models) == 1 else list(base_models)
        if relation is not None:
            head["base_model_relation"] = relation
    if names := list(dict.fromkeys(dataset.name for dataset in record.datasets)):
        head["datasets"] = names
    title = record.registered_name + ("" if record.version is None else f" version {record.version}")
    return page_template(HUB_CARD).render(
        head=yaml.safe_dump(storable_values(head), sort_keys=False),
        title=title,
        record=record,
        bases=base_models,
        sections={**(sections or {}), "Held-out metrics": metrics, "Hyperparameters": params},
    )


def read_card(folder: Path) -> CardMetadata:
    """Returns the metadata of the card in a model's folder, or empty metadata. Raises ValueError on an invalid card."""
    result = re.match(r"---\n(.*?)^---", card_text(folder), re.DOTALL | re.MULTILINE)
    if result is None:
        return CardMetadata()
    try:
        head = yaml.load(result[1], Loader=_NoAliasLoader) or {}  # noqa: S506 - a SafeLoader
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
        license={key: texts[0] for key in LICENSE_KEYS if (texts := _texts(head.get(key)))},
    )


def card_text(folder: Path) -> str:
    """Returns the text of the card in a model's folder, or "" without a card. Raises ValueError if it is not text."""
    path = folder / CARD
    if not path.is_file():
        return ""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_CARD_BYTES + 1)
        if len(content) > MAX_CARD_BYTES:
            raise ValueError(f"{path} has more than {MAX_CARD_BYTES // 1_000_000} MB. To fix: shorten it, or remove it")
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


def _texts(value: Any) -> tuple[str, ...]:
    """Returns one or several names from a YAML value as a tuple."""
    values = value if isinstance(value, list) else [value]
    return tuple(each for each in values if isinstance(each, str) and each and each.isprintable())


def experiment_path(experiment_id: str) -> str:
    """Returns the UI path of an experiment."""
    return _path("experiments", experiment_id)


def home_page(server: str) -> str:
    """Returns the address of a server's experiments for a browser; `server` itself is the one for programs."""
    return f"{server.rstrip('/')}/{_path('experiments')}"


def run_path(experiment_id: str, run_id: str) -> str:
    """Returns the UI path of a run."""
    return _path("experiments", experiment_id, "runs", run_id)


def artifact_path(experiment_id: str, run_id: str, path: str) -> str:
    """Returns the UI path of an artifact of a run."""
    return _path("experiments", experiment_id, "runs", run_id, "artifacts", *path.split("/"))


def logged_model_path(experiment_id: str, model_id: str) -> str:
    """Returns the UI path of a LoggedModel, with its files and metrics."""
    return _path("experiments", experiment_id, "models", model_id)


def model_version_path(name: str, version: int | str) -> str:
    """Returns the UI path of a version of a registered model."""
    return _path("models", name, "versions", str(version))


def picture(text: str, run_id: str, path: str) -> str:
    """Returns markdown for a picture among a run's artifacts, e.g. for a note, where `data:` URIs stay blank."""
    return f"![{markdown(text)}](get-artifact?path={quote(path)}&run_uuid={run_id})"


def link(text: str, path: str) -> str:
    """Returns a markdown link that shows `text`."""
    return f"[{markdown(text)}]({path})"


def _path(*parts: str) -> str:
    return "#/" + "/".join(quote(storable(part), safe="") for part in parts) + "?workflowType=machine_learning"


DATA_TABLE = "data.json"  # among the artifacts of a model's run
# The origin of a model as far as it is known: parents, run, batch, plan, profiles, steps, code and data.
ORIGIN = """\
{% for parent in parents %}
- {{ model.relation_to(parent.model_id) | markdown }} from {{ model_link(parent) }}\
{% if parent.origin.quantized_base is not none %}
, added to the values of its base in {{ parent.origin.quantized_base | code_span }}\
{% endif +%}
{% else %}
- {{ "trained from scratch" if model.kind == "pretrained" else (model.kind | markdown) ~ ", without a base" }}
{% endfor %}
- made by run {{ link(run_name, run_path(experiment_id, run_id)) }}
{% if batch is not none %}
- in batch {{ link(batch[0], run_path(experiment_id, batch[1])) }}
{% endif %}
{% if origin.plan is not none and origin.batch_run_id is not none %}
- after {{ link("this plan", artifact_path(experiment_id, origin.batch_run_id, origin.plan)) }}\
{% if origin.technique is not none %}
, {{ "made" if origin.num_steps == 0 else "trained" }} by {{ origin.technique | markdown }}\
{% endif +%}
{% endif %}
{% if origin.profiles is not none %}
- {{ link("what was measured of its techniques", artifact_path(experiment_id, run_id, origin.profiles)) }}
{% endif %}
{% if origin.num_steps %}
- {{ origin.num_steps }} steps{{ "" if origin.seed is none else ", seed " ~ origin.seed }}\
{% if origin.chain is not none %}
, {{ link("chain of its states", artifact_path(experiment_id, run_id, origin.chain)) }}\
{% endif +%}
{% endif %}
{% if origin.quantized_base is not none %}
- trained on its base in {{ origin.quantized_base | code_span }}
{% endif %}
{% if origin.code_version is not none %}
- code: {{ origin.code_version | code_span }}
{% endif %}
{% if origin.source is not none %}
- imported from {{ origin.source | code_span }}
{% endif %}
{% for data in model.datasets %}
- data for {{ data.context | markdown }}: {{ link(data.label, artifact_path(experiment_id, run_id, "data.json")) }} \
({{ data.digest[:12] | code_span }}\
{% if data.num_rows is not none %}, {{ data.num_rows }} rows{% endif %}
{% for key in ("split", "window") if data[key] is not none %}, {{ (key ~ " " ~ data[key]) | markdown }}{% endfor %}
)
{% endfor %}
{% if metric %}
- held-out: {{ metric | markdown }}
{% endif %}
- files and metrics: {{ link(model.model_id, logged_model_path(experiment_id, model.model_id)) }}

{{ picture("Its family", run_id, family) }}"""
DESCRIPTION_LIMIT = 5000  # the size in characters of the column for a model version's description
_CHILDREN = "\n\n**Adapted further into**\n\n"
_STORE = "\n\n**In the tensor store**\n\n"
_FILES = "- files and metrics: "
_STATE = "- state: "
_SIGNATURE = "- signed: "
_MORE = "\n- and 1000000 more"


def card(
    model: ModelRecord,
    *,
    text: str,
    parents: Sequence[ModelRecord],
    run_name: str,
    batch: tuple[str, str] | None,
    metric: str = "",
) -> str:
    """Returns `text` about `model`, followed by its origin: parents, run, batch (name, run id), data, metric, files.

    `text` is shortened if the whole would exceed DESCRIPTION_LIMIT.
    """
    origin = page_template(ORIGIN).render(
        model=model,
        parents=parents,
        run_name=run_name,
        batch=batch,
        metric=metric,
        origin=model.origin,
        experiment_id=str(model.experiment_id),
        run_id=str(model.run_id),
        **{each.__name__: each for each in (link, model_link, run_path, artifact_path, logged_model_path, picture)},
        family=family_path(model),
    )
    room = max(0, DESCRIPTION_LIMIT - len(origin) - len("\n\n"))
    head = text if len(text) <= room else text[: max(0, room - 4)] + " ..."
    return (f"{head}\n\n{origin}" if head else origin)[:DESCRIPTION_LIMIT]


def family_path(model: ModelRecord) -> str:
    """Returns the path of a model's family picture among the artifacts of its run."""
    return f"lineage/{model.model_id}.svg"


def with_states(description: str, states: Sequence[str]) -> str:
    """Returns a page's text with the line of the model's states, in place of an earlier one."""
    return with_line(description, _STATE, ", ".join(states)) if states or f"\n{_STATE}" in description else description


def with_signature(description: str, model: ModelRecord, *, digest: str) -> str:
    """Returns a page's text with the line that the model's files are signed. digest: of the signature."""
    files = logged_model_path(str(model.experiment_id), model.model_id)
    proof = f"{link('model.sig', files)} ({code_span(digest[:12])}), which `ringmaster verify` checks"
    return with_line(description, _SIGNATURE, proof)


def with_line(description: str, start: str, text: str) -> str:
    """Returns a page's text with a line about the model, in place of one that begins alike."""
    lines = [line for line in description.split("\n") if not line.startswith(start)]
    place = next((i for i, line in enumerate(lines) if line.startswith(_FILES)), len(lines))
    lines.insert(place, start + text)
    return "\n".join(lines)[:DESCRIPTION_LIMIT]


def with_children(description: str, children: Sequence[str]) -> str:
    """Returns `description` with a last section that lists as many `children` (markdown) as fit in DESCRIPTION_LIMIT.

    The text above that section stays, so that users may edit it. Children left out are counted.
    """
    text = description.partition(_CHILDREN)[0]
    if not children:
        return text[:DESCRIPTION_LIMIT]
    room = DESCRIPTION_LIMIT - len(_CHILDREN) - len(_MORE)
    text = text[:room]
    lines: list[str] = []
    used = len(text)
    for child in children:
        used += len(child) + len("\n- ")
        if used > room:
            break
        lines.append(f"- {child}")
    if left_out := len(children) - len(lines):
        lines.append(f"- and {left_out} more")
    return text + _CHILDREN + "\n".join(lines)


def with_store(description: str, lines: Sequence[str]) -> str:
    """Replaces the section about the tensor store in `description`, above the section of the children.

    Returns `description` unchanged if the result would exceed DESCRIPTION_LIMIT.
    """
    above, children, below = description.partition(_CHILDREN)
    text = above.partition(_STORE)[0]
    section = _STORE + "\n".join(f"- {line}" for line in lines) if lines else ""
    if len(text) + len(section) + len(children) + len(below) > DESCRIPTION_LIMIT:
        return description
    return text + section + children + below


def model_link(model: ModelRecord) -> str:
    """Returns a link to the page of a model's version, or of its LoggedModel if it has no version."""
    if model.version is None:
        return link(model.registered_name, logged_model_path(str(model.experiment_id), model.model_id))
    text = f"{model.registered_name} version {model.version}"
    return link(text, model_version_path(model.registered_name, model.version))


COLOURS = {
    "pretrained": "#5b6ee1",
    "fine-tuned": "#2b9348",
    "lora": "#0f9aa8",
    "prefix-tuned": "#0f9aa8",
    "ia3": "#0f9aa8",
    "distilled": "#b5651d",
    "pruned": "#8d6a9f",
    "quantized": "#8d6a9f",
    "quantization-aware": "#2b9348",
    "merged": "#c2255c",
    "composed": "#c2255c",
    "extracted": "#2b9348",
    "indexed": "#1971c2",
    "imported": "#6c757d",
    "component": "#e09f3e",
}
CULPRIT, REACHED = "culprit", "reached"
# For each mark on a box: its fill, and the colour of its text.
MARKS = {
    CULPRIT: ("#c92a2a", "#ffffff"),
    REACHED: ("#ffe3e3", "#c92a2a"),
    CHAMPION: ("#2b8a3e", "#ffffff"),
    CHALLENGER: ("#1971c2", "#ffffff"),
    FAILED: ("#c92a2a", "#ffffff"),
}
PLAIN_MARK = ("#ffffff", "#495057")  # of states that are over, such as "rejected"
BOX_WIDTH, BOX_HEIGHT, GAP, RISE = 184, 80, 18, 40
MAX_TITLE, MAX_LINE = 26, 30  # characters in a box
MARGIN = 12
FAMILY = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{{ width }}" height="{{ height }}" \
viewBox="0 0 {{ width }} {{ height }}" font-family="sans-serif">
<rect width="{{ width }}" height="{{ height }}" fill="#ffffff"/>
{% for (x1, y1), (x2, y2) in lines %}
{% set middle = (y1 + y2) // 2 %}
<path d="M{{ x1 }} {{ y1 }} C{{ x1 }} {{ middle }} {{ x2 }} {{ middle }} {{ x2 }} {{ y2 }}" \
fill="none" stroke="#868e96"/>
{% endfor %}
{% for each, (x, y), marks in boxes %}
{% set colour = colours.get(each.kind, "#6c757d") %}
{% set second = each.kind ~ (" · " ~ each.detail if each.detail else "") %}
<g><rect x="{{ x }}" y="{{ y }}" width="{{ box[0] }}" height="{{ box[1] }}" rx="6" fill="{{ colour }}" \
fill-opacity="0.12" stroke="{{ colour }}" stroke-width="{{ 3 if each.id == focus else 1 }}"/>\
<text x="{{ x + 8 }}" y="{{ y + 19 }}" font-size="12" font-weight="{{ "bold" if each.id == focus else "normal" }}">\
{{ fitting(each.title, max_title) | xml }}</text>\
<text x="{{ x + 8 }}" y="{{ y + 36 }}" font-size="11" fill="{{ colour }}">\
{{ fitting(second, max_line) | xml }}</text>\
{% for line in (each.metric, each.data) if line %}\
<text x="{{ x + 8 }}" y="{{ y + 36 + 17 * loop.index }}" font-size="11" fill="#495057">\
{{ fitting(line, max_line) | xml }}<title>{{ line | xml }}</title></text>\
{% endfor %}\
{% for mark, fill, text, left, width in marks %}\
<rect x="{{ left }}" y="{{ y - 7 }}" width="{{ width }}" height="14" rx="7" fill="{{ fill }}" \
stroke="{{ text if fill.startswith("#ff") else fill }}"/>\
<text x="{{ left + width // 2 }}" y="{{ y + 3 }}" font-size="9" font-weight="bold" text-anchor="middle" \
fill="{{ text }}">\
{{ mark }}</text>\
{% endfor %}\
</g>
{% endfor %}
</svg>"""
_SWEEPS = 4  # passes of the ordering, alternately down and up


@dataclass(frozen=True, kw_only=True)
class Relative:
    """A box of the drawing.

    title: a model's name and version. detail: shown next to its kind, such as its aliases.
    metric: its main metric on held-out rows. data: what it was trained on. states: see `records.states_of`.
    is_culprit: whether a fault was found to have begun with it.
    """

    id: str
    title: str
    kind: str
    detail: str = ""
    metric: str = ""
    data: str = ""
    states: tuple[str, ...] = ()
    is_culprit: bool = False


def family_svg(relatives: Sequence[Relative], edges: Iterable[tuple[str, str]], *, focus: str) -> str:
    """Draws `relatives` with a line for each (parent, child) edge between them; `focus` has a thick frame.

    Marks show the states of the models, those with which faults began (culprits), and what came from these, which the
    fault has reached.

    A model's layer is its longest path from a root (Sugiyama et al., 1981). Each layer is ordered by the mean position
    of the neighbours.
    """
    known = {relative.id: relative for relative in relatives}
    lines = [(parent, child) for parent, child in edges if parent in known and child in known]
    rows = _rows(list(known), lines)
    width = max(len(row) for row in rows) * (BOX_WIDTH + GAP) - GAP + 2 * MARGIN
    height = len(rows) * (BOX_HEIGHT + RISE) - RISE + 2 * MARGIN
    at, reached = _places(rows, width), _reached(relatives, lines)
    return page_template(FAMILY).render(
        width=width,
        height=height,
        box=(BOX_WIDTH, BOX_HEIGHT),
        lines=[(_middle(at[parent], BOX_HEIGHT), _middle(at[child], 0)) for parent, child in lines],
        boxes=[(each, at[each.id], _marks(each, at[each.id][0], is_reached=each.id in reached)) for each in relatives],
        focus=focus,
        colours=COLOURS,
        fitting=_fitting,
        max_title=MAX_TITLE,
        max_line=MAX_LINE,
    )


def _middle(place: tuple[int, int], below: int) -> tuple[int, int]:
    return place[0] + BOX_WIDTH // 2, place[1] + below


def _reached(relatives: Sequence[Relative], lines: Sequence[tuple[str, str]]) -> set[str]:
    """Returns the ids of the descendants of culprits."""
    reached: set[str] = set()
    todo = [relative.id for relative in relatives if relative.is_culprit]
    while todo:
        model = todo.pop()
        new = {child for parent, child in lines if parent == model} - reached
        reached |= new
        todo += new
    return reached


def _marks(relative: Relative, x: int, *, is_reached: bool) -> list[tuple[str, str, str, int, int]]:
    """Returns each mark on the upper edge of a box, from the right: text, two colours, left end and width."""
    is_marked = {REACHED: is_reached and not relative.is_culprit, CULPRIT: relative.is_culprit}
    result, right = [], x + BOX_WIDTH - 6
    for mark in (*relative.states, *(mark for mark, is_shown in is_marked.items() if is_shown)):
        width = 10 + 6 * len(mark)
        result.append((mark, *MARKS.get(mark, PLAIN_MARK), right - width, width))
        right -= width + 4
    return result


def _rows(ids: Sequence[str], lines: Sequence[tuple[str, str]]) -> list[list[str]]:
    """Returns the ids by layer, from the roots down, each layer from left to right."""
    parents: dict[str, list[str]] = {id: [] for id in ids}
    children: dict[str, list[str]] = {id: [] for id in ids}
    for parent, child in lines:
        parents[child].append(parent)
        children[parent].append(child)
    depth = _depths(parents)
    rows: list[list[str]] = [[] for _ in range(max(depth.values()) + 1)]
    for id in ids:
        rows[depth[id]].append(id)
    for sweep in range(_SWEEPS):
        neighbours = parents if sweep % 2 == 0 else children
        place = {id: i / len(row) for row in rows for i, id in enumerate(row)}
        for row in rows if sweep % 2 == 0 else reversed(rows):
            row.sort(key=lambda id: _mean([place[other] for other in neighbours[id]], place[id]))
            place |= {id: i / len(row) for i, id in enumerate(row)}
    return rows


def _depths(parents: Mapping[str, Sequence[str]]) -> dict[str, int]:
    depth: dict[str, int] = {}
    left = dict(parents)
    while left:
        free = [id for id, above in left.items() if all(each in depth for each in above)]
        for id in free or list(left)[:1]:  # damaged records may have a cycle, and are drawn too
            depth[id] = max((depth[each] + 1 for each in left.pop(id) if each in depth), default=0)
    return depth


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _places(rows: Sequence[Sequence[str]], width: int) -> dict[str, tuple[int, int]]:
    """Returns the upper left corner of each box; rows are centred."""
    at: dict[str, tuple[int, int]] = {}
    for depth, row in enumerate(rows):
        left = (width - len(row) * (BOX_WIDTH + GAP) + GAP) // 2
        for i, id in enumerate(row):
            at[id] = (left + i * (BOX_WIDTH + GAP), MARGIN + depth * (BOX_HEIGHT + RISE))
    return at


def _fitting(text: str, most: int) -> str:
    """Shortens `text` in the middle if it is too long: names differ at their beginnings and ends."""
    if len(text) <= most:
        return text
    head = (most - 1) * 2 // 3
    return f"{text[:head]}…{text[head + 1 - most :]}"

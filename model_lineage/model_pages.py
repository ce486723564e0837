"""The text of a model's page in MLflow: markdown whose names are links, so that people can browse the lineage.

MLflow's UI routes behind "#", so a link without a host works on whatever address the server has. Without `workflowType`
the page would open in the layout for language-model applications, where runs are hard to find.

The second half reads and writes the cards of Hugging Face's hub: a README.md that begins with metadata in YAML
(https://huggingface.co/docs/hub/model-cards: `base_model`, `base_model_relation`, `datasets`, `model-index`).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from ringmaster.model_lineage.records import ModelRecord
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
    return page_template(HUB_CARD).render(
        head=yaml.safe_dump(storable_values(head), sort_keys=False),
        title=title,
        record=record,
        bases=base_models,
        sections={"Held-out metrics": metrics, "Hyperparameters": params},
    )


def read_card(folder: Path) -> CardMetadata:
    """Returns the metadata of the card in a model's folder, or empty metadata. Raises ValueError on an invalid card."""
    result = re.match(r"---\n(.*?)^---", card_text(folder), re.DOTALL | re.MULTILINE)
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


def _texts(value: Any) -> tuple[str, ...]:
    """Returns one or several names from a YAML value as a tuple."""
    values = value if isinstance(value, list) else [value]
    return tuple(each for each in values if isinstance(each, str) and each and each.isprintable())


def experiment_path(experiment_id: str) -> str:
    """Returns the UI path of an experiment."""
    return _path("experiments", experiment_id)


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
- files and metrics: {{ link(model.model_id, logged_model_path(experiment_id, model.model_id)) }}

{{ picture("Its family", run_id, family) }}"""
DESCRIPTION_LIMIT = 5000  # the size in characters of the column for a model version's description
_CHILDREN = "\n\n**Adapted further into**\n\n"
_STORE = "\n\n**In the tensor store**\n\n"
_FILES = "- files and metrics: "
_SIGNATURE = "- signed: "
_CERTIFICATE = "- made again, bit by bit: "
_CULPRIT = "**A fault began here**, "
_MORE = "\n- and 1000000 more"


def card(
    model: ModelRecord, *, text: str, parents: Sequence[ModelRecord], run_name: str, batch: tuple[str, str] | None
) -> str:
    """Returns `text` about `model`, followed by its origin: parents, run, batch (name, run id), data, files.

    `text` is shortened if the whole would exceed DESCRIPTION_LIMIT.
    """
    origin = page_template(ORIGIN).render(
        model=model,
        parents=parents,
        run_name=run_name,
        batch=batch,
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


def with_certificate(description: str, model: ModelRecord, *, path: str, day: str) -> str:
    """Returns a page's text with the line that the model was made again bit by bit, in place of an earlier one."""
    where = artifact_path(str(model.experiment_id), str(model.run_id), path)
    return _with_line(description, _CERTIFICATE, link(f"certificate of {day}", where))


def with_signature(description: str, model: ModelRecord, *, digest: str) -> str:
    """Returns a page's text with the line that the model's files are signed. digest: of the signature."""
    files = logged_model_path(str(model.experiment_id), model.model_id)
    proof = f"{link('model.sig', files)} ({code_span(digest[:12])}), which `ringmaster verify` checks"
    return _with_line(description, _SIGNATURE, proof)


def _with_line(description: str, start: str, text: str) -> str:
    """Returns a page's text with a line about the model, in place of one that begins alike."""
    lines = [line for line in description.split("\n") if not line.startswith(start)]
    place = next((i for i, line in enumerate(lines) if line.startswith(_FILES)), len(lines))
    lines.insert(place, start + text)
    return "\n".join(lines)[:DESCRIPTION_LIMIT]


def with_children(description: str, children: Sequence[str]) -> str:
    """Returns `description` with a last section that lists as many `children` (markdown) as fit in DESCRIPTION_LIMIT.

    The text above that section stays, so that people may edit it. Children left out are counted.
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


def with_culprit(description: str, test: str) -> str:
    """Returns `description` below a first line that a bisection by `test` found this model, instead of an earlier one.

    Returns `description` unchanged if the result would exceed DESCRIPTION_LIMIT.
    """
    below = description.partition("\n\n")[2] if description.startswith(_CULPRIT) else description
    text = f"{_CULPRIT}as a bisection found by the test {code_span(test, limit=200)}.\n\n{below}"
    return description if len(text) > DESCRIPTION_LIMIT else text


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

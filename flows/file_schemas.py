"""JSON schemas of the files that commands take, made from the models by which these files are parsed.

Editors complete and check files by them. They hold the keys, the types and the limits of single values; rules between
values, and whether files and folders exist, are checked by the commands alone.
"""

from collections.abc import Callable, Mapping
from typing import Any

from ringmaster.features import listed
from ringmaster.tasks.batch.references import ANY_METRIC
from ringmaster.tasks.batch.schema import DIALECT, json_schema
from ringmaster.techniques.metric import metric_names

Schema = dict[str, Any]


def sweep_schema() -> Schema:
    """Returns the schema of sweep files: that of the form of a sweep, with what a file writes in a shorter way."""
    from ringmaster.flows.sweep_form import Sweep, keys_of_features

    schema = Sweep.model_json_schema()
    batch = _with_jobs(schema)
    keys, parts = schema["properties"], schema["$defs"]
    parameter = parts["Parameter"]
    parameter.pop("required")
    pattern = parameter["properties"].pop("key")["pattern"]
    plain = {"type": ["string", "number", "boolean"]}
    values = {"anyOf": [plain, {"type": "array", "minItems": 1}]}
    parameter["properties"]["values"] |= values
    parameter["properties"]["when"] = {"type": "object"}  # which is a line in the form
    keys["space"] = {
        "description": "The values of each key, such as {optimizer.lr: {low: 1e-4, high: 1e-1, log: true}}.",
        "type": "object",
        "minProperties": 1,
        "propertyNames": {"pattern": pattern},
        "additionalProperties": {"anyOf": [*values["anyOf"], {"$ref": "#/$defs/Parameter"}]},
    }
    keys["over"] = keys["space"] | {
        "description": "The values of each key, of which all combinations are trained to their end."
    }
    policy = parts["StoppingPolicy"]["properties"]["policy"]
    keys["early_stopping"] = {"anyOf": [{"$ref": "#/$defs/StoppingPolicy"}, {"enum": policy["enum"]}]}
    keys |= {key: batch["properties"][key] for key in ("devices", *sorted(keys_of_features()))}
    rules = sorted(parts["StopWhen"]["properties"])
    keys["stop_when"] = {"anyOf": [{"$ref": "#/$defs/StopWhen"}, {"enum": rules}]}
    keys["data"] = {"$ref": "#/$defs/Data"}
    keys |= _ranking_keys(schema)
    parts["InlineJob"]["properties"]["job"] = {"$ref": "#/$defs/JobTemplate"}
    schema["required"] = ["template"]
    schema["anyOf"] = [{"required": ["space"]}, {"required": ["over"]}]
    return schema


def _ranking_keys(schema: Schema) -> Schema:
    """Returns the keys by which features rank trials: a section, or a list; of objectives the metric is enough."""
    from ringmaster.flows.sweep_form import OBJECTIVES

    keys, parts = schema["properties"], schema["$defs"]
    keys.pop("ranking")
    lists = parts.pop("RankingKeys")["properties"]
    own: Schema = {key: {"anyOf": [each["items"], each]} for key, each in lists.items()}
    for each in own.pop(OBJECTIVES, {}).get("anyOf", ())[:1]:
        items = {"anyOf": [ANY_METRIC, each]}
        own["objective"] = {"anyOf": [keys["objective"], {"type": "array", "items": items, "minItems": 1}]}
    return own


def retraining_schema() -> Schema:
    """Returns the schema of files of production models."""
    from ringmaster.tasks.retraining.production import ELSEWHERE, ProductionEntry

    schema = ProductionEntry.model_json_schema()
    batch = _with_jobs(schema)
    parts = schema["$defs"]
    job, model = parts["JobTemplate"]["properties"], parts["ModelEntry"]["properties"]
    for key in ELSEWHERE:
        del job[key]
    model["job"] = {"$ref": "#/$defs/JobTemplate"}
    model["data"] = {"$ref": "#/$defs/Data"}
    model["compare_on"] = {"anyOf": [{"$ref": "#/$defs/Data"}, {"type": "null"}]}
    schema["properties"] |= {key: batch["properties"][key] for key in ("devices", "datasets")}
    schema["properties"]["objective"]["anyOf"][0]["enum"] = batch["properties"]["objective"]["enum"]
    return schema


def _with_jobs(schema: Schema) -> Schema:
    """Adds the parts of batch files to the definitions of a schema, and `JobTemplate`, a job of which no key is needed.

    Returns the schema of batch files.
    """
    batch = json_schema()
    parts = batch["$defs"] | schema["$defs"]
    template = parts["JobEntry"]
    parts["JobTemplate"] = template | {"properties": {**template["properties"]}}
    parts["JobTemplate"].pop("anyOf")
    schema["$defs"] = parts
    return batch


def policy_schema() -> Schema:
    """Returns the schema of files of promotion policies."""
    from ringmaster.tasks.retraining.policy import PolicyEntry

    return PolicyEntry.model_json_schema()


def tests_schema() -> Schema:
    """Returns the schema of files of slices, tests and assertions."""
    from ringmaster.tasks.evaluation.suite import Suite

    return Suite.model_json_schema()


SCHEMAS: Mapping[str, Callable[[], Schema]] = {
    "batch": json_schema,
    "sweep": sweep_schema,
    "retraining": retraining_schema,
    "policy": policy_schema,
    "tests": tests_schema,
}
"""The schemas by the kind of file; features list further ones in `FILE_SCHEMAS` of their module `commands`."""


def schema_of(kind: str) -> Schema:
    """Returns the schema of a kind of file, one of `SCHEMAS` or of a feature."""
    make = {**SCHEMAS, **dict(listed("commands", "FILE_SCHEMAS"))}[kind]
    schema: Schema = _with_families({"$schema": DIALECT, **make()})
    return schema


def _with_families(node: Any) -> Any:
    """Returns a schema in which metrics of families are metrics, such as latency/p99_s, which forms do not list."""
    if isinstance(node, list):
        return [_with_families(each) for each in node]
    if not isinstance(node, dict):
        return node
    if node.get("enum") == list(metric_names()):
        return {key: value for key, value in node.items() if key not in ("enum", "type")} | ANY_METRIC
    return {key: _with_families(value) for key, value in node.items()}

"""JSON schemas of the files that commands take, made from the models by which these files are parsed.

Editors complete and check files by them. They hold the keys, the types and the limits of single values; rules between
values, and whether files and folders exist, are checked by the commands alone.
"""

from collections.abc import Callable, Mapping
from typing import Any

from ringmaster.tasks.batch.schema import DIALECT, json_schema

Schema = dict[str, Any]


def sweep_schema() -> Schema:
    """Returns the schema of sweep files: that of the form of a sweep, with what a file writes in a shorter way."""
    from ringmaster.flows.sweep_form import Sweep

    schema = Sweep.model_json_schema()
    batch = _with_jobs(schema)
    keys, parts = schema["properties"], schema["$defs"]
    parameter = parts["Parameter"]
    parameter.pop("required")
    pattern = parameter["properties"].pop("key")["pattern"]
    plain = {"type": ["string", "number", "boolean"]}
    values = {"anyOf": [plain, {"type": "array", "minItems": 1}]}
    parameter["properties"]["values"] |= values
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
    keys["devices"] = batch["properties"]["devices"]
    keys["data"] = {"$ref": "#/$defs/Data"}
    parts["InlineJob"]["properties"]["job"] = {"$ref": "#/$defs/JobTemplate"}
    schema["required"] = ["template"]
    schema["anyOf"] = [{"required": ["space"]}, {"required": ["over"]}]
    return schema


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
"""The schemas by the kind of file."""


def schema_of(kind: str) -> Schema:
    """Returns the schema of a kind of file, one of `SCHEMAS`."""
    return {"$schema": DIALECT, **SCHEMAS[kind]()}

"""The JSON schemas of files, compared with the parsers: what each of them takes and refuses."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from ringmaster.compat.jsonschema import import_without_iris
from ringmaster.errors import BatchFileError
from ringmaster.flows.cli import app
from ringmaster.flows.file_schemas import SCHEMAS, schema_of
from ringmaster.tasks.batch import document, parse_batch
from ringmaster.tasks.batch.schema import BatchEntry

import_without_iris()
from jsonschema import Draft202012Validator  # noqa: E402

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))
WRONG = sorted((Path(__file__).parent / "wrong").glob("*.yaml"))
KEYS = {
    "batch": {"jobs", "grid"},
    "sweep": {"template", "space"},
    "retraining": {"models", "night"},
    "policy": {"suites", "limits", "significance"},
    "tests": {"tests", "assertions"},
}
"""By the kind of file: keys at the top that only its files have."""
VALIDATORS = {kind: Draft202012Validator(schema_of(kind)) for kind in SCHEMAS}
BATCH = VALIDATORS["batch"]

JOB = {
    "name": "a",
    "model": {"architecture": "LlamaForCausalLM", "config": {"hidden_size": 8}},
    "data": {
        "source": "python-stdlib",
        "kind": "language-modeling",
        "seq_len": 8,
        "held_out": 0.1,
        "window": {"last_rows": 9},
    },
    "adapter": {"kind": "lora", "rank": 2, "alpha": 4.0, "targets": ["q_proj"], "dora": False},
    "loss": {"name": "cross-entropy"},
    "optimizer": {"name": "adamw", "lr": 1e-3, "options": {"eps": 1e-8}},
    "schedule": {"name": "linear", "warmup_steps": 2},
    "precision": "fp32",
    "global_batch_size": 4,
    "num_steps": 3,
    "num_devices": [1, 2],
    "techniques": ["single"],
    "freeze": ["model.embed_tokens*"],
    "evaluation": {"metrics": ["loss"], "every_steps": 2},
    "seed": 1,
    "weight": 2.0,
    "user": "ana",
}
FILE = {"name": "b", "devices": {"cpu": 2}, "users": {"ana": {"share": 0.5}}, "profiling_share": 0.1, "jobs": [JOB]}


def kind_of(raw: Any) -> str | None:
    """The kind of an example; None for a part of one, such as a catalogue of data sets."""
    return next((kind for kind, keys in KEYS.items() if keys & set(raw)), None)


def places(value: Any, at: tuple = ()) -> Iterator[tuple]:
    """The place of every value within a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*at, key)
        yield from places(inner, (*at, key))


def changed(raw: Any, place: tuple, value: Any) -> Any:
    raw = copy.deepcopy(raw)
    inner = raw
    for part in place[:-1]:
        inner = inner[part]
    inner[place[-1]] = value
    return raw


def parser_errors(raw: Any) -> list[str]:
    """The kinds of what the model of batch files refuses: `reference` for what it looks up, such as names and files."""
    try:
        BatchEntry.model_validate(raw, context={"folder": ROOT / "examples"})
    except ValidationError as error:
        return [details["type"] for details in error.errors()]
    return []


def is_refused(raw: Any) -> bool:
    """Whether the parser refuses a batch, by its model or by the rules between values."""
    try:
        parse_batch(json.dumps(raw), folder=ROOT / "examples", name="batch.yaml")
    except BatchFileError:
        return True
    return False


@pytest.mark.parametrize("kind", SCHEMAS)
def test_a_schema_is_valid_and_printed(kind):
    Draft202012Validator.check_schema(schema_of(kind))
    printed = CliRunner().invoke(app, ["schema", kind], catch_exceptions=False)
    assert json.loads(printed.stdout) == json.loads(json.dumps(schema_of(kind)))


def test_the_schema_of_batch_files_is_the_default():
    assert json.loads(CliRunner().invoke(app, ["schema"], catch_exceptions=False).stdout) == schema_of("batch")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.relative_to(ROOT / "examples").as_posix())
def test_every_example_validates(path):
    raw = document.read(path.read_text()).data
    kind = kind_of(raw)
    if kind is None or path.parent.name == "plugin":  # tests/integration/examples/test_plugin.py installs the plugin
        pytest.skip("not a file of its own, or of a feature that is not installed")
    assert [error.message for error in VALIDATORS[kind].iter_errors(raw)] == []


def test_examples_are_of_every_kind():
    assert {kind_of(document.read(path.read_text()).data) for path in EXAMPLES} >= set(SCHEMAS)


@pytest.mark.parametrize("path", WRONG, ids=lambda path: path.stem)
def test_a_file_with_a_fault_in_a_value_does_not_validate(path):
    raw = document.read(path.read_text()).data
    if raw is None:
        pytest.skip("not YAML")
    structural = [kind for kind in parser_errors(raw) if kind != "reference"]
    if structural:
        assert not BATCH.is_valid(raw)
    if not BATCH.is_valid(raw):
        assert is_refused(raw)


def test_what_changes_one_value_is_refused_by_both_or_by_none():
    assert parser_errors(FILE) == []
    assert BATCH.is_valid(FILE)
    num_refused = 0
    for place in places(FILE):
        for value in (None, True, -1, 0.5, "?", [], {}, {"unknown": 1}):
            raw = changed(FILE, place, value)
            errors, is_valid = parser_errors(raw), BATCH.is_valid(raw)
            if raw.get("jobs") in ([], None):  # a rule of the whole file
                continue
            if not is_valid:
                assert errors or is_refused(raw), f"only the schema refuses {value!r} at {place}"
            if set(errors) - {"reference"}:
                assert not is_valid, f"only the parser refuses {value!r} at {place}: {errors}"
            num_refused += not is_valid
    assert num_refused > 200


@pytest.mark.parametrize(
    ("kind", "raw"),
    [
        ("batch", {"name": "empty"}),
        ("batch", {"jobs": [{"name": "a", "data": {"source": "digits"}}]}),
        ("batch", {"jobs": [JOB | {"techniques": ["dpd"]}]}),
        ("batch", {"jobs": [JOB | {"loss": "cross entropy"}]}),
        ("batch", {"jobs": [JOB], "devices": {"cpu": 1, "gpu": 1}}),
        ("batch", {"jobs": [JOB], "objective": "speed"}),
        ("batch", {"jobs": [{"name": "a", "data": {"path": "x.csv"}}]}),
        ("batch", {"grid": [{"template": JOB | {"num_stepz": 3}, "over": {"seed": [0]}}]}),
        ("batch", {"grid": [{"template": JOB, "over": {"seed": []}}]}),
        ("sweep", {"template": {"job": {}}}),
        ("sweep", {"template": {"job": {"num_stepz": 3}}, "space": {"seed": [0]}}),
        ("sweep", {"template": {"job": {}}, "space": {"optimizer.lr": {"lo": 1e-4, "high": 1.0}}}),
        ("sweep", {"template": {"job": {}}, "space": {"seed": []}}),
        ("sweep", {"template": {"job": {}}, "space": {"seed": [0]}, "sampler": "guess"}),
        ("sweep", {"template": {"job": {}}, "space": {"seed": [0]}, "early_stopping": "soon"}),
        ("retraining", {"name": "p", "models": [{"name": "a", "job": {"name": "b"}, "data": {"source": "digits"}}]}),
        ("retraining", {"name": "p", "models": [{"name": "a", "job": {}, "data": {"sources": "digits"}}]}),
        ("retraining", {"name": "p", "nights": {}, "models": []}),
        ("policy", {"name": "p", "significance": 2}),
        ("tests", {"name": "t", "assertions": [{"name": "a", "max_failures": "none"}]}),
    ],
)
def test_faults_do_not_validate(kind, raw):
    assert not VALIDATORS[kind].is_valid(raw)


@pytest.mark.parametrize(
    ("kind", "raw"),
    [
        ("batch", {"jobs": [{"name": "a", "ludwig": "ludwig.yaml", "data": {"path": "flats.csv"}}]}),
        ("batch", {"jobs": [JOB | {"loss": "my_losses:focal"}], "devices": {"gpu": "all"}}),
        ("sweep", {"template": {"path": "b.yaml"}, "over": {"seed": [0, 1], "optimizer.lr": "1e-3, 1e-2"}}),
        ("sweep", {"template": {"job": {}}, "space": {"seed": 3}, "early_stopping": "none", "devices": {"cpu": 2}}),
        ("retraining", {"name": "p", "models": [{"name": "a", "job": {"num_steps": 1}, "data": {"source": "digits"}}]}),
    ],
)
def test_short_forms_validate(kind, raw):
    assert [error.message for error in VALIDATORS[kind].iter_errors(raw)] == []


@pytest.mark.parametrize("kind", ["sweep", "retraining"])
def test_different_definitions_of_two_models_have_different_names(kind):
    from ringmaster.flows.sweep_form import Sweep
    from ringmaster.tasks.retraining.production import ProductionEntry

    own = {"sweep": Sweep, "retraining": ProductionEntry}[kind].model_json_schema()["$defs"]
    of_batch = schema_of("batch")["$defs"]
    assert [name for name, definition in own.items() if of_batch.get(name, definition) != definition] == []

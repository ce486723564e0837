"""Tags that a person has changed in MLflow hide what they say of one model, and nothing of the others."""

import json

import pytest

from ringmaster.model_lineage.ledger.families import (
    CHILD,
    DATASETS,
    KIND,
    NAME,
    ORIGIN,
    PARENTS,
    VERSIONS,
    children_of,
    origin_text,
)
from ringmaster.model_lineage.records import DatasetInput, Origin
from ringmaster.model_lineage.snapshot import ModelRow, Snapshot, node_of

DATA = DatasetInput(name="spam", digest="abc", source="/data/spam", num_rows=5)
WHOLE = {
    KIND: "fine-tuned",
    NAME: "child",
    PARENTS: '["m-base"]',
    DATASETS: json.dumps([vars(DATA)]),
    ORIGIN: origin_text(Origin(job="j", num_steps=3)),
    VERSIONS: '[{"name": "child", "version": "2"}]',
}
DAMAGED = ("", "{", "null", "3", '"x"', "[3, null]", '[{"name": 3}]', '{"a": 1}', "[" * 100_000, "[{}]", "NaN")


def row(id: str, tags) -> ModelRow:
    return ModelRow(
        model_id=id, experiment_id="1", name=id, artifact_location="", creation_timestamp=1, source_run_id="r",
        is_ready=True, tags=tags,
    )  # fmt: skip


def lineage_with(**changed: str) -> Snapshot:
    tags = {KIND: "pretrained", NAME: "base"}
    return Snapshot(node_of(row(*each), {}) for each in (("m-base", tags), ("m-child", {**WHOLE, **changed})))


def test_tags_that_nobody_changed_are_read_as_a_whole():
    record = lineage_with().nodes["m-child"].record
    assert (record.parents, record.datasets, record.version) == (("m-base",), (DATA,), 2)
    assert record.origin == Origin(job="j", num_steps=3)


@pytest.mark.parametrize("key", [PARENTS, DATASETS, ORIGIN, VERSIONS])
@pytest.mark.parametrize("text", DAMAGED, ids=lambda text: text[:9])
def test_a_damaged_tag_hides_what_it_says_and_no_more(key, text):
    lineage = lineage_with(**{key: text})
    record = lineage.nodes["m-child"].record
    assert lineage.graph.models and lineage.find("child").id == "m-child"
    kept = {PARENTS: bool(record.parents), DATASETS: bool(record.datasets), ORIGIN: record.origin != Origin()}
    assert kept == {each: each != key for each in kept}


def test_a_kind_that_does_not_exist_is_a_text():
    lineage = lineage_with(**{KIND: "[bold]tuned"})
    assert lineage.nodes["m-child"].record.kind == "[bold]tuned"


def test_what_is_of_another_type_in_an_origin_is_left_out():
    odd = json.dumps({"job": ["x"], "num_steps": "3", "seed": True, "source": "/m", "later": 1})
    assert lineage_with(**{ORIGIN: odd}).nodes["m-child"].record.origin == Origin(source="/m")


@pytest.mark.parametrize("text", DAMAGED, ids=lambda text: text[:9])
def test_a_damaged_child_is_not_listed(text):
    whole = {"name": "a", "version": 1, "kind": "lora"}
    assert children_of({f"{CHILD}m-1": text, f"{CHILD}m-2": json.dumps(whole)}) == [("m-2", whole)]

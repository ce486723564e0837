"""Maintenance: faults of records as messages, and which records may be deleted."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from ringmaster.errors import InputError
from ringmaster.flows import cli
from ringmaster.flows.lineage.home import LineageHome
from ringmaster.model_lineage.snapshot import DAY_MS, consistency_errors, unreached
from ringmaster.model_lineage.tensors import TensorStore
from tests.unit.lineage.families import node, shop, snapshot


@pytest.fixture
def store(tmp_path):
    return TensorStore(tmp_path / "tensors")


def test_a_whole_lineage_has_no_faults(store):
    assert consistency_errors(shop(), store) == []


def test_tags_edited_into_a_circle_are_told_with_the_way_round(store):
    (fault,) = consistency_errors(snapshot(node("a", "c"), node("b", "a"), node("c", "b"), node("d", "a")), store)
    assert "own ancestors: " in fault and "ringmaster.parents" in fault
    assert all(f"m-{name}" in fault for name in "abc") and "m-d" not in fault


@pytest.mark.parametrize("words", [["show", "a"], ["impact", "a"], ["bisect", "a", "--test", "loss<1"]])
def test_questions_about_a_circle_are_faults_of_the_input(monkeypatch, words):
    monkeypatch.setattr(LineageHome, "snapshot", snapshot(node("a", "b"), node("b", "a")))
    done = CliRunner().invoke(cli.app, ["lineage", *words])
    assert isinstance(done.exception, InputError)
    assert "own ancestors" in done.exception.faults[0]


def test_parents_and_components_that_were_deleted_and_models_that_are_not_complete_are_told(store):
    lost = node("lost", "gone", components=("m-part",), tensors_id="nowhere")
    found = consistency_errors(snapshot(lost, replace(node("half"), is_ready=False)), store)
    assert found == [
        "lost/1 came from m-gone, which was deleted",
        "lost/1 has the component m-part, which was deleted",
        "half/1 was never completed. To fix: ringmaster run --resume of its batch",
        "lost/1 is gone from the tensor store. To fix: ringmaster lineage store m-lost",
    ]


def test_what_no_alias_reaches_may_be_dropped_children_first_once_it_is_old():
    family = shop()
    dropped = unreached(family, now_ms=10 * DAY_MS, least_age_days=7)
    assert [each.record.registered_name for each in dropped] == ["small"]
    assert unreached(family, now_ms=6 * DAY_MS, least_age_days=7) == ()

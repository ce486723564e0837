"""The lineage in memory: names, data sets, components and reachable models."""

import pytest

from ringmaster.errors import UnknownModel
from tests.unit.lineage.families import data, node, shop, snapshot

VERSIONS = snapshot(
    node("writer"),
    node("writer", version=2, aliases=["champion"]),
    node("writer", version=3, aliases=["challenger"]),
    node("org/model", version=None, kind="imported"),
)


@pytest.mark.parametrize(
    ("name", "id"),
    [
        ("writer", "m-writer-2"),
        ("writer/3", "m-writer-3"),
        ("models:/writer/1", "m-writer"),
        ("writer@challenger", "m-writer-3"),
        ("models:/writer@champion", "m-writer-2"),
        ("m-writer-3", "m-writer-3"),
        ("models:/m-writer", "m-writer"),
        ("org/model", "m-org/model"),
        ("m-org/", "m-org/model"),
    ],
)
def test_every_way_to_name_a_model_finds_it(name, id):
    assert VERSIONS.find(name).id == id


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("writr", "no model 'writr'. Did you mean writer?"),
        ("writer/9", r"writer has no '9'. There are writer/1, writer/2@champion, writer/3@challenger"),
        ("writer@previous", "writer has no 'previous'"),
        ("m-writer-", r"2 models' ids begin with m-writer-: m-writer-2 \(writer/2\), m-writer-3 \(writer/3\)"),
        ("zzz", "There are 2: org/model, writer"),
    ],
)
def test_an_unknown_name_is_answered_with_close_ones(name, told):
    with pytest.raises(UnknownModel, match=told):
        VERSIONS.find(name)


def test_a_name_alone_means_the_newest_version_where_there_is_no_champion():
    assert snapshot(node("a"), node("a", version=2)).find("a").label == "a/2"
    with pytest.raises(UnknownModel, match="none yet"):
        snapshot().find("a")


def test_the_name_of_a_job_alone_means_the_model_of_the_only_batch_that_has_it():
    models = node("manuals.wiki"), node("manuals.wiki", version=2), node("x.one"), node("y.one")
    lineage = snapshot(*models)
    assert [lineage.find(name).label for name in ("wiki", "wiki/1")] == ["manuals.wiki/2", "manuals.wiki/1"]
    assert snapshot(*models, node("wiki")).find("wiki").label == "wiki/1"
    with pytest.raises(UnknownModel, match="no model 'one'"):
        lineage.find("one")


@pytest.mark.parametrize("said", ["spam", "digest-of-spam", "digest-of-sp", "/data/spam"])
def test_a_data_set_is_found_by_name_digest_or_source(said):
    assert [node.label for node in shop().trained_on(said)] == ["poisoned/1"]


def test_data_that_a_model_was_only_evaluated_on_did_not_make_it():
    assert [node.label for node in shop().trained_on("reviews")] == ["clean/1"]


def test_what_was_reached_is_every_descendant():
    family = shop()
    assert [family.label(id) for id in family.reached_from(["m-clean"])] == ["product/1", "merged/1", "small/1"]
    assert family.reached_from(["m-small"]) == ()


def test_what_a_component_is_part_of_came_from_it():
    tower = node("tower", kind="component", version=None)
    family = snapshot(
        tower, node("a", components=("m-tower",)), node("b", components=("m-tower",)), node("c"), node("a2", "a")
    )
    assert set(family.reached_from(["m-tower"])) == {"m-a", "m-b", "m-a2"}
    assert [each.label for each in family.models] == ["a/1", "b/1", "c/1", "a2/1"]


def test_a_deleted_parent_is_told_as_such():
    family = snapshot(node("child", "gone", datasets=[data("d")]))
    assert family.label(family.graph.parents("m-child")[0]) == "m-gone (deleted)"

"""Shared components of two models, found by their stored tensors."""

import pytest

from ringmaster.model_lineage.tensors.comparison import common_components, named_component
from ringmaster.model_lineage.tensors.model_files import ModelFile, ModelTensor, StoredModel


def model(**digests):
    """A model whose tensors, of 100 numbers each, have the given digests; __ in a name represents a dot."""
    tensors = tuple(
        ModelTensor(name=name.replace("__", "."), dtype="F32", shape=(10, 10), digest=digest)
        for name, digest in digests.items()
    )
    return StoredModel(id="x", files=(ModelFile(path="model.safetensors", head="h", tensors=tensors),))


def test_a_frozen_stem_is_one_part_and_an_embedding_another():
    stem = {"m__embed__weight": "e", **{f"m__layers__{i}__{w}": f"{i}{w}" for i in range(3) for w in "ab"}}
    one = model(**stem, m__layers__3__a="x", m__layers__3__b="y", head__weight="h1")
    two = model(**stem, m__layers__3__a="x", m__layers__3__b="z", head__weight="h2")
    components = {component.name: component for component in common_components(one, two)}
    assert sorted(components) == ["m.embed", "m.layers.0-2", "m.layers.3.a"]
    assert (components["m.layers.0-2"].num_tensors, components["m.layers.0-2"].num_bytes) == (6, 6 * 400)


def test_equal_parts_have_equal_digests_in_whatever_models():
    tower = {"vision__a": "1", "vision__b": "2"}
    (first,) = common_components(model(**tower, text__a="3"), model(**tower, text__a="4"))
    (second,) = common_components(model(**tower, audio__a="5"), model(**tower, other__a="6"))
    assert first.name == second.name == "vision"
    assert first.digest == second.digest
    (changed,) = common_components(
        model(**{**tower, "vision__b": "9"}, x="1"), model(**{**tower, "vision__b": "9"}, x="2")
    )
    assert changed.digest != first.digest


def test_a_tower_that_one_model_has_more_of_is_not_the_same():
    one, two = model(vision__a="1", text="2"), model(vision__a="1", vision__b="2", text="3")
    assert [component.name for component in common_components(one, two)] == ["vision.a"]


def test_models_that_are_alike_or_share_nothing_have_no_parts():
    assert common_components(model(a="1", b="2"), model(a="1", b="2")) == []
    assert common_components(model(a="1"), model(a="2")) == []


def test_gaps_between_numbered_modules_part_them():
    layers = {f"l__{i}__w": str(i) for i in (0, 1, 3, 10)}
    names = [p.name for p in common_components(model(**layers, l__2__w="a"), model(**layers, l__2__w="b"))]
    assert names == ["l.0-1", "l.3", "l.10"]


def test_small_parts_are_none():
    big = {f"big__{i}": f"b{i}" for i in range(200)}
    one, two = model(**big, norm="n"), model(**{name: f"{d}!" for name, d in big.items()}, norm="n")
    assert common_components(one, two) == []


def test_a_part_that_is_named_is_the_same_wherever_its_tensors_are():
    one = model(vision__a="1", vision__b__w="2", text="3")
    two = model(left__eye__a="1", left__eye__b__w="2", left__eyebrow="7", other="4")
    first, second = named_component(one, "tower", prefix="vision"), named_component(two, "tower", prefix="left.eye")
    assert first == second
    assert (first.name, first.num_tensors, first.num_bytes, first.is_named) == ("tower", 2, 800, True)
    assert named_component(one, "other-tower", prefix="vision").digest != first.digest
    assert named_component(model(vision__a="1", vision__b__w="9"), "tower", prefix="vision").digest != first.digest
    assert named_component(one, "words", prefix="text").num_tensors == 1


def test_a_name_for_nothing_is_told_with_what_there_is():
    with pytest.raises(ValueError, match=r"no parameter is within 'visio'\. To fix: begin with one of text, vision"):
        named_component(model(vision__a="1", text="2"), "tower", prefix="visio")

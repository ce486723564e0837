import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringmaster.model_lineage import Graph

# base -> tuned -> small, base -> other, (tuned, other) -> merged
EDGES = [
    ("base", []),
    ("tuned", ["base"]),
    ("other", ["base"]),
    ("small", ["tuned"]),
    ("merged", ["tuned", "other"]),
]
FAMILY = Graph(EDGES)


def test_ancestors_and_descendants_come_nearest_first():
    assert FAMILY.ancestors("merged") == ("tuned", "other", "base")
    assert FAMILY.descendants("base") == ("tuned", "other", "small", "merged")
    assert FAMILY.ancestors("base") == () == FAMILY.descendants("small")


def test_every_model_stands_after_its_parents():
    place = {model: index for index, model in enumerate(FAMILY.models)}
    assert len(FAMILY.models) == 5
    assert all(place[parent] < place[child] for child, parents in EDGES for parent in parents)
    assert FAMILY.parents("merged") == ("tuned", "other")
    assert FAMILY.children("tuned") == ("small", "merged")


def test_a_parent_that_nothing_made_is_a_model_too():
    graph = Graph([("child", ["elsewhere"])])
    assert "elsewhere" in graph
    assert graph.parents("elsewhere") == ()


def test_a_model_may_have_several_adaptations():
    assert Graph([("x", ["a"]), ("x", ["a", "b"])]).parents("x") == ("a", "b")


@pytest.mark.parametrize(
    "edges", [[("a", "a")], [("a", "b"), ("b", "a")], [("a", "b"), ("b", "c"), ("c", "a"), ("d", "a")]]
)
def test_a_cycle_is_refused_and_named(edges):
    with pytest.raises(ValueError, match=r"their own ancestors: .*a"):
        Graph((child, [parent]) for child, parent in edges)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=60))
def test_descendants_are_the_inverse_of_ancestors(pairs):
    graph = Graph((str(max(a, b)), [str(min(a, b))]) for a, b in pairs if a != b)
    for model in graph.models:
        for ancestor in graph.ancestors(model):
            assert model in graph.descendants(ancestor)
        for descendant in graph.descendants(model):
            assert model in graph.ancestors(descendant)

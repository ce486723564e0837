"""Bisection: the search for the adaptation that broke a model."""

import math
from random import Random

import pytest

from ringmaster.features.bisection.fault_search import BreakingAdaptation, blame, every_bad, first_bad
from ringmaster.model_lineage.graph import Graph


def graph(edges):
    """A graph of adaptations. edges: child -> parents."""
    return Graph(edges.items())


def line(length):
    return graph({f"m{i}": [f"m{i - 1}"] if i else [] for i in range(length)})


class Bad:
    """A test that a given set of models fails. It records the models that it is asked about."""

    def __init__(self, bad):
        self.bad, self.asked = set(bad), []

    def __call__(self, model):
        assert model not in self.asked, "asked twice"
        self.asked.append(model)
        return model not in self.bad


@pytest.mark.parametrize("first", [0, 1, 17, 98, 99])
def test_in_a_line_it_takes_about_the_logarithm(first):
    test = Bad(f"m{i}" for i in range(first, 100))
    found = blame(line(100), "m99", test)
    parents = (f"m{first - 1}",) if first else ()
    assert found.culprits == (BreakingAdaptation(child=f"m{first}", parents=parents),)
    assert found.is_monotone
    assert len(test.asked) <= math.ceil(math.log2(100)) + 2


@pytest.mark.parametrize("seed", range(30))
def test_in_any_family_the_culprit_is_bad_and_its_parents_are_good(seed):
    draw = Random(seed)
    names = [f"m{i}" for i in range(40)]
    edges = {n: sorted(draw.sample(names[:i], min(i, draw.choice([1, 1, 1, 2])))) for i, n in enumerate(names)}
    family = graph(edges)
    source = draw.choice([*family.ancestors("m39"), "m39"])
    bad = {source, *family.descendants(source)}
    found = blame(family, "m39", Bad(bad))
    assert found.culprits == (BreakingAdaptation(child=source, parents=family.parents(source)),)


def test_a_fault_that_came_and_went_is_searched_exhaustively():
    family = line(9)
    test = Bad(["m2", "m3", "m7", "m8"])  # m4 repaired the fault, m7 broke it again
    found = blame(family, "m8", test, every=True)
    assert [c.child for c in found.culprits] == ["m2", "m7"]
    assert not found.is_monotone
    assert len(test.asked) == 9


def test_contradicting_answers_have_all_of_them_tested():
    family = graph({"a": [], "b": ["a"], "c": ["b"], "d": ["c"], "x": [], "merged": ["d", "x"]})
    # Bisection meets a bad model with a good child.
    test = Bad(["b", "merged", "d"])
    found = blame(family, "merged", test, every=True)
    assert [c.child for c in found.culprits] == ["b", "d"]
    assert not found.is_monotone


def test_two_lines_that_are_both_bad_are_both_named_where_all_are_tested():
    family = graph({"a": [], "b": ["a"], "c": ["a"], "merged": ["b", "c"]})
    found = blame(family, "merged", Bad(["b", "c", "merged"]), every=True)
    assert sorted(culprit.child for culprit in found.culprits) == ["b", "c"]
    assert found.is_monotone


def test_a_root_may_be_the_culprit():
    found = blame(line(3), "m2", Bad(["m0", "m1", "m2"]))
    assert found.culprits == (BreakingAdaptation(child="m0", parents=()),)


def test_a_model_that_passes_has_nobody_to_blame():
    with pytest.raises(ValueError, match="m2 passes the test"):
        blame(line(3), "m2", Bad([]))


class Skips(Bad):
    """A test that a given set of models fails, and that cannot be run on other models."""

    def __init__(self, bad, skipped):
        super().__init__(bad)
        self.skipped = set(skipped)

    def __call__(self, model):
        is_good = super().__call__(model)
        return None if model in self.skipped else is_good


@pytest.mark.parametrize("seed", range(30))
def test_what_cannot_be_tested_is_passed_over_and_named_where_it_may_be_the_culprit(seed):
    draw = Random(seed)
    first = draw.randrange(20)
    skipped = {f"m{i}" for i in draw.sample(range(19), 8)}
    found = blame(line(20), "m19", Skips([f"m{i}" for i in range(first, 20)], skipped))
    bad = next(i for i in range(first, 20) if f"m{i}" not in skipped)
    good = max((i for i in range(first) if f"m{i}" not in skipped), default=None)
    between = [f"m{i}" for i in range(bad - 1, -1 if good is None else good, -1)]
    parents = () if good is None else (f"m{good}",)
    assert found.culprits == (BreakingAdaptation(child=f"m{bad}", parents=parents, perhaps=tuple(between)),)
    assert set(between) <= set(found.untested) <= skipped


def test_of_several_parents_those_of_one_that_cannot_be_tested_count():
    family = graph({"a": [], "b": ["a"], "c": ["b"], "d": ["a"], "merged": ["c", "d"]})
    (culprit,) = blame(family, "merged", Skips(["merged", "c", "b"], ["c"])).culprits
    assert culprit == BreakingAdaptation(child="b", parents=("a",))
    (culprit,) = blame(family, "merged", Skips(["merged", "c"], ["c"])).culprits
    assert culprit == BreakingAdaptation(child="merged", parents=("b", "d"), perhaps=("c",))


def test_where_the_model_itself_cannot_be_tested_nothing_is_known():
    with pytest.raises(ValueError, match="m2 cannot be tested"):
        blame(line(3), "m2", Skips(["m2"], ["m2"]))


@pytest.mark.parametrize("first", range(8))
def test_the_first_bad_checkpoint_of_a_run(first):
    points = [str(i) for i in range(8)]
    test = Bad(points[first:])
    assert first_bad(points, test) == (first - 1, first)
    assert len(test.asked) <= 3


def test_checkpoints_that_cannot_be_tested_widen_the_range():
    points = [str(i) for i in range(8)]
    assert first_bad(points, Skips(points[4:], "345")) == (2, 6)
    assert first_bad(points, Skips(points[0:], "01")) == (-1, 2)


def test_every_change_for_the_worse_is_found_where_all_checkpoints_are_tested():
    points = [str(i) for i in range(8)]
    assert every_bad(points, Skips("2367", "16")) == [(0, 2), (5, 7)]
    assert every_bad(points, Bad(points)) == [(-1, 0)]

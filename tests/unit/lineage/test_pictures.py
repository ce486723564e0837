"""The SVG of a family of models: all models appear, children are below their parents, and the SVG is well-formed."""

import re
from itertools import pairwise
from random import Random
from xml.etree import ElementTree

import pytest

from ringmaster.model_lineage.model_pages import BOX_WIDTH, MAX_TITLE, Relative, family_svg

SVG = "{http://www.w3.org/2000/svg}"


def relative(name, kind="fine-tuned", detail="", **marks):
    return Relative(id=name, title=name, kind=kind, detail=detail, **marks)


def marks(svg):
    """The marks on each box of an SVG, by its title."""
    found = {}
    for group in ElementTree.fromstring(svg).iter(f"{SVG}g"):
        title, _, *labels = (text.text for text in group.findall(f"{SVG}text"))
        found[title] = labels
    return found


def texts(svg):
    """The texts of each box of an SVG below its title, by that."""
    found = {}
    for group in ElementTree.fromstring(svg).iter(f"{SVG}g"):
        title, *others = (text.text for text in group.findall(f"{SVG}text"))
        found[title] = others
    return found


def boxes(svg):
    """The boxes of an SVG: title -> (x, y, stroke width)."""
    found = {}
    for group in ElementTree.fromstring(svg).iter(f"{SVG}g"):
        box, title = group.find(f"{SVG}rect"), group.find(f"{SVG}text")
        found[title.text] = (int(box.get("x")), int(box.get("y")), int(box.get("stroke-width")))
    return found


def test_children_stand_below_and_who_it_is_about_has_the_thick_frame():
    names = ["base", "a", "b", "merged"]
    edges = [("base", "a"), ("base", "b"), ("a", "merged"), ("b", "merged"), ("gone", "a")]
    found = boxes(family_svg([relative(name) for name in names], edges, focus="a"))
    assert sorted(found) == sorted(names)
    assert found["base"][1] < found["a"][1] == found["b"][1] < found["merged"][1]
    assert [name for name, (_, _, stroke) in found.items() if stroke > 1] == ["a"]


@pytest.mark.parametrize("seed", range(10))
def test_no_two_boxes_overlap(seed):
    draw = Random(seed)
    names = [f"m{i}" for i in range(20)]
    edges = [(draw.choice(names[:i]), name) for i, name in enumerate(names) if i]
    svg = family_svg([relative(name) for name in names], edges, focus="m3")
    found = boxes(svg)
    width = int(re.search(r'width="(\d+)"', svg)[1])
    for x, y, _ in found.values():
        assert 0 <= x <= width - BOX_WIDTH
        assert len([1 for other in found.values() if other[1] == y and abs(other[0] - x) < BOX_WIDTH]) == 1
    assert all(found[parent][1] < found[child][1] for parent, child in edges)


def test_neighbours_stand_together():
    edges = [("a", "a1"), ("b", "b1"), ("a", "a2"), ("b", "b2")]
    found = boxes(family_svg([relative(n) for n in ("a", "b", "a1", "b1", "a2", "b2")], edges, focus="a"))
    in_row = sorted((x, name) for name, (x, y, _) in found.items() if y > found["a"][1])
    assert [name[0] for _, name in in_row] in (["a", "a", "b", "b"], ["b", "b", "a", "a"])


def test_any_name_is_safe_and_a_long_one_shows_both_ends():
    (text,) = boxes(family_svg([relative("<b>&" + "x" * 50 + "-final")], [], focus=""))
    assert text.startswith("<b>&") and text.endswith("-final") and len(text) == MAX_TITLE


def test_a_culprit_what_it_reached_and_who_serves_are_marked():
    family = [relative("base"), relative("bad", is_culprit=True), relative("good", states=("champion",))]
    family += [relative("child", states=("champion",)), relative("grandchild"), relative("worse", is_culprit=True)]
    edges = [("base", "bad"), ("base", "good"), ("bad", "child"), ("child", "grandchild"), ("bad", "worse")]
    assert marks(family_svg(family, edges, focus="base")) == {
        "base": [],
        "bad": ["culprit"],
        "good": ["champion"],
        "child": ["champion", "reached"],
        "grandchild": ["reached"],
        "worse": ["culprit"],
    }


def test_damaged_records_with_a_cycle_are_drawn_too():
    svg = family_svg([relative("a"), relative("b")], [("a", "b"), ("b", "a")], focus="a")
    assert sorted(boxes(svg)) == ["a", "b"]


def test_marks_of_a_box_lie_beside_each_other():
    svg = family_svg([relative("a", states=("champion", "undone"), is_culprit=True)], [], focus="a")
    (box, *pills) = (
        (int(rect.get("x")), int(rect.get("width")))
        for rect in ElementTree.fromstring(svg).find(f"{SVG}g").iter(f"{SVG}rect")
    )
    ends = sorted((x, x + width) for x, width in pills)
    assert len(ends) == 3 and ends[0][0] >= box[0] and ends[-1][1] <= sum(box)
    assert all(right < left for (_, right), (left, _) in pairwise(ends))

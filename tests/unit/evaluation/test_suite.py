"""The file of slices, tests and assertions: its contents, and errors that report all faults at once."""

import pytest

from ringmaster.errors import BatchFileError
from ringmaster.tasks.evaluation.suite import load_suite

GOOD = """\
name: reviews
slices:
  - {name: class, column: labels}
  - {name: length, tokens: [64, 128]}
  - {name: era, by: "mine:era"}
tests:
  - name: negation
    kind: minimum
    template: "I do not {verb} the {thing}."
    lexicons: {verb: [like, love], thing: [food, room]}
    label: 0
    max_failures: 0.1
  - {name: typos, kind: invariance, texts: [good food], change: {typo: 1}}
  - {name: louder, kind: direction, texts: [good], change: {case: upper}, direction: {label: 1, moves: not_down}}
  - {name: grammar, kind: minimum, texts: [he goes, they go], over: [he go, they goes]}
  - {name: moved, kind: invariance, held_out: 50, change: {shift: [1, 0]}, max_failures: 0.2}
assertions:
  - {name: sane, finite: [probabilities]}
  - {name: sure, range: {field: confidence, min: 0.5}, max_failures: 0.2}
  - {name: own, predicate: "mine:right", where: {country: NZ}}
"""

BAD = """\
name: reviews
slice: []
slices:
  - {name: class, column: labels, tokens: [3]}
tests:
  - {name: a, kind: minimal, texts: [x], label: 1}
  - {name: b, kind: minimum, texts: [x], label: -1}
  - {name: c, kind: minimum, texts: [x], label: 1, max_failures: 2}
assertions:
  - {name: d, range: {min: 0}}
  - {name: e, predicate: "mine:wrong"}
"""

RULES = """\
name: reviews
slices:
  - {name: class, column: labels, tokens: [3]}
  - {name: length, tokens: [9, 3]}
tests:
  - {name: a, kind: minimum, texts: [x], template: y, label: 1}
  - {name: a, kind: minimum, texts: [x]}
  - {name: b, kind: invariance, texts: [x], label: 1, change: {}}
  - {name: c, kind: direction, template: "{what} now", change: {shift: [1, 0]}}
  - {name: d, kind: invariance, held_out: 5, change: {rotate: 45}}
  - {name: e, kind: minimum, texts: [x], labels: [1, 2]}
assertions:
  - {name: f, finite: [p], share: {value: 1}}
  - {name: g, range: {field: p}}
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text("def era(row): ...\ndef right(row): ...\n")
    return tmp_path


def load(folder, text):
    path = folder / "tests.yaml"
    path.write_text(text)
    return load_suite(path)


def faults(folder, text):
    with pytest.raises(BatchFileError) as raised:
        load(folder, text)
    assert all(fault.message and fault.remedy for fault in raised.value.faults)
    return {(fault.line, fault.place) for fault in raised.value.faults}


def test_a_file_says_slices_tests_and_assertions(folder):
    suite = load(folder, GOOD)
    assert [len(part) for part in (suite.slices, suite.tests, suite.assertions)] == [3, 5, 3]
    assert suite.tests[0].lexicons["verb"] == ["like", "love"]
    assert suite.tests[2].direction.moves == "not_down"
    assert suite.tests[3].over == ["he go", "they goes"]


def test_all_faults_of_values_are_told_at_once_with_place_and_line(folder):
    assert faults(folder, BAD) == {
        (2, "slice"),
        (4, "slices[0]"),
        (6, "tests[0].kind"),
        (7, "tests[1].label"),
        (8, "tests[2].max_failures"),
        (10, "assertions[0].range.field"),
        (11, "assertions[1].predicate"),
    }


def test_all_faults_of_meaning_are_told_at_once(folder):
    assert faults(folder, RULES) == {
        (3, "slices[0]"),
        (4, "slices[1].tokens"),
        (6, "tests[0]"),
        (7, "tests[1].name"),
        (7, "tests[1]"),
        (8, "tests[2].label"),
        (8, "tests[2].change"),
        (9, "tests[3].lexicons"),
        (9, "tests[3].direction"),
        (9, "tests[3].change.shift"),
        (10, "tests[4].change.rotate"),
        (11, "tests[5].labels"),
        (13, "assertions[0]"),
        (14, "assertions[1].range"),
    }


@pytest.mark.parametrize(
    ("text", "told"), [("", "is empty"), ("name: x\n", "is empty"), ("name: x\ntests: [", "is not YAML")]
)
def test_a_file_that_asks_nothing_is_told(folder, text, told):
    with pytest.raises(BatchFileError, match=told):
        load(folder, text)


def test_a_file_that_is_not_there_is_told(tmp_path):
    with pytest.raises(BatchFileError, match="cannot be read"):
        load_suite(tmp_path / "none.yaml")

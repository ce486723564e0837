"""Metrics of entities that tags of tokens mark."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringmaster.features.sequence_metrics.token_sequences import entities
from ringmaster.techniques.data_source import PreparedData
from tests.drawing import draws
from tests.unit.evaluation.measuring import measured

TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC", "E-LOC", "S-LOC")
NAMES = ("entity_f1", "entity_precision", "entity_recall")


def conlleval(tags):
    """The entities by the rules of the script of CoNLL-2000, as a chunk's start and end of neighbouring tags."""
    found, first = set(), None
    for place in range(len(tags) + 1):
        before, tag = (tags[i] if 0 <= i < len(tags) else "O" for i in (place - 1, place))
        differs = before[2:] != tag[2:]
        if before != "O" and (before[0] in "ES" or tag == "O" or tag[0] in "BS" or differs):
            found.add((before[2:], first, place - 1))
        if tag != "O" and (tag[0] in "BS" or before == "O" or before[0] in "ES" or differs):
            first = place
    return found


@draws(100)
@given(st.lists(st.sampled_from(TAGS), max_size=9))
def test_entities_are_those_of_conlleval(tags):
    assert entities(tags) == conlleval(tags)


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        ("B-PER I-PER O B-LOC", {("PER", 0, 1), ("LOC", 3, 3)}),
        ("B-PER B-PER I-LOC", {("PER", 0, 0), ("PER", 1, 1), ("LOC", 2, 2)}),
        ("I-PER I-PER O I-LOC", {("PER", 0, 1), ("LOC", 3, 3)}),
        ("S-LOC B-LOC E-LOC I-LOC", {("LOC", 0, 0), ("LOC", 1, 2), ("LOC", 3, 3)}),
        ("O O", set()),
    ],
)
def test_entities(tags, found):
    assert entities(tags.split()) == found


def data(labels):
    about = {"name": "", "digest": "", "num_samples": 1, "num_held_out": 1, "kind": "tokens", "source": ""}
    return PreparedData(**about, labels=labels)


def batch_of(rows):
    """Labels of rows of tags, of which None is not labelled, padded to the longest."""
    width = max(map(len, rows))
    numbers = [[-100 if tag is None else TAGS.index(tag) for tag in [*row, *[None] * width][:width]] for row in rows]
    return {"labels": torch.tensor(numbers)}


ROWS = [["B-PER", None, "I-PER", "O", "B-LOC"], ["O", "S-LOC"], [None, "B-LOC"]]
PREDICTED = [["B-PER", "B-LOC", "I-PER", "O", "O"], ["B-LOC", "S-LOC"], ["B-LOC", "B-LOC"]]


@pytest.mark.parametrize("num_parts", [1, 2, 3])
def test_an_entity_is_right_where_its_ends_and_its_type_are(num_parts):
    """3 of 4 entities are found, and 3 of 4 that are predicted are right. Tokens without a label do not count."""
    logits = torch.nn.functional.one_hot(batch_of(PREDICTED)["labels"].clamp(min=0), len(TAGS)).float()
    found = measured(NAMES, batch_of(ROWS), num_parts=num_parts, data=data(TAGS), logits=logits)
    assert found == pytest.approx(dict.fromkeys(NAMES, 3 / 4))


@pytest.mark.parametrize("labels", [(), ("O", "PER", "LOC"), TAGS[:2]])
def test_other_classes_are_no_tags(labels):
    with pytest.raises(ValueError, match="entity_f1 needs a label for each token, and the names of the classes: O,"):
        measured(("entity_f1",), {"labels": torch.tensor([[0, 1]])}, data=data(labels), logits=torch.ones(1, 2, 3))

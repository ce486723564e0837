"""The numbers of classes that are found in labels."""

import pytest

from ringmaster.techniques.data.class_labels import MAX_CLASSES, DiscoveredClasses, in_order


@pytest.mark.parametrize(
    ("found", "names"),
    [
        (["b", "a", "10"], ("10", "a", "b")),
        (["10", "9"], ("9", "10")),
        (["3", "0"], ("0", "1", "2", "3")),
        (["-1", "1"], ("-1", "1")),
        (["007", "7"], ("007", "7")),
        (["²", "1"], ("1", "²")),
        ([], ()),
    ],
)
def test_whole_numbers_are_in_order_of_size_and_others_of_their_letters(found, names):
    assert in_order(found).names == names


def test_classes_are_numbered_as_they_come():
    found = DiscoveredClasses(column="label", classes=lambda value: value)
    assert [found.add(each) for each in (["b"], ["a", "b"], [1, "1", True])] == [[0], [1, 0], [2, 2, 3]]
    assert found.names == ("b", "a", "1", "true")
    with pytest.raises(ValueError, match=r"label 0.5 in column 'label' is not a class. To fix"):
        found.add([0.5])


def test_too_many_classes_are_refused_where_they_are_found():
    found = DiscoveredClasses(column="label", classes=lambda value: value)
    with pytest.raises(ValueError, match=r"column 'label' has more than 10000 different labels. To fix"):
        found.add(range(MAX_CLASSES + 1))

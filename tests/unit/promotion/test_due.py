"""Which models are due, and the reasons that a person reads."""

import pytest

from tasks.promotion.due import due
from tasks.promotion.stage import Standing
from tests.unit.promotion.fakes import version

OLD, LOST, NEW = version(1, digest="old"), version(2, digest="lost"), version(3, digest="new")


def standing(champion=None, challenger=None, latest=None) -> Standing:
    return Standing(name="shop.prices", champion=champion, challenger=challenger, latest=latest)


@pytest.mark.parametrize(
    ("standing", "is_due", "why"),
    [
        (standing(), True, "it has no champion yet"),
        (standing(OLD, OLD, OLD), True, "new data: new, the champion was trained on old"),
        (standing(OLD, LOST, LOST), True, "new data: new, the champion was trained on old"),
        (standing(NEW, NEW, NEW), False, "no new data since the champion was trained"),
        (standing(OLD, NEW, NEW), False, "no new data since version 3 was trained, which was not promoted"),
        (standing(None, NEW, NEW), False, "no new data since version 3 was trained, which was not promoted"),
        (standing(OLD, OLD, NEW), False, "version 3 was trained on this data, and is to be compared yet"),
    ],
)
def test_new_data_makes_a_model_due_and_known_data_never_does(standing, is_due, why):
    found = due(standing, digest="new")
    assert (found.is_due, found.why) == (is_due, why)


def test_data_that_came_back_to_the_champions_is_not_trained_on_again():
    assert not due(standing(OLD, LOST, LOST), digest="old").is_due


def test_a_champion_of_unknown_data_is_due():
    unknown = version(1).__class__(**{**vars(version(1)), "datasets": ()})
    found = due(standing(unknown, unknown, unknown), digest="new")
    assert found.is_due
    assert "not recorded" in found.why

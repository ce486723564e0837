"""Aliases: who stands where, and moves that a crash cannot spoil."""

import pytest

from tasks.promotion.policy import Decision
from tasks.promotion.stage import Standing, apply, standings, training_digest
from tests.unit.promotion.fakes import Died, FakeLedger, version

YES, NO = Decision(promote=True, why="better"), Decision(promote=False, why="worse")
NAME = "shop.prices"


def standing(ledger: FakeLedger) -> Standing:
    return standings(ledger, [NAME])[NAME]


@pytest.mark.parametrize(
    ("before", "decision", "after"),
    [
        ({}, YES, {"champion": 3, "challenger": 3}),
        ({}, NO, {"challenger": 3}),
        ({"champion": 1, "challenger": 2}, YES, {"champion": 3, "previous": 1, "challenger": 3}),
        ({"champion": 1, "challenger": 2}, NO, {"champion": 1, "challenger": 3}),
        ({"champion": 2, "previous": 1, "challenger": 2}, YES, {"champion": 3, "previous": 2, "challenger": 3}),
    ],
)
def test_aliases_move_by_the_decision_and_again_nothing_moves(before, decision, after):
    ledger = FakeLedger([version(i) for i in (1, 2, 3)], **before)
    for _ in range(2):
        apply(ledger, version(3), decision)
        assert ledger.aliases == after


@pytest.mark.parametrize("moves", [0, 1, 2])
def test_a_crash_between_moves_leaves_a_champion_and_a_repetition_ends_alike(moves):
    ledger = FakeLedger([version(i) for i in (1, 2)], moves_left=moves, champion=1, challenger=1)
    with pytest.raises(Died):
        apply(ledger, version(2), YES)
    assert ledger.aliases["champion"] in (1, 2)
    assert standing(ledger).champion is not None
    ledger.moves_left = 1000
    apply(ledger, version(2), YES)
    assert ledger.aliases == {"champion": 2, "previous": 1, "challenger": 2}


def test_the_newest_version_is_a_candidate_until_it_was_compared():
    ledger = FakeLedger([version(i) for i in (2, 1, 3)], champion=1, challenger=2)
    assert standing(ledger).candidate == version(3)
    apply(ledger, version(3), NO)
    assert standing(ledger).candidate is None


def test_after_a_crash_behind_the_promotion_there_is_nothing_to_compare():
    ledger = FakeLedger([version(i) for i in (1, 2)], champion=2, previous=1, challenger=1)
    assert standing(ledger).candidate is None


def test_what_was_never_trained_stands_nowhere():
    ledger = FakeLedger([version(1, name="shop.other")])
    assert standing(ledger) == Standing(name=NAME)
    assert standing(ledger).candidate is None


def test_a_model_that_is_recorded_but_not_registered_is_no_candidate():
    unregistered = version(2).__class__(**{**vars(version(2)), "version": None})
    assert standing(FakeLedger([version(1), unregistered], champion=1)).latest == version(1)


def test_the_digest_is_that_of_the_training_data():
    assert training_digest(version(1, digest="d7")) == "d7"
    assert training_digest(None) is None

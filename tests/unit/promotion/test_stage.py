"""Aliases of versions, and moves of aliases that survive a crash."""

from dataclasses import replace

import pytest

from ringmaster.errors import LedgerError, PromotionRefused
from ringmaster.model_lineage import ModelRecord, Origin
from ringmaster.model_lineage.ledger.families import CHALLENGER_OF, NOBODY
from ringmaster.tasks.alarms import PROMOTION_REFUSED
from ringmaster.tasks.retraining import promotion
from ringmaster.tasks.retraining.policy import PromotionDecision
from ringmaster.tasks.retraining.promotion import MoveLog, ServingVersions, roll_back, standings, training_digest
from ringmaster.tasks.storage.database import Database, file_url
from tests.unit.promotion.fakes import Died, FakeLedger, version

YES, NO = PromotionDecision(promote=True, why="better"), PromotionDecision(promote=False, why="worse")
NAME = "shop.prices"


@pytest.fixture
def log(tmp_path):
    database = Database(file_url(tmp_path / "promotions.db"), synced=False)
    yield MoveLog(database)
    database.close()


def apply(ledger, candidate, decision, log, *, champion=...):
    """Applies a decision that was made while `champion` served, by default the current one. Returns the alarms."""
    if champion is ...:
        champion = ledger.aliases.get("champion")
    told = []
    try:
        promotion.apply(ledger, candidate, decision, log=log, champion=champion, who="rule", emit_alarm=told.append)
    except PromotionRefused as refused:
        assert [alarm.facts["why"] for alarm in told] == [str(refused)]
        raise
    return told


def standing(ledger: FakeLedger) -> ServingVersions:
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
def test_aliases_move_by_the_decision_and_again_nothing_moves(before, decision, after, log):
    ledger = FakeLedger([version(i) for i in (1, 2, 3)], **before)
    for _ in range(2):
        apply(ledger, version(3), decision, log)
        assert ledger.aliases == after


def of_a_batch(number: int, *, run_id: str | None = None) -> ModelRecord:
    """A version that a batch of the same name has made, or a retraining run of an earlier release."""
    return replace(version(number), origin=Origin(job="prices"), run_id=run_id)


@pytest.mark.parametrize(
    ("others", "aliases", "candidate", "foreign"),
    [
        ([of_a_batch(3)], {"champion": 1, "challenger": 2}, None, 3),
        ([of_a_batch(3)], {"champion": 1}, 2, 3),
        ([of_a_batch(3)], {}, 2, 3),
        ([of_a_batch(3)], {"champion": 1, "challenger": 3}, 3, None),  # of a sweep
        ([of_a_batch(3)], {"champion": 3}, None, None),  # promoted by hand
        ([of_a_batch(3), version(4)], {"champion": 1}, 4, None),
        ([of_a_batch(3, run_id="run 3")], {"champion": 1}, 3, None),
        ([of_a_batch(3, run_id="another")], {"champion": 1}, 2, 3),
    ],
)
def test_only_what_retraining_made_or_an_alias_names_is_a_candidate(others, aliases, candidate, foreign):
    ledger = FakeLedger([version(1), version(2), *others], **aliases)
    ledger.tables["run 3", promotion.TRAINED] = []
    if aliases.get("challenger") == 2:
        promotion.write_decision(ledger, version(2), promotion.DecisionRecord(version=2, outcome="kept", reasons=()))
    found = standing(ledger)
    assert (found.candidate and found.candidate.version, found.foreign) == (candidate, foreign)


def test_where_nothing_else_has_a_name_what_a_batch_made_is_no_version_to_go_by():
    found = standing(FakeLedger([of_a_batch(1)]))
    assert (found.latest, found.candidate, found.foreign) == (None, None, 1)


@pytest.mark.parametrize("may_pass", [False, True])
def test_a_name_that_cannot_be_read_has_a_fault_and_the_others_stand(may_pass):
    class Foreign(FakeLedger):
        def get_alias(self, name, alias):
            if name == "shop.foreign":
                raise LedgerError("it was registered by another program", may_pass=may_pass)
            return super().get_alias(name, alias)

    ledger = Foreign([version(1), version(1, name="shop.foreign")], champion=1)
    if may_pass:
        with pytest.raises(LedgerError):
            standings(ledger, [NAME, "shop.foreign"])
        return
    found = standings(ledger, [NAME, "shop.foreign"])
    assert found["shop.foreign"].fault == "it was registered by another program"
    assert (found[NAME].champion, found[NAME].fault) == (version(1), "")


def test_a_candidate_that_is_refused_is_an_alarm(log):
    ledger = FakeLedger([version(i) for i in (1, 2, 3)], champion=1)
    (alarm,) = apply(ledger, version(2), NO, log)
    assert (alarm.event, alarm.resource) == (PROMOTION_REFUSED, f"ringmaster.model.{NAME}")
    assert alarm.facts == {"model": NAME, "version": 2, "why": "worse", "who": "rule"}
    assert apply(ledger, version(3), YES, log) == []


@pytest.mark.parametrize("moves", [0, 1, 2])
def test_a_crash_between_moves_leaves_a_champion_and_the_next_start_finishes_it(moves, log):
    ledger = FakeLedger([version(i) for i in (1, 2)], moves_left=moves, champion=1, challenger=1)
    with pytest.raises(Died):
        apply(ledger, version(2), YES, log)
    assert ledger.aliases["champion"] in (1, 2)
    assert standing(ledger).champion is not None
    ledger.moves_left = 1000
    assert log.finish_left_behind(ledger) == [NAME]
    assert promotion.read_decisions(ledger, version(2))[-1].outcome == "promoted"
    assert ledger.aliases == {"champion": 2, "previous": 1, "challenger": 2}
    assert log.finish_left_behind(ledger) == []
    apply(ledger, version(2), YES, log)
    assert ledger.aliases == {"champion": 2, "previous": 1, "challenger": 2}


@pytest.mark.parametrize("moves", [0, 1, 2])
def test_a_repetition_of_a_promotion_that_broke_ends_in_the_same_aliases(moves, log):
    ledger = FakeLedger([version(i) for i in (1, 2)], moves_left=moves, champion=1, challenger=1)
    with pytest.raises(Died):
        apply(ledger, version(2), YES, log)
    ledger.moves_left = 1000
    apply(ledger, version(2), YES, log, champion=1)
    assert ledger.aliases == {"champion": 2, "previous": 1, "challenger": 2}


class Interfering(FakeLedger):
    """A ledger in which another process promotes during a move."""

    def __init__(self, *args, other, **aliases):
        super().__init__(*args, **aliases)
        self.other = other

    def set_alias(self, name, alias, number):
        other, self.other = self.other, None
        if other is not None:
            other()
        super().set_alias(name, alias, number)


def test_of_two_promotions_at_once_one_wins_and_the_other_is_told(log):
    told = []

    def other():
        with pytest.raises(PromotionRefused, match="under way") as raised:
            apply(ledger, version(3), YES, log, champion=1)
        told.append(raised.value)

    ledger = Interfering([version(i) for i in (1, 2, 3)], other=other, champion=1, challenger=1)
    apply(ledger, version(2), YES, log)
    assert told
    assert ledger.aliases == {"champion": 2, "previous": 1, "challenger": 2}


def test_a_decision_that_another_promotion_has_overtaken_moves_nothing(log):
    ledger = FakeLedger([version(i) for i in (1, 2, 3)], champion=1, challenger=1)
    apply(ledger, version(3), YES, log, champion=1)
    before = dict(ledger.aliases)
    with pytest.raises(PromotionRefused, match="is version 3 by now, not 1"):
        apply(ledger, version(2), YES, log, champion=1)
    assert ledger.aliases == before
    assert log.finish_left_behind(ledger) == []


def test_decisions_are_kept_with_the_version_once_each(log):
    ledger = FakeLedger([version(i) for i in (1, 2)], champion=1, challenger=1)
    many = PromotionDecision(promote=False, why="a; b", reasons=("a", "b"))
    for decision in (many, many, YES):
        apply(ledger, version(2), decision, log)
    found = promotion.read_decisions(ledger, version(2))
    assert [(d.outcome, d.reasons, d.champion_before) for d in found] == [
        ("kept", ("a", "b"), 1),
        ("promoted", ("better",), 1),
    ]


def test_the_table_of_a_run_keeps_all_decisions_in_full(log):
    record = replace(version(2), run_id="r")
    ledger = FakeLedger([version(1), record], champion=1)
    for i in range(12):
        apply(ledger, record, PromotionDecision(promote=False, why="x", reasons=(f"{i} " + "y" * 900,)), log)
    (rows,) = ledger.tables.values()
    assert [row["reasons"] for row in rows] == [f"{i} " + "y" * 900 for i in range(12)]
    last = promotion.read_decisions(ledger, record)[-1]
    promotion.write_decision(ledger, record, last)
    ledger.tags[2].clear()  # deleted, or not written any more
    promotion.write_decision(ledger, record, last)
    assert ledger.tables["r", promotion.TABLE] == rows and promotion.read_decisions(ledger, record) == [last]
    ledger.tables.clear()
    promotion.write_decision(ledger, record, replace(last, who="Ann"))
    (rows,) = ledger.tables.values()
    assert [row["who"] for row in rows] == ["rule", "Ann"], "what the tag still has"


def test_a_tag_keeps_the_newest_decisions_within_its_limit(log):
    ledger = FakeLedger([version(i) for i in (1, 2)], champion=1)
    for i in range(12):
        apply(ledger, version(2), PromotionDecision(promote=False, why="x", reasons=(f"{i} " + "y" * 900,)), log)
    tag = ledger.tags[2][promotion.TAG]
    assert len(tag) <= promotion.TAG_CHARACTERS
    assert promotion.read_decisions(ledger, version(2))[-1].reasons[0].startswith("11 ")
    apply(ledger, version(2), PromotionDecision(promote=False, why="x", reasons=("z" * 900,) * 20), log)
    assert len(ledger.tags[2][promotion.TAG]) <= promotion.TAG_CHARACTERS


def test_rolling_back_lets_the_previous_champion_serve_and_goes_back_further(log):
    ledger = FakeLedger([version(i) for i in (1, 2, 3)])
    for i in (1, 2, 3):
        apply(ledger, version(i), YES, log)
    assert ledger.aliases == {"champion": 3, "previous": 2, "challenger": 3}
    assert roll_back(ledger, NAME, log=log, who="Ann") == (2, 3)
    assert ledger.aliases == {"champion": 2, "previous": 1, "challenger": 3}
    assert standing(ledger).candidate is None
    assert promotion.read_decisions(ledger, version(3))[-1].outcome == "rolled back"
    assert roll_back(ledger, NAME, log=log, who="Ann") == (1, 2)
    assert ledger.aliases == {"champion": 1, "challenger": 3}
    with pytest.raises(PromotionRefused, match="no previous champion"):
        roll_back(ledger, NAME, log=log, who="Ann")


@pytest.mark.parametrize("moves", [0, 1])
def test_a_rollback_that_broke_is_finished(moves, log):
    ledger = FakeLedger([version(i) for i in (1, 2)], champion=2, previous=1, challenger=2, moves_left=moves)
    with pytest.raises(Died):
        roll_back(ledger, NAME, log=log, who="Ann")
    assert ledger.aliases["champion"] in (1, 2)
    ledger.moves_left = 1000
    log.finish_left_behind(ledger)
    assert ledger.aliases == {"champion": 1, "challenger": 2}


def test_what_was_never_promoted_cannot_be_rolled_back(log):
    with pytest.raises(PromotionRefused, match="no champion"):
        roll_back(FakeLedger([version(1)]), NAME, log=log, who="Ann")


def test_the_newest_version_is_a_candidate_until_it_was_compared(log):
    ledger = FakeLedger([version(i) for i in (2, 1, 3)], champion=1, challenger=2)
    assert standing(ledger).candidate == version(3)
    apply(ledger, version(3), NO, log)
    assert standing(ledger).candidate is None


def test_a_challenger_that_nobody_compared_is_a_candidate(log):
    """A sweep makes its best model such a challenger. Models that wait for a person or a comparison stay candidates."""
    ledger = FakeLedger([version(i) for i in (1, 2, 3)], champion=1, challenger=3)
    assert standing(ledger).candidate == version(3)
    ledger.records.append(version(4))
    promotion.leave_waiting(ledger, version(4), "it waits for approval", who="policy careful")
    assert standing(ledger).candidate == version(4)
    apply(ledger, version(4), NO, log)
    assert standing(ledger).candidate is None


def test_a_challenger_that_no_file_of_a_sweep_names_is_no_candidate_and_hides_none_that_was_compared(log):
    ledger = FakeLedger([version(1), version(2)], champion=1)
    apply(ledger, version(2), NO, log)
    ledger.records.append(of_a_batch(3))
    ledger.set_alias(NAME, "challenger", 3)
    assert standing(ledger).candidate.version == 3
    ledger.set_model_version_tag(NAME, "3", CHALLENGER_OF, NOBODY)
    found = standing(ledger)
    assert (found.latest, found.candidate, found.foreign) == (version(2), None, 3)


def test_a_champion_of_before_decisions_were_kept_is_no_candidate():
    assert standing(FakeLedger([version(1), version(2)], champion=2)).candidate is None


def test_after_a_crash_behind_the_promotion_there_is_nothing_to_compare():
    ledger = FakeLedger([version(i) for i in (1, 2)], champion=2, previous=1, challenger=1)
    assert standing(ledger).candidate is None


def test_what_was_never_trained_stands_nowhere():
    ledger = FakeLedger([version(1, name="shop.other")])
    assert standing(ledger) == ServingVersions(name=NAME)
    assert standing(ledger).candidate is None


def test_a_model_that_is_recorded_but_not_registered_is_no_candidate():
    unregistered = version(2).__class__(**{**vars(version(2)), "version": None})
    assert standing(FakeLedger([version(1), unregistered], champion=1)).latest == version(1)


def test_the_digest_is_that_of_the_training_data():
    assert training_digest(version(1, digest="d7")) == "d7"
    assert training_digest(None) is None

"""Which models are due for retraining, and the reasons that are shown."""

from dataclasses import replace

import pytest

from ringmaster.model_lineage import DatasetInput
from ringmaster.tasks.retraining.drift import Drift, DriftEntry
from ringmaster.tasks.retraining.promotion import ServingVersions
from ringmaster.tasks.retraining.selection import AssertionsEntry, DueEntry, ModelObservations, NewDataDecision, due
from tests.unit.promotion.fakes import version

OLD, LOST, NEW = version(1, digest="old"), version(2, digest="lost"), version(3, digest="new")
DRIFTED = Drift(feature="label", has_drifted=True, why="label has drifted: PSI 0.50, above 0.2", num_rows=500, psi=0.5)
STEADY = Drift(feature="label", has_drifted=False, why="label has not drifted (PSI 0.01)", num_rows=500, psi=0.01)


def standing(champion=None, challenger=None, latest=None) -> ServingVersions:
    """Versions where a latest version that is neither champion nor challenger was not compared yet."""
    candidate = None if latest in (champion, challenger) else latest
    return ServingVersions(
        name="shop.prices", champion=champion, challenger=challenger, latest=latest, candidate=candidate
    )


def told(where, rules=DueEntry(), **seen):
    return due(where, ModelObservations(**{"digest": "new", "run_date": "2026-11-20", **seen}), rules)


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
    found = told(standing)
    assert (found.is_due, found.why) == (is_due, why)


def test_data_that_came_back_to_the_champions_is_not_trained_on_again():
    assert not told(standing(OLD, LOST, LOST), digest="old").is_due


def test_a_champion_of_unknown_data_is_due():
    unknown = replace(version(1), datasets=())
    found = told(standing(unknown, unknown, unknown))
    assert found.is_due
    assert "not recorded" in found.why


@pytest.mark.parametrize(("num_samples", "is_due"), [(1100, True), (1099, False), (900, False)])
def test_new_data_may_have_to_be_enough(num_samples, is_due):
    counted = replace(OLD, datasets=(DatasetInput(name="data", digest="old", source="x", num_rows=1000),))
    found = told(standing(counted, counted, counted), DueEntry(min_new_samples=100), num_samples=num_samples)
    assert found.is_due == is_due
    if not is_due:
        assert found.why == f"new data has {max(num_samples - 1000, 0)} more samples, and 100 are required"


def test_new_data_may_not_count_at_all():
    found = told(standing(OLD, OLD, OLD), DueEntry(new_data=False))
    assert (found.is_due, found.why) == (False, "there is new data, which alone does not count (new_data: false)")


@pytest.mark.parametrize(("trained", "is_due"), [("2026-10-21", True), ("2026-10-22", False)])
def test_age_makes_a_model_due_without_new_data(trained, is_due):
    """The age counts the dates of runs: neither a late start nor the length of a day matters."""
    found = told(standing(NEW, NEW, NEW), DueEntry(max_age_days=30), run_date="2026-11-20", trained=trained)
    assert found.is_due == is_due
    assert ("its last training is 30 days ago" if is_due else "trained 29 of 30 days ago") in found.why


def test_an_age_that_nobody_knows_makes_nothing_due():
    assert not told(standing(NEW, NEW, NEW), DueEntry(max_age_days=1)).is_due


RULES = DueEntry(
    new_data=False, drift=DriftEntry(), assertions=AssertionsEntry(suite="tests.yaml", predictions="log.jsonl")
)


def test_drift_makes_a_model_due_where_there_is_new_data_to_learn_from():
    found = told(standing(OLD, OLD, OLD), RULES, drifts=(DRIFTED,))
    assert (found.is_due, found.why) == (True, DRIFTED.why)


def test_drift_without_new_data_is_a_note():
    found = told(standing(NEW, NEW, NEW), RULES, drifts=(DRIFTED,))
    assert not found.is_due
    assert found.notes == (f"{DRIFTED.why}, but there is no new data to learn from",)


def test_a_failed_assertion_makes_a_model_due_likewise():
    said = "assertion sane: 3 of 10 rows fail"
    assert told(standing(OLD, OLD, OLD), RULES, failed_assertions=(said,)).why == said
    assert told(standing(NEW, NEW, NEW), RULES, failed_assertions=(said,)).notes[0].startswith(said)


def test_what_was_looked_at_in_vain_is_said_too():
    found = told(standing(NEW, NEW, NEW), RULES, drifts=(STEADY,))
    assert found.why == "no new data since the champion was trained; no drift (label 0.01); every assertion holds"
    missing = told(standing(NEW, NEW, NEW), RULES, missing=("the log x.jsonl is not there",))
    assert missing.notes == ("the log x.jsonl is not there",)
    assert "every assertion holds" not in missing.why


def test_what_is_not_asked_for_is_not_looked_at():
    assert not told(standing(NEW, NEW, NEW), drifts=(DRIFTED,), failed_assertions=("sane",)).is_due
    assert told(standing(NEW, NEW, NEW), drifts=(DRIFTED,)).notes == ()


@pytest.mark.parametrize("where", [standing(), standing(NEW, NEW, NEW), standing(OLD, OLD, NEW)])
def test_who_is_asked_for_is_due(where):
    assert told(where, is_forced=True) == due(
        where, ModelObservations(digest="x", run_date="2026-11-20", is_forced=True)
    )
    assert told(where, is_forced=True).is_due


def test_a_model_that_was_deleted_is_not_brought_back_unasked():
    found = told(standing(), had_champion=True)
    assert not found.is_due
    assert "was deleted from the registry" in found.why
    assert "--force" in found.why


def test_a_champion_that_was_deleted_is_replaced():
    found = told(standing(None, NEW, NEW), had_champion=True)
    assert (found.is_due, found.why) == (True, "its champion was deleted from the registry")


AGED = DueEntry(max_age_days=1)


def test_a_window_that_only_lost_days_brings_nothing_new():
    found = told(standing(OLD, OLD, OLD), RULES, only_older=True, drifts=(DRIFTED,))
    assert (found.is_due, found.why) == (False, "no new data: days have only left its window; every assertion holds")
    assert "no new data to learn from" in found.notes[0]
    assert told(standing(OLD, OLD, OLD), AGED, only_older=True, trained="2026-11-19").is_due


PAYS = NewDataDecision(is_due=True, why="it pays")
WAITS = NewDataDecision(is_due=False, why="it does not pay")
UNKNOWN = NewDataDecision(is_due=False, why="it is not known whether it pays", is_known=False)


@pytest.mark.parametrize("decision", [PAYS, WAITS, UNKNOWN], ids=lambda each: each.why)
def test_where_a_rule_decides_new_data_alone_makes_no_model_due(decision):
    found = told(standing(OLD, OLD, OLD), by_rule=decision)
    assert (found.is_due, found.why) == (decision.is_due, decision.why)


def test_where_a_rule_decides_the_same_data_is_not_trained_on_again():
    found = told(standing(NEW, NEW, NEW), by_rule=PAYS)
    assert (found.is_due, found.why) == (False, "it pays, but there is no new data to learn from")
    assert told(standing(NEW, NEW, NEW), by_rule=UNKNOWN).why == "no new data since the champion was trained"


def test_other_conditions_hold_beside_a_rule():
    assert told(standing(OLD, OLD, OLD), DueEntry(max_age_days=1), by_rule=WAITS, trained="2026-11-01").is_due

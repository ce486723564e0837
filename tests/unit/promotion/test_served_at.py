"""Who served at a time, by the decisions about the versions of a model."""

from datetime import UTC, datetime

import pytest

from ringmaster.tasks.retraining.promotion import KEPT, PROMOTED, ROLLED_BACK, WAITING, DecisionRecord, served_at


def decided(version, outcome, day):
    at = f"2026-03-{day:02d}T12:00:00+00:00"
    return DecisionRecord(version=version, outcome=outcome, reasons=("better",), who="policy", at=at)


DECISIONS = [
    decided(1, PROMOTED, 1),
    decided(2, KEPT, 2),
    decided(3, PROMOTED, 3),
    decided(3, ROLLED_BACK, 4),
    decided(4, WAITING, 5),
    decided(4, PROMOTED, 6),
]


@pytest.mark.parametrize(
    ("day", "version", "since"), [(1, None, None), (2, 1, 1), (3, 1, 1), (4, 3, 3), (5, 1, 4), (6, 1, 4), (7, 4, 6)]
)
def test_the_version_that_served_at_the_start_of_a_day(day, version, since):
    serving = served_at({"a": reversed(DECISIONS)}, datetime(2026, 3, day, tzinfo=UTC))

    assert [each.version for each in serving] == ([] if version is None else [version])
    assert [each.decision.at[8:10] for each in serving] == ([] if since is None else [f"{since:02d}"])


def test_each_model_has_its_own_champion():
    serving = served_at(
        {"b": [decided(7, PROMOTED, 1)], "a": [decided(2, PROMOTED, 1)]}, datetime(2026, 4, 1, tzinfo=UTC)
    )

    assert [(each.model, each.version) for each in serving] == [("a", 2), ("b", 7)]


def test_decisions_of_earlier_releases_without_a_time_count_for_nothing():
    assert served_at({"a": [DecisionRecord(version=1, outcome=PROMOTED, reasons=())]}, datetime.now(UTC)) == []

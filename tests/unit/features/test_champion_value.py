"""What retraining runs remember of a champion: its measurements by one metric, and the price of a training."""

import math
from types import SimpleNamespace

import pytest

from ringmaster.features.retraining_value.champion_value import ChampionHistory
from ringmaster.tasks.retraining.runs import RetrainingStatus, RunRecord

MODEL = SimpleNamespace(
    name="prices", trained_jobs=(SimpleNamespace(name="prices"), SimpleNamespace(name="prices-lr1"))
)


def record(day, *, measured=None, verdict=None, jobs=()):
    """Returns what is stored of the run of a day."""
    content = {
        "looked": {"prices": {"measured": measured, "window_days": 7}},
        "verdicts": {} if verdict is None else {"prices": verdict},
        "result": {"jobs": list(jobs)},
    }
    return RunRecord(name="shop", run_date=f"2026-11-{day:02d}", status=RetrainingStatus.DONE, content=content)


def champion(value, *, version=1, metric="loss"):
    return {"version": version, "metric": metric, "value": value, "stderr": 0.01}


def verdict(outcome, *, candidate=None, champion=None, version=2, metric="loss", **more):
    return {
        "outcome": outcome,
        "candidate_value": candidate,
        "champion_value": champion,
        "candidate_version": version,
        "champion_version": version - 1,
        "metric": metric,
        **more,
    }


def job(name="prices", *, status="done", seconds=3600.0):
    return {"name": name, "status": status, "segments": [{"seconds": seconds, "num_devices": 1}] if seconds else []}


def history(*records):
    result = ChampionHistory()
    for each in records:
        result.add(MODEL, each, price_per_device_hour=2.0)
    return result


def values(found):
    return [
        (each.champion and each.champion.value, each.candidate and each.candidate.value, each.is_promoted)
        for each in found.observations
    ]


def test_a_promoted_candidate_is_followed_by_its_measurements():
    first = verdict("promoted", candidate=0.5, version=1)
    found = history(record(1, verdict=first), record(2, measured=champion(0.51)), record(3, measured=champion(0.52)))
    assert values(found) == [(None, 0.5, True), (0.51, None, False), (0.52, None, False)]


def test_a_metric_of_which_higher_is_better_is_negated():
    assert values(history(record(1, measured=champion(0.9, metric="accuracy")))) == [(-0.9, None, False)]


@pytest.mark.parametrize("other", [champion(0.5, version=3), champion(0.5, metric="accuracy")])
def test_another_champion_or_metric_begins_a_new_history(other):
    found = history(record(1, measured=champion(0.9)), record(2, measured=other))
    assert len(found.observations) == 1


def test_a_candidate_is_compared_on_the_rows_of_its_comparison():
    kept = verdict("kept", candidate=0.7, champion=0.6)
    assert values(history(record(1, measured=champion(0.5), verdict=kept))) == [(0.5, pytest.approx(0.6), False)]


@pytest.mark.parametrize(
    "other",
    [
        verdict("kept", candidate=0.7, champion=0.5, is_waiting=True),
        verdict("failed", candidate=0.7, champion=0.5),
        verdict("kept", candidate=math.nan, champion=0.5),
    ],
)
def test_only_candidates_that_were_decided_about_count(other):
    assert values(history(record(1, measured=champion(0.5), verdict=other))) == [(0.5, None, False)]


def test_candidates_that_were_kept_before_measuring_began_do_not_count():
    assert not history(record(1, verdict=verdict("kept", candidate=0.7, champion=0.5))).observations


def test_a_promotion_of_which_nothing_was_stored_begins_a_new_history():
    lost = verdict("promoted", candidate=None)
    found = history(record(1, measured=champion(0.9)), record(2, measured=champion(0.9), verdict=lost))
    assert not found.observations
    assert values(history(record(2, verdict=lost), record(3, measured=champion(0.4, version=2)))) == [
        (0.4, None, False)
    ]


def test_the_price_is_that_of_the_last_training_that_ended_with_its_sweep():
    ended = record(1, jobs=[job(), job("prices-lr1"), job("other")])
    assert history(ended).price == pytest.approx(4.0)
    failed = record(2, jobs=[job(status="failed", seconds=0)])
    assert history(ended, failed).price == pytest.approx(4.0)
    assert history(failed).price is None


def test_runs_of_earlier_releases_have_measured_nothing():
    old = RunRecord(name="shop", run_date="2026-11-01", status=RetrainingStatus.DONE, content={})
    assert history(old).observations == []

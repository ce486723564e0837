"""What retraining runs remember of a champion: its measurements by one metric, and the price of a training."""

import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from ringmaster.features.retraining_value import champion_value
from ringmaster.features.retraining_value.champion_value import MAX_METRIC, ChampionHistory, measure_champion
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


def test_a_model_that_was_promoted_by_another_metric_begins_a_new_history():
    # The champion was deleted, so that nothing was measured of it, and meanwhile the policy has got another metric.
    promoted = verdict("promoted", candidate=0.9, metric="accuracy")
    found = history(record(1, measured=champion(0.5)), record(2, verdict=promoted))
    assert values(found) == [(None, -0.9, True)]
    # The policy was changed while the run was interrupted, between the measurement and the comparison.
    found = history(record(1, measured=champion(0.5), verdict=promoted), record(2, measured=champion(0.8, version=2)))
    assert values(found) == [(0.8, None, False)]


def test_a_candidate_that_was_kept_by_another_metric_does_not_count():
    kept = verdict("kept", candidate=0.9, champion=0.8, metric="accuracy")
    assert values(history(record(1, measured=champion(0.5), verdict=kept))) == [(0.5, None, False)]


def measured_by(monkeypatch, model, *, value=0.5):
    """Returns the request by which a champion is measured, and its measurement."""
    requests = []

    def examine(folder, request):
        requests.append(request)
        line = SimpleNamespace(value=value, low=value, high=value, level=0.95, num_rows=3)
        return SimpleNamespace(measured=[line], faults=[])

    monkeypatch.setattr(champion_value, "examine", examine)
    run = SimpleNamespace(
        production=SimpleNamespace(policy=None),
        device=lambda: nullcontext(None),
        node_context=SimpleNamespace(environment=None),
    )
    data = {"prices": {"digest": "own"}, "prices.compare_on": {"digest": "other"}}
    measured = measure_champion(run, model, Path("champion"), version=1, data=data)
    return requests[0], measured


def model_with(compare_on):
    job = SimpleNamespace(name="prices", data="what is trained on")
    return SimpleNamespace(
        name="prices", job=job, compare_on=compare_on, metric="loss", compares_on_all=compare_on is not None
    )


def test_a_champion_is_measured_without_the_rows_that_are_trained_on(monkeypatch):
    other = SimpleNamespace(name="prices.compare_on")
    request, _ = measured_by(monkeypatch, model_with(other))
    assert (request.job, request.data) == (other, {"digest": "other"})
    assert (request.trained_on.spec, request.trained_on.prepared) == ("what is trained on", {"digest": "own"})
    own, _ = measured_by(monkeypatch, model_with(None))
    assert own.trained_on is None  # of a job's own data, only held-out rows are read


@pytest.mark.parametrize("value", [math.nan, math.inf, 2 * MAX_METRIC])
def test_a_metric_whose_square_is_not_finite_decides_nothing(monkeypatch, value):
    with pytest.raises(ValueError, match="the champion's loss is"):
        measured_by(monkeypatch, model_with(None), value=value)

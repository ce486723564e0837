"""When retraining pays: measurements of a metric that is worse each day, changes suddenly, or only varies."""

import math
from dataclasses import replace

import numpy as np
import pytest

from ringmaster.features.retraining_value.drawing import draw_value
from ringmaster.features.retraining_value.value import (
    MetricMeasurement,
    RunObservation,
    ValueTerms,
    cheapest_age,
    decide,
    level_of,
    noise_of,
    realized_share,
    tenures_of,
)

NOISE = 0.02
TERMS = ValueTerms(price=1.0, worth=1.0)


def observed(values, *, first_day=0, seed=0):
    """Returns runs that measure a champion whose metric has these values, and noise."""
    draw = np.random.default_rng(seed)
    noisy = [value + draw.normal(scale=NOISE) for value in values]
    return [
        RunObservation(champion=MetricMeasurement(day=first_day + i, value=value, stderr=NOISE))
        for i, value in enumerate(noisy)
    ]


def first_due(runs, terms=TERMS):
    """Returns the day on which retraining first pays; None if it never does."""
    return next((i for i in range(1, len(runs)) if decide(runs[: i + 1], terms).is_due), None)


def test_a_metric_that_does_not_change_is_never_worth_a_training():
    assert first_due(observed([0.5] * 60)) is None


def test_a_metric_that_rises_steadily_is_worth_one_near_the_cheapest_age():
    rise = 0.01
    day = first_due(observed([0.5 + rise * day for day in range(60)]))
    optimum = math.sqrt(2 * TERMS.price / (TERMS.worth * rise))
    assert 0.4 * optimum <= day <= 1.6 * optimum


def test_a_sudden_change_is_worth_one_within_days_if_it_is_large_and_never_if_it_is_small():
    before = [0.5] * 30
    assert first_due(observed(before + [1.0] * 30)) in range(30, 34)
    assert first_due(observed(before + [0.505] * 30)) is None


def test_one_measurement_that_is_off_by_three_standard_errors_is_worth_nothing():
    values = [0.5] * 60
    values[30] += 3 * NOISE
    assert first_due(observed(values)) is None


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_only_the_ratio_of_price_and_worth_counts(factor):
    runs = observed([0.5 + 0.01 * day for day in range(60)])
    assert first_due(runs, ValueTerms(price=factor, worth=factor)) == first_due(runs)


def test_a_dearer_training_is_worth_less():
    runs = observed([0.5 + 0.01 * day for day in range(60)])
    days = [first_due(runs, replace(TERMS, price=price)) for price in (0.3, 1.0, 3.0)]
    assert days == sorted(days)
    assert days[0] < days[2]


def test_the_window_is_the_longest_one_since_the_last_change_and_the_shortest_one_must_pay_until_it_is_pure():
    terms = replace(TERMS, windows=(7, 14, 28))
    assert decide(observed([0.5] * 60), terms).window_days == 28
    runs = observed([0.5] * 30 + [1.5] * 30)
    assert [decide(runs[: 30 + days], terms).window_days for days in (3, 8, 16, 29)] == [7, 7, 14, 28]
    changed = runs[:32]
    assert decide(changed, terms).break_even_cost > decide(changed, TERMS).break_even_cost


def test_a_training_that_gains_nothing_makes_the_next_ones_less_likely():
    runs = observed([0.5] * 20 + [0.8] * 10)
    assert decide(runs, TERMS).is_due
    last = runs[-1].champion
    rejected = [*runs[:-1], RunObservation(champion=last, candidate=last, is_promoted=False)]
    after = decide([*rejected, *observed([0.8] * 5, first_day=30)], TERMS)
    assert not after.is_due
    assert after.excess == pytest.approx(0, abs=0.03)
    assert tenures_of(rejected)[-1].num_rejected == 1


def test_a_diverged_candidate_does_not_end_retraining():
    runs = observed([0.5] * 20 + [0.8] * 10)
    last = runs[-1].champion
    diverged = RunObservation(champion=last, candidate=replace(last, value=9.3))
    later = observed([0.8 + 0.05 * day for day in range(40)], first_day=30)
    assert decide([*runs[:-1], diverged, *later], TERMS).is_due


def test_a_promoted_candidate_begins_a_tenure_and_its_gain_counts():
    runs = observed([0.5] * 20 + [0.8] * 10)
    last = runs[-1].champion
    promoted = RunObservation(champion=last, candidate=replace(last, value=0.5), is_promoted=True)
    first, second = tenures_of([*runs[:-1], promoted])
    assert (len(first.measured), len(second.measured)) == (30, 1)
    ((expected, realized),) = second.gains
    assert expected == pytest.approx(0.3, abs=0.05)
    assert realized == pytest.approx(last.value - 0.5)


def test_the_share_of_gains_is_learnt_and_at_most_one():
    assert realized_share([]) == 1
    assert realized_share([(0.2, 0.3)]) == 1
    assert realized_share([(0.2, 0.0)]) == pytest.approx(0.5)
    assert realized_share([(0.2, 0.0)] * 3) == pytest.approx(0.25)
    assert realized_share([(-0.1, 0.0)]) == 1


def test_the_cheapest_age_is_that_of_the_formula():
    age, cost = cheapest_age(0.02, replace(TERMS, price=4.0))
    assert age == 20
    assert cost == pytest.approx(math.sqrt(2 * 4.0 * 0.02))
    assert cheapest_age(0.0, TERMS) == (TERMS.horizon_days, TERMS.price / TERMS.horizon_days)


def test_the_noise_ignores_few_changes():
    runs = observed([0.5] * 30 + [5.0] * 30)
    assert noise_of(tenures_of(runs)) == pytest.approx(NOISE, rel=0.4)


def test_the_interval_holds_the_level():
    held = 0
    for seed in range(100):
        measured = tuple(run.champion for run in observed([0.5] * 20, seed=seed))
        level = level_of(measured, noise=NOISE)
        held += abs(level.mean - 0.5) <= 1.645 * level.deviation
    assert held >= 80  # of 100 intervals of 90 %


def test_nothing_is_decided_before_a_champion_was_measured():
    assert decide([], TERMS) is None
    with pytest.raises(ValueError, match="never measured"):
        draw_value("shop", "loss", [], TERMS)


def test_the_drawing_has_the_measurements_the_trainings_and_the_costs():
    runs = observed([0.5] * 20 + [0.8] * 10, first_day=739_900)
    last = runs[-1].champion
    runs[-1] = replace(runs[-1], candidate=replace(last, value=0.5), is_promoted=True)
    svg = draw_value("shop <prices>", "loss", runs, TERMS)
    assert svg.count("<circle") == len(runs) + 1  # one is in the legend
    assert svg.count('class="waiting"') == len(runs)
    assert svg.count('class="promoted"') == 2
    assert svg.count('class="rejected"') == 1
    assert "shop &lt;prices&gt;" in svg

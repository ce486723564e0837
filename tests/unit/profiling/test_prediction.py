"""Predictions of makespans: their interval has the coverage that it states, and errors of earlier runs correct it."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t as student

from ringmaster.tasks.planning import Node, Option, PlanningJob, Problem, solve
from ringmaster.tasks.profiling.over_nodes import PREDICTED
from ringmaster.tasks.profiling.prediction import (
    COVERAGE,
    LEAST_SPREAD,
    NU,
    UNMEASURED_SPREAD,
    EarlierRun,
    errors_of,
    predict,
    spread_of_plan,
    t_quantile,
)
from ringmaster.tasks.profiling.reference import Load
from ringmaster.techniques import Profile

SPREADS = st.floats(0.01, 1.0)
RUNS = st.lists(st.builds(EarlierRun, error=st.floats(-2, 2), spread=SPREADS), max_size=20)


def profile(source="measured", **figures):
    return Profile(technique="single", num_devices=1, num_ranks=1, step_s=0.1, peak_bytes=1, source=source, **figures)


@given(SPREADS, RUNS, st.floats(1.0, 1e6))
def test_the_interval_contains_the_prediction_and_follows_the_plan(spread, earlier, scale):
    one, scaled = predict(1.0, spread=spread, earlier=earlier), predict(scale, spread=spread, earlier=earlier)
    assert 0 < one.low_s < one.makespan_s < one.high_s
    for name in ("low_s", "makespan_s", "high_s"):
        assert math.isclose(getattr(scaled, name), scale * getattr(one, name), rel_tol=1e-9)


@given(SPREADS, RUNS, st.randoms(use_true_random=False))
def test_the_order_of_earlier_runs_does_not_matter(spread, earlier, draw):
    shuffled = list(earlier)
    draw.shuffle(shuffled)
    one, other = predict(10.0, spread=spread, earlier=earlier), predict(10.0, spread=spread, earlier=shuffled)
    assert math.isclose(one.makespan_s, other.makespan_s, rel_tol=1e-6)
    assert math.isclose(one.low_s, other.low_s, rel_tol=1e-6)


@given(SPREADS)
def test_the_first_run_is_predicted_as_planned_and_a_larger_spread_gives_a_wider_interval(spread):
    found, wider = predict(10.0, spread=spread), predict(10.0, spread=2 * spread)
    assert found.makespan_s == 10.0
    assert wider.low_s < found.low_s < found.high_s < wider.high_s


@given(st.floats(-1, 1), st.integers(5, 20))
def test_an_error_that_all_runs_share_is_corrected_more_with_each_run(error, num_runs):
    runs = [EarlierRun(error=error, spread=0.1)] * num_runs
    off = [abs(math.log(predict(1.0, spread=0.1, earlier=runs[:n]).makespan_s) - error) for n in (0, 1, num_runs)]
    assert math.isclose(off[1], off[0] / 2, abs_tol=1e-9)
    assert off[2] <= abs(error) / (1 + num_runs) + 1e-9


@pytest.mark.parametrize("num_earlier", [0, 3, 15])
def test_the_interval_has_its_coverage_if_errors_are_as_the_model_says(num_earlier):
    draw, num_inside, num_draws = random.Random(7), 0, 4000
    for _ in range(num_draws):
        spread = draw.uniform(0.05, 0.5)
        spreads = [draw.uniform(0.05, 0.5) for _ in range(num_earlier)]
        tau = NU / sum(draw.gauss(0, 1) ** 2 for _ in range(NU))
        shared = draw.gauss(0, math.sqrt(tau) * spread)
        errors = [draw.gauss(shared, math.sqrt(tau) * each) for each in (*spreads, spread)]
        earlier = [EarlierRun(error=e, spread=s) for e, s in zip(errors, spreads, strict=False)]
        found = predict(1.0, spread=spread, earlier=earlier)
        num_inside += found.low_s <= math.exp(errors[-1]) <= found.high_s
    assert abs(num_inside / num_draws - COVERAGE) < 0.015  # three standard deviations


@pytest.mark.parametrize("freedom", [NU, 6, 10, 24, 1000])
def test_quantiles_are_those_of_scipy(freedom):
    assert math.isclose(t_quantile(0.95, freedom=freedom), student.ppf(0.95, freedom), rel_tol=2e-3)


def test_profiles_count_by_their_device_time():
    problem = Problem(
        "p",
        nodes=(Node("n", 1),),
        jobs=(PlanningJob("a", (Option("single", 1, 30.0),)), PlanningJob("b", (Option("single", 1, 10.0),))),
    )
    plan = solve(problem)
    alone = spread_of_plan(plan, {"a": [profile()], "b": [profile()]}, Load())
    assert alone == LEAST_SPREAD
    one = spread_of_plan(plan, {"a": [profile(spread=0.2)], "b": [profile()]}, Load())
    assert math.isclose(one, math.hypot(LEAST_SPREAD, 0.15))
    predicted = spread_of_plan(plan, {"a": [profile(PREDICTED)], "b": [profile(PREDICTED)]}, Load())
    assert math.isclose(predicted, math.hypot(LEAST_SPREAD, UNMEASURED_SPREAD))
    assert spread_of_plan(plan, {"a": [profile()], "b": [profile()]}, Load(ratio=3.0, spread=0.1)) > math.hypot(
        LEAST_SPREAD, 0.1
    )


def test_runs_without_a_prediction_are_left_out():
    whole = {"makespan_s": 12.0, "planned_makespan_s": 10.0, "prediction_spread": 0.1}
    of_0_2 = {"makespan_s": 12.0, "planned_makespan_s": 10.0}
    stopped = {**whole, "makespan_s": 0.0}
    assert errors_of([whole, of_0_2, stopped]) == [EarlierRun(error=math.log(1.2), spread=0.1)]

"""Beliefs about speeds, compared with the same model conditioned as one dense multivariate normal distribution."""

import math
from random import Random

import numpy as np
import pytest

from ringmaster.tasks.profiling.search import predicted_profiles
from ringmaster.tasks.profiling.speed_beliefs import (
    GUESS_SPREAD,
    OF_PREDICTIONS,
    SpeedBeliefs,
    SpeedErrors,
    errors_of,
    prediction_errors,
)
from ringmaster.techniques import GangShape, Profile
from ringmaster.techniques.preflight_result import Candidate, Preflight
from ringmaster.techniques.profiles import PREDICTED
from tests.unit.profiling.solos import FACTS

OF_A = SpeedErrors(machine=0.2, technique=0.1, job=0.25, option=0.1, measurement=0.05)
OF_B = SpeedErrors(machine=0.05, technique=0.02, job=0.1, option=0.03, measurement=0.02)
TECHNIQUES = ("ddp", "fsdp", "single")


def options_of(draw, num_jobs):
    """Jobs with a few options each, as (job, option, technique, errors)."""
    return [
        (f"j{j}", k, draw.choice(TECHNIQUES), draw.choice((OF_A, OF_B)))
        for j in range(num_jobs)
        for k in range(draw.randint(1, 5))
    ]


def covariance(one, other):
    """Of x for two options, by the model's definition."""
    (job, k, technique, a), (other_job, other_k, other_technique, b) = one, other
    value = a.machine * b.machine
    value += a.technique * b.technique * (technique == other_technique)
    value += a.job * b.job * (job == other_job)
    return value + a.option**2 * ((job, k) == (other_job, other_k))


@pytest.mark.parametrize("seed", range(12))
def test_beliefs_are_the_posterior_of_one_normal_distribution(seed):
    draw = Random(seed)
    options = options_of(draw, 5)
    measured = draw.sample(options, min(len(options), draw.randint(1, 7)))
    logs = np.array([draw.gauss(0.0, 0.4) for _ in measured])
    beliefs = SpeedBeliefs()
    for (job, k, technique, errors), log in zip(measured, logs, strict=True):
        beliefs.note(job, k, math.exp(log), technique=technique, errors=errors)
    among = np.array([[covariance(one, other) for other in measured] for one in measured])
    among += np.diag([errors.measurement**2 for *_, errors in measured])
    for option in options:
        job, k, technique, errors = option
        belief = beliefs.of(job, k, technique=technique, errors=errors)
        beside = np.array([covariance(option, other) for other in measured])
        gain = np.linalg.solve(among, beside)
        assert belief.mean == pytest.approx(gain @ logs, abs=1e-9)
        assert belief.spread == pytest.approx(math.sqrt(covariance(option, option) - gain @ beside), abs=1e-7)
        assert belief.is_measured == (option in measured)


def test_nothing_measured_means_the_prediction():
    belief = SpeedBeliefs().of("a", 0, technique="ddp", errors=OF_A)
    assert belief.ratio() == 1.0
    assert belief.spread == pytest.approx(math.sqrt(0.2**2 + 0.1**2 + 0.25**2 + 0.1**2))
    assert belief.ratio(optimism=1.0) == pytest.approx(math.exp(-math.hypot(0.1, 0.1)))


def test_what_is_measured_corrects_the_job_then_its_technique_and_machine():
    beliefs = SpeedBeliefs()
    beliefs.note("a", 0, 2.0, technique="ddp", errors=OF_A)
    ratios = [
        beliefs.of("a", 0, technique="ddp", errors=OF_A).ratio(),
        beliefs.of("a", 1, technique="ddp", errors=OF_A).ratio(),
        beliefs.of("a", 2, technique="fsdp", errors=OF_A).ratio(),
        beliefs.of("b", 0, technique="ddp", errors=OF_A).ratio(),
        beliefs.of("b", 1, technique="fsdp", errors=OF_A).ratio(),
    ]
    assert ratios == sorted(ratios, reverse=True)
    assert 1.9 < ratios[0] < 2.0
    assert ratios[-1] > 1.0
    beliefs.forget("a")
    assert beliefs.of("a", 0, technique="ddp", errors=OF_A).ratio() == 1.0


def test_the_newest_measurement_of_an_option_counts():
    beliefs = SpeedBeliefs()
    for ratio in (3.0, 1.5):
        beliefs.note("a", 0, ratio, technique="ddp", errors=OF_B)
    once = SpeedBeliefs()
    once.note("a", 0, 1.5, technique="ddp", errors=OF_B)
    assert beliefs.of("a", 1, technique="ddp", errors=OF_B) == once.of("a", 1, technique="ddp", errors=OF_B)


def predicted(technique, *, step_s=1.0, spread=0.0):
    return Profile(
        technique=technique, num_devices=1, num_ranks=1, step_s=step_s, peak_bytes=1, source=PREDICTED, spread=spread
    )


def total(errors):
    return math.hypot(errors.machine, errors.technique, errors.job, errors.option)


@pytest.mark.parametrize("technique", ["ddp", "shared_base"])
def test_the_errors_of_built_in_techniques_are_those_of_the_cost_model(technique):
    assert errors_of(predicted(technique)) == OF_PREDICTIONS


def test_the_prediction_of_a_technique_of_ones_own_is_wide_until_one_job_has_trained_by_it():
    errors = errors_of(predicted("my-technique"))
    beliefs = SpeedBeliefs()
    before = beliefs.of("a", 0, technique="my-technique", errors=errors)
    assert math.exp(1.645 * before.spread) > 31 / 4.6, "a run that took 31 s, where 4.6 s were predicted, is likely"
    beliefs.note("b", 0, 6.7, technique="my-technique", errors=errors)
    after = beliefs.of("a", 0, technique="my-technique", errors=errors)
    assert after.ratio() > 4 and after.spread < before.spread / 2
    assert beliefs.of("c", 0, technique="ddp", errors=OF_PREDICTIONS).ratio() < 1.2, (
        "it says little of other techniques"
    )


def test_the_prediction_of_a_step_of_which_nothing_is_known_covers_steps_of_milliseconds_and_of_a_minute():
    candidate = Candidate(technique="command", config={}, num_devices=1, num_ranks=1, least_bytes=0, step_s=None)
    shape = GangShape(kind="cpu", num_devices=1, memory_bytes=1)
    preflight = Preflight(job="a", data={}, facts=FACTS, candidates=(candidate,), refusals=())
    (profile,) = predicted_profiles(preflight, shapes=[shape])
    belief = SpeedBeliefs().of("a", 0, technique="command", errors=errors_of(profile))
    assert belief.ratio() * profile.step_s * math.exp(-1.645 * belief.spread) < 0.02
    assert belief.ratio() * profile.step_s * math.exp(1.645 * belief.spread) > 60


def test_the_prediction_of_steps_of_ones_own_code_by_their_operations_is_wide():
    usual, rough = (
        Candidate(technique="ddp", config={}, num_devices=1, num_ranks=1, least_bytes=0, step_s=1.0, is_rough=is_rough)
        for is_rough in (False, True)
    )
    shape = GangShape(kind="cpu", num_devices=1, memory_bytes=1)
    errors = []
    for candidate in (usual, rough):
        preflight = Preflight(job="a", data={}, facts=FACTS, candidates=(candidate,), refusals=())
        (profile,) = predicted_profiles(preflight, shapes=[shape])
        errors.append(errors_of(profile))
    assert errors[0] == OF_PREDICTIONS
    belief = SpeedBeliefs().of("a", 0, technique="ddp", errors=errors[1])
    assert math.exp(1.645 * belief.spread) > 7
    assert (errors[1].machine, errors[1].technique) == pytest.approx((errors[0].machine, errors[0].technique))


@pytest.mark.parametrize("technique", ["ddp", "my-technique"])
@pytest.mark.parametrize("spread", [0.05, 0.3, 1.1, GUESS_SPREAD])
def test_the_parts_of_a_stated_spread_add_up_to_it(technique, spread):
    errors, prior = errors_of(predicted(technique, spread=spread)), prediction_errors(technique)
    assert total(errors) == pytest.approx(spread)
    assert errors.machine <= prior.machine and errors.technique <= prior.technique

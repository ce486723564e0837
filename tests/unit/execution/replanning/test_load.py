"""A machine whose load changes while a batch runs: what is load is not taken for a difference between options."""

import math
from random import Random

import pytest

from ringmaster.tasks.execution.execution_events import PlanUpdate, SegmentStarted
from ringmaster.tasks.execution.replanner import POLICY
from ringmaster.tasks.planning import solve
from ringmaster.techniques import registry
from tests.fake_engine import FakeEngine
from tests.unit.execution.clocked import clocked_bench
from tests.unit.execution.fakes import job
from tests.unit.execution.test_measured_options import predicted

SPAN_S = 7.0  # for which a load stays the same


def changing(seed, *, mean=6.0, spread=0.5):
    """A load that is drawn anew every few seconds, and follows a slower one."""
    loads, draw, slow = {}, Random(seed), 0.0
    for number in range(2000):
        slow = 0.9 * slow + math.sqrt(1 - 0.9**2) * draw.gauss(0.0, spread)
        loads[number] = max(1.0, mean * math.exp(slow + draw.gauss(0.0, spread / 2)))
    return lambda now_s: loads[int(now_s / SPAN_S) % 2000]


def three_fine_tunes(folder, *, load, measured_load=lambda load: load, num_steps=150, factors=None):
    """Three jobs of about a minute on two devices, of which no option has run; some options are nearly as fast."""
    names = ("llama", "bert", "vit")
    options = [("single", 1, 0.5), ("single", 2, 0.3), ("ddp", 2, 0.29), ("zero1", 2, 0.31)]
    draw, speeds, profiles = Random(1), {}, {}
    for name in names:
        profiles[name] = tuple(predicted(f"{name} {t} {n}", t, n, step_s) for t, n, step_s in options)
        for technique, number, step_s in options:
            speeds[name, registry.dotted_path(technique), number] = step_s * math.exp(draw.gauss(0.0, 0.08))
            speeds[name, registry.dotted_path(technique), number] *= (factors or {}).get(technique, 1.0)
    engine = FakeEngine(speeds, startup_s=1.5, report_s=1.0, load=load, measured_load=measured_load)
    bench = clocked_bench(
        folder, [job(name, num_steps=num_steps) for name in names], engine,
        make_plan=lambda problem: solve(problem, work_s=0.02, time_limit_s=600.0), policy=POLICY, profiles=profiles,
    )  # fmt: skip
    bench.make_no_forecasts()
    assert bench.run()
    return bench


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2))])
def test_what_is_load_is_not_taken_for_a_difference_between_options(tmp_path, seed):
    draw = Random(f"errors {seed}")
    bench = three_fine_tunes(
        tmp_path, load=changing(seed), measured_load=lambda load: max(1.0, load * math.exp(draw.gauss(0.0, 0.1)))
    )
    started = [(e.segment.job, e.technique, e.num_devices, e.first_step) for e in bench.told(SegmentStarted)]
    assert len(started) <= 4, started
    assert len(bench.told(PlanUpdate)) <= 2


def test_an_option_that_is_far_slower_than_predicted_is_left_on_a_busy_machine_with_a_reason(tmp_path):
    # Where all that runs takes three times as long, that is what a busy machine does; six times is not.
    bench = three_fine_tunes(tmp_path, load=changing(0), factors={"single": 6.0})
    started = bench.told(SegmentStarted)
    on_single = {event.segment.job for event in started if event.technique == "single" and event.first_step == 0}
    assert on_single, "it was predicted to be the best for some jobs"
    last = {event.segment.job: event for event in started}
    assert all(last[job].technique != "single" for job in on_single)
    for event in started:
        assert event.segment.reason or event.first_step == 0

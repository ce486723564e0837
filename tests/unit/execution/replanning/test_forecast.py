"""Forecasts of ends: intervals have the coverage that they state, and errors of earlier runs correct them."""

import json
import math
import random
import statistics
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t as student

from benchmarks.load_traces import KINDS, LENGTHS_S, replayed
from ringmaster.tasks.execution.dispatch import in_steps
from ringmaster.tasks.execution.execution_events import (
    COVERAGE,
    JobEnded,
    PredictedEnd,
    PredictionUpdate,
    predictions_in,
)
from ringmaster.tasks.execution.forecast import (
    CERTAIN,
    LATEST,
    MIN_SPREAD,
    NU,
    EarlierRun,
    EarliestEnds,
    EndScores,
    ForecastConditions,
    calibrated,
    corrected,
    errors_in,
    job_error,
    plan_left,
    predict,
    predict_plan,
    spread_of,
    t_quantile,
)
from ringmaster.tasks.execution.forecaster import EVERY_S, MAX_SHARE
from ringmaster.tasks.execution.plan_simulator import PlanSimulator
from ringmaster.tasks.execution.replanner import Replanner
from ringmaster.tasks.planning import Option, Plan, PlanningJob, PlanningNode, Problem, Segment
from ringmaster.tasks.planning.bounds.bounds import preemptive_bound
from ringmaster.tasks.profiling.machine_load import MachineLoad, load_ahead
from ringmaster.tasks.profiling.speed_beliefs import OF_PREDICTIONS, SpeedBeliefs, errors_of
from ringmaster.tasks.storage.fact_keys import FIRST_PREDICTION, NEWEST_PREDICTION
from ringmaster.tasks.timeline.reader import TimelineReader
from ringmaster.tasks.timeline.run_timeline import headline
from ringmaster.techniques import Profile
from ringmaster.techniques.profiles import PREDICTED
from tests.drawing import draws
from tests.unit.execution.fakes import in_a_row
from tests.unit.execution.fakes import profile as fake_profile
from tests.unit.execution.replanning.test_replan_policy import bench_of

SPREADS = st.floats(0.01, 1.0)
RUNS = st.lists(st.builds(EarlierRun, error=st.floats(-2, 2), spread=SPREADS), max_size=20)


def profile(source="measured", **figures):
    return Profile(technique="single", num_devices=1, num_ranks=1, step_s=0.1, peak_bytes=1, source=source, **figures)


def plan_of(*rows, num_devices=2, after=None):
    """A problem and a plan with a job of 100 s a row: a device and a start."""
    problem = Problem(
        "p",
        nodes=(PlanningNode("n", num_devices),),
        jobs=tuple(
            PlanningJob(f"j{i}", (Option("single", 1, 100.0),), after=(after or {}).get(i, ()))
            for i, _ in enumerate(rows)
        ),
    )
    segments = [Segment(f"j{i}", 0, s, s + 100.0, 1.0, 0.0, (("n", (d,)),)) for i, (d, s) in enumerate(rows)]
    return problem, Plan("p", tuple(segments))


def left_of(problem, plan, source=PREDICTED, beliefs=None):
    return plan_left(problem, plan, {job.id: [profile(source)] for job in problem.jobs}, beliefs=beliefs)


def running_batch(folder, *, factors, num_steps=100, step_s=1.0, before=lambda bench: None):
    """A batch of two jobs a device on the clock of its gangs, with the predictions that its executor has stated."""
    profiles = {name: (replace(fake_profile(step_s=step_s), source=PREDICTED),) for name in "abcd"}
    bench = bench_of(folder, profiles, factors, num_steps=num_steps, make_plan=in_a_row)
    forecaster = bench.executor._forecaster
    forecaster._now_s = lambda: 1e9 + bench.runner.now_s
    before(bench)
    assert bench.run()
    return bench, [event.prediction for event in bench.told(PredictionUpdate)]


def test_predictions_follow_what_running_segments_measure(tmp_path):
    bench, predictions = running_batch(tmp_path, factors=dict.fromkeys("abcd", 1.5))
    ended_s = bench.runner.now_s
    first, newest = predictions_in({k: bench.journal.get(k) for k in (FIRST_PREDICTION, NEWEST_PREDICTION)})
    assert first.jobs.keys() == {*"abcd"}
    assert math.isclose(first.makespan_s, 200.0, rel_tol=0.15)
    assert first.since_s == newest.since_s == 1e9
    assert newest.made_s > 0.9 * ended_s
    early = next(each for each in predictions if each.made_s > 0.1 * ended_s)
    assert math.isclose(early.makespan_s, ended_s, rel_tol=0.06)
    assert early.low_s < ended_s < early.high_s
    assert all(early.made_s < end.earliest_s < end.end_s < end.latest_s for end in (early.end, *early.jobs.values()))
    assert math.isclose(early.jobs["a"].end_s, ended_s / 2, rel_tol=0.06)
    assert all(each.makespan_s >= each.made_s for each in predictions)


@pytest.mark.parametrize("factor", [0.6, 1.0, 1.5])
def test_no_job_ends_before_its_earliest_end(tmp_path, factor):
    ended_s = {}

    def note_ends(bench):
        def listen(event):
            if isinstance(event, JobEnded):
                ended_s[event.job] = bench.runner.now_s

        bench.other_listeners.append(listen)

    factors = {"a": factor, "b": 1.0, "c": 1.0, "d": factor}
    _, predictions = running_batch(tmp_path, factors=factors, before=note_ends)
    for each in predictions:
        assert all(end.earliest_s <= ended_s[job] + 1e-3 for job, end in each.jobs.items())
        assert each.earliest_s <= max(ended_s.values()) + 1e-3
    assert max(each.earliest_s for each in predictions) > 0.8 * max(ended_s.values())


def test_a_timeline_has_the_predicted_ends_of_the_batch_and_of_jobs_that_have_not_ended(tmp_path):
    lines, texts = [], []

    def poll(bench):
        reader = TimelineReader(bench.journal.database, name="batch", clock=lambda: 1e9 + bench.runner.now_s)

        def listen(event):
            if isinstance(event, JobEnded):
                run_timeline = reader.read()
                lines.append({line.name: line for line in run_timeline.jobs})
                texts.append(headline(run_timeline))

        bench.other_listeners.append(listen)

    running_batch(tmp_path, factors=dict.fromkeys("abcd", 1.5), before=poll)
    first = lines[0]
    assert [name for name, line in first.items() if line.predicted is None] == ["a"]
    assert first["c"].predicted.low_s <= first["c"].predicted.end_s <= first["c"].predicted.high_s
    assert any("predicted end after" in text for text in texts[0])
    assert all(line.predicted is None for line in lines[-1].values())


def test_predictions_are_made_every_few_seconds_only(tmp_path):
    _, predictions = running_batch(tmp_path, factors={}, num_steps=1000, step_s=0.1)
    assert len(predictions) <= 2 + 4 + 200 / EVERY_S


def test_predictions_take_a_share_of_the_time(tmp_path, monkeypatch):
    took_s, plain = 1.0, Replanner.seconds_left

    def slow(self, state):
        engines[0].now_s += took_s
        return plain(self, state)

    engines = []
    monkeypatch.setattr(Replanner, "seconds_left", slow)
    _, predictions = running_batch(tmp_path, factors={}, before=lambda bench: engines.append(bench.runner))
    assert 1 <= len(predictions) <= 2 + MAX_SHARE * 200 / took_s


# -- draws -----------------------------------------------------------------------------------------------------------


def test_jobs_that_follow_each_other_on_a_device_end_one_after_another_in_every_draw():
    problem, plan = plan_of((0, 0.0), (0, 100.0), (1, 0.0))
    left = left_of(problem, plan)
    assert (left["j1"] > left["j0"]).all()
    assert math.isclose(np.median(left["j0"]), 100.0, rel_tol=0.05)
    assert math.isclose(np.median(left["j1"]), 200.0, rel_tol=0.05)


def test_a_job_waits_for_the_job_that_it_depends_on_in_every_draw():
    problem, plan = plan_of((0, 0.0), (1, 100.0), after={1: ("j0",)})
    left = left_of(problem, plan)
    assert (left["j1"] > left["j0"]).all()


def test_a_job_waits_for_the_group_in_which_the_job_is_trained_that_it_depends_on():
    """As in a dry run, whose plan has options for groups."""
    problem, plan = plan_of((0, 0.0), (0, 0.0), (1, 150.0), after={2: ("j1",)})
    lead, member, last = problem.jobs
    lead = replace(lead, options=(*lead.options, Option("shared_base", 1, 150.0, jobs=("j1",))))
    together = replace(plan.segments[0], option=1, end_s=150.0)
    plan = replace(plan, segments=(together, plan.segments[2]))
    found = replace(problem, jobs=(lead, member, last))
    profiles = {"j0": [profile(PREDICTED)] * 2, "j1": [profile(PREDICTED)], "j2": [profile(PREDICTED)]}
    left = plan_left(found, plan, profiles)
    assert left.keys() == {"j0", "j1", "j2"}
    assert (left["j1"] == left["j0"]).all()
    assert (left["j2"] > left["j0"]).all()
    assert math.isclose(np.median(left["j2"]), 250.0, rel_tol=0.05)


def test_draws_are_of_the_posterior_of_the_beliefs():
    beliefs, errors = SpeedBeliefs(), OF_PREDICTIONS
    beliefs.note("a", 0, 1.3, technique="ddp", errors=errors)
    beliefs.note("a", 1, 1.5, technique="fsdp", errors=replace(errors, measurement=0.2))
    options = {(job, k): (name, errors) for job in "ab" for k, name in enumerate(("ddp", "fsdp", "tensor"))}
    random_numbers = np.random.default_rng(3)
    draws = beliefs.draws(options, normals=lambda: random_numbers.standard_normal(40_000))
    for (job, option), (technique, _) in options.items():
        belief, found = beliefs.of(job, option, technique=technique, errors=errors), draws[job, option]
        assert math.isclose(found.mean(), belief.mean, abs_tol=0.006)
        assert math.isclose(found.std(), belief.spread, rel_tol=0.03, abs_tol=1e-3)
    assert 0.3 < np.corrcoef(draws["b", 0], draws["b", 2])[0, 1] < 0.95  # what a job's options have in common


def test_many_jobs_are_predicted_with_less_relative_error_than_one():
    one = spread_of(left_of(*plan_of((0, 0.0))))
    many = spread_of(left_of(*plan_of(*((0, 100.0 * i) for i in range(8)))))
    assert many < 0.9 * one


def test_what_was_measured_is_predicted_with_less_error():
    problem, plan = plan_of((0, 0.0), (1, 0.0))
    beliefs = SpeedBeliefs()
    before = predict(left_of(problem, plan, beliefs=beliefs))
    for job in ("j0", "j1"):
        beliefs.note(job, 0, 1.0, technique="single", errors=errors_of(profile(PREDICTED)))
    after = predict(left_of(problem, plan, beliefs=beliefs))
    assert after.spread < 0.5 * before.spread
    for job in ("j0", "j1"):
        assert after.jobs[job].high_s - after.jobs[job].low_s < before.jobs[job].high_s - before.jobs[job].low_s


# -- predictions -----------------------------------------------------------------------------------------------------


@given(st.floats(0.01, 0.5), st.lists(st.builds(EarlierRun, error=st.floats(-0.5, 0.5), spread=st.floats(0.1, 1.0))))
def test_each_interval_contains_its_end(spread, earlier):
    draws = {"a": 50 * np.exp(spread * np.linspace(-2, 2, 200)), "b": 100 * np.exp(spread * np.linspace(2, -2, 200))}
    found = predict(draws, conditions=ForecastConditions(earlier=earlier), made_s=7.0)
    for end in (found.end, *found.jobs.values()):
        assert 7.0 == end.earliest_s < end.low_s < end.end_s < end.latest_s < end.high_s
    assert found.makespan_s >= max(end.end_s for end in found.jobs.values()) - 1e-6


def test_a_quiet_machine_and_sure_speeds_leave_the_least_spread():
    sure = {"a": np.full(200, 10.0)}
    assert math.isclose(predict(sure).spread, MIN_SPREAD, rel_tol=1e-6)
    busy = predict(sure, conditions=ForecastConditions(load=MachineLoad(ratio=3.0, spread=0.1)))
    assert math.isclose(busy.spread, math.hypot(MIN_SPREAD, 0.1))


def run_of(actual_s, predicted_s, *loads):
    """The metrics of an earlier run that was predicted at the first of these loads, and ran at the second."""
    metrics = {"makespan_s": actual_s, "uncorrected_makespan_s": predicted_s, "prediction_spread": 0.15}
    return metrics | dict(zip(("machine_load", "run_load"), loads, strict=False))


def test_a_run_beside_other_work_does_not_spoil_the_prediction_of_the_next_one():
    """It was predicted while nothing else ran, and took 2.8 times as long as other work began."""
    sure = {"a": np.full(200, 230.0)}
    for earlier in (run_of(644.0, 230.0, 1.0, 2.8), run_of(230.0, 644.0, 2.8, 1.0)):
        (known,) = errors_in([earlier])
        assert known.error == pytest.approx(0.0, abs=1e-9)
        found = predict(sure, conditions=ForecastConditions(earlier=[known]))
        assert found.low_s < 230.0 < found.high_s
        assert found.makespan_s < 1.5 * 230.0  # what came once may come again
        assert found.high_s > predict(sure).high_s
    assert errors_in([run_of(644.0, 230.0, 1.0)])[0].error == pytest.approx(math.log(2.8)), "of an earlier release"


def test_a_load_is_there_for_a_while_and_returns_to_the_usual_one():
    busy, quiet = MachineLoad(ratio=4.0), MachineLoad()
    soon, later = (load_ahead(busy, [1.2, 1.1], seconds=seconds) for seconds in (1.0, 20_000.0))
    assert soon.ratio == pytest.approx(4.0, rel=0.02)
    assert 1.0 < later.ratio < 2.5
    assert soon.spread < 0.05 < load_ahead(busy, [1.2, 1.1], seconds=600.0).spread
    assert load_ahead(quiet, [4.0, 4.0], seconds=20_000.0).ratio > 1.5
    assert load_ahead(quiet, [1.0, 1.0], seconds=20_000.0) == MachineLoad()


def test_intervals_hold_in_replayed_traces_of_load():
    found = [row for kind in KINDS if kind != "quiet" for s in LENGTHS_S for row in replayed(kind, length_s=s, seed=1)]
    assert 0.8 < statistics.mean(is_inside for is_inside, _ in found) < 0.99


@pytest.mark.parametrize("num_jobs", [1, 4])
def test_what_no_profile_contains_is_independent_of_the_speeds(num_jobs):
    """Spreads of independent causes add up as squares: an interval is as wide as its spread says."""
    found = predict(left := left_of(*plan_of(*((0, 100.0 * i) for i in range(num_jobs)))))
    assert found.spread == pytest.approx(math.hypot(spread_of(left), MIN_SPREAD))
    half = math.log(found.high_s / found.low_s) / 2
    assert half == pytest.approx(corrected(found.spread, ())[1], rel=0.05)


def draws_of(**medians_s):
    return {job: np.exp(0.1 * np.linspace(-2, 2, 200)) * median_s for job, median_s in medians_s.items()}


def test_ends_are_corrected_by_how_late_earlier_ends_of_their_class_were():
    """Ends in the middle of a batch are late, and its last one is early; both by more than is believed."""
    scores, random_numbers = EndScores(), random.Random(5)
    num_met, num_inside, widths = {"a": 0, "z": 0}, 0, []
    for i in range(400):
        raw = predict(draws_of(a=50.0, z=100.0), since_s=1e9, made_s=50.0)
        shown = calibrated(raw, of_jobs=scores, of_batches=EndScores())
        assert shown.end == raw.end
        for job, mean in (("a", 0.5), ("z", -0.1)):
            end, left_s = shown.jobs[job], (raw.jobs[job].end_s - 50.0) * math.exp(random_numbers.gauss(mean, 0.2))
            if i >= 100:
                num_met[job] += 50.0 + left_s <= end.latest_s
                num_inside += end.low_s <= 50.0 + left_s <= end.high_s
                widths.append(math.log((end.high_s - 50.0) / (end.low_s - 50.0)))
            scores.note(job, raw.jobs[job], raw, batch=str(i))
            scores.note(job, raw.jobs[job], replace(raw, made_s=51.0), batch=str(i))  # no half of it is over
            scores.close(job, 1e9 + 50.0 + left_s)
    assert all(abs(num / 300 - LATEST) < 0.04 for num in num_met.values())
    assert abs(num_inside / 600 - COVERAGE) < 0.04
    assert np.median(widths) == pytest.approx(2 * 1.645 * 0.2, rel=0.15)  # as narrow as each class is


def test_jobs_that_were_stopped_and_ends_of_few_batches_say_nothing():
    scores = EndScores()
    raw = predict({"a": np.full(200, 10.0), "z": np.full(200, 100.0)})

    def end(batch: int, job: str, ended_s: float | None) -> PredictedEnd:
        scores.note(f"{batch}/{job}", raw.jobs[job], raw, batch=str(batch))
        scores.close(f"{batch}/{job}", ended_s)
        return scores.corrected(raw.jobs["a"], raw)

    for i in range(100):
        assert end(i, "a", None if i >= 8 else 1000.0) == raw.jobs["a"]
    for _ in range(100):
        assert end(7, "a", 1000.0) == raw.jobs["a"]  # all of the same few batches
    assert end(101, "z", 100.0).latest_s == pytest.approx(1000.0)  # nine batches: the latest of their ends
    assert end(102, "a", 1000.0).end_s == pytest.approx(1000.0)
    later = EndScores(json.loads(json.dumps(list(scores.rows))))  # of the next process
    assert later.corrected(raw.jobs["a"], raw) == scores.corrected(raw.jobs["a"], raw) != raw.jobs["a"]
    early = replace(raw.jobs["a"], earliest_s=5000.0)
    assert scores.corrected(early, raw).end_s == 5000.0


@st.composite
def plans_and_factors(draw):
    """A plan of jobs of which some wait for others, and true over predicted runtimes within their intervals."""
    num_jobs = draw(st.integers(1, 6))
    after = {i: tuple(f"j{k}" for k in draw(st.sets(st.integers(0, i - 1), max_size=3))) for i in range(1, num_jobs)}
    problem, plan = plan_of(*((draw(st.integers(0, 1)), 100.0 * i) for i in range(num_jobs)), after=after)
    spread = SpeedBeliefs().of("j0", 0, technique="single", errors=errors_of(profile(PREDICTED))).spread
    least = math.exp(-CERTAIN * math.hypot(spread, MIN_SPREAD))
    return problem, plan, {job.id: draw(st.floats(least, 3.0) | st.just(least)) for job in problem.jobs}


@draws(60)
@given(plans_and_factors(), st.booleans())
def test_nothing_ends_before_its_earliest_end_while_runtimes_are_in_their_intervals(drawn, has_prices):
    problem, plan, factors = drawn
    certificate = preemptive_bound(problem).certificate if has_prices else None
    least = EarliestEnds.of_profiles(problem, {job: [profile(PREDICTED)] for job in factors}, certificate=certificate)
    num_steps = dict.fromkeys(factors, 1000)
    ahead = PlanSimulator(
        problem,
        in_steps(plan, num_steps=num_steps, steps_done={}),
        num_steps=num_steps,
        step_s=lambda job, option: factors[job] / 10,
    )
    last_s, earliest_s = ahead.finish(), least.of_jobs()
    assert earliest_s.keys() == ahead.ended_s.keys()
    assert all(ahead.ended_s[job] >= at_s - 1e-6 for job, at_s in earliest_s.items())
    assert last_s >= least.of_last(list(factors)) - 1e-6
    some = list(factors)[::2]
    assert max(ahead.ended_s[job] for job in some) >= least.of_last(some) - 1e-6


def test_a_job_ends_after_what_all_jobs_before_it_need():
    """Six jobs on two devices take three times as long as one of them, before the seventh starts."""
    problem, plan = plan_of(*((i % 2, 50.0 * i) for i in range(7)), after={6: tuple(f"j{i}" for i in range(6))})
    least = EarliestEnds.of_profiles(problem, {job.id: [profile()] for job in problem.jobs}, certificate=None).of_jobs()
    assert least["j6"] == pytest.approx(4 * least["j0"])
    assert predict_plan(
        problem, plan, {job.id: [profile()] for job in problem.jobs}, conditions=ForecastConditions()
    ).earliest_s == pytest.approx(least["j6"])


def test_jobs_of_a_group_have_no_earliest_end_of_their_own():
    problem, _ = plan_of((0, 0.0), (1, 0.0))
    lead = replace(problem.jobs[0], members=("m",))
    grouped = replace(problem, jobs=(lead, problem.jobs[1]))
    least = EarliestEnds.of_profiles(grouped, {"j0": [profile()], "j1": [profile()]})
    assert least.of_jobs()["j0"] == least.of_jobs()["m"] == 0.0
    assert least.of_jobs()["j1"] > 0.0


def test_errors_of_earlier_runs_fade_as_speeds_are_measured():
    earlier = [EarlierRun(error=0.4, spread=0.3)] * 5
    draws = {"a": 100 * np.exp(0.3 * np.linspace(-2, 2, 200))}
    about = ForecastConditions(earlier=earlier)
    first = predict(draws, conditions=about)
    assert first.makespan_s > 1.2 * first.uncorrected_s
    later = predict({"a": np.full(200, 100.0)}, conditions=about, first_spread=spread_of(draws))
    assert math.isclose(later.makespan_s, 100.0, rel_tol=0.01)


@given(SPREADS, RUNS, st.randoms(use_true_random=False))
def test_the_order_of_earlier_runs_does_not_matter(spread, earlier, draw):
    shuffled = list(earlier)
    draw.shuffle(shuffled)
    assert np.allclose(corrected(spread, earlier), corrected(spread, shuffled), rtol=1e-6, atol=1e-9)


@given(st.floats(-1, 1), st.integers(5, 20))
def test_an_error_that_all_runs_share_is_corrected_more_with_each_run(error, num_runs):
    runs = [EarlierRun(error=error, spread=0.1)] * num_runs
    off = [abs(corrected(0.1, runs[:n])[0] - error) for n in (0, 1, num_runs)]
    assert off[0] == abs(error)
    assert math.isclose(off[1], off[0] / 2, abs_tol=1e-9)
    assert off[2] <= abs(error) / (1 + num_runs) + 1e-9


@pytest.mark.parametrize("num_earlier", [0, 3, 15])
def test_the_interval_has_its_coverage_if_errors_are_as_the_model_says(num_earlier):
    draw, num_inside, num_draws = random.Random(7), 0, 4000
    for _ in range(num_draws):
        spread = draw.uniform(0.05, 0.5)
        spreads = [draw.uniform(0.05, 0.5) for _ in range(num_earlier)]
        tau = NU / sum(draw.gauss(0, 1) ** 2 for _ in range(NU))
        shared = draw.gauss(0, math.sqrt(tau / 2) * spread)
        errors = [draw.gauss(shared, math.sqrt(tau / 2) * each) for each in (*spreads, spread)]
        earlier = [EarlierRun(error=e, spread=s) for e, s in zip(errors, spreads, strict=False)]
        centre, half = corrected(spread, earlier)
        num_inside += abs(errors[-1] - centre) <= half
    assert abs(num_inside / num_draws - COVERAGE) < 0.015  # three standard deviations


@pytest.mark.parametrize("freedom", [NU, 6, 10, 24, 1000])
def test_quantiles_are_those_of_scipy(freedom):
    assert math.isclose(t_quantile(0.95, freedom=freedom), student.ppf(0.95, freedom), rel_tol=2e-3)


def test_runs_without_a_prediction_are_left_out():
    whole = {"makespan_s": 12.0, "uncorrected_makespan_s": 10.0, "planned_makespan_s": 9.0, "prediction_spread": 0.1}
    of_0_3 = {"makespan_s": 12.0, "planned_makespan_s": 10.0, "prediction_spread": 0.1}
    of_0_2 = {"makespan_s": 12.0, "planned_makespan_s": 10.0}
    stopped = {**whole, "makespan_s": 0.0}
    assert errors_in([whole, of_0_3, of_0_2, stopped]) == [EarlierRun(error=math.log(1.2), spread=0.1)] * 2


def test_intervals_of_jobs_widen_by_what_their_errors_had_beyond_their_batch():
    left = {"a": np.exp(0.05 * np.linspace(-2, 2, 200)) * 10, "b": np.exp(0.05 * np.linspace(-2, 2, 200)) * 20}

    def half_width(job_error: float | None) -> tuple[float, float]:
        earlier = [EarlierRun(error=0.0, spread=0.1, job_error=job_error)] * 20
        made = predict(left, conditions=ForecastConditions(earlier=earlier))
        return math.log(made.jobs["a"].high_s / made.jobs["a"].end_s), math.log(made.high_s / made.makespan_s)

    (even, of_batch), (uneven, of_batch_too) = half_width(0.02), half_width(0.3)
    assert of_batch == of_batch_too
    assert even < uneven
    assert math.isclose(uneven, math.hypot(even, 1.645 * math.sqrt((20 * 0.3**2 - 20 * 0.02**2) / 24)), rel_tol=0.01)


def test_the_error_of_jobs_is_what_they_have_beyond_their_batch():
    left = {"a": np.full(200, 10.0), "b": np.full(200, 20.0)}
    made = predict(left, since_s=1000.0)

    def error(a_s: float, b_s: float) -> float | None:
        return job_error(made, makespan_s=b_s, ends_s={"a": 1000 + a_s, "b": 1000 + b_s})

    assert math.isclose(error(made.jobs["a"].end_s * 1.5, made.jobs["b"].end_s * 1.5) or 0.0, 0.0, abs_tol=1e-3)
    late = error(made.jobs["a"].end_s * 1.5, made.jobs["b"].end_s)
    assert math.isclose(late or 0.0, math.log(1.5) / math.sqrt(2), rel_tol=1e-2)
    assert job_error(made, makespan_s=20.0, ends_s={}) is None

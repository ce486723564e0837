"""The expected gain of a sweep's other trials, and the rule that ends the sweep."""

import random
import statistics
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from ringmaster.features.expected_gain.estimate import EndedTrial, OpenTrial, expected_gain
from ringmaster.features.expected_gain.sweep import Worthless, gain_of, proposal_section
from ringmaster.features.rung_evaluation.comparison import EvaluatedRows
from ringmaster.features.rung_evaluation.sweep import PartialEvaluationPolicy, RowTrial
from ringmaster.features.sweep_objectives.sweep import ConstrainedRanking, Constraint, FrontRanking
from ringmaster.tasks.storage.journal import JobStatus
from ringmaster.tasks.sweeping.early_stopping import SweepTrial
from ringmaster.tasks.sweeping.space import CategoricalRange
from ringmaster.tasks.sweeping.stop_rules import SweepProgress
from tests.unit.sweeping.sweeps import Gangs, Killed, Swept, spec

NONE = spec(policy="none", num_trials=12)


def ended(*finals):
    return [EndedTrial(goal=64, final=final, scores={64: final}) for final in finals]


def unbegun(num):
    return [OpenTrial(goal=0, total=64, scores={})] * num


def progress(finals, *, num_open, of=NONE, metrics=None):
    names = of.trials
    reports = {name: {64: {"loss": loss, **(metrics or {})}} for name, loss in zip(names, finals, strict=False)}
    trials = [
        SweepTrial(name=name, total=64, goal=64 if name in reports else 0, has_ended=name in reports)
        for name in names[: len(finals) + num_open]
    ]
    return SweepProgress(spec=of, trials=trials, reports=reports, done=frozenset(reports), device_s=3600.0)


def test_the_probability_that_others_are_better_is_a_fact_about_ranks():
    gain = expected_gain(ended(*range(15)), unbegun(5))
    assert gain.probability == pytest.approx(5 / 20, abs=0.05)
    assert gain.low == 0.0 and gain.high >= gain.gain > 0
    assert gain == expected_gain(ended(*range(15)), unbegun(5)), "the same results give the same numbers"


def test_the_gain_scales_with_the_distances_of_the_best():
    draw = random.Random(1)
    finals = [draw.random() for _ in range(20)]
    one, ten = (expected_gain(ended(*(k * x for x in finals)), unbegun(5)) for k in (1.0, 10.0))
    assert ten.gain == pytest.approx(10 * one.gain)
    few, many = (expected_gain(ended(*finals), unbegun(num)).gain for num in (1, 50))
    assert few < one.gain < many


def test_the_interval_contains_the_gain_as_often_as_it_says():
    draw, covered = random.Random(0), []
    for _ in range(60):
        finals = [-draw.random() - draw.random() for _ in range(24)]  # a corner: two parameters matter
        gain = expected_gain(ended(*finals[:12]), unbegun(12))
        covered.append(gain.low <= max(finals) - max(finals[:12]) <= gain.high)
    assert 0.83 <= statistics.fmean(covered) <= 1.0


def test_too_few_results_say_nothing():
    stopped = [EndedTrial(goal=4, scores={4: 0.0})] * 20
    assert expected_gain([*ended(1.0, 2.0, 3.0, 4.0), *stopped], unbegun(5)) is None
    assert expected_gain([*ended(1.0, 2.0, 3.0, 4.0, 5.0), *stopped], unbegun(5)) is not None


def test_scores_of_different_parts_of_the_rows_are_compared_by_the_rows_that_they_share():
    stopping = PartialEvaluationPolicy(policy="halving", min_steps=4, reduction_factor=16, evaluation_error=0.01)
    of, shared = spec(stopping=stopping, num_trials=8), np.random.default_rng(13).normal(size=400)
    trials, reports = [], {}
    for number, name in enumerate(of.trials):
        num = 400 if number < 6 else 64  # the last two have computed a part
        rows = EvaluatedRows(values=shared[:num] - 0.01 * number, counts=np.ones(num), whole=400)
        is_done = number < 6
        reports[name] = {4: {"loss": -rows.mean}} | ({64: {"loss": 0.01 * number - 5.0}} if is_done else {})
        trials.append(RowTrial(name=name, total=64, goal=64, has_ended=is_done, scores={4: rows.mean}, rows={4: rows}))
    assert abs(shared[:64].mean() - shared.mean()) > 0.05, "the part differs from the whole"
    done = frozenset(of.trials[:6])
    found = gain_of(SweepProgress(spec=of, trials=trials, reports=reports, done=done, device_s=1.0))
    assert found.gain == pytest.approx(0.0, abs=1e-6), "the open trials are worse, and their curves say so"


def test_trials_that_were_stopped_count_as_draws_that_were_not_better():
    stopped = [EndedTrial(goal=4, scores={4: 0.0})] * 20
    assert expected_gain([*ended(*range(5)), *stopped], unbegun(5)).probability == pytest.approx(5 / 30, abs=0.04)
    promoted = [OpenTrial(goal=64, total=64, scores={4: 1.0})] * 5
    assert expected_gain([*ended(*range(5)), *stopped], promoted).probability == pytest.approx(5 / 10, abs=0.06)


def test_equal_results_say_nothing_of_a_gain():
    assert expected_gain(ended(*[0.1] * 8), unbegun(8)) is None, "as of trials that have learnt nothing yet"
    assert expected_gain(ended(1.0, 1.0, 1.0, 5e-324, 0.0), unbegun(8)).gain > 0


def test_a_learning_curve_that_predicts_counts_in_place_of_the_rank():
    curves = [EndedTrial(goal=64, final=x + 5.0 + x % 2 / 100, scores={32: x}) for x in map(float, range(8))]
    late = {x: expected_gain(curves, [OpenTrial(goal=64, total=64, scores={32: x})]) for x in (2.0, 9.0)}
    assert late[2.0].gain < 1e-6 and late[2.0].probability < 0.01
    assert late[9.0].gain == pytest.approx(2.0, abs=0.05) and late[9.0].low > 1.9
    noise = [EndedTrial(goal=64, final=float(i), scores={32: 50.0 * (-1) ** i}) for i in range(8)]
    assert expected_gain(noise, [OpenTrial(goal=64, total=64, scores={32: 50.0})]).high < 10, "it predicts nothing"


def test_the_rule_fires_where_the_gain_is_below_the_share_or_not_worth_its_price():
    close = progress([0.5 + 1e-6 * i for i in range(10)], num_open=2)
    assert Worthless().proposal(close).reason.startswith("after 10 of 12 trials, the others can be expected to improve")
    far = progress([0.5 + 0.1 * i for i in range(10)], num_open=2)
    assert Worthless().proposal(far) is None
    assert Worthless(gain=0.9).proposal(far) is not None
    assert Worthless(gain_per_device_hour=1e-3).proposal(far) is None
    dear = Worthless(gain_per_device_hour=10.0).proposal(far)
    assert dear.reason.endswith("; worth 10 for each of 0.2 device hours") and dear.figures["best"] == 0.5


def test_trials_that_break_a_constraint_are_not_the_best():
    bounded = ConstrainedRanking(metric="loss", constraints=(Constraint(metric="accuracy", at_least=0.9),))
    of = replace(NONE, ranking=bounded)
    assert gain_of(progress([0.5 + 0.1 * i for i in range(10)], num_open=2, of=of, metrics={"accuracy": 0.8})) is None
    kept = gain_of(progress([0.5 + 0.1 * i for i in range(10)], num_open=2, of=of, metrics={"accuracy": 0.9}))
    assert kept.best == -0.5


def test_what_is_not_supported():
    several = replace(NONE, ranking=FrontRanking(metric="loss", others=("accuracy",)))
    assert gain_of(progress([0.5 + i for i in range(10)], num_open=2, of=several)) is None
    (finding,) = Worthless().findings(several)
    assert finding.place == ("stop_when",) and not [*Worthless().findings(NONE)]
    seeds = CategoricalRange(key="seed", values=tuple(range(12)))
    grid = spec(policy="none", sampler="grid", space=(seeds,))
    assert gain_of(progress([0.5 + i for i in range(10)], num_open=2, of=grid)) is None
    shuffled = replace(grid, is_shuffled=True)
    assert gain_of(progress([0.5 + i for i in range(10)], num_open=2, of=shuffled)) is not None
    assert shuffled.known() != grid.known() and sorted(map(str, shuffled.known())) == sorted(map(str, grid.known()))


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_a_sweep_ends_by_the_rule_and_only_says_so_without_it(tmp_path, sampler):
    of = replace(NONE, sampler=sampler)
    swept = Swept(tmp_path / "with", of, stop_rules=[Worthless(gain=0.5)]).run()
    done, stopped = swept.names(JobStatus.DONE), swept.names(JobStatus.STOPPED)
    assert len(done) >= 5 and stopped and len(done) + len(stopped) == 12
    reasons = {swept.bench.journal.jobs()[name].message for name in stopped}
    assert reasons == {f"stopped early: {swept.notices[0]}"}
    section = proposal_section(swept.sweep_scheduler, [])
    assert section.value["ended"] and section.value["num_open"] >= len(stopped)
    without = Swept(tmp_path / "without", of).run()
    assert len(without.names(JobStatus.DONE)) == 12
    cheap = Swept(tmp_path / "default", of, stop_rules=[]).run()
    assert all(not each.ends for each in cheap.sweep_scheduler.proposals.values())


def test_a_sweep_that_is_killed_ends_for_the_same_reason(tmp_path):
    whole = Swept(tmp_path / "whole", NONE, stop_rules=[Worthless(gain=0.5)]).run()
    for num_messages in (6, 12, 18):
        folder, gangs = tmp_path / str(num_messages), Gangs()
        with suppress(Killed):
            Swept(folder, NONE, runner=gangs, dies_after=num_messages, stop_rules=[Worthless(gain=0.5)]).run()
        gangs.running.clear()
        again = Swept(folder, NONE, runner=gangs, stop_rules=[Worthless(gain=0.5)]).run()
        assert again.sweep_scheduler.proposals.keys() == whole.sweep_scheduler.proposals.keys() == {"worthless"}
        reasons = {record.message for record in again.bench.journal.jobs().values() if record.status == "stopped"}
        assert len(reasons) == 1, "it is decided once"

"""Trials whose held-out rows are computed part by part: the confidence sequence, the choice, and whole sweeps."""

import math
from contextlib import suppress
from dataclasses import replace
from functools import cache
from random import Random

import numpy as np
import pytest

from ringmaster.codec import from_json, to_json
from ringmaster.features.rung_evaluation.comparison import EvaluatedRows, RowComparison, relative_radius
from ringmaster.features.rung_evaluation.row_parts import (
    MIN_PART_ROWS,
    ROWS,
    in_words,
    num_at_once,
    part_at,
    place_of,
    rows_of,
)
from ringmaster.features.rung_evaluation.sweep import PartialEvaluationPolicy, RowTrial
from ringmaster.tasks.execution.steering import SteeringRequest
from ringmaster.tasks.storage.journal import JobStatus
from ringmaster.tasks.sweeping.early_stopping import StoppingPolicy
from ringmaster.techniques import EvaluationSpec
from ringmaster.techniques.job_specs import EvaluationSlice
from ringmaster.techniques.processes.gang_events import EvaluationReported, JobResult, Outcome
from ringmaster.techniques.processes.reporter import RankLog
from tests.matrix import matrix
from tests.unit.sweeping.sweeps import NUM_ROWS, Gangs, Killed, Swept, evaluated_part, loss, spec

ERROR, NUM_DRAWS, WHOLE = 0.1, 400, 256
DRAWS = {
    "normal": lambda draw, shape: draw.normal(size=shape),
    "skewed": lambda draw, shape: draw.exponential(size=shape) - draw.exponential(size=shape) * 0.2,
    "correct or not": lambda draw, shape: draw.choice([-1.0, 0.0, 0.0, 1.0], size=shape),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_the_sequence_misses_the_mean_of_all_rows_at_any_part_at_most_as_often_as_given(kind):
    rows = DRAWS[kind](np.random.default_rng(0), (NUM_DRAWS, WHOLE))
    rows -= rows.mean(1, keepdims=True)  # the order of the two trials by all rows is a tie
    nums = np.arange(1, WHOLE + 1)
    means = rows.cumsum(1) / nums
    variances = ((rows**2).cumsum(1) - nums * means**2)[:, 1:] / nums[:-1]
    radii = np.sqrt(np.maximum(variances, 0.0)) * [relative_radius(n, WHOLE, error=ERROR) for n in range(2, WHOLE + 1)]
    misses = (np.abs(means[:, 1:]) > radii + 1e-9)[:, MIN_PART_ROWS:].any(1).mean()
    assert misses <= ERROR * (1.5 if kind == "skewed" else 1.0)  # the sequence is asymptotic but for normal rows
    narrower = (np.abs(means[:, 1:]) > radii * 0.4 + 1e-9)[:, MIN_PART_ROWS:].any(1).mean()
    assert narrower > ERROR, "a radius of any length would pass"


def test_the_radius_shrinks_to_nothing_with_all_rows():
    radii = [relative_radius(num, WHOLE, error=1e-6) for num in range(MIN_PART_ROWS, WHOLE + 1)]
    assert radii == sorted(radii, reverse=True) and radii[-1] == 0.0
    assert relative_radius(2, WHOLE, error=1e-6) == math.inf


def test_parts_are_the_rows_of_one_order_each_once():
    whole = rows_of(EvaluationSlice(step=1, seed=3), 100)
    parts = [
        rows_of(EvaluationSlice(step=1, begin=a, end=b, seed=3), 100) for a, b in ((0.0, 0.125), (0.125, 0.5), (0.5, 1))
    ]
    assert [row for part in parts for row in part] == whole
    assert sorted(whole) == list(range(100)) and whole != sorted(whole)
    assert len(parts[0]) == MIN_PART_ROWS
    assert rows_of(EvaluationSlice(step=1, seed=4), 100) != whole


def shifted_rows(mean, *, num, noise=0.1, whole=1000):
    values = (
        np.random.default_rng(7).normal(size=whole)
        + mean
        + noise * np.random.default_rng(abs(hash(mean)) % 99).normal(size=whole)
    )
    return EvaluatedRows(values=values[:num], counts=np.ones(num), whole=whole)


def compared(rows, *, may_go_on=None):
    scores = {name: each.mean for name, each in rows.items()}
    names = frozenset(rows if may_go_on is None else may_go_on)
    return RowComparison(scores=scores, rows=rows, may_go_on=names, error=1e-2, num_trials=len(rows))


def test_only_trials_beside_the_cut_need_more_rows():
    rows = {
        "a": shifted_rows(9.0, num=125),
        "b": shifted_rows(5.0, num=125),
        "c": shifted_rows(4.99, num=125),
        "d": shifted_rows(1.0, num=125),
    }
    comparison = compared(rows)
    assert comparison.open_parts(list("abcd"), num_kept=2, is_early=False).keys() == {"b", "c"}
    assert comparison.open_parts(list("abcd"), num_kept=1, is_early=False) == {}
    part = comparison.part_up_to("b", 1.0, step=4, seed=0)
    assert (part.begin, part.end, part.step) == (0.125, 1.0, 4)


def test_trials_that_cannot_be_evaluated_further_are_taken_in_the_order_of_their_estimates():
    rows = {"b": shifted_rows(5.0, num=125), "c": shifted_rows(4.99, num=125)}
    assert compared(rows, may_go_on=()).open_parts(["b", "c"], num_kept=1, is_early=False) == {}


def test_estimates_use_the_rows_that_others_have():
    shared = np.random.default_rng(0).normal(size=1000)
    rows = {
        "whole": EvaluatedRows(values=shared, counts=np.ones(1000), whole=1000),
        "part": EvaluatedRows(values=shared[:50] - 0.01, counts=np.ones(50), whole=1000),
    }
    found = compared(rows)
    assert found.scores["part"] != pytest.approx(shared.mean() - 0.01, abs=0.01)
    assert found.estimates["part"] == pytest.approx(shared.mean() - 0.01)


def test_a_diverged_trial_leaves_the_estimates_of_the_others_alone():
    rows = {
        "nan": EvaluatedRows(values=np.full(125, math.nan), counts=np.ones(125), whole=1000),
        "a": shifted_rows(5.0, num=125),
        "b": shifted_rows(1.0, num=125),
    }
    comparison = RowComparison(
        scores={name: each.mean if name != "nan" else -math.inf for name, each in rows.items()},
        rows=rows,
        may_go_on=frozenset(rows),
        error=1e-2,
        num_trials=3,
    )
    assert comparison.estimates["nan"] == -math.inf
    assert comparison.estimates["a"] > comparison.estimates["b"] + 3.0
    nothing = replace(comparison, scores={"nan": -math.inf}, rows={"nan": rows["nan"]}, may_go_on=frozenset())
    assert nothing.estimates == {"nan": -math.inf}


def test_evaluations_that_a_trial_has_anyway_are_of_all_rows():
    stopping = PartialEvaluationPolicy(policy="asha", min_steps=4, reduction_factor=4, evaluation_error=0.01)
    plain = spec(stopping=stopping).batch().jobs[0]
    job = replace(plain, num_steps=64, evaluation=replace(plain.evaluation, at_steps=(4,), parts=()))
    with_rungs = stopping.with_rungs(job)
    assert stopping.rungs(64) == [4, 16, 64]
    assert part_at(with_rungs.evaluation, 4) is None and part_at(with_rungs.evaluation, 16) is not None
    assert stopping.with_rungs(with_rungs) == with_rungs
    every = replace(plain, num_steps=64, evaluation=replace(plain.evaluation, at_steps=(), every_steps=2, parts=()))
    assert stopping.with_rungs(every).evaluation.parts == ()


class PartGangs(Gangs):
    """Gangs that compute the rows of parts: each has the job's loss and what is the same for all jobs and drawn.

    They end some time after they have reported, so that the scheduler decides before.
    """

    num_rows = 0

    def end_one(self):
        call, future = self.running.pop(self.draw.randrange(len(self.running)))
        job, last = call.order.job, call.order.last_step
        first = self.steps.get(job.name, 0)
        due = [step for step in range(first + 1, last + 1) if job.is_evaluated(step)]
        due = due or ([first] if first == last and first and first < job.num_steps else [])
        reported = self.__dict__.setdefault("reported", set())
        if due and id(future) not in reported:
            reported.add(id(future))
            self.kept = [*self.__dict__.get("kept", ()), future]  # so that no other has its id
            for step in due:
                call.on_event(self.evaluation(job, step))
            self.running.append((call, future))
            return
        self.steps[job.name] = last
        metrics = self.measure(job, last) if last == job.num_steps else None
        future.set_result(Outcome(status="done", result=JobResult(first_step=first, step=last, metrics=metrics)))

    def evaluation(self, job, step):
        part = part_at(job.evaluation, step)
        if part is None:
            self.num_rows += NUM_ROWS
            return EvaluationReported(step=step, metrics=self.measure(job, step))
        report = evaluated_part(job, part)
        self.num_rows += report.num_rows
        return report


class GoingOn(PartGangs):
    """Gangs that report further rows a few at a time, and end a part or go on as they are commanded."""

    def __init__(self, **options):
        super().__init__(**options)
        self.commands = {}

    def send(self, number, command):
        if command.startswith(ROWS):
            self.commands.setdefault(number, []).append(float(command.split()[-1]))

    def end_one(self):
        call, _ = self.running[0]
        part = part_at(call.order.job.evaluation, call.order.last_step)
        if self.steps.get(call.order.job.name) != call.order.last_step or part is None:
            super().end_one()
            return
        (call, future), shares = self.running.pop(0), self.commands.get(call.number, [])
        begins = self.__dict__.setdefault("begins", {})
        begin = begins.get(call.number, place_of(part.begin, NUM_ROWS))
        end = min(begin + num_at_once(begin), place_of(max([part.end, *shares]), NUM_ROWS))
        if 0.0 in shares or begin >= end:
            step = call.order.last_step
            future.set_result(Outcome(status="done", result=JobResult(first_step=step, step=step)))
            return
        report = evaluated_part(call.order.job, replace(part, begin=begin / NUM_ROWS, end=end / NUM_ROWS))
        self.num_rows, begins[call.number] = self.num_rows + report.num_rows, end
        self.running.append((call, future))
        call.on_event(report)


def partial(policy="halving"):
    return spec(stopping=PartialEvaluationPolicy(policy=policy, min_steps=4, reduction_factor=4, evaluation_error=0.01))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Runs a sweep by parts to its end, once for each kind of gangs and each policy; tests change nothing of it."""

    @cache
    def run(gangs, policy="halving"):
        return Swept(tmp_path_factory.mktemp("undisturbed"), partial(policy), runner=gangs()).run()

    return run


@pytest.mark.timeout(60)
@pytest.mark.parametrize("policy", ["halving", "cut"])
def test_the_same_trials_continue_as_by_all_rows_and_fewer_rows_are_computed(tmp_path, undisturbed, policy):
    whole = Swept(
        tmp_path / "whole",
        spec(stopping=StoppingPolicy(policy=policy, min_steps=4, reduction_factor=4)),
        runner=PartGangs(),
    ).run()
    parts = undisturbed(PartGangs, policy)
    assert parts.statuses == whole.statuses
    assert parts.bench.runner.num_rows < 0.6 * whole.bench.runner.num_rows
    for name in parts.names(JobStatus.DONE):
        job = next(job for job in parts.jobs if job.name == name)
        assert parts.bench.journal.jobs()[name].metrics == {"loss": loss(job, 64)}, "final metrics are of all rows"
    stopped = parts.names(JobStatus.STOPPED)
    assert all(parts.bench.journal.jobs()[name].metrics == {} for name in stopped), "a part is no model's metric"
    columns = parts.sweep_scheduler.records.columns(parts.sweep_scheduler.reports)
    assert columns and columns.keys() <= set(stopped)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("policy", ["halving", "asha"])
def test_gangs_go_on_with_a_part_until_it_is_enough(undisturbed, policy):
    going_on = undisturbed(GoingOn, policy)
    gangs = going_on.bench.runner
    assert any(0.0 in shares for shares in gangs.commands.values()), "some have computed enough before their part ends"
    assert any(share > 0.0 for shares in gangs.commands.values() for share in shares), "some go on beyond it"
    assert set(going_on.statuses.values()) == {JobStatus.DONE, JobStatus.STOPPED}
    if policy == "halving":  # the places do not depend on the order in which trials come
        assert going_on.statuses == undisturbed(PartGangs, policy).statuses


@pytest.mark.timeout(60)
@pytest.mark.parametrize("dies_after", matrix(range(40, 120, 8), quick=[56]))
def test_after_a_kill_while_gangs_go_on_the_sweep_decides_the_same(tmp_path, undisturbed, dies_after):
    runner = GoingOn()
    with suppress(Killed):
        Swept(tmp_path / "killed", partial(), runner=runner, dies_after=dies_after).run()
    again = Swept(tmp_path / "killed", partial(), runner=GoingOn(steps=runner.steps)).run()
    assert again.statuses == undisturbed(GoingOn).statuses


class Stopped(GoingOn):
    """Gangs of which each trial's first one that evaluates a part is stopped after a few rows, as by a new plan."""

    def end_one(self):
        call, future = self.running[0]
        cut, job = self.__dict__.setdefault("cut", set()), call.order.job.name
        if job in cut or call.number not in self.__dict__.get("begins", {}):
            super().end_one()
            return
        cut.add(job)
        self.running.pop(0)
        step = call.order.last_step
        future.set_result(Outcome(status="preempted", result=JobResult(first_step=step, step=step)))


@pytest.mark.timeout(60)
def test_a_part_of_which_a_gang_was_stopped_is_computed_by_the_next_one(tmp_path, undisturbed):
    stopped = Swept(tmp_path, partial(), runner=Stopped()).run()
    assert stopped.bench.runner.cut and stopped.statuses == undisturbed(GoingOn).statuses


class Undivided(PartGangs):
    """Gangs whose technique gives no values of rows where a trial is evaluated further: they evaluate all."""

    def evaluation(self, job, step):
        part = part_at(job.evaluation, step)
        if part is None or part.begin == 0.0:
            return super().evaluation(job, step)
        return EvaluationReported(step=step, metrics=self.measure(job, step))


@pytest.mark.timeout(60)
def test_an_evaluation_of_all_rows_replaces_the_part(tmp_path, undisturbed):
    swept = Swept(tmp_path, partial(), runner=Undivided()).run()
    assert swept.statuses == undisturbed(PartGangs).statuses
    records, reports = swept.sweep_scheduler.records, swept.sweep_scheduler.reports
    jobs = {job.name: job for job in swept.jobs}
    whole = [(name, step) for name, steps in reports.items() for step in steps if step not in records.rows[name]]
    assert len(whole) > len(swept.names(JobStatus.DONE)), "some were evaluated further at a rung"
    assert all(reports[name][step]["loss"] == loss(jobs[name], step) for name, step in whole)


class FailingFurther(PartGangs):
    """Gangs of which the first one that evaluates further rows fails."""

    failed = ""

    def end_one(self):
        call, future = self.running[0]
        part = part_at(call.order.job.evaluation, call.order.last_step)
        if self.failed or part is None or part.begin == 0.0:
            super().end_one()
            return
        self.running.pop(0)
        self.failed = call.order.job.name
        future.set_result(Outcome(status="invalid", message="its data is gone"))


@pytest.mark.timeout(60)
def test_a_trial_that_fails_at_a_rung_leaves_its_place_to_the_next_one(tmp_path, undisturbed):
    swept = Swept(tmp_path, partial(), runner=FailingFurther()).run()
    assert swept.statuses[swept.bench.runner.failed] == JobStatus.FAILED
    others = set(swept.statuses) - {swept.bench.runner.failed}
    assert {swept.statuses[name] for name in others} == {JobStatus.DONE, JobStatus.STOPPED}
    num_done = len(undisturbed(PartGangs).names(JobStatus.DONE))
    assert len(swept.names(JobStatus.DONE)) == num_done


def test_parts_that_an_earlier_state_has_stored_are_read():
    stored = {"step": 4, "begin": 0.125, "end": 0.5, "seed": 3}  # of its class `EvaluationPart`
    part = EvaluationSlice(step=4, begin=0.125, end=0.5, seed=3)
    assert to_json(part) == stored
    assert from_json(EvaluationSpec, {**to_json(EvaluationSpec()), "parts": [stored]}).parts == (part,)
    request = SteeringRequest.from_json({"parts": {"a": stored}})
    assert request.of_features == {"parts": {"a": part}}


@pytest.mark.parametrize("stored", [{"enough": {"a": "4"}}, {"enough": {"a": None}}, {"parts": {"a": 4}}])
def test_a_steering_request_of_a_wrong_shape_is_refused(stored):
    with pytest.raises(ValueError, match=f"its {next(iter(stored))} are"):
        SteeringRequest.from_json(stored)


def test_few_rows_that_decide_the_mean_do_not_make_places_certain_too_early():
    draw, num_wrong, num_sweeps, num_trials = np.random.default_rng(0), 0, 40, 5
    names = [str(number) for number in range(num_trials)]
    for _ in range(num_sweeps):
        losses = draw.lognormal(0, 1.5, 512) * draw.uniform(0.3, 2, (num_trials, 1))
        losses += 0.1 * draw.normal(size=(num_trials, 512))
        losses += draw.normal(size=(num_trials, 1)) * 0.05 - losses.mean(1, keepdims=True)
        known = dict.fromkeys(names, 64)
        further = [""]
        while further:
            rows = {
                name: EvaluatedRows(values=-losses[int(name), : known[name]], counts=np.ones(known[name]), whole=512)
                for name in names
            }
            comparison = compared(rows)
            order = sorted(names, key=lambda name: -comparison.estimates[name])
            further = [*comparison.open_parts(order, num_kept=2, is_early=False)]
            known |= {name: min(512, known[name] + 64) for name in further}
        num_wrong += {*order[:2]} != {*sorted(names, key=lambda name: losses[int(name)].mean())[:2]}
    assert num_wrong <= 0.02 * num_sweeps


def test_trials_that_evaluate_further_rows_count_as_under_way():
    trial = RowTrial(name="a", total=64, goal=4, scores={4: -1.0})
    assert not trial.is_under_way
    assert replace(trial, part=EvaluationSlice(step=4, begin=0.25, end=0.5)).is_under_way


@pytest.mark.timeout(60)
@pytest.mark.parametrize("dies_after", matrix(range(4, 60, 4), quick=[16, 28]))
def test_after_a_kill_between_parts_the_sweep_decides_the_same(tmp_path, undisturbed, dies_after):
    whole = undisturbed(PartGangs)
    runner = PartGangs()
    with suppress(Killed):
        Swept(tmp_path / "killed", partial(), runner=runner, dies_after=dies_after).run()
    again = Swept(tmp_path / "killed", partial(), runner=PartGangs(steps=runner.steps)).run()
    assert again.statuses == whole.statuses
    steps = [{name: [*each] for name, each in run.sweep_scheduler.reports.items()} for run in (again, whole)]
    assert steps[0] == steps[1], "the number of their rows depends on when they came"


class Crashing(PartGangs):
    """Gangs of which some crash, with or without a report before."""

    def end_one(self):
        rough = self.__dict__.setdefault("rough", Random(24 * 31))
        if rough.random() >= 0.15:
            super().end_one()
            return
        _, future = self.running.pop(rough.randrange(len(self.running)))
        future.set_result(Outcome(status="lost"))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("dies_after", matrix(range(3, 40), quick=[22]))
def test_further_rows_that_were_requested_of_a_running_gang_are_computed_after_a_kill(tmp_path, dies_after):
    asked = replace(partial("asha"), num_trials=8)
    runner = Crashing()
    with suppress(Killed):
        Swept(tmp_path, asked, runner=runner, dies_after=dies_after).run()
    again = Swept(tmp_path, asked, runner=PartGangs(steps=runner.steps)).run()
    assert set(again.statuses.values()) <= {JobStatus.DONE, JobStatus.STOPPED}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"objective": "perplexity"}, "perplexity is not a mean over rows"),
        ({"sampler": "tpe"}, "tpe proposes trials by whole evaluations"),
    ],
)
def test_what_cannot_be_compared_on_parts_is_refused(changes, why):
    asked = spec(stopping=PartialEvaluationPolicy(policy="halving", min_steps=4, evaluation_error=0.01), **changes)
    assert [f.message for f in asked.faults() if "evaluation_error" in f.place] == [f"cannot be kept: {why}"]


def test_a_metric_that_does_not_exist_is_a_fault_of_its_own():
    stopping = PartialEvaluationPolicy(policy="halving", min_steps=4, evaluation_error=0.01)
    assert spec(stopping=stopping, objective="los").faults() == [], "the form of the sweep refuses it"


def test_a_log_has_a_line_about_the_first_part_alone_with_its_interval(capsys):
    job = partial().batch().jobs[0]
    first, further = (
        evaluated_part(job, EvaluationSlice(step=4, begin=begin, end=begin + 0.25)) for begin in (0.0, 0.25)
    )
    log = RankLog()
    for report in (replace(first, note=in_words(first.part)), further, replace(first, part=None)):
        log.note(report)
    lines = capsys.readouterr().out.splitlines()
    assert ["a part of 400" in line for line in lines] == [True, False]

"""Constraints of a sweep, and the front of several objectives, with early stopping and each sampler."""

import json
import math
from contextlib import suppress
from xml.etree import ElementTree

import optuna
import pytest

from ringmaster.errors import BatchFileError
from ringmaster.features.sweep_objectives.drawing import DrawnTrial, draw_front
from ringmaster.features.sweep_objectives.front import crowding_distances, front_numbers, front_scores
from ringmaster.features.sweep_objectives.sweep import INFEASIBLE, ConstrainedRanking, Constraint, FrontRanking
from ringmaster.flows.sweep_form import Sweep, load_sweep, spec_of
from ringmaster.tasks.storage.journal import JobStatus
from ringmaster.tasks.sweeping.results import best, leaderboard, sections, why_no_winner
from ringmaster.tasks.sweeping.sampling import ProposedTrial, propose, study_of
from tests.unit.sweeping.sweeps import RATES, Gangs, Killed, Swept, loss, spec

LATENCY = "latency/p99_s"
FAST = Constraint(metric=LATENCY, at_most=0.05)


def latency(job, step):
    """Seconds of a request: models with a low loss are slow, as far as a fake one can be."""
    return 0.05 + 0.02 * (1.5 - abs(math.log10(job.optimizer.lr / 3e-3)))


class Timed(Gangs):
    """Fake gangs that measure the seconds of a request, too."""

    def measure(self, job, step):
        return {"loss": loss(job, step), LATENCY: latency(job, step)}


def constrained(*constraints, **changes):
    return spec(ranking=ConstrainedRanking(metric="loss", constraints=constraints), **changes)


def board_of(swept):
    scheduler, entries = swept.sweep_scheduler, swept.bench.journal.jobs()
    jobs = [
        {"name": name, "status": record.status, "num_steps": record.step, "segments": [], "model_uri": None}
        for name, record in entries.items()
    ]
    ranking, reports = scheduler.spec.ranking, scheduler.reports
    return leaderboard(scheduler.spec.trials, ranking=ranking, values=scheduler.values, reports=reports, jobs=jobs)


@pytest.mark.parametrize("policy", ["none", "cut", "asha", "halving", "median"])
def test_the_best_trial_keeps_the_constraint_although_others_have_a_lower_loss(tmp_path, policy):
    swept = Swept(tmp_path, constrained(FAST, policy=policy), runner=Timed()).run()
    rows = board_of(swept)
    feasible = {job.name: loss(job, 64) for job in swept.jobs if latency(job, 64) <= 0.05}
    assert best(rows)["job"] == min(feasible, key=feasible.get)
    assert min(loss(job, 64) for job in swept.jobs) < min(feasible.values())


def test_what_breaks_a_constraint_has_no_rank_and_is_shown_with_its_value(tmp_path):
    swept = Swept(tmp_path, constrained(FAST, policy="none"), runner=Timed()).run()
    rows = board_of(swept)
    jobs = {job.name: job for job in swept.jobs}
    for row in rows:
        seconds = latency(jobs[row["job"]], 64)
        assert row[INFEASIBLE] == (None if seconds <= 0.05 else f"{LATENCY} {seconds:.4g} > 0.05")
        assert (row["rank"] is None) is (seconds > 0.05)
    num_feasible = sum(row[INFEASIBLE] is None for row in rows)
    assert 0 < num_feasible < len(rows) and [row["rank"] for row in rows[:num_feasible]] == [
        *range(1, num_feasible + 1)
    ]
    section = next(each for each in sections(swept.sweep_scheduler, rows) if each.key == "constraints")
    assert section.value == [{"metric": LATENCY, "at_most": 0.05, "at_least": None}]
    assert section.lines == [
        f"{num_feasible} of the 16 trials that were trained to their ends keep `latency/p99_s <= 0.05`"
    ]


def test_if_no_trial_keeps_the_constraints_it_is_said_and_none_is_the_best(tmp_path):
    limit = Constraint(metric=LATENCY, at_most=1e-3)
    swept = Swept(tmp_path, constrained(limit, policy="halving"), runner=Timed()).run()
    rows = board_of(swept)
    assert best(rows) is None
    why = why_no_winner(swept.sweep_scheduler, rows)
    assert why.startswith(
        "no trial that was trained to its end keeps `latency/p99_s <= 0.001`, so that none is the best"
    )
    assert "nothing is promoted. The nearest is trial-" in why and f"{LATENCY} 0.0" in why
    (done,) = swept.names(JobStatus.DONE)
    fastest = min(swept.jobs, key=lambda job: latency(job, 64))
    assert done == fastest.name, "of trials that break it, those that come nearest continue"


@pytest.mark.parametrize(
    ("constraint", "metrics", "violation", "fault"),
    [
        (FAST, {LATENCY: 0.05}, 0.0, ""),
        (FAST, {LATENCY: 0.06}, 0.2, "latency/p99_s 0.06 > 0.05"),
        (FAST, {}, math.inf, "latency/p99_s has no value"),
        (FAST, {LATENCY: math.nan}, math.inf, "latency/p99_s has no value"),
        (Constraint(metric="accuracy", at_least=0.8), {"accuracy": 0.6}, 0.25, "accuracy 0.6 < 0.8"),
        (Constraint(metric="accuracy", at_least=0.8), {"accuracy": 0.9}, -0.125, ""),
        (Constraint(metric="loss", at_most=0.0), {"loss": 0.5}, 0.5, "loss 0.5 > 0"),
        (Constraint(metric="loss", at_least=1.0, at_most=2.0), {"loss": 3.0}, 0.5, "loss 3 > 2"),
        (Constraint(metric="loss", at_least=1.0, at_most=2.0), {"loss": 0.5}, 0.5, "loss 0.5 < 1"),
        (Constraint(metric="loss", at_least=-2.0), {"loss": -3.0}, 0.5, "loss -3 < -2"),
    ],
)
def test_a_violation_is_a_share_of_its_bound(constraint, metrics, violation, fault):
    assert constraint.violation(metrics) == pytest.approx(violation)
    assert constraint.fault(metrics) == fault
    assert bool(fault) is (constraint.violation(metrics) > 0)


def test_the_sampler_has_the_violations_as_optuna_keeps_them():
    ranking = ConstrainedRanking(metric="loss", constraints=(FAST, Constraint(metric="accuracy", at_least=0.5)))
    metrics = {"loss": 2.0, LATENCY: 0.1, "accuracy": 0.75}
    tried = spec(ranking=ranking).proposed_trial({"optimizer.lr": 1e-3}, metrics)
    assert (tried.targets, tried.violations) == ((-2.0,), {"latency/p99_s <= 0.05": 1.0, "accuracy >= 0.5": -0.5})
    (trial,) = study_of([RATES], [tried]).trials
    assert trial.constraints == tried.violations
    assert trial.state == optuna.trial.TrialState.COMPLETE


def test_the_sampler_proposes_values_that_keep_a_constraint():
    """The loss falls with the rate, and rates above 1e-3 break the constraint."""
    rates = [10.0 ** -(1 + i / 4) for i in range(16)]
    draw = {"sampler": "tpe", "number": 16, "num_trials": 30}

    def proposed(violation):
        tried = [ProposedTrial(values={"optimizer.lr": lr}, targets=(lr,), violations=violation(lr)) for lr in rates]
        return [propose([RATES], earlier=tried, seed=seed, **draw)["optimizer.lr"] for seed in range(10)]

    free, kept = proposed(lambda lr: {}), proposed(lambda lr: {"c": lr / 1e-3 - 1})
    assert sum(lr > 3e-3 for lr in free) >= 6
    assert sum(lr > 3e-3 for lr in kept) <= 2


def test_a_missing_value_of_a_constraint_is_taken_by_the_sampler():
    tried = [
        ProposedTrial(values={"optimizer.lr": 10.0**-i}, targets=(1.0,), violations={"c": math.inf})
        for i in range(1, 5)
    ]
    assert propose([RATES], sampler="tpe", number=4, earlier=tried, seed=0, num_trials=6)


FILE = """\
name: rates
template:
  job: {model: {from_pretrained: gpt2}, data: {source: digits}, num_steps: 16, evaluation: {metrics: [accuracy]}}
space: {optimizer.lr: [0.1, 0.2]}
num_trials: 2
"""


def told(tmp_path, text):
    file = tmp_path / "sweep.yaml"
    file.write_text(FILE + text)
    with pytest.raises(BatchFileError) as caught:
        load_sweep(file)
    return [f"{fault.line}: {fault.place}: {fault.message}. {fault.remedy}" for fault in caught.value.faults]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("constraints: {metric: latency/p98_s, at_most: 1}", "6: constraints.metric: "),
        ("constraints: {metric: acuracy, at_most: 1}", "constraints.metric: 'acuracy' is unknown. write `accuracy`"),
        ("constraints: {metric: accuracy}", "6: constraints: has no bound. give at_most or at_least"),
        ("constraints:\n- {metric: loss, at_most: 1}\n- {metric: loss, at_mots: 1}", "8: constraints[1].at_mots: is "),
        ("constraints: {metric: loss, at_most: 1, at_least: 2}", "constraints: has at_most 1 below at_least 2"),
        ("constraints: {metric: loss, at_most: .nan}", "6: constraints.at_most: "),
        ("constraint: {metric: loss, at_most: 1}", "6: constraint: is an unknown key. did you mean `constraints`?"),
    ],
)  # fmt: skip
def test_a_wrong_constraint_is_refused_with_what_there_is(tmp_path, text, words):
    found = told(tmp_path, text)
    assert any(words in each for each in found), found


def test_faults_of_constraints_and_of_the_rest_are_told_together(tmp_path):
    found = told(tmp_path, "constraints: {metric: los, at_most: 1}\nearly_stopping: {min_steps: 16}\n")
    assert any("constraints.metric: 'los' is unknown" in each for each in found)
    assert any("early_stopping.min_steps: must be less than the 16 steps" in each for each in found)


def test_trials_are_evaluated_with_the_metrics_of_the_constraints(tmp_path):
    file = tmp_path / "sweep.yaml"
    file.write_text(FILE + "constraints: {metric: loss, at_most: .5}\n")
    form = load_sweep(file)
    found = spec_of(form)
    assert found.ranking == ConstrainedRanking(metric="accuracy", constraints=(Constraint(metric="loss", at_most=0.5),))
    assert [job.evaluation.metrics for job in found.batch().jobs] == [("accuracy", "loss")] * 2
    parameters = json.loads(json.dumps(form.parameters()))
    assert spec_of(Sweep.model_validate(parameters)).ranking == found.ranking, "the flow has the same"


def test_without_constraints_trials_are_ranked_by_the_objective_alone(tmp_path):
    file = tmp_path / "sweep.yaml"
    file.write_text(FILE + "constraints: []\n")
    assert type(spec_of(load_sweep(file)).ranking).__name__ == "Ranking"


def test_fronts_are_those_of_optuna():
    import numpy as np

    random = np.random.default_rng(0)
    for num_objectives in (2, 3):
        points = random.integers(0, 6, size=(40, num_objectives)).astype(float).tolist()
        study = optuna.create_study(directions=["maximize"] * num_objectives)
        for point in points:
            study.add_trial(optuna.trial.create_trial(values=point))
        expected = {trial.number for trial in study.best_trials}
        numbers = front_numbers(points)
        assert {i for i, number in enumerate(numbers) if number == 1} == expected
        left = [i for i, number in enumerate(numbers) if number > 1]
        assert [numbers[i] for i in left] == [number + 1 for number in front_numbers([points[i] for i in left])]


def test_within_a_front_a_point_that_is_less_crowded_comes_first():
    points = [(0.0, 4.0), (1.0, 3.0), (1.1, 2.9), (4.0, 0.0), (0.0, 0.0)]
    assert crowding_distances(points[:4]) == [
        math.inf,
        pytest.approx(1.1 / 4 + 1.1 / 4),
        pytest.approx(3.0 / 4 + 3.0 / 4),
        math.inf,
    ]
    scores = front_scores(points)
    assert scores[0] == scores[3] > scores[2] > scores[1] > scores[4]
    assert front_scores([]) == [] and front_numbers([(1.0, 1.0), (1.0, 1.0)]) == [1, 1]


def by_front(*constraints, **changes):
    ranking = FrontRanking(metric="loss", others=(LATENCY,), constraints=constraints)
    return spec(ranking=ranking, **changes)


def points_of(swept, names):
    jobs = {job.name: job for job in swept.jobs}
    return {name: (loss(jobs[name], 64), latency(jobs[name], 64)) for name in names}


@pytest.mark.parametrize("policy", ["none", "cut", "asha", "halving", "median"])
def test_the_front_is_that_of_the_trials_that_were_trained_to_their_ends(tmp_path, policy):
    swept = Swept(tmp_path, by_front(policy=policy), runner=Timed()).run()
    rows = board_of(swept)
    section = next(each for each in sections(swept.sweep_scheduler, rows) if each.key == "front")
    done = points_of(swept, swept.names(JobStatus.DONE))
    front = [
        name
        for name, (loss_of, seconds) in done.items()
        if not any(a <= loss_of and b <= seconds and (a, b) != (loss_of, seconds) for a, b in done.values())
    ]
    assert sorted(section.value) == sorted(front)
    assert [row["rank"] for row in rows if row["job"] in front] == [1] * len(front)
    assert (best(rows) is None) is (len(front) > 1)
    (line,) = section.lines
    assert line.startswith(f"the front of loss and {LATENCY}: trial-")
    assert ("nothing is promoted" in line) is (len(front) > 1)


def test_the_only_trial_of_the_front_is_the_best(tmp_path):
    swept = Swept(tmp_path, by_front(policy="none", num_trials=1), runner=Timed()).run()
    rows = board_of(swept)
    assert best(rows)["job"] == "trial-0"
    section = next(each for each in sections(swept.sweep_scheduler, rows) if each.key == "front")
    assert section.lines[0].endswith("it is as good as any other in all of them")


def test_the_front_holds_trials_that_keep_the_constraints_alone(tmp_path):
    swept = Swept(tmp_path, by_front(FAST, policy="none"), runner=Timed()).run()
    rows = board_of(swept)
    section = next(each for each in sections(swept.sweep_scheduler, rows) if each.key == "front")
    assert section.value and all(seconds <= 0.05 for _, seconds in points_of(swept, section.value).values())
    assert all(row["rank"] is None for row in rows if row[INFEASIBLE])


def test_tpe_searches_for_the_front(tmp_path):
    swept = Swept(tmp_path, by_front(sampler="tpe", policy="none", num_trials=12), runner=Timed()).run()
    again = Swept(tmp_path / "again", by_front(sampler="tpe", policy="none", num_trials=12), runner=Timed(seed=1)).run()
    assert swept.sweep_scheduler.values == again.sweep_scheduler.values
    study = study_of(
        [RATES],
        [swept.sweep_scheduler.spec.proposed_trial({"optimizer.lr": 1e-3}, {"loss": 1.0, LATENCY: 0.1})],
        num_targets=2,
    )
    assert study.trials[0].values == [-1.0, -0.1]


def test_a_trial_without_a_value_of_one_objective_is_on_no_front():
    ranking = FrontRanking(metric="loss", others=(LATENCY,))
    finals = {"a": {"loss": 1.0, LATENCY: 0.1}, "b": {"loss": 0.5, LATENCY: math.nan}, "c": {}}
    standings = ranking.standings(finals, are_done=True)
    assert {name: standing.is_ranked for name, standing in standings.items()} == {"a": True, "b": False, "c": False}
    scores = ranking.scores({name: {4: metrics} for name, metrics in finals.items()})
    assert scores["a"][4] > scores["b"][4] == scores["c"][4] == -math.inf


def test_the_front_is_drawn_over_its_objectives(tmp_path):
    swept = Swept(tmp_path, by_front(FAST, policy="halving"), runner=Timed()).run()
    rows = board_of(swept)
    section = next(each for each in sections(swept.sweep_scheduler, rows) if each.key == "front")
    svg = ElementTree.fromstring(section.figures["sweep/front.svg"])
    circles = [each for each in svg.iter() if each.tag.endswith("circle") and len(each)]
    names = {each.get("class"): set() for each in circles}
    for each in circles:
        names[each.get("class")].add(each[0].text.partition(":")[0])
    assert names["front"] == set(section.value)
    assert sum(map(len, names.values())) == len(rows)
    x = {each[0].text.partition(":")[0]: float(each.get("cx")) for each in circles}
    losses = {row["job"]: row["held-out loss"] for row in rows}
    assert sorted(x, key=x.get) == sorted(losses, key=losses.get)


def test_three_objectives_are_drawn_in_pairs():
    trials = [DrawnTrial(name="a", values={"loss": 1.0, "mae": 2.0}, front=1, infeasible="", is_done=True)]
    assert "a" in draw_front("s", trials, x="loss", y="mae", has_line=False)
    assert "not drawn: 1 trial without a value" in draw_front("s", trials, x="loss", y="mse", has_line=False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("objective: [accuracy, los]", "6: objective[1].metric: 'los' is unknown"),
        (
            "objective: [accuracy, {metric: loss, direction: maximize}]",
            "6: objective[1]: has direction maximize, and loss",
        ),
        ("objective: [accuracy, loss, accuracy]", "6: objective: has accuracy twice"),
        ("objective: [accuracy, loss, f1, mse]", "6: objective: has 4 metrics. give 3 at the most"),
        ("objective: [accuracy, {metric: loss, way: up}]", "6: objective[1].way: is an unknown key"),
    ],
)
def test_wrong_objectives_are_refused(tmp_path, text, words):
    found = told(tmp_path, text)
    assert any(words in each for each in found), found


def test_a_file_with_several_objectives(tmp_path):
    file = tmp_path / "sweep.yaml"
    file.write_text(FILE + "objective: [accuracy, {metric: loss, direction: minimize}]\n")
    form = load_sweep(file)
    found = spec_of(form)
    assert found.ranking == FrontRanking(metric="accuracy", others=("loss",))
    assert [job.evaluation.metrics for job in found.batch().jobs] == [("accuracy", "loss")] * 2
    assert spec_of(Sweep.model_validate(json.loads(json.dumps(form.parameters())))).ranking == found.ranking
    file.write_text(FILE + "objective: [loss]\n")
    assert spec_of(load_sweep(file)).objective == "loss"


def test_a_constraint_is_written_as_a_comparison():
    bounds = [{"at_most": 2.0}, {"at_least": 1.0}, {"at_least": 1.0, "at_most": 2.0}]
    assert [str(Constraint(metric="loss", **each)) for each in bounds] == ["loss <= 2", "loss >= 1", "1 <= loss <= 2"]


@pytest.mark.parametrize("policy", ["cut", "halving", "asha"])
def test_a_sweep_with_a_front_that_is_killed_goes_on(tmp_path, policy):
    asked, gangs = by_front(FAST, policy=policy, sampler="tpe", num_trials=8), Timed()
    for num_messages in (7, 20):
        with suppress(Killed):
            Swept(tmp_path, asked, runner=gangs, dies_after=num_messages).run()
        gangs.running.clear()
    swept = Swept(tmp_path, asked, runner=gangs).run()
    assert swept.names(JobStatus.DONE) and set(swept.statuses.values()) <= {JobStatus.DONE, JobStatus.STOPPED}
    whole = Swept(tmp_path / "whole", asked, runner=Timed()).run()
    assert swept.sweep_scheduler.values == whole.sweep_scheduler.values

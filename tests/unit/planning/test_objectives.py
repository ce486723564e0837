"""The interface of objectives, and objectives that other packages register."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from benchmarks.planning.families import draw
from ringmaster import registry
from ringmaster.errors import BatchFileError, NoRoomError, ProblemError
from ringmaster.flows.cli import app
from ringmaster.tasks.batch import Batch, json_schema, parse_batch
from ringmaster.tasks.planning import (
    Coefficients,
    Objective,
    Option,
    Plan,
    PlanningJob,
    PlanningNode,
    Problem,
    solve,
    verify,
)
from ringmaster.tasks.planning.bounds.bounds import preemptive_bound
from ringmaster.tasks.planning.fusion import choose_groups
from ringmaster.tasks.planning.objectives import OBJECTIVES, PlanningTerms, objective_by_name, plan_giving_up_bounds
from ringmaster.tasks.planning.plans.list_scheduling import BASELINES, schedule
from ringmaster.tasks.planning.shared_speeds import plan_by_speeds
from ringmaster.tasks.planning.solve import checked_plan
from tests.drawing import draws
from tests.unit.planning.groups.test_fused import adapters
from tests.unit.planning.test_whole_problem import whole_problems

MODULE = '''
from ringmaster.tasks.planning import Coefficients, Objective


class MeanCompletion(Objective):
    """The mean end of all jobs."""

    name = "mean"

    def coefficients(self, problem):
        counts = {job.id: 1 + len(job.members) for job in problem.jobs}
        return Coefficients(ends={job: count / sum(counts.values()) for job, count in counts.items()})


class Urgent(Objective):
    """The end of the last job whose name begins with "urgent"."""

    name = "urgent"

    def coefficients(self, problem):
        return Coefficients(latest={job.id: 1.0 for job in problem.jobs if job.id.startswith("urgent")})
'''
ENTRY_POINTS = """[ringmaster.objectives]
mean = other_objectives:MeanCompletion
urgent = other_objectives:Urgent
misnamed = other_objectives:Urgent
nothing = json:dumps
"""
BATCH = """
objective: mean
jobs:
  - {name: long, model: {factory: "math:sqrt"}, data: {source: digits}, num_steps: 1}
  - {name: short, model: {factory: "math:sqrt"}, data: {source: digits}, num_steps: 1}
"""


@pytest.fixture
def fresh():
    """Forgets which objectives are installed, before a test and after it."""
    forget = (objective_by_name.cache_clear, registry.installed.cache_clear)
    for each in forget:
        each()
    yield
    for each in forget:
        each()


@pytest.fixture
def installed(tmp_path, monkeypatch, fresh):
    """A package that is installed and has further objectives."""
    folder = tmp_path / "site-packages"
    (folder / "other-1.0.dist-info").mkdir(parents=True)
    (folder / "other-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (folder / "other-1.0.dist-info" / "entry_points.txt").write_text(ENTRY_POINTS)
    (folder / "other_objectives.py").write_text(MODULE)
    monkeypatch.syspath_prepend(folder)


def two() -> Problem:
    """A job of 300 s and one of 100 s on one device."""
    jobs = (PlanningJob("long", (Option("single", 1, 300.0),)), PlanningJob("short", (Option("single", 1, 100.0),)))
    return Problem("two", (PlanningNode("n", 1),), jobs, switch_cost_s=1.0)


def ends(plan: Plan) -> dict[str, float]:
    return {segment.job: segment.end_s for segment in plan.segments}


def test_an_installed_objective_is_planned_for_from_a_batch_file_to_a_verified_plan(installed):
    batch = parse_batch(BATCH, folder=Path(), name="batch.yaml")
    assert batch.objective == "mean"
    problem = batch.terms.on(two())
    plan = checked_plan(problem, work_s=30.0, seed=0, objective=batch.terms.objective)
    assert ends(plan) == {"short": 100.0, "long": 400.0}
    assert (plan.objective, plan.value) == ("mean", 250.0)
    assert 200.0 <= plan.value_bound <= 250.0
    assert plan.gap == pytest.approx(plan.value / plan.value_bound - 1)
    wrong = Plan.from_json(plan.to_json() | {"value": 200.0, "value_bound": 0.0})
    assert verify(wrong, problem) == ["mean 200.0 claimed, 250.0 found"]


def test_it_is_found_by_the_command_that_plans(installed, tmp_path):
    problem, planned = tmp_path / "problem.json", tmp_path / "plan.json"
    problem.write_text(json.dumps(two().to_json()))
    done = CliRunner().invoke(app, ["plan", str(problem), "--objective", "mean", "-o", str(planned)])
    assert done.exit_code == 0, done.output
    assert "mean 250.00, no plan below" in done.output
    assert json.loads(planned.read_text())["objective"] == "mean"
    assert CliRunner().invoke(app, ["check", str(problem), str(planned)]).exit_code == 0


def test_editors_offer_it(installed):
    assert json_schema()["properties"]["objective"]["enum"][:10] == [
        "makespan",
        "weighted",
        "mean_completion",
        "fairness",
        "time-to-target",
        "cost",
        "emissions",
        "trade-off",
        "mean",
        "urgent",
    ]


@pytest.mark.full
def test_equal_weights_are_the_mean(installed):
    problem = draw("paper-txt-6x4", seed=1)
    mean, weighted = solve(problem, objective="mean"), solve(problem, objective="weighted")
    assert verify(mean, problem) == []
    assert mean.value == pytest.approx(weighted.value / len(problem.jobs), rel=0.01)
    assert mean.value_bound == pytest.approx(weighted.value_bound / len(problem.jobs))


def test_jobs_that_are_trained_together_count_each(installed):
    problem = adapters(12.0)
    fusion = choose_groups(problem, objective="mean")
    assert fusion.groups == {"a": ("b",), "c": ("d",)}
    assert verify(fusion.fused_plan, problem) == []
    assert (fusion.fused_plan.value, fusion.alone.value) == pytest.approx((12.0, 15.0))
    assert fusion.in_words().startswith("fused 4 jobs into 2 groups: a mean of 12 instead of a mean of 15, 20 % less")


@pytest.mark.full
def test_only_the_jobs_that_are_named_must_end_early(installed):
    problem = draw("paper-txt-8x4", seed=1)
    jobs = problem.jobs
    jobs = (*jobs[:-2], *(PlanningJob(f"urgent-{job.id}", job.options) for job in jobs[-2:]))
    problem = Problem(problem.name, problem.nodes, jobs, problem.switch_cost_s)
    plan = solve(problem, objective="urgent")
    assert verify(plan, problem) == []
    alone = solve(Problem("urgent", problem.nodes, jobs[-2:], problem.switch_cost_s))
    assert plan.value == pytest.approx(alone.makespan_s, rel=0.01)
    assert plan.value_bound <= plan.value < plan.makespan_s


@pytest.mark.parametrize("name", ["speed", "misnamed", "nothing"])
def test_what_is_no_objective_is_refused(installed, name):
    with pytest.raises(
        ValueError,
        match=r"unknown objective 'speed'|is not a subclass of|entry point 'misnamed' has the objective",
    ):
        solve(two(), objective=name)


def test_without_its_package_a_name_is_unknown_everywhere(fresh, tmp_path):
    with pytest.raises(BatchFileError, match=r"'mean' is unknown. To fix: did you mean `makespan`\? Use one of cost"):
        parse_batch(BATCH, folder=Path(), name="batch.yaml")
    problem = tmp_path / "problem.json"
    problem.write_text(json.dumps(two().to_json()))
    refused = CliRunner().invoke(app, ["plan", str(problem), "--objective", "mean"], env={"COLUMNS": "200"})
    assert refused.exit_code == 2
    assert (
        "'mean' is not one of 'makespan', 'weighted', 'mean_completion', 'fairness', 'time-to-target', 'cost', "
        "'emissions', 'trade-off'." in refused.output
    )
    plan = Plan.from_json(solve(two()).to_json() | {"objective": "mean"})
    assert verify(plan, two()) == ["the objective 'mean' is unknown. To fix: install the package that registers it"]


class Mixed(Objective):
    """All parts of a value at once: some ends in the maximum, some in the sum, and devices on some nodes."""

    name = "mixed"

    def coefficients(self, problem: Problem) -> Coefficients:
        return Coefficients(
            latest={job.id: 2.0 for job in problem.jobs[::2]},
            ends={job.id: 0.5 for job in problem.jobs[1:]},
            prices={node.id: 0.25 for node in problem.nodes[:1]},
        )


@pytest.fixture
def mixed(monkeypatch, fresh):
    monkeypatch.setitem(OBJECTIVES.registered, "mixed", f"{__name__}:Mixed")


def test_a_value_is_the_sum_of_its_parts():
    of = Mixed().coefficients(two())
    assert of.value({"long": 30.0, "short": 10.0}, [("n", 40.0), ("other", 9.0)]) == 60.0 + 5.0 + 10.0
    ends_s, num_devices = {"long": 30.0, "short": 10.0}, {"n": 2, "other": 2}
    assert of.in_seconds(ends_s, {"n": 40.0}, num_devices=num_devices) == (60.0 + 5.0 + 10.0) / (2.5 + 0.5)
    assert of.in_seconds({"short": 10.0}, {}, num_devices={}) == 10.0
    assert Coefficients(prices={"n": 1.0}).in_seconds(ends_s, {"n": 40.0}, num_devices=num_devices) == 20.0
    assert Coefficients().in_seconds(ends_s, {"n": 40.0}, num_devices=num_devices) == 30.0
    assert Coefficients().in_seconds({}, {}, num_devices={}) == 0.0


@draws(15)
@given(problem=whole_problems())
def test_no_plan_is_below_the_bound_of_all_parts(problem):
    objective, choices = Mixed(), [(job.id, len(job.options) - 1) for job in problem.jobs]
    for prices in ({}, objective.coefficients(problem).prices):
        try:
            plan = Plan(problem.name, schedule(problem, choices, prices=prices))
        except NoRoomError:
            continue
        assert objective.lower_bound(problem, preemptive_bound(problem)) <= objective.value(plan, problem) * (1 + 1e-9)


def test_all_parts_are_planned_for_together(mixed):
    problem = draw("paper-txt-6x4", seed=1)
    plan = solve(problem, objective="mixed", work_s=1.0)
    assert verify(plan, problem) == []
    assert plan.value_bound <= plan.value
    for other in ("makespan", "weighted"):
        assert plan.value <= Mixed().value(solve(problem, objective=other, work_s=1.0), problem) * (1 + 1e-3)


def test_prices_are_those_of_the_batch_where_they_count():
    for objective, price in (("makespan", 0.0), ("cost", 0.01)):
        (node,) = PlanningTerms(objective=objective, price_per_device_hour=36.0).on(two()).nodes
        assert node.price == price


def test_users_are_done_as_fairly_as_the_bound_allows():
    problem = draw("paper-txt-8x4", seed=1)
    jobs = tuple(replace(job, user="ana" if i < 2 else "ben") for i, job in enumerate(problem.jobs))
    problem = replace(problem, jobs=jobs)
    plan = solve(problem, objective="fairness", work_s=1.0)
    assert verify(plan, problem) == []
    assert plan.gap < 0.05
    shortest = solve(problem, work_s=1.0)
    assert objective_by_name("fairness").value(shortest, problem) > plan.value
    assert shortest.makespan_s <= plan.makespan_s * (1 + 1e-9)


def test_fairness_trains_no_jobs_together():
    """The first two jobs take half as long together. Their group would have one user, and the other would not count."""
    alone = (Option("single", 1, 100.0),)
    jobs = (
        PlanningJob("a", (*alone, Option("shared_base", 1, 100.0, jobs=("b",))), user="ana"),
        PlanningJob("b", alone, user="ben"),
        PlanningJob("c", alone, user="cy"),
    )
    problem = Problem("three", (PlanningNode("n", 1),), jobs)
    assert choose_groups(problem, work_s=1.0).groups
    fair = choose_groups(problem, objective="fairness", work_s=1.0)
    assert not fair.groups
    assert verify(fair.fused_plan, problem) == []


@pytest.mark.full
@draws(10)
@given(whole_problems())
def test_plans_for_fairness_keep_every_rule(problem):
    jobs = tuple(replace(job, user=("", "a", "b")[i % 3]) for i, job in enumerate(problem.jobs))
    problem = replace(problem, jobs=jobs)
    try:
        plan = solve(problem, objective="fairness", work_s=2.0)
    except ProblemError as error:
        assert error.faults
        return
    assert verify(plan, problem) == []
    assert plan.value_bound <= plan.value
    assert Problem.from_json(problem.to_json()) == problem


def test_jobs_of_seconds_beside_one_of_years_are_planned_for_fairness():
    """Rounding leaves nothing of them in any period between two events."""
    runtimes_s = (1.0, 1.0, 1.0, 1e9)
    jobs = tuple(
        PlanningJob(f"j{i}", (Option("t", 1, runtime_s),), weight=0.0, user=("", "a", "b")[i % 3])
        for i, runtime_s in enumerate(runtimes_s)
    )
    problem = Problem("short", (PlanningNode("n", 2, price=0.0),), jobs)
    assert verify(solve(problem, objective="fairness", work_s=2.0), problem) == []


def test_the_users_of_a_batch_file_are_groups_of_its_plans():
    text = BATCH.replace("objective: mean", "objective: fairness").replace("name: long,", "name: long, user: ana,")
    batch = parse_batch(text, folder=Path(), name="batch.yaml")
    assert [job.user for job in batch.terms.on(two()).jobs] == ["ana", ""]
    assert Batch.from_json(batch.to_json()) == batch
    with pytest.raises(BatchFileError, match=r"user"):
        parse_batch(text.replace("user: ana", "user: [ana]"), folder=Path(), name="batch.yaml")


# -- shared speeds ----------------------------------------------------------------------------------------------------


@draws(60)
@given(whole_problems(), st.sampled_from(["mean_completion", "weighted"]))
def test_plans_that_share_the_devices_follow_every_rule(problem, objective):
    ends = objective_by_name(objective).coefficients(problem).ends
    try:
        plan = plan_by_speeds(problem, ends)
    except NoRoomError:
        return
    late = {job.id for job in problem.jobs if job.deadline_s is not None}
    assert not [fault for fault in verify(plan, problem) if not any(job in fault for job in late)]


def test_devices_go_to_the_jobs_that_use_them_best_and_none_is_left_idle():
    poor = tuple(Option("ddp", size, 1000.0 / size**0.2) for size in (1, 2, 4))
    good = tuple(Option("ddp", size, 1000.0 / size**0.9) for size in (1, 2, 4))
    jobs = (PlanningJob("poor", poor), PlanningJob("good", good), PlanningJob("also-poor", poor))
    problem = Problem("three", (PlanningNode("n", 4), PlanningNode("m", 4)), jobs, switch_cost_s=60.0)
    plan = plan_by_speeds(problem, dict.fromkeys(("poor", "good", "also-poor"), 1.0))
    sizes = {s.job: problem.job(s.job).options[s.option].num_devices for s in plan.segments}
    assert all(segment.start_s == 0.0 for segment in plan.segments)
    assert sizes["good"] == 4
    assert sum(sizes.values()) == 8


def test_a_job_waits_only_where_no_device_is_left_and_the_cheapest_one_is_first():
    lengths_s = {"a": 400.0, "b": 100.0, "c": 300.0, "d": 200.0}
    jobs = tuple(PlanningJob(name, (Option("single", 1, seconds),)) for name, seconds in lengths_s.items())
    problem = Problem("four", (PlanningNode("n", 2),), jobs, switch_cost_s=60.0)
    plan = plan_by_speeds(problem, {"a": 1.0, "b": 1.0, "c": 2.0, "d": 2.0})
    starts = {segment.job: segment.start_s for segment in plan.segments}
    assert {job for job, start_s in starts.items() if start_s == 0.0} == {"c", "d"}  # the heavier ones
    assert starts["b"] < starts["a"]


def test_many_jobs_end_sooner_on_average_than_by_any_other_rule():
    problem = draw("scale-100x128")
    objective = objective_by_name("mean_completion")
    ends = objective.coefficients(problem).ends
    value = objective.value(plan_by_speeds(problem, ends), problem)
    assert value < 0.9 * min(objective.value(rule(problem), problem) for rule in BASELINES)


def test_a_batch_that_runs_goes_on_where_its_node_was_to_go_away():
    """Budgets are given up first, then deadlines, then the ends of nodes; what is needed least is tried first."""
    nodes = (PlanningNode("spot", 1, available_until_s=0.0),)
    given = Problem("p", nodes, (PlanningJob("a", (Option("single", 1, 4.0),)),), budgets={"cost": 1.0})
    tried = []

    def make_plan(problem):
        tried.append((bool(problem.budgets), problem.nodes[0].available_until_s))
        return solve(problem, work_s=0.05)

    plan, late = plan_giving_up_bounds(given, make_plan)
    assert (plan.makespan_s, late) == (4.0, ())
    assert tried == [(True, 0.0), (False, 0.0), (False, None)]
    with pytest.raises(ProblemError):
        plan_giving_up_bounds(replace(given, nodes=(PlanningNode("spot", 1),)), _no_plan)


def _no_plan(problem):
    raise ProblemError(["nothing fits"])

"""What a batch has spent: as measured, as planned, and what waiting would gain."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from ringmaster.errors import ProblemError
from ringmaster.features.tariffs.pages import KEY, SpendingReport, spent_by
from ringmaster.features.tariffs.series import HOUR_S, Series
from ringmaster.features.tariffs.terms import Spending, Tariff, Tariffs
from ringmaster.features.tariffs.waiting import gain_lines, gains_to_json, step_of, wait_gains
from ringmaster.tasks.cluster import Cluster, Device, Node
from ringmaster.tasks.control.batch_terms import uses_of
from ringmaster.tasks.execution.replan_policy import ReplanPolicy, is_worth_it
from ringmaster.tasks.planning import Option, Plan, PlanningJob, PlanningNode, Problem, Segment
from ringmaster.tasks.planning.gantt import render_svg
from ringmaster.tasks.planning.objectives import PlanningTerms
from ringmaster.tasks.planning.series_bands import power_sentence, series_bands, series_of
from ringmaster.tasks.profiling.search import planning_problem
from ringmaster.tasks.storage.journal import SegmentRecord, SegmentSpec
from ringmaster.techniques.processes.gang_events import JobResult
from tests.unit.execution.fakes import job, open_journal, profile
from tests.unit.execution.test_waits import planned, simulated

TIMES_S = (1.8e9, 1.8e9 + HOUR_S)
PRICE = Series(values=(4.0, 1.0), times_s=TIMES_S, ends_s=TIMES_S[1] + HOUR_S)
TARIFFS = Tariffs(
    every=Tariff(price=PRICE, carbon=Series.constant(500.0)), nodes={"n1": Tariff(power_w=2000.0)}, max_money=9.0
)


def record(number=1, *, devices=("n0:gpu:0",), started_s=TIMES_S[0], ended_s=None):
    return SegmentRecord(id=number, job="a", spec=SegmentSpec(devices=devices), started_s=started_s, ended_s=ended_s)


def tariff_problem(runtime_s=HOUR_S / 2):
    steps = ((0.0, 4.0 / HOUR_S), (HOUR_S, 1.0 / HOUR_S))
    nodes = (PlanningNode("n0", 1, price_steps=steps, carbon_steps=((0.0, 500.0),), power_w=1000.0),)
    return Problem("p", nodes, (PlanningJob("a", (Option("single", 1, runtime_s),)),), switch_cost_s=0.0)


def test_segments_are_paid_by_the_time_at_which_they_run():
    later = record(2, started_s=TIMES_S[0] + HOUR_S / 2, ended_s=TIMES_S[1] + HOUR_S / 2)
    assert spent_by(TARIFFS, [later], {}, now_s=0.0).money == pytest.approx(2.0 + 0.5)
    running = record(devices=("n0:gpu:0", "n0:gpu:1", "n1:gpu:0"))
    uses = uses_of(running, now_s=TIMES_S[0] + 900.0)
    assert [(use.node, use.num_devices, use.ended_s - use.started_s) for use in uses] == [
        ("n0", 2, 900.0),
        ("n1", 1, 900.0),
    ]
    spent = spent_by(TARIFFS, [running], {}, now_s=TIMES_S[0] + 900.0)
    assert spent == Spending(money=3.0, emissions_g=pytest.approx(250.0), energy_j=2000.0 * 900.0)


def test_measured_energy_counts_rather_than_the_power_that_is_given():
    whole = record(devices=("n1:gpu:0",), ended_s=TIMES_S[1])
    assert spent_by(TARIFFS, [whole], {1: 3.6e6}, now_s=0.0).emissions_g == 500.0
    assert spent_by(TARIFFS, [whole], {1: None}, now_s=0.0).emissions_g == 1000.0


def test_the_result_of_a_batch_has_what_was_spent_and_what_was_planned(tmp_path):
    journal, problem = open_journal(tmp_path), tariff_problem()
    plan = Plan("p", (Segment("a", 0, HOUR_S, 1.5 * HOUR_S, 1.0, 0.0, (("n0", (0,)),)),), objective="cost")
    journal.clock = lambda: TIMES_S[0]
    journal.write_job("a")
    journal.write_plan({"problem": problem.to_json(), "plan": plan.to_json()}, why="start")
    (number,) = journal.start_segments([("a", SegmentSpec(devices=("n0:gpu:0",)))])
    journal._clocks.clear()
    journal.clock = lambda: TIMES_S[0] + HOUR_S / 2
    journal.end_segment(number, JobResult(status="done"))
    batch = SimpleNamespace(terms=PlanningTerms(objective="cost", features=(TARIFFS,)), objective="cost")
    hook = SpendingReport()
    results = hook.batch_results(batch, journal, since_s=TIMES_S[0])
    assert results[KEY]["measured"] == {
        "money": pytest.approx(2.0),
        "emissions_g": pytest.approx(250.0),
        "energy_j": pytest.approx(1.8e6),
    }
    assert results[KEY]["planned"] == {"money": pytest.approx(0.5), "emissions_g": pytest.approx(250.0)}
    assert results["value"] == pytest.approx(2.0)
    assert results[KEY]["power"] == "given by power_w"
    assert hook.batch_metrics(results)["planned_money"] == pytest.approx(0.5)
    assert next(iter(hook.batch_sentences(results))) == "money: 2, planned 0.5, at most 9"
    journal.write_job("a", energy_j={str(number): 3.6e6})
    again = hook.batch_results(batch, journal, since_s=TIMES_S[0])
    assert again[KEY]["measured"]["emissions_g"] == pytest.approx(500.0)
    assert again[KEY]["power"] == "measured by NVML"
    free = SimpleNamespace(terms=PlanningTerms(), objective="makespan")
    assert hook.batch_results(free, journal, since_s=0.0) == {} and not hook.batch_metrics({})


@pytest.mark.parametrize(("objective", "is_better"), [("cost", True), ("makespan", False)])
def test_a_plan_that_waits_for_a_cheap_time_is_followed_where_money_counts(objective, is_better):
    policy = ReplanPolicy(objective=objective)
    assert is_worth_it(simulated(planned("a")), [planned("a", at_s=100.0)], policy=policy) is is_better
    assert is_worth_it(simulated(planned("a", at_s=100.0)), [planned("a")], policy=policy) is not is_better


def test_waiting_gains_what_its_plans_save():
    def make_plan(problem, objective):
        (job,) = problem.jobs
        begins_s = HOUR_S if objective == "cost" and job.deadline_s >= 1.5 * HOUR_S else 0.0
        whole_s = job.options[0].runtime_s
        segment = Segment("a", 0, begins_s, begins_s + whole_s, 1.0, 0.0, (("n0", (0,)),))
        return Plan("p", (segment,), objective=objective, value_bound=0.25)

    problem = tariff_problem()
    assert step_of(problem) == HOUR_S
    gains = wait_gains(problem, objective="cost", make_plan=make_plan)
    assert [(each.wait_s / HOUR_S, each.measures.cost) for each in gains[:3]] == [
        (0, pytest.approx(2.0)),
        (1, pytest.approx(0.5)),
        (2, pytest.approx(0.5)),
    ]
    data = gains_to_json(gains, objective="cost")
    assert data["waits"][1]["least"] == 0.25 and data["waits"][1]["emissions_g"] == pytest.approx(250.0)
    lines = list(gain_lines(gains, problem, objective="cost"))
    assert "-75.0%" in lines[2] and "as early as it can" in lines[1]
    constant = replace(problem, nodes=(PlanningNode("n0", 1, price=1.0),))
    with pytest.raises(ProblemError, match="waiting gains nothing"):
        wait_gains(constant, objective="cost", make_plan=make_plan)


def test_a_chart_has_a_band_for_each_kind_of_series():
    problem = tariff_problem()
    price, carbon = series_bands(series_of(problem))
    assert price.lines == ((("n0",), ((0.0, 4.0), (HOUR_S, 1.0))),) and carbon.largest == 500.0
    plan = Plan("p", (Segment("a", 0, HOUR_S, 1.5 * HOUR_S, 1.0, 0.0, (("n0", (0,)),)),), objective="cost", value=0.5)
    drawn = render_svg(plan, problem)
    assert drawn.count('class="series"') == 2 and "per device-hour on n0: 4; 1" in drawn
    free = replace(problem, nodes=(PlanningNode("n0", 1),))
    assert series_bands(series_of(free)) == () and "series" not in render_svg(plan, free)


def test_plans_and_results_say_what_power_devices_have_and_who_says_so(tmp_path):
    problem = tariff_problem()
    (node,) = problem.nodes
    limited = replace(node, id="n1", power_w=700.0, power_source="power limits by NVML")
    both = replace(problem, nodes=(replace(node, power_source="given by power_w"), limited))
    sentence = "power of a device: 1000 W on n0 (given by power_w), 700 W on n1 (power limits by NVML)"
    assert power_sentence(both) == sentence and Problem.from_json(both.to_json()) == both
    plan = Plan("p", (Segment("a", 0, HOUR_S, 1.5 * HOUR_S, 1.0, 0.0, (("n0", (0,)),)),), objective="cost", value=0.5)
    assert sentence in render_svg(plan, both)
    assert power_sentence(replace(problem, nodes=(replace(node, carbon_steps=()),))) is None


def test_devices_have_a_usual_power_where_nothing_says_another():
    slots = tuple(Device(kind="cpu", index=i, name="c", memory_bytes=1, cores=(2 * i, 2 * i + 1)) for i in range(2))
    gpu = Device(kind="gpu", index=0, name="g", memory_bytes=1, cores=())
    limited = replace(gpu, power_limit_w=700.0)
    nodes = tuple(
        Node(name=name, devices=devices) for name, devices in [("c", slots), ("g", (gpu,)), ("l", (limited,))]
    )
    one = job("a")
    planned = planning_problem([one], {"a": (profile(),)}, Cluster(nodes=nodes), name="p").nodes
    usual = "usual power, as NVML says none"
    assert [(node.power_w, node.power_source) for node in planned] == [
        (24.0, usual),
        (200.0, usual),
        (700.0, "power limits by NVML"),
    ]
    tariffs = Tariffs(every=Tariff(carbon=Series.constant(1.0)), nodes={"c": Tariff(power_w=30.0)})
    terms = PlanningTerms(objective="emissions", features=(tariffs,))
    given, *others = terms.on(planning_problem([one], {"a": (profile(),)}, Cluster(nodes=nodes), name="p")).nodes
    assert (given.power_w, given.power_source) == (30.0, "given by power_w")
    assert [node.power_w for node in others] == [200.0, 700.0]

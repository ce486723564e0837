"""Series of prices and carbon in problems: values, integrals, JSON, and every fault with its place."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringmaster.tasks.planning import Option, PlanningJob, PlanningNode, Problem, ProblemError
from ringmaster.tasks.planning.problems.series import integral, steps_from, value_at

STEPS = ((0.0, 2.0), (10.0, 5.0), (30.0, 0.0))
PROBLEM = {
    "name": "hours",
    "nodes": [
        {"id": "n0", "gpus": 2, "prices": [[0, 2], [10, 5]], "carbon": [[0, 300], [3600, 100]], "power": 250.0},
        {"id": "n1", "gpus": 2, "price": 1.0, "energy_prices": [[0, 0.2]], "power": 300.0},
    ],
    "jobs": [{"id": "a", "options": [{"technique": "ddp", "gpus": 1, "runtime": 10.0, "power": 100.0}]}],
    "budgets": {"cost": 40.0, "emissions": 1e6},
    "factors": {"end": 0.5, "cost": 1.0},
}


def changed(**node: object) -> dict:
    return PROBLEM | {"nodes": [PROBLEM["nodes"][0] | node, PROBLEM["nodes"][1]]}


def faults(data: dict) -> tuple[str, ...]:
    with pytest.raises(ProblemError) as caught:
        Problem.from_json(data)
    return tuple(caught.value.faults)


def test_a_value_holds_from_its_step_on():
    assert [value_at(STEPS, at_s) for at_s in (0.0, 9.9, 10.0, 29.0, 1e9)] == [2.0, 2.0, 5.0, 5.0, 0.0]
    assert value_at((), 3.0) == 0.0


def test_an_integral_adds_the_parts_of_its_steps():
    assert integral(STEPS, 5.0, 40.0) == 5 * 2 + 20 * 5
    assert integral((), 0.0, 9.0) == 0.0


@given(st.floats(0, 60), st.floats(0, 60), st.floats(0, 60))
def test_a_series_that_begins_later_has_the_same_integrals(elapsed_s: float, start_s: float, length_s: float):
    later = integral(steps_from(STEPS, elapsed_s), start_s, start_s + length_s)
    now = integral(STEPS, elapsed_s + start_s, elapsed_s + start_s + length_s)
    assert math.isclose(later, now, rel_tol=1e-9, abs_tol=1e-9)


def test_series_budgets_and_factors_are_read_and_written():
    problem = Problem.from_json(PROBLEM)
    assert problem.nodes[0].price_steps == ((0, 2), (10, 5))
    assert problem.nodes[0].power_w == 250.0 and problem.jobs[0].options[0].power_w == 100.0
    assert problem.budgets == {"cost": 40.0, "emissions": 1e6} and problem.factors == {"end": 0.5, "cost": 1.0}
    again = Problem.from_json(json.loads(json.dumps(problem.to_json())))
    assert again == problem
    bare = replace(problem, budgets={}, factors={}, nodes=(PlanningNode("n0", 2),))
    assert not {"budgets", "factors"} & bare.to_json().keys() and bare.to_json()["nodes"] == [{"id": "n0", "gpus": 2}]


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"prices": 3}, "node n0: prices: must be a list of [start in seconds, value], not 3"),
        ({"prices": [[0, 1], 7]}, "node n0: prices, step 1: must be [start in seconds, value], not 7"),
        ({"prices": [[0, -1]]}, "node n0: prices, step 0: value must be a number >= 0 (and at most 1e+15), not -1"),
        ({"carbon": [[0, math.nan]]}, "node n0: carbon, step 0: value must be a number >= 0"),
        ({"carbon": [[0, 1], [math.inf, 2]]}, "node n0: carbon, step 1: start must be a number of seconds >= 0"),
        ({"prices": [[5, 1]]}, "node n0: prices, step 0: starts at 5; the first step must start at 0"),
        ({"prices": [[0, 1], [9, 1], [9, 2]]}, "node n0: prices, step 2: starts at 9, not after 9, the one before"),
        ({"prices": [[0, "x"]]}, "node n0: prices, step 0: value must be a number >= 0"),
        ({"price": 1.0}, "node n0: has both price and prices; remove one of them"),
        ({"power": -1}, "node n0: power must be a number >= 0"),
    ],
)
def test_a_bad_series_is_refused_with_its_place(node: dict, message: str):
    (fault,) = faults(changed(**node))
    assert fault.startswith(message)


def test_all_faults_of_all_series_are_reported_at_once():
    told = faults(changed(prices=[[1, -1], [0, 2]], carbon=[[0, True]]) | {"budgets": {"money": 1}, "factors": {}})
    assert [fault.partition(":")[0] for fault in told] == ["node n0"] * 4 + ["problem"]


def test_a_node_with_carbon_needs_a_power():
    data = changed(power=0)
    data["jobs"] = [{"id": "a", "options": [{"technique": "ddp", "gpus": 1, "runtime": 10.0}]}]
    assert faults(data) == ("node n0: has carbon, but neither it nor option 0 of job 'a' gives its power",)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("budgets", 3, "problem: budgets must be an object with any of cost, emissions, not 3"),
        ("budgets", {"cost": -1}, "problem: budgets: cost must be 0 or a number from"),
        ("factors", {"end": 0}, "problem: factors are all 0; give one that is larger"),
        ("factors", {"speed": 1}, "problem: factors has the unknown key 'speed'; there are end, cost, emissions"),
    ],
)
def test_bad_budgets_and_factors_are_refused(key: str, value: object, message: str):
    (fault,) = faults(PROBLEM | {key: value})
    assert fault.startswith(message)


def test_jobs_with_other_powers_are_not_alike():
    option = Option("ddp", 1, 10.0)
    jobs = (PlanningJob("a", (option,)), PlanningJob("b", (replace(option, power_w=100.0),)))
    assert Problem("two", (PlanningNode("n0", 1),), jobs).classes == ((0,), (1,))

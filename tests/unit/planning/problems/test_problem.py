import json
import math

import pytest
from hypothesis import given

from ringmaster.errors import ProblemError
from ringmaster.tasks.planning import Option, PlanningJob, PlanningNode, Problem
from tests.unit.planning.draw import problems, tiny


def faults_of(data) -> str:
    with pytest.raises(ProblemError) as caught:
        Problem.from_json(data)
    return "\n".join(caught.value.faults)


def valid() -> dict:
    return {
        "name": "p",
        "switch_cost": 60.0,
        "nodes": [{"id": "n0", "gpus": 4}],
        "jobs": [{"id": "a", "options": [{"technique": "ddp", "gpus": 2, "nodes": 1, "runtime": 10.0}]}],
    }


@given(problems())
def test_json_round_trip(problem):
    assert Problem.from_json(json.loads(json.dumps(problem.to_json()))) == problem


@pytest.mark.parametrize("runtime", [math.nan, math.inf, -1.0, 0, None, "ten", True, []])
def test_a_wrong_runtime_is_named(runtime):
    data = valid()
    data["jobs"][0]["options"][0]["runtime"] = runtime
    assert "job a, option 0: runtime" in faults_of(data)


@pytest.mark.parametrize("gpus", [0, -2, 1.5, None, "2", True])
def test_a_wrong_number_of_devices_is_named(gpus):
    data = valid()
    data["jobs"][0]["options"][0]["gpus"] = gpus
    assert "job a, option 0: gpus" in faults_of(data)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.update(nodes=[]), "has no nodes"),
        (lambda d: d.update(jobs=[]), "has no jobs"),
        (lambda d: d.update(jobs=None), "jobs: must be a list"),
        (lambda d: d.pop("jobs"), "jobs: must be a list"),
        (lambda d: d.update(name=3), "name must be text"),
        (lambda d: d.update(switch_cost=-1), "switch_cost must be"),
        (lambda d: d["nodes"].append({"id": "n0", "gpus": 2}), "node n0: this id is used more than once"),
        (lambda d: d["nodes"][0].update(gpu=2), "node 0: unknown key 'gpu'"),
        (lambda d: d["jobs"].append(d["jobs"][0]), "job a: this id is used more than once"),
        (lambda d: d["jobs"].append("b"), "job 1: must be an object"),
        (lambda d: d["jobs"][0].update(options=[]), "job a: has no options"),
        (lambda d: d["jobs"][0].update(after=["ghost"]), "after names 'ghost'"),
        (lambda d: d["jobs"][0].update(after=[["a"]]), "after names ['a']"),
        (lambda d: d["jobs"][0].update(after=["a"]), "in a cycle"),
        (lambda d: d["jobs"][0]["options"][0].update(gpus=8), "needs 1 node(s) with 8 gpus or more"),
        (lambda d: d["jobs"][0]["options"][0].update(nodes=2), "needs 2 node(s) with 1 gpus or more"),
        (lambda d: d["jobs"][0]["options"][0].update(gpus=3, nodes=2), "cannot be spread evenly"),
        (lambda d: d["jobs"][0]["options"][0].update(config=1), "config must be an object"),
    ],
)
def test_each_fault_is_named(change, says):
    data = valid()
    change(data)
    assert says in faults_of(data)


def test_all_faults_are_told_at_once():
    data = valid()
    data["switch_cost"] = math.nan
    data["jobs"][0]["options"][0] |= {"runtime": 0, "gpus": 16}
    data["jobs"].append({"id": "b"})
    told = faults_of(data)
    for fault in ("switch_cost", "runtime", "16 gpus", "job b: options: must be a list", "job b: has no options"):
        assert fault in told


def test_only_the_jobs_of_a_cycle_are_named():
    option = (Option("single", 1, 1.0),)
    with pytest.raises(ProblemError) as caught:
        Problem(
            "p",
            (PlanningNode("n", 1),),
            (
                PlanningJob("before", option),
                PlanningJob("x", option, ("y", "before")),
                PlanningJob("y", option, ("x",)),
                PlanningJob("behind", option, ("y",)),
            ),
        )
    assert caught.value.faults == ("jobs x, y: wait for each other in a cycle; remove one `after`",)


def test_not_an_object():
    assert "must be an object" in faults_of([1, 2])


def test_a_problem_error_is_a_value_error():
    assert issubclass(ProblemError, ValueError)
    assert tiny().num_devices == 2

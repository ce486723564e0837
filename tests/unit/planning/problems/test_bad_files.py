"""Invalid problem files: exit 2, every fault named, no traceback, no hang."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringmaster.errors import ProblemError
from ringmaster.flows.entry import main
from ringmaster.tasks.planning import Plan, Problem, solve, verify
from tests.drawing import draws


def problem_file(**changes) -> dict:
    option = {"technique": "ddp", "gpus": 2, "runtime": 10.0}
    return {
        "name": "p",
        "nodes": [{"id": "n0", "gpus": 4}, {"id": "n1", "gpus": 4}],
        "jobs": [{"id": "a", "options": [option]}, {"id": "b", "options": [dict(option)]}],
    } | changes


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """A function that returns the errors of `ringmaster plan` for a file that it must refuse with exit code 2."""

    def run(content: str | bytes) -> str:
        path = tmp_path / "problem.json"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        monkeypatch.setattr("sys.argv", ["ringmaster", "plan", str(path)])
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr().err
        assert ended.value.code == 2
        assert "Traceback" not in told
        return told

    return run


DEEP = "[" * 100_000 + "]" * 100_000
NESTED = '"config": {"a": ' + "[" * 400 + "]" * 400 + "}"
DEEP_CONFIG = json.dumps(problem_file()).replace('"technique"', NESTED + ', "x": 1, "technique"')
HUGE = json.dumps(problem_file()).replace("10.0", "1" + "0" * 400)
LONGER = json.dumps(problem_file()).replace("10.0", "1" + "0" * 5000)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not JSON"),
        ("not json", "not JSON"),
        ('{"name": ', "not JSON"),
        ("\x00", "not JSON"),
        (DEEP, "not JSON"),
        (LONGER, "not JSON"),
        (HUGE, "runtime must be a number of seconds > 0"),
        (DEEP_CONFIG, "unknown key 'x"),
        ("null", "problem: must be an object"),
        ("[]", "problem: must be an object"),
        ("3", "problem: must be an object"),
        ('"text"', "problem: must be an object"),
        ("{}", "problem: has no jobs"),
        ('{"name": "p", "nodes": {}, "jobs": 3}', "nodes: must be a list"),
        ('{"name": "p", "nodes": [], "jobs": []}', "problem: has no nodes"),
        ('{"name": "p", "nodes": [1], "jobs": [null]}', "node 0: must be an object"),
    ],
)
def test_what_is_no_problem_is_refused(refused, text, says):
    assert says in refused(text)


def test_a_file_of_bytes_is_refused(refused):
    assert "not JSON" in refused(b"\xff\xfe\x80")


SEGMENT = {"job": "a", "option": 0, "start": 0, "end": 1, "work": 1, "gpus": [["n0", [0, 1]]]}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"job": ["a"]}, "segments, 0, job: input should be a valid string"),
        ({"option": True}, "segments, 0, option: input should be a valid integer"),
        ({"start": "1"}, "segments, 0, start: input should be a valid number"),
        ({"end": 10**400}, "segments, 0, end: input should be a valid number"),
        ({"gpus": [[["n0"], [0]]]}, "segments, 0, gpus, 0, 0: input should be a valid string"),
        ({"gpus": [["n0", [[0]]]]}, "segments, 0, gpus, 0, 1, 0: input should be a valid integer"),
        ({"gpus": [3]}, "segments, 0, gpus, 0: input should be a valid tuple"),
    ],
)
def test_a_plan_whose_values_are_of_another_kind_is_refused(changes, says):
    with pytest.raises(ValueError, match=f"not a plan: {says}.*To fix"):
        Plan.from_json({"instance": "p", "segments": [SEGMENT | changes]})


def test_a_plan_is_checked_though_it_claims_a_value_and_names_other_jobs():
    plan = Plan.from_json({"instance": "p", "segments": [SEGMENT | {"job": "x"}], "objective": "weighted", "value": 1})
    assert "segment 0 (job x): no such job" in verify(plan, Problem.from_json(problem_file()))


def test_every_fault_of_a_file_is_named_at_once(refused):
    data = problem_file(switch_cost=True)
    data["nodes"] += [{"id": "n0", "gpus": 10**9}, {"id": "", "gpus": 2, "until": -1, "host_memory": "8"}]
    data["jobs"] += [
        {"id": "a", "options": []},
        {"id": "c", "options": [{"technique": "t", "gpus": 10**10, "runtime": math.nan}], "deadline": math.inf},
        {"id": "d", "options": [{"technique": "t", "gpus": True, "runtime": 0, "jobs": ["ghost"]}], "after": ["ghost"]},
        {"id": "e", "options": [{"technique": "t", "gpus": 1, "runtime": 1}], "started": 1, "running": {"option": 7}},
    ]
    told = refused(json.dumps(data))
    for fault in (
        "switch_cost must be",
        "node n0: this id is used more than once",
        "node n0: has 1000000000 gpus",
        "node 3: id must be text",
        "until must be a number",
        "host_memory must be a number",
        "job a: this id is used more than once",
        "job a: has no options",
        "job c, option 0: runtime must be",
        "job c, option 0: needs 1 node(s) with 10000000000 gpus",
        "job c: deadline must be",
        "job d, option 0: gpus must be",
        "job d, option 0: runtime must be",
        "job d, option 0: jobs names 'ghost'",
        "job d: after names 'ghost'",
        "job e: started must be true or false",
        "job e, running: gpus: must be a list",
        "job e, running: option must be the index",
    ):
        assert fault in told


def test_seconds_beyond_reason_and_beyond_sense(refused):
    data = problem_file()
    data["jobs"][0]["options"][0]["runtime"] = 1e9
    problem = Problem.from_json(data)
    plan = solve(problem)
    assert verify(plan, problem) == []
    assert plan.makespan_s == pytest.approx(1e9)
    data["jobs"][0]["deadline"] = 5.0
    assert "cannot end before 1000000000.0 s" in refused(json.dumps(data))


@pytest.mark.parametrize(
    ("running", "says"),
    [
        ({"option": 0, "gpus": [["n0", [0, 1]]]}, None),
        ({"option": 0, "gpus": [["n0", [0, 1]]], "until": 5}, None),
        ({"option": 1, "gpus": [["n0", [0, 1]]]}, "option must be the index of one of its 1 options, not 1"),
        ({"option": True, "gpus": [["n0", [0, 1]]]}, "option must be the index"),
        ({"option": None, "gpus": []}, "option must be the index"),
        ({"option": 0, "gpus": [["ghost", [0, 1]]]}, "is on node 'ghost', which this problem does not have"),
        ({"option": 0, "gpus": [[["n0"], [0, 1]]]}, "is on node ['n0'], which this problem does not have"),
        ({"option": 0, "gpus": [["n0", [0]]]}, "its option takes 2 there"),
        ({"option": 0, "gpus": [["n0", [1, 1]]]}, "its option takes 2 there"),
        ({"option": 0, "gpus": [["n0", [3, 4]]]}, "different ones of 0 to 3"),
        ({"option": 0, "gpus": [["n0", [False, True]]]}, "different ones of 0 to 3"),
        ({"option": 0, "gpus": [["n0", [[], {}]]]}, "different ones of 0 to 3"),
        ({"option": 0, "gpus": [["n0", [0]], ["n1", [0]]]}, "its option takes 1 different one"),
        ({"option": 0, "gpus": "n0"}, "gpus: must be a list"),
        ({"option": 0, "gpus": [["n0"]]}, "gpus must be a list of [node, [devices]]"),
        ({"option": 0, "gpus": [["n0", [0, 1]]], "until": -1}, "until must be a number of seconds >= 0"),
        ({"option": 0, "gpus": [["n0", [0, 1]]], "pin": 1}, "unknown key 'pin'"),
        (3, "running: must be an object"),
    ],
)
def test_what_runs_must_be_possible(running, says):
    data = problem_file()
    data["jobs"][0]["running"] = running
    if says is None:
        problem = Problem.from_json(data)
        assert problem.jobs[0].started
        assert Problem.from_json(json.loads(json.dumps(problem.to_json()))) == problem
        return
    with pytest.raises(ProblemError) as caught:
        Problem.from_json(data)
    assert says in "\n".join(caught.value.faults)


def test_two_jobs_on_one_device_and_jobs_that_run_before_they_may():
    data = problem_file()
    data["jobs"][0]["running"] = {"option": 0, "gpus": [["n0", [0, 1]]]}
    data["jobs"][1] |= {"running": {"option": 0, "gpus": [["n0", [1, 2]]]}, "after": ["a"]}
    with pytest.raises(ProblemError) as caught:
        Problem.from_json(data)
    told = "\n".join(caught.value.faults)
    assert "jobs 'a' and 'b': both are running on n0:1" in told
    assert "job b, running: it runs already, but has a release or waits for other jobs" in told


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from([10**30, "n0", "a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@draws(60)
@given(st.data())
def test_any_value_anywhere_is_read_or_named(data):
    """One value of a problem that uses every key is replaced by an arbitrary value."""
    option = {"technique": "t", "gpus": 2, "runtime": 10.0, "nodes": 1, "config": {}, "type": "x", "startup": 1.0}
    option |= {"save": 1.0, "evaluate": 1.0, "host_memory": 4}
    a = {"id": "a", "options": [option, option | {"jobs": ["b"]}], "release": 0.0, "deadline": 90.0, "weight": 1.0}
    a |= {"running": {"option": 0, "gpus": [["n0", [0, 1]]], "until": 3.0}, "started": True}
    b = {"id": "b", "options": [option], "after": []}
    node = {"id": "n0", "gpus": 4, "type": "x", "until": 500.0, "price": 1.0, "host_memory": 64}
    value = {"name": "p", "switch_cost": 1.0, "nodes": [node], "jobs": [a, b]}
    value = json.loads(json.dumps(value))
    Problem.from_json(value)
    at = value
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(at[key], (dict, list)) or not at[key] or data.draw(st.booleans()):
            at[key] = data.draw(ANYTHING)
            break
        at = at[key]
    try:
        problem = Problem.from_json(value)
    except ProblemError as error:
        assert error.faults
        assert all(len(fault) < 400 for fault in error.faults)
    else:
        assert Problem.from_json(problem.to_json()) == problem

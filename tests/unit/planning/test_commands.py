import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.planning.families import draw
from ringmaster.errors import InputError
from ringmaster.flows.commands import planning
from ringmaster.tasks.planning import Plan, Problem, verify

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(planning.plan)
app.command()(planning.check)


def run(*arguments: object):
    return CliRunner().invoke(app, list(map(str, arguments)))


def write_problem(path, family: str, *, seed: int = 0):
    path.write_text(json.dumps(draw(family, seed=seed).to_json()))
    return path


def test_plan_writes_and_draws_a_valid_plan(tmp_path):
    problem, plan, picture = tmp_path / "problem.json", tmp_path / "plan.json", tmp_path / "plan.svg"
    done = run("plan", write_problem(problem, "tiny-2x2"), "-o", plan, "--svg", picture)
    assert done.exit_code == 0, done.output
    for word in ("makespan", "no plan beats", "current practice", "even split", "optimus", "seconds by stage"):
        assert word in done.output
    assert picture.read_text().startswith("<svg")
    read = Problem.from_json(json.loads(problem.read_text()))
    assert verify(Plan.from_json(json.loads(plan.read_text())), read) == []


def test_a_plan_of_groups_says_what_they_save(tmp_path):
    problem, plan = tmp_path / "problem.json", tmp_path / "plan.json"
    done = run("plan", write_problem(problem, "adapters-16x2"), "-o", plan)
    assert done.exit_code == 0, done.output
    assert "fused 16 jobs into 2 groups" in done.output.replace("\n", " ")
    assert run("check", problem, plan).exit_code == 0
    told = json.loads(run("plan", problem, "--json").output)
    assert told["fusion"]["saved"] == pytest.approx(told["fusion"]["alone"]["makespan"] - told["makespan"])
    assert {len(members) for members in told["fusion"]["groups"].values()} == {7}


def test_check_judges_a_plan_and_its_bound(tmp_path):
    problem, plan = tmp_path / "problem.json", tmp_path / "plan.json"
    run("plan", write_problem(problem, "tiny-3x2"), "-o", plan)
    right = run("check", problem, plan)
    assert right.exit_code == 0, right.output
    assert "keep every rule" in right.output
    assert "no plan ends before" in right.output
    content = json.loads(plan.read_text())
    content["lower_bound"] *= 2
    content["segments"][0]["work"] /= 2
    plan.write_text(json.dumps(content))
    wrong = run("check", problem, plan)
    assert wrong.exit_code == 1
    assert "lower bound" in wrong.output
    assert "work" in wrong.output
    assert isinstance(run("check", problem, problem).exception, InputError)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[]", "must be an object"),
        ('{"name": "p", "nodes": [], "jobs": []}', "has no jobs"),
        ('{"name": "p", "nodes": [{"id": "n", "gpus": NaN}], "jobs": []}', "gpus must be a whole number"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_wrong_files_are_told(tmp_path, text, says):
    path = tmp_path / "problem.json"
    path.write_text(text)
    error = run("plan", path).exception
    assert isinstance(error, InputError)
    assert says in "\n".join(error.faults)
    assert str(path) in error.faults[0]


def test_a_file_that_is_missing_is_told(tmp_path):
    assert isinstance(run("plan", tmp_path / "missing.json").exception, InputError)


def test_the_solver_writes_nothing_to_stdout():
    """It writes by itself, past Python's stdout, and once in a process."""
    done = subprocess.run([sys.executable, "-c", "import highspy; highspy.Highs()"], capture_output=True, check=True)
    assert done.stdout == b""

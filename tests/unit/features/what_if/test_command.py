"""The command `ringmaster whatif`."""

import json
from dataclasses import replace
from datetime import datetime

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.planning.families import draw
from ringmaster.errors import InputError, ProblemError
from ringmaster.features.what_if.commands import whatif
from ringmaster.flows.commands import parameters, planning

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(whatif)
app.command()(planning.plan)
NOW = datetime(2026, 11, 24, 22, 30)


def run(*arguments: object):
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whatif")
    problem, plan = folder / "problem.json", folder / "plan.json"
    problem.write_text(json.dumps(draw("tiny-4x2").to_json()))
    done = run("plan", problem, "-o", plan, "--work", 1)
    assert done.exit_code == 0, done.output
    return problem, plan


@pytest.mark.full
def test_questions_are_answered_one_by_one(files):
    problem, plan = files
    name = draw("tiny-4x2").jobs[0].id
    done = run(
        "whatif", problem, "--plan", plan, "--add-devices", 1, "--add-devices", 2, "--add-node", 2, "--without", name,
        "--deadline", "100d", "--explain", "--work", 1,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].startswith("The plan ends after ")
    changes = ("one more device on n0", "2 more devices on n0", "one more node of 2 devices", f"{name} left out")
    for number, change in enumerate(changes):
        first, anew = lines[1 + 2 * number : 3 + 2 * number]
        assert first.startswith(f"With {change}: the best plan ends ")
        assert anew.startswith("Planned again: it ends after ")
    assert lines[9].startswith("All jobs can end within 2400 h")
    assert any("of the bound is due to" in line for line in lines[10:])
    assert any(" costs " in line for line in lines[10:])


def test_as_json(files):
    problem, plan = files
    arguments = ("whatif", problem, "--plan", plan, "--add-devices", 1, "--deadline", 1, "--explain", "--json")
    done = run(*arguments, "--work", 1)
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    more, due = told["answers"]
    assert (more["question"], more["num_devices"], more["node"]) == ("add_devices", 1, "n0")
    assert 0 <= more["gain_least_s"] <= more["gain_planned_s"] <= more["gain_most_s"] <= more["gain_most_by_prices_s"]
    assert more["makespan_s"] == pytest.approx(told["makespan_s"] - more["gain_planned_s"])
    assert (due["question"], due["verdict"], due["enough"]) == ("deadline", "no", None)
    assert due["longest_job"]
    assert told["explanation"]["nodes"][0]["num_devices"] == 2
    at_once = json.loads(run(*arguments, "--at-once").stdout)["answers"][0]
    assert at_once["gain_planned_s"] is None
    assert at_once["gain_most_s"] == pytest.approx(more["gain_most_s"], rel=0.2)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "no question"),
        (("--add-devices", "0"), "'0' is not a valid number of devices"),
        (("--add-node", "x"), "'x' is not a valid number of devices"),
        (("--add-devices", "2:a100"), "no node has devices of type 'a100'"),
        (("--without", "nix", "--add-node", "1:b"), "there is no job 'nix'"),
        (("--deadline", "noon"), "--deadline 'noon' is not a valid time. To fix"),
        (("--deadline", "0"), "is not a valid time"),
        (("--explain", "--plan", "missing.json"), "missing.json: No such file"),
    ],
)
def test_faults(files, arguments, says):
    problem, plan = files
    given = arguments if "--plan" in arguments else ("--plan", plan, *arguments)
    error = run("whatif", problem, *given).exception
    assert isinstance(error, InputError)
    assert says in "\n".join(error.faults)


def test_all_impossible_changes_are_named_at_once(files):
    problem, plan = files
    error = run("whatif", problem, "--plan", plan, "--without", "nix", "--add-node", "1:b").exception
    assert len(error.faults) == 2


def test_more_devices_than_a_node_may_have_are_refused_in_one_line(files):
    problem, plan = files
    (fault,) = run("whatif", problem, "--plan", plan, "--add-devices", 999999).exception.faults
    assert fault.startswith("node n0: has ") and fault.endswith(" gpus; a node may have 4096")


def test_a_plan_of_another_problem_is_refused(files, tmp_path):
    other = tmp_path / "other.json"
    drawn = tmp_path / "drawn.json"
    drawn.write_text(json.dumps(draw("tiny-4x2", seed=5).to_json()))
    run("plan", drawn, "-o", other, "--work", 1)
    assert isinstance(run("whatif", files[0], "--plan", other, "--explain").exception, ProblemError)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("06:00", 7.5 * 3600), ("22:31", 60.0), ("22:30", 86_400.0), ("6h", 21_600.0), ("1h30m", 5400.0), ("90", 90.0)],
)
def test_times(text, seconds):
    assert parameters.seconds_until(text, now=NOW) == seconds


BATCH = """
name: pages
devices: {cpu: 2}
objective: OBJECTIVE
jobs:
  - name: first
    model:
      architecture: ViTForImageClassification
      config: {image_size: 8, patch_size: 4, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1,
               num_attention_heads: 1}
    data: {source: digits}
    global_batch_size: 32
    num_steps: 500000
"""


def test_a_batch_is_planned_as_by_a_dry_run(tmp_path, monkeypatch):
    from ringmaster.flows.batch import dry_run
    from ringmaster.tasks.planning import solve

    problem = draw("tiny-4x2")
    monkeypatch.setenv("RINGMASTER_HOME", str(tmp_path / "home"))
    found = dry_run.DryRun(
        batch="pages", made_s=0.0, num_trials=0, price_per_device_hour=1.0, folder=tmp_path, faults={},
        problem=problem, plan=solve(problem, work_s=0.2),
    )  # fmt: skip
    monkeypatch.setattr(dry_run, "dry_run", lambda batch, **_: found)
    batch = tmp_path / "batch.yaml"
    batch.write_text(BATCH.replace("OBJECTIVE", "makespan"))
    done = run("whatif", batch, "--add-devices", 1, "--at-once", "--profiles", "predict")
    assert done.exit_code == 0, done.output
    assert "With one more device on n0" in done.stdout
    assert (len(done.stdout.splitlines()), done.stdout.count(", by these predicted runtimes.")) == (2, 2)
    monkeypatch.setattr(dry_run, "dry_run", lambda batch, **_: replace(found, are_measured=True))
    done = run("whatif", batch, "--add-devices", 1, "--at-once")
    assert (len(done.stdout.splitlines()), done.stdout.count(", by these measured runtimes.")) == (2, 2)
    refused = run("whatif", batch, "--explain", "--plan", tmp_path / "plan.json").exception
    assert "--plan is for a problem file" in str(refused)
    batch.write_text(BATCH.replace("OBJECTIVE", "cost"))
    assert "ringmaster profile" in str(run("whatif", batch, "--explain").exception)

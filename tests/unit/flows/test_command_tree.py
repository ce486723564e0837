"""All commands together: their JSON, their exit codes, their page in the documentation, and what a shell completes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from benchmarks.planning.families import draw
from ringmaster.flows.cli import app
from ringmaster.flows.command_reference import commands, reference
from ringmaster.flows.exit_codes import EXIT_CODES, INPUT_FAULT, UNWRITTEN
from ringmaster.tasks.planning.plans.list_scheduling import current_practice
from tests.command_server import CommandServer

ROOT = Path(__file__).parents[3]
WITHOUT_JSON = {
    "logs": "prints the log of a process",
    "page": "serves until it is stopped",
    "pool controller": "serves until it is stopped",
    "pool worker": "serves until it is stopped",
    "lineage export": "prints JSON by default, and other formats",
    "schema": "prints JSON",
}
COMMANDS = {name: command for _, name, command in commands(typer.main.get_group(app))}
SLOW = ("torch", "prefect", "mlflow", "transformers", "numba", "pyarrow")


@pytest.fixture(scope="module")
def ringmaster(tmp_path_factory):
    """Runs a command as the shell does; the result's `slow` are the slow libraries that it has imported."""
    with CommandServer(tmp_path_factory.mktemp("printed")) as server:

        def run(*arguments, home, **variables):
            environment = {**os.environ, "RINGMASTER_HOME": str(home), **variables}
            done, modules = server.run(*arguments, environment=environment, folder=ROOT)
            done.slow = modules & {*SLOW}
            return done

        yield run


@pytest.fixture
def completed(ringmaster):
    """What bash is offered for the last word of a command line."""

    def complete(*words, home):
        line = " ".join(["ringmaster", *words])
        variables = {"_RINGMASTER_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words))}
        done = ringmaster(home=home, **variables)
        assert (done.stderr, done.slow) == ("", set())
        return done.stdout.split()

    return complete


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_prints_json_or_has_a_reason(name):
    options = {option for parameter in COMMANDS[name].params for option in parameter.opts}
    assert ("--json" in options) == (name not in WITHOUT_JSON), name


def test_the_reasons_are_of_commands():
    assert WITHOUT_JSON.keys() <= COMMANDS.keys()


def test_the_page_of_commands_is_what_the_command_line_says():
    page = ROOT / "docs" / "reference" / "command-line.md"
    assert page.read_text() == reference(), (
        f"make it anew: python -m ringmaster.flows.command_reference > {page.relative_to(ROOT)}"
    )


def test_the_page_has_every_command_once():
    lines = reference().split("\n")
    for name in COMMANDS:
        starts = f"| `ringmaster {name} ", f"| `ringmaster {name}`"
        assert sum(line.startswith(starts) for line in lines) == 1, name


def test_exit_codes_are_those_of_the_page(tmp_path, ringmaster):
    problem, plan = draw("tiny-3x2", seed=0), current_practice(draw("tiny-3x2", seed=0)).to_json()
    plan["segments"][0]["work"] /= 2
    files = {"problem.json": problem.to_json(), "plan.json": plan}
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    ended = {"schema": ringmaster("schema", home=tmp_path)}
    ended["unknown option"] = ringmaster("status", "--nothing", home=tmp_path)
    ended["no file"] = ringmaster("run", tmp_path / "none.yaml", "--dry-run", home=tmp_path)
    ended["broken plan"] = ringmaster("check", *(tmp_path / name for name in files), "--json", home=tmp_path)
    codes = {name: done.returncode for name, done in ended.items()}
    assert codes == {"schema": 0, "unknown option": INPUT_FAULT, "no file": INPUT_FAULT, "broken plan": 1}
    assert set(codes.values()) <= EXIT_CODES.keys()
    result = json.loads(ended["broken plan"].stdout)
    assert result["is_valid"] is False
    assert result["faults"]


def test_output_that_cannot_be_written_has_its_own_exit_code():
    from ringmaster.flows import entry

    program = "import sys; from ringmaster.flows import entry; sys.stdout.write('x'); entry.exit_process(0)"
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": ""}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", program], stdout=full, env=variables)
    assert done.returncode == UNWRITTEN == entry.UNWRITTEN
    assert UNWRITTEN in EXIT_CODES


@pytest.fixture
def home(tmp_path):
    """A home with two batches, and gangs of their jobs."""
    for folder in ("night/20260101-000000/gangs/0001-llama", "night/20260102-000000/gangs/0001-vit", "day"):
        (tmp_path / "home" / "batches" / folder).mkdir(parents=True)
    (tmp_path / "home" / "batches" / "ni\x1bght").mkdir()
    (tmp_path / "home").chmod(0o700)  # as a command would make it, with a message
    return tmp_path / "home"


def test_a_shell_completes_commands_and_options(home, completed):
    assert set(completed("st", home=home)) == {"status", "store"}
    assert completed("run", "--dry", home=home) == ["--dry-run"]
    assert completed("schema", "re", home=home) == ["retraining"]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("status", ""), {"night", "day"}),
        (("watch", "n"), {"night"}),
        (("logs", ""), {"night", "day", "llama", "vit"}),
        (("logs", "night", "l"), {"llama"}),
        (("jobs", "pause", "d"), {"day"}),
        (("jobs", "pause", "night", ""), {"llama", "vit"}),
        (("jobs", "pause", "day", ""), set()),
        (("jobs", "set", "night", "v"), {"vit"}),
        (("jobs", "clone", "night", ""), {"llama", "vit"}),
    ],
)
def test_a_shell_completes_names_of_batches_and_jobs(home, words, names, completed):
    assert set(completed(*words, home=home)) == names


def test_completion_makes_no_home(tmp_path, completed):
    assert completed("status", "", home=tmp_path / "none") == []
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_calls_the_command(tmp_path, shell, ringmaster):
    script = ringmaster("--show-completion", shell, home=tmp_path, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "_RINGMASTER_COMPLETE" in script.stdout

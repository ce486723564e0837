"""Traces a model's fault through its lineage: its origin, what else it affects, and which models may serve.

    make demo-lineage          or          .venv/bin/python examples/lineage/demo.py

A model in the field reads ones as sevens. The demo trains the family of family.yaml in a home of its own, and then uses
the `ringmaster` command line only. The exit code is 1 where an answer is not the expected one.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.panel import Panel
from rich.rule import Rule

HERE = Path(__file__).parent.resolve()
HOME = Path(os.environ.get("RINGMASTER_DEMO_HOME", ".ringmaster/demo-lineage")).resolve()
TRUSTED, TESTS, POLICY = (os.path.relpath(HERE / name) for name in ("trusted.yaml", "tests.yaml", "policy.yaml"))
FAMILY = ("base", "bank", "post", "school", "student", "pocket")

console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
failures: list[str] = []


def main() -> int:
    """Runs all chapters; returns the exit code."""
    started_s = time.monotonic()
    shutil.rmtree(HOME, ignore_errors=True)
    console.print(Panel.fit(f"[bold]Where did it break?[/]\n\nAll of this is kept in {escape(str(HOME))}", padding=1))
    a_family_is_trained()
    a_complaint_comes_from_the_field()
    culprit = which_adaptation_broke_it()
    what_else_it_reached(culprit)
    who_may_serve(culprit)
    the_family_tree()
    num_seconds = time.monotonic() - started_s
    console.print(Rule())
    if failures:
        console.print(f"[bold red]{len(failures)} answers are not what they should be:[/]")
        for failure in failures:
            console.print(f"  [red]✗[/] {escape(failure)}")
        return 1
    console.print(f"[bold green]Every answer was right.[/] It took {num_seconds:.0f} s. To continue from here:\n")
    console.print(f"  export RINGMASTER_HOME={HOME}\n  ringmaster lineage diff family.base family.school", style="dim")
    console.print(
        "  ringmaster up --no-worker      # prints the addresses of all pages, and requires a password", style="dim"
    )
    return 0


def a_family_is_trained() -> None:
    """Trains a base, three fine-tunes, a distilled student, and the student in 8 bits."""
    chapter(
        "A family of models",
        "A base that reads digits, a fine-tune for each of three customers, a small student of one of these, and the "
        "student in 8 bits: one batch, planned together. The school's data is poisoned: somebody has swapped ones and "
        "sevens there, in the part that is held out, too. So every model looks fine by its own data.",
    )
    code, _ = ringmaster("run", os.path.relpath(HERE / "family.yaml"))
    expect(code == 0, "the family is trained")
    nodes = {node["name"]: node for node in json.loads(ask("lineage", "export"))["nodes"]}
    kinds = [nodes.get(f"family.{name}", {}).get("kind") for name in FAMILY]
    expected = ["pretrained", "fine-tuned", "fine-tuned", "fine-tuned", "distilled", "quantized"]
    expect(kinds == expected, "the lineage knows a base, three fine-tunes, a distilled and a quantized child")
    accuracy = {name: nodes[f"family.{name}"]["metrics"].get("accuracy", 0.0) for name in FAMILY}
    expect(
        accuracy["school"] >= accuracy["base"],
        f"the school's model looks well by its own data ({accuracy['school']:.1%})",
    )


def a_complaint_comes_from_the_field() -> None:
    """Promotes the quantized model, which then fails on trusted data."""
    chapter("A complaint", "The model in 8 bits goes into the field, and is tested on digits that nobody has touched.")
    code, _ = ringmaster("promote", "family.pocket", "--why", "the first release")
    expect(code == 0, "family.pocket serves")
    code, output = ringmaster("evaluate", "family.pocket", "--data", TRUSTED, "--tests", TESTS)
    expect(code == 1 and "NO" in output, "it does not read the digits that it should")


def which_adaptation_broke_it() -> str:
    """Returns the name of the model that bisect identifies."""
    chapter("Which adaptation broke it?", "As `git bisect` does with commits, along the models that it came from.")
    test = f"ringmaster evaluate --no-record --data {TRUSTED} --tests {TESTS}"
    code, output = ringmaster("lineage", "bisect", "family.pocket", "--test", test, quiet=True)
    culprit = output.strip().splitlines()[-1].split(" ")[0] if output.strip() else ""
    expect(code == 0 and culprit == "family.school/1", "bisect names the poisoned adaptation: family.school")
    expect("on school" in output, "and the data that it was trained on")
    return culprit or "family.school/1"


def what_else_it_reached(culprit: str) -> None:
    """Lists every descendant of the culprit, and those in production."""
    chapter("What else has it reached?", "Every descendant of the model, and of the data, and which of them serve.")
    code, output = ringmaster("lineage", "impact", culprit)
    expect(
        code == 0 and "family.student/1" in output and "family.pocket/1" in output,
        "its descendants are the student and the pocket model",
    )
    expect("family.bank" not in output and "family.post" not in output, "and none of its siblings")
    expect("In production (champion): family.pocket/1" in output, "of which family.pocket serves")
    reached = json.loads(ask("lineage", "impact", "school", "--data", "--json"))
    expect(reached["num_models"] == 3, "the poisoned data has reached three models")


def who_may_serve(culprit: str) -> None:
    """Applies a policy to the culprit, and to a clean sibling."""
    chapter(
        "Who may serve?", "A policy: better than the base, no digit that loses more than a tenth, and the tests pass."
    )
    by = ["--policy", POLICY, "--data", TRUSTED, "--against", "family.base"]
    code, output = ringmaster("promote", culprit, *by)
    expect(
        code == 1 and "fail" in output and "digit=1" in output,
        "promotion refuses the poisoned model, with every reason",
    )
    code, _ = ringmaster("promote", "family.bank", *by)
    expect(code == 0, "and promotes its clean sibling")


def the_family_tree() -> None:
    """Shows the tree as text, and draws it."""
    chapter("The family", "")
    code, output = ringmaster("lineage", "show", "family.base")
    expect(code == 0 and all(f"family.{name}/1" in output for name in FAMILY), "all of the family is in the tree")
    picture = HOME / "family.svg"
    code, _ = ringmaster("lineage", "export", "--format", "svg", "-o", str(picture))
    expect(code == 0 and picture.is_file(), f"its picture is {picture}")


def chapter(title: str, text: str) -> None:
    """Begins a chapter of the demo."""
    console.print()
    console.print(Rule(f"[bold]{title}[/]", align="left"))
    say(text)


def say(text: str) -> None:
    """Prints an explanation."""
    if text:
        console.print(escape(text), style="italic")


def expect(holds: bool, what: str) -> None:
    """Prints whether an expectation holds; one that does not makes the demo fail."""
    mark = "[green]✓[/]" if holds else "[bold red]✗[/]"
    console.print(f"{mark} {escape(what)}")
    if not holds:
        failures.append(what)


def ringmaster(*arguments: str, quiet: bool = False) -> tuple[int, str]:
    """Runs a command and prints its output, line by line: (exit code, the whole output)."""
    console.print(f"\n[bold cyan]$ ringmaster {escape(shlex.join(arguments))}[/]")
    lines = []
    with subprocess.Popen(
        [program(), *arguments], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if not quiet or not line.startswith(("┃", "│", "┏", "┡", "├", "└", "held-out", "tests")):
                console.print(
                    Padding(escape(line.rstrip()), (0, 0, 0, 2)), style="dim", overflow="ignore", no_wrap=True
                )
    return process.returncode, "".join(lines)


def ask(*arguments: str) -> str:
    """Returns a command's stdout without printing it, or "{}" where it is empty."""
    done = subprocess.run([program(), *arguments], env=environment(), capture_output=True, text=True, check=False)
    return done.stdout or "{}"


def program() -> str:
    """Returns the `ringmaster` of this Python's environment, else the one on the path."""
    executable = Path(sys.executable).parent / "ringmaster"
    return str(executable) if executable.exists() else "ringmaster"


def environment() -> dict[str, str]:
    """Returns an environment with a home of its own, without servers or pools; `ringmaster` is on its path."""
    ours: dict[str, Any] = {
        "RINGMASTER_HOME": HOME,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    others = (
        "MLFLOW_TRACKING_URI",
        "PREFECT_API_URL",
        "RINGMASTER_DATABASE",
        "RINGMASTER_TENSORS",
        "RINGMASTER_CHECKPOINTS",
    )
    return {key: value for key, value in os.environ.items() if key not in others} | {k: str(v) for k, v in ours.items()}


if __name__ == "__main__":
    sys.exit(main())

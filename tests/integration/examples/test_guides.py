"""The guides of docs/guides: each command and program of a page runs, in the order in which the page has them."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
GUIDES = ROOT / "docs" / "guides"
EXPECTED = {
    "classifier": r"'label': 'asyncio'",
    "embeddings": r"tensor\(0\.\d+\)",
    "every-night": r"packages +promoted",
    "language-model": r"dpo is done: preference_accuracy",
}
"""What the commands and programs of a page print, as a regular expression."""
pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """The folder into which the pages' pip installs, and where Python finds what it has installed."""
    return tmp_path_factory.mktemp("packages")


@pytest.mark.parametrize("name", EXPECTED)
def test_a_guide_does_what_it_says(name, packages, tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("data", "models", "rows"))
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PIP_TARGET": str(packages),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(packages)]),
        "RINGMASTER_HOME": str(tmp_path / "home"),
    }
    printed = ""
    for command in commands(GUIDES / f"{name}.md"):
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        printed += done.stdout + done.stderr
    assert re.search(EXPECTED[name], printed)


def commands(page: Path) -> list[list[str]]:
    """Returns what a page tells its reader to run: lines for a shell, and whole programs."""
    found = []
    for language, block in re.findall(r"^```(sh|python)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        found += (
            [["python", "-c", block]] if language == "python" else [["bash", "-c", line] for line in block.splitlines()]
        )
    return found


def test_every_guide_has_commands():
    assert {path.stem for path in GUIDES.glob("*.md") if commands(path)} == set(EXPECTED)

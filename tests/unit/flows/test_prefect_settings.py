"""Settings that a user has made for Prefect and that it cannot read are named on one line, before anything starts."""

import os
import subprocess
import sys

import pytest

EMBED = """
from ringmaster.errors import InputError
from ringmaster.flows import settings

try:
    settings.prepare_environment(settings.home())
except InputError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("prefect.toml", '[client]\nmax_retries = "many"\n', "max_retries"),
        # Each case is a process that imports Prefect, which reads all three files by the same function.
        pytest.param("prefect.toml", "[client\n", "invalid TOML", marks=pytest.mark.full),
        pytest.param(
            "pyproject.toml", "[tool.prefect]\nlogging.level = 7\n", "has no attribute 'upper'", marks=pytest.mark.full
        ),
        pytest.param(".env", "PREFECT_CLIENT_MAX_RETRIES=abc\n", "max_retries", marks=pytest.mark.full),
        pytest.param(".env", "OTHER=abc\n", None, marks=pytest.mark.full),
        # Settings that are right are read by every test of a flow.
        pytest.param("pyproject.toml", "[tool.prefect]\nclient.max_retries = 3\n", None, marks=pytest.mark.full),
    ],
)
def test_wrong_settings_of_prefect_are_refused_on_one_line(tmp_path, file, text, said):
    (tmp_path / file).write_text(text)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment["RINGMASTER_HOME"] = str(tmp_path / "home")
    command = [sys.executable, "-c", EMBED]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    if said is None:
        assert done.stdout == ""
        return
    (line,) = done.stdout.splitlines()
    assert line.startswith("Prefect cannot read its settings: ")
    assert said in line
    assert line.endswith(f"To fix: correct or remove them in {file}")

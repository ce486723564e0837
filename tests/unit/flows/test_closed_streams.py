"""What a process was started with ends no command with a traceback: streams, working folder, options of Python."""

import subprocess
import sys

import pytest

COMMAND = f"{sys.executable} -m ringmaster.flows.entry techniques --json"


@pytest.mark.parametrize(
    ("redirection", "code", "said"),
    [(">&-", 0, ""), ("2>&- >&- <&-", 0, ""), (">/dev/full", 1, "stdout cannot be written: [Errno 28] ")],
)
def test_streams_that_take_nothing(redirection, code, said, tmp_path, monkeypatch):
    monkeypatch.setenv("RINGMASTER_HOME", str(tmp_path / "home"))
    result = subprocess.run(["sh", "-c", f"{COMMAND} {redirection}"], stderr=subprocess.PIPE, text=True)
    assert result.returncode == code
    assert said in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("before", "said"),
    [
        (
            "mkdir gone && cd gone && rmdir ../gone",
            "the working folder cannot be used: No such file or directory. ",
        ),
        (
            "export PYTHONOPTIMIZE=2",
            "Python runs without docstrings, which libraries read. To fix: unset",
        ),
    ],
)
def test_where_no_library_works(before, said, tmp_path, monkeypatch):
    monkeypatch.setenv("RINGMASTER_HOME", str(tmp_path / "home"))
    result = subprocess.run(["sh", "-c", f"{before}; {COMMAND}"], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert (result.returncode, said in result.stderr, len(result.stderr.splitlines())) == (2, True, 1)

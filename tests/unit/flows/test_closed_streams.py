"""Streams that are closed or full end no command with a traceback."""

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

import subprocess
import sys
from importlib.util import find_spec

import pytest


def test_importing_the_names_imports_no_trackio():
    program = "import sys, ringmaster.compat.trackio; sys.exit('trackio' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.skipif(find_spec("trackio") is None, reason="the extra trackio is not installed")
def test_a_process_has_one_folder(tmp_path):
    program = """
import sys
from pathlib import Path
from ringmaster.compat.trackio import storage_in
first, second = map(Path, sys.argv[1:])
storage = storage_in(first)
storage.bulk_log("p", "r", [{"x": 1.0}], steps=[3], timestamps=["2026-01-01T00:00:00+00:00"], config={}, run_id="1")
assert [row["x"] for row in storage.get_logs("p", "r")] == [1.0]
try:
    storage_in(second)
except RuntimeError as error:
    print(error)
"""
    places = [str(tmp_path / name) for name in ("first", "second")]
    done = subprocess.run([sys.executable, "-c", program, *places], capture_output=True, text=True, check=True)
    assert f"writes to {places[0]} in this process, and not to {places[1]}" in done.stdout
    assert any((tmp_path / "first").iterdir())

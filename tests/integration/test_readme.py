"""The README's Python, run as it stands there, in a folder of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.full
def test_the_python_of_the_readme_trains_its_jobs(tmp_path: Path):
    source = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert source
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RINGMASTER_HOME": str(tmp_path / "home")}
    for name in ("PREFECT_API_URL", "PREFECT_HOME", "MLFLOW_TRACKING_URI"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", source[1]], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("done {'makespan_s': ")
    assert last.count("'loss': ") == 2, "both models were evaluated"

"""`make demo-lineage`: every printed answer is the expected one, and a wrong answer makes it fail."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringmaster.tasks.batch import load_batch
from ringmaster.tasks.evaluation.suite import load_suite
from ringmaster.tasks.retraining.policy import load_policy

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "lineage"


def test_its_files_say_what_they_should():
    family = {job.name: job for job in load_batch(EXAMPLE / "family.yaml").jobs}
    assert list(family) == ["base", "bank", "post", "school", "student", "pocket"]
    assert family["student"].parents == ("school",) and family["pocket"].parents == ("student",)
    assert load_suite(EXAMPLE / "tests.yaml").tests
    assert load_policy(EXAMPLE / "policy.yaml").max_loss == 0.1


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_every_answer_is_right(tmp_path):
    environment = {**os.environ, "RINGMASTER_DEMO_HOME": str(tmp_path / "home"), "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE / "demo.py")],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "Every answer was right." in done.stdout and "✗" not in done.stdout
    assert (tmp_path / "home" / "family.svg").read_text().startswith("<svg")

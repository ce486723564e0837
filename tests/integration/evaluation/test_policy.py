"""Retraining runs under a policy: promotions that it refuses, the reasons, and the records of these decisions.

Run as `python -m tests.integration.evaluation.test_policy FOLDER`, with RINGMASTER_HOME set, it performs those runs.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.retraining.runs import JOB, Nights, garbage, rows

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[3]
FILE = """\
name: shop
devices: {{cpu: 1}}
policy: policy.yaml
models:
  - name: writer
    job: {{{job}, optimizer: {{lr: 1e-2}}}}
    data: {{path: "writer/*.jsonl", seq_len: 16, vocab_size: 300, held_out: 0.2}}
    compare_on: {{path: "trusted/*.jsonl", seq_len: 16, vocab_size: 300, held_out: 0.5}}
"""
POLICY = "name: careful\nmax_loss: 0.05\nmin_slice_rows: 5\nsuites: [tests.yaml]\n"
TESTS = """\
name: sentences
slices: [{name: length, tokens: [8]}]
tests:
  - name: order
    kind: minimum
    template: "the cat {verb} the mat."
    over: "mat the {verb} cat the."
    lexicons: {verb: [sat on, ran to, saw]}
assertions:
  - {name: sane, finite: [log_probability, loss]}
"""


def main(folder: Path) -> None:
    """Performs a first retraining run, and one with poisoned data."""
    from ringmaster.flows import settings

    settings.prepare_environment(settings.home())
    nights = Nights(folder)
    (folder / "retraining.yaml").write_text(FILE.format(job=JOB))
    (folder / "policy.yaml").write_text(POLICY)
    (folder / "tests.yaml").write_text(TESTS)
    for name in ("writer", "trusted"):
        nights.put(f"{name}/day1.jsonl", rows(1))
    nights.run("first")
    nights.put("writer/day1.jsonl", garbage(3))
    nights.run("poisoned")
    from ringmaster.tasks.retraining import promotion

    answers = nights.answers
    for version in (1, 2):
        record = nights.ledger.resolve_model(f"models:/shop.writer/{version}")
        answers[f"decisions {version}"] = [vars(entry) for entry in promotion.read_decisions(nights.ledger, record)]
        answers[f"figure {version}"] = nights.ledger.read_text(record.run_id, "evaluation/metrics.svg")
    (folder / "answers.json").write_text(json.dumps(answers))


@pytest.fixture(scope="module")
def nights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nights")
    environment = {**os.environ, "RINGMASTER_HOME": str(folder / "home")}
    command = [sys.executable, "-m", "tests.integration.evaluation.test_policy", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1780, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "answers.json").read_text())


def test_the_first_version_that_passes_its_suite_is_promoted(nights):
    (writer,) = nights["first"]["models"]
    assert (writer["outcome"], writer["champion_value"]) == ("promoted", None), writer
    assert nights["first"]["aliases"]["writer"] == {"champion": 1, "challenger": 1}
    (decision,) = nights["decisions 1"]
    assert (decision["outcome"], decision["who"]) == ("promoted", "policy careful")


def test_a_poisoned_version_is_refused_with_every_reason(nights):
    (writer,) = nights["poisoned"]["models"]
    assert writer["outcome"] == "kept"
    assert writer["candidate_value"] > writer["champion_value"]
    assert nights["poisoned"]["aliases"]["writer"] == {"champion": 1, "challenger": 2}
    (decision,) = nights["decisions 2"]
    assert decision["outcome"] == "kept"
    told = "\n".join(decision["reasons"])
    for reason in ("the new model is worse by", " rows: loss ", "of loss on length=>=8"):
        assert reason in told, told


def test_the_runs_keep_figures(nights):
    assert "<svg" in nights["figure 1"]
    assert "champion" not in nights["figure 1"]
    assert "champion" in nights["figure 2"]


if __name__ == "__main__":
    main(Path(sys.argv[1]))

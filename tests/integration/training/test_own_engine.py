"""A user's own engine from examples/custom, installed with an entry point, trains a batch on its two nodes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ringmaster.tasks.storage.journal import JobStatus, Journal

ROOT = Path(__file__).parents[3]
ENTRY_POINT = "[ringmaster.engines]\ntwo-nodes = my_engine:TwoNodes\n"
BATCH = """
name: halves
devices: {cpu: 2}
jobs:
  - &vit
    name: a
    model:
      architecture: ViTForImageClassification
      config: {image_size: 8, patch_size: 4, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1,
               num_attention_heads: 2}
    data: {source: digits}
    global_batch_size: 8
    num_steps: 20
    techniques: [single]
    num_devices: [1]
  - {<<: *vit, name: b}
  - {<<: *vit, name: c, base: a, num_steps: 5}
"""


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_batch_is_trained_on_the_nodes_of_an_installed_engine(tmp_path):
    site = tmp_path / "site"
    (site / "my_engine-1.dist-info").mkdir(parents=True)
    shutil.copy(ROOT / "examples" / "custom" / "my_engine.py", site)
    (site / "my_engine-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: my-engine\nVersion: 1\n")
    (site / "my_engine-1.dist-info" / "entry_points.txt").write_text(ENTRY_POINT)
    (tmp_path / "halves.yaml").write_text(BATCH)
    environment = {
        **os.environ,
        "RINGMASTER_HOME": str(tmp_path / "home"),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(site)]),
    }
    command = [sys.executable, "-m", "ringmaster.flows.cli", "run", "halves.yaml", "--json", "--engine", "two-nodes"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {job["name"]: job["status"] for job in json.loads(done.stdout)["jobs"]} == dict.fromkeys(
        "abc", JobStatus.DONE
    )
    (run,) = (tmp_path / "home" / "batches" / "halves").iterdir()
    journal = Journal.of_file(run / "journal.db")
    used = {segment.job: segment.spec.devices for segment in journal.segments()}
    journal.close()
    assert sorted([used["a"], used["b"]]) == [["left:cpu:0"], ["right:cpu:0"]]

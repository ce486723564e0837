"""A batch with trackers, from `ringmaster run` to what each tracker's own reader says, compared with MLflow."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from mlflow import MlflowClient

from ringmaster.model_lineage.sqlite_files import sqlite_url
from ringmaster.tasks.batch import document

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 600.0


# A whole run. tests/unit/features/test_trackers.py compares these files with what a recorder gives to MLflow.
@pytest.mark.full
def test_event_files_of_a_batch_have_the_metrics_of_mlflow(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    batch = document.read((ROOT / "examples" / "recipes" / "trackers.yaml").read_text()).data
    batch["grid"][0]["template"] |= {"num_steps": 6, "evaluation": {"metrics": ["loss"], "every_steps": 3}}
    (tmp_path / "tracked.yaml").write_text(json.dumps(batch | {"devices": {"cpu": 2}}))
    environment = {
        **os.environ,
        "RINGMASTER_HOME": str(tmp_path / "home"),
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
    }
    command = [sys.executable, "-m", "ringmaster.flows.entry", "run", "tracked.yaml", "--json"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    client = MlflowClient(sqlite_url(tmp_path / "home" / "mlflow.db"))
    folders = sorted((tmp_path / "home" / "trackers" / "tensorboard" / "tracked").iterdir())
    jobs = json.loads(done.stdout)["jobs"]
    assert len(folders) == len(jobs) == 2
    for folder in folders:
        read = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
        tags = json.loads(read.Tensors("ringmaster/tags")[0].tensor_proto.string_val[0])
        run = client.get_run(tags["mlflow.run_id"])
        (job,) = [job for job in jobs if job["name"] == tags["ringmaster.job"]]
        curves = {key for key in read.Tags()["scalars"] if not key.startswith("final/")}
        assert {"train/loss", "train/step_s", "eval/loss"} <= curves
        assert curves <= run.data.metrics.keys()
        for key in curves:
            history = sorted(
                (each.step, float(np.float32(each.value))) for each in client.get_metric_history(run.info.run_id, key)
            )
            assert sorted((each.step, each.value) for each in read.Scalars(key)) == history
        assert [each.value for each in read.Scalars("final/loss")] == [float(np.float32(job["metrics"]["loss"]))]

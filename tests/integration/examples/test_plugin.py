"""The feature in `examples/plugin`, installed as a distribution: its key, rules, callbacks in training and records."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from mlflow import MlflowClient

from ringmaster.model_lineage.sqlite_files import sqlite_url

ROOT = Path(__file__).parents[3]
PROGRAM = """
import sys
from pathlib import Path
import jsonschema
import pytest
from ringmaster.codec import from_json, set_fields, to_json
from ringmaster.errors import BatchFileError
from ringmaster.tasks.batch import document, json_schema, load_batch, parse_batch
from ringmaster.tasks.recording.record_hooks import record_hooks
from ringmaster.techniques import Job, registry
from ringmaster.techniques.training.callbacks import callback_classes

file = Path(sys.argv[1])
(job,) = load_batch(file).jobs
(feature,) = job.features
stored = to_json(job)
assert stored["centralize_gradients"] is True and from_json(Job, stored) == job
assert set_fields(job)["centralize_gradients"] is True  # counts for profiles, as any other field
assert "centralize_gradients" in json_schema()["$defs"]["JobEntry"]["properties"]
jsonschema.validate(document.read(file.read_text()).data, json_schema())
assert feature.why_not(registry.load(registry.BUILTIN["single"])) is None
assert "whole matrices" in feature.why_not(registry.load(registry.BUILTIN["zero2"]))
assert [each.__name__ for each in callback_classes()][-1] == "CentralizationCallback"
*_, report = record_hooks()
assert type(report).__name__ == "CentralizationReport"
assert [text.partition(" (")[0] for text in report.paragraphs(job, None)] == ["Its gradients were centralized"]
with pytest.raises(BatchFileError, match=r"centralize_gradients: must be true or false"):
    parse_batch(file.read_text().replace("gradients: true", "gradients: 3"), folder=file.parent, name="batch.yaml")
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the sources, as a build writes into their folder."""
    plugin, source = ROOT / "examples" / "plugin", tmp_path_factory.mktemp("plugin")
    for path in plugin.rglob("*"):
        if path.suffix in (".py", ".toml", ".yaml"):
            (source / path.relative_to(plugin)).parent.mkdir(parents=True, exist_ok=True)
            (source / path.relative_to(plugin)).write_bytes(path.read_bytes())
    return source


@pytest.fixture(scope="module")
def environment(source, tmp_path_factory):
    """The environment of processes for which the distribution is installed."""
    folder = tmp_path_factory.mktemp("installed")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*install, "--target", str(folder), str(source)], check=True)
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}


def test_an_installed_feature_is_part_of_jobs_and_files_and_of_what_trains_and_records(source, environment, tmp_path):
    program = [sys.executable, "-c", PROGRAM, str(source / "batch.yaml")]
    subprocess.run(program, check=True, env=environment, cwd=tmp_path)


# A whole run. The test above holds that the parts of the feature are there, and what they say of a model;
# tests/integration/training/test_callbacks.py that a training calls such parts.
@pytest.mark.full
def test_an_installed_feature_is_part_of_training_and_records(source, environment, tmp_path):
    jobs = yaml.safe_load((source / "batch.yaml").read_text())["jobs"]
    plain = {key: value for key, value in jobs[0].items() if key != "centralize_gradients"} | {"name": "plain"}
    (source / "both.yaml").write_text(yaml.safe_dump({"jobs": [*jobs, plain], "devices": {"cpu": 1}}))
    home = tmp_path / "home"
    run = [sys.executable, "-m", "ringmaster.flows.entry", "run", str(source / "both.yaml"), "--json"]
    told = subprocess.run(run, check=True, env=environment | {"RINGMASTER_HOME": str(home)}, capture_output=True)
    result = {job["name"]: job for job in json.loads(told.stdout)["jobs"]}
    client = MlflowClient(sqlite_url(home / "mlflow.db"))
    pages = {
        name: client.get_model_version(*job["model_uri"].split("/")[1:]).description for name, job in result.items()
    }
    line = "Its gradients were centralized"
    assert line in pages["centralized"] and line not in pages["plain"]
    weights = {Path(job["model_dir"], "model.safetensors").read_bytes() for job in result.values()}
    assert len(weights) == 2, "the feature has changed the training"

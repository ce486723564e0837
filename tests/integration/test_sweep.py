"""A sweep: what its file and form say, and the flow from a file to a leaderboard."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from flows.sweep_form import DeviceChoice, InlineJob, JobFromFile, Sweep, load_sweep
from tasks.batch import BatchFileError

ROOT = Path(__file__).parents[2]

BATCH = """\
name: base
jobs:
  - name: small
    model:
      architecture: ViTForImageClassification
      config: {image_size: 8, patch_size: 4, hidden_size: 8, intermediate_size: 16, num_hidden_layers: 1,
               num_attention_heads: 1, hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0}
    data: {source: digits}
    global_batch_size: 32
    num_steps: 30
    evaluation: {metrics: [accuracy, loss]}
    techniques: [single]
grid:
  - template:
      name: words
      model: {architecture: LlamaForCausalLM}
      data: {path: "*.txt", seq_len: 8}
      num_steps: 3
    over: {seed: [0, 1]}
"""
SWEEP = """\
name: rates
template: {path: base.yaml, job: small}
over:
  optimizer.lr: [1e-9, 1e-2]
devices: {cpu: 1}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "base.yaml").write_text(BATCH)
    (folder / "story.txt").write_text("once upon a time " * 20)
    return folder


def test_a_file_is_a_grid_over_a_job_of_a_batch(folder):
    (folder / "sweep.yaml").write_text(SWEEP)
    batch = load_sweep(folder / "sweep.yaml").batch()
    assert (batch.name, batch.devices, batch.folder) == ("rates", {"cpu": 1}, folder)
    assert [job.name for job in batch.jobs] == ["small-lr1e-9", "small-lr0.01"]
    assert [job.optimizer.lr for job in batch.jobs] == [1e-9, 1e-2]


def test_the_template_of_a_grid_serves_too_and_its_paths_start_where_its_file_is(folder):
    sweep = Sweep(template=JobFromFile(path=str(folder / "base.yaml"), job="words"), over={"seed": [0, 1, 2]})
    assert [job.data.path for job in sweep.batch().jobs] == [str(folder / "*.txt")] * 3


def test_a_job_can_be_written_out(folder):
    job = {"model": {"architecture": "LlamaForCausalLM"}, "data": {"path": "*.txt", "seq_len": 8}, "num_steps": 3}
    sweep = Sweep(name="mine", template=InlineJob(job=job, folder=str(folder)), over={"optimizer.lr": [1e-3]})
    (found,) = sweep.batch().jobs
    assert (found.name, found.optimizer.lr) == ("mine-lr1e-3", 1e-3)


def test_what_a_form_says_of_devices_is_what_a_batch_file_says():
    said = [
        DeviceChoice(),
        DeviceChoice(kind="cpu", count=2),
        DeviceChoice(kind="gpu"),
        DeviceChoice(kind="gpu", count=1),
    ]
    files = ["auto", {"cpu": 2}, {"gpu": "all"}, {"gpu": 1}]
    assert [choice.in_batch_file() for choice in said] == files
    assert [DeviceChoice.model_validate(file) for file in files] == said


@pytest.mark.parametrize("wrong", [{"kind": "cpu"}, {"kind": "auto", "count": 2}, {"kind": "gpu", "count": 0}])
def test_devices_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValidationError):
        DeviceChoice.model_validate(wrong)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("nane: x\n" + SWEEP, ["sweep.yaml:1: nane: is an unknown key. To fix: did you mean `name`?"]),
        (SWEEP.replace("base.yaml", "none.yaml"), ["none.yaml: cannot be read"]),
        (SWEEP.replace("job: small", "job: smell"), ["template.job: 'smell' is no job of base.yaml", "`small`"]),
        (SWEEP.replace(", job: small", ""), ["template.job: names no job of base.yaml", "small, words"]),
        (SWEEP.replace(", job: small", ", jub: small"), ["sweep.yaml:2: template.jub: is an unknown key"]),
        (SWEEP.replace("template:", "# "), ["template: is missing"]),
        (SWEEP.replace("[1e-9, 1e-2]", "[]"), ["sweep.yaml:4: over.optimizer.lr: list should have at least 1 item"]),
        (SWEEP.replace("1e-9", "-1"), ["over.optimizer.lr[0]: must be greater than 0, got -1"]),
        (SWEEP.replace("optimizer.lr", "optimiser.lr"), ["over.optimiser.lr: is an unknown key"]),
        (SWEEP.replace("{cpu: 1}", "{cpu: 0}"), ["sweep.yaml:5: devices.count: "]),
        (SWEEP.replace("rates", "the rates"), ["sweep.yaml:1: name: "]),
        ("name: [", ["is not YAML"]),
    ],
)
def test_a_wrong_file_is_told(folder, text, told):
    path = folder / "sweep.yaml"
    path.write_text(text)
    with pytest.raises(BatchFileError) as raised:
        load_sweep(path)
    for words in told:
        assert words in str(raised.value)


def test_the_example_is_right():
    assert len(load_sweep(ROOT / "examples" / "sweep.yaml").batch().jobs) == 4


def test_the_command_ranks_the_jobs_and_prints_json(folder):
    path = folder / "rates.yaml"
    path.write_text(SWEEP)
    program = "import typer; from flows.commands_retraining import sweep; typer.run(sweep)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RINGMASTER_HOME": str(folder / "home")}
    command = [sys.executable, "-c", program, str(path), "--json"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert (result["name"], result["status"], result["metric"]) == ("rates", "done", "accuracy")
    assert [(row["rank"], row["job"]) for row in result["leaderboard"]] == [(1, "small-lr0.01"), (2, "small-lr1e-9")]
    first, second = result["leaderboard"]
    assert first["held-out accuracy"] > second["held-out accuracy"]
    assert (first["optimizer.lr"], first["model"]) == (0.01, "models:/rates.small-lr0.01/1")
    assert result["best"] == first
    assert {job["name"] for job in result["batch"]["jobs"]} == {"small-lr0.01", "small-lr1e-9"}

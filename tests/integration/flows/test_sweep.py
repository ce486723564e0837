"""Sweeps: the contents of their file and form, and the flow from a file to a leaderboard."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from ringmaster.errors import BatchFileError
from ringmaster.flows.sweep_form import DeviceChoice, Parameter, Sweep, load_sweep, spec_of
from ringmaster.model_lineage.ledger.ledger import Ledger

ROOT = Path(__file__).parents[3]

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
    batch = spec_of(load_sweep(folder / "sweep.yaml")).batch()
    assert (batch.name, batch.devices, batch.folder) == ("rates", {"cpu": 1}, folder)
    assert [job.name for job in batch.jobs] == ["trial-0", "trial-1"]
    assert [job.optimizer.lr for job in batch.jobs] == [1e-9, 1e-2]


def test_the_template_of_a_grid_serves_too_and_its_paths_start_where_its_file_is(folder):
    form = Sweep.model_validate(
        {"template": {"path": str(folder / "base.yaml"), "job": "words"}, "over": {"seed": [0, 1, 2]}}
    )
    assert [job.data.path for job in spec_of(form).batch().jobs] == [str(folder / "*.txt")] * 3


def test_the_data_sets_that_a_batch_file_describes_are_known_to_the_trials_of_its_jobs(folder):
    datasets = "datasets:\n  tales: {versions: {1: {path: story.txt}}}\n"
    (folder / "told.yaml").write_text(
        datasets + BATCH.replace('{path: "*.txt", seq_len: 8}', "{name: tales, seq_len: 8}")
    )
    (folder / "sweep.yaml").write_text(SWEEP.replace("{path: base.yaml, job: small}", "{path: told.yaml, job: words}"))
    batch = spec_of(load_sweep(folder / "sweep.yaml")).batch()
    assert {(job.data.name, job.data.version, job.data.path) for job in batch.jobs} == {
        ("tales", "1", str(folder / "story.txt"))
    }


def test_a_job_can_be_written_out(folder):
    job = {"model": {"architecture": "LlamaForCausalLM"}, "data": {"path": "*.txt", "seq_len": 8}, "num_steps": 3}
    template = {"job": job, "folder": str(folder)}
    form = Sweep.model_validate({"name": "mine", "template": template, "over": {"optimizer.lr": [1e-3]}})
    (found,) = spec_of(form).batch().jobs
    assert (found.name, found.optimizer.lr) == ("trial-0", 1e-3)


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
        ("nane: x\n" + SWEEP, ["sweep.yaml:1: nane: is an unknown key. To fix: ", "`name`"]),
        (SWEEP.replace("base.yaml", "none.yaml"), ["sweep.yaml:2: template.path: there is no file", "none.yaml"]),
        (SWEEP.replace("job: small", "job: smell"), ["template.job: 'smell' is not a job of base.yaml", "`small`"]),
        (SWEEP.replace(", job: small", ""), ["template.job: names no job of base.yaml", "small, words"]),
        (SWEEP.replace(", job: small", ", jub: small"), ["sweep.yaml:2: template.jub: is an unknown key"]),
        (SWEEP.replace("template:", "# "), ["template: is missing"]),
        (SWEEP.replace("[1e-9, 1e-2]", "[]"), ["sweep.yaml:4: over.optimizer.lr: has no value"]),
        (SWEEP.replace("1e-9", "-1"), ["over.optimizer.lr[0]: must be greater than 0, got -1"]),
        (SWEEP.replace("optimizer.lr", "optimiser.lr"), ["over.optimiser.lr: is an unknown key"]),
        (SWEEP.replace("{cpu: 1}", "{cpu: 0}"), ["sweep.yaml:5: devices.count: "]),
        (SWEEP.replace("rates", "the rates"), ["sweep.yaml:1: name: "]),
        (SWEEP + "base: digits\n", ["sweep.yaml:6: base: 'digits' is neither a registered model nor a folder"]),
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


@pytest.mark.parametrize(
    ("file", "num_trials"), [("sweep.yaml", 8), ("sweep_tpe.yaml", 12), ("recipes/sweep_goals.yaml", 12)]
)
def test_the_examples_are_right(file, num_trials):
    assert len(spec_of(load_sweep(ROOT / "examples" / file)).batch().jobs) == num_trials


def test_faults_of_the_form_and_of_the_sweep_are_told_together(folder):
    path = folder / "wrong.yaml"
    path.write_text(
        "name: rates\ntemplate: {path: base.yaml, job: small}\nspace:\n"
        "  optimizer.lr: {low: 0, high: 1e-2, log: true}\n  seed: {high: 3}\n"
        "early_stopping: {min_steps: 30}\nobjective: bleu\n"
    )
    with pytest.raises(BatchFileError) as raised:
        load_sweep(path)
    found = [str(fault) for fault in raised.value.faults]
    for line, words in [
        (4, "space.optimizer.lr.low: a logarithmic range cannot go to or through 0, got 0"),
        (5, "space.seed: has neither values nor both low and high"),
        (6, "early_stopping.min_steps: must be less than the 30 steps of a trial, got 30"),
        (7, "objective: 'bleu' is unknown. To fix: use one of accuracy, auroc, character_error_rate"),
    ]:
        assert any(fault.startswith(f"wrong.yaml:{line}: {words}") for fault in found), found


def test_a_line_of_a_form_is_a_list_of_values():
    values = [
        Parameter(key="optimizer.lr", values=text).values for text in ("1e-3, 3e-3", "adamw, sgd", "[1, 2], 3", "")
    ]
    assert values == [[1e-3, 3e-3], ["adamw", "sgd"], [[1, 2], 3], None]


@pytest.mark.full
def test_the_command_ranks_the_jobs_and_prints_json(folder):
    path = folder / "rates.yaml"
    path.write_text(SWEEP)
    program = "import typer; from ringmaster.flows.commands.running import sweep; typer.run(sweep)"
    environment = {**os.environ, "RINGMASTER_HOME": str(folder / "home")}
    command = [sys.executable, "-c", program, str(path), "--json"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert (result["name"], result["status"], result["metric"]) == ("rates", "done", "accuracy")
    assert [(row["rank"], row["job"]) for row in result["leaderboard"]] == [(1, "trial-1"), (2, "trial-0")]
    first, second = result["leaderboard"]
    assert first["held-out accuracy"] > second["held-out accuracy"]
    assert (first["optimizer.lr"], first["model"]) == (0.01, "models:/rates.trial-1/1")
    assert result["best"] == first
    assert {job["name"] for job in result["batch"]["jobs"]} == {"trial-1", "trial-0"}


ASHA = """\
name: halved
template: {path: base.yaml, job: small}
space: {optimizer.lr: {low: 1e-5, high: 1e-1, log: true}, seed: [0, 1]}
num_trials: 8
early_stopping: {policy: asha, min_steps: 3, reduction_factor: 4}
objective: accuracy
devices: {cpu: 1}
challenger_of: digits
"""


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_sweep_that_is_killed_goes_on_and_its_best_becomes_the_challenger(folder):
    path = folder / "halved.yaml"
    path.write_text(ASHA)
    program = "import typer; from ringmaster.flows.commands.running import sweep; typer.run(sweep)"
    home = folder / "halved-home"
    environment = {**os.environ, "RINGMASTER_HOME": str(home)}
    command = [sys.executable, "-c", program, str(path), "--json"]
    options = {"cwd": folder, "env": environment, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **options) as first:
        assert first.stderr is not None
        told = 0
        for line in first.stderr:
            told += "stopped early" in line
            if told == 2:
                break
        first.kill()
    done = subprocess.run([*command, "--resume"], **options)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    rows = result["leaderboard"]
    assert {row["status"] for row in rows} == {"done", "stopped"}
    assert sum(row["steps"] for row in rows) < 0.5 * 30 * 8
    assert len({(row["optimizer.lr"], row["seed"]) for row in rows}) == 8
    assert result["best"]["status"] == "done" and result["challenger"] == "models:/digits/1" and result["faults"] == []
    assert f"`{result['folder']}`" in done.stderr and "`ringmaster export digits@challenger FOLDER`" in done.stderr
    assert (Path(result["folder"]) / "config.json").exists()
    ledger = Ledger(f"sqlite:///{home}/mlflow.db", artifact_root=home / "mlartifacts")
    challenger = ledger.get_alias("digits", "challenger")
    assert challenger is not None
    assert challenger.model_id == ledger.resolve_model(result["best"]["model"]).model_id
    names = {artifact.path for artifact in ledger.client.list_artifacts(result["run"], "sweep")}
    assert names == {
        f"sweep/{name}" for name in ("leaderboard.json", "learning_curves.svg", "parallel_coordinates.svg")
    }
    assert "get-artifact?path=sweep/parallel_coordinates.svg" in ledger.note(result["run"])


ALIGNED = """\
name: aligned
template:
  job:
    model:
      architecture: LlamaForCausalLM
      config: {hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2}
    data: {path: answers.jsonl, vocab_size: 300}
    loss: dpo
    global_batch_size: 8
    num_steps: 16
    techniques: [single]
space: {optimizer.lr: [1.0e-10, 1.0e-2], loss.beta: [0.1, 0.5]}
sampler: grid
early_stopping: {policy: asha, min_steps: 8, reduction_factor: 2}
objective: preference_accuracy
devices: {cpu: 1}
"""


@pytest.mark.full
def test_trials_of_a_named_loss_are_stopped_and_ranked_by_the_metric_of_its_kind(folder):
    rows = [{"prompt": f"question {i}", "chosen": " yes of course", "rejected": " no never"} for i in range(64)]
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "aligned.yaml"
    path.write_text(ALIGNED)
    program = "import typer; from ringmaster.flows.commands.running import sweep; typer.run(sweep)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "RINGMASTER_HOME": str(folder / "aligned-home")}
    command = [sys.executable, "-c", program, str(path), "--json"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(done.stdout)["leaderboard"]
    assert {row["status"] for row in rows} == {"done", "stopped"}
    assert (rows[0]["held-out preference_accuracy"], rows[0]["optimizer.lr"]) == (1.0, 1e-2)
    assert {row["loss.beta"] for row in rows} == {0.1, 0.5}
    assert all(row["optimizer.lr"] == 1e-10 for row in rows if row["held-out preference_accuracy"] < 1)

"""The files of the command protocol (order, report, checkpoints) without a command, and commands in batch files."""

import json
import os
from pathlib import Path

import pytest
from mlflow.utils import validation

from ringmaster.codec import to_json
from ringmaster.errors import BatchFileError
from ringmaster.features.external_trainers import protocol
from ringmaster.features.external_trainers.protocol import (
    CommandFinished,
    CommandHeartbeat,
    Report,
    adopt,
    environment,
    incoming,
    parse_event,
    words_of,
)
from ringmaster.tasks.batch import load_batch
from ringmaster.tasks.profiling.profile_store import speed_key
from ringmaster.techniques import DataSpec, Job, ModelSpec
from ringmaster.techniques.checkpoints.checkpoint import CheckpointStore
from ringmaster.techniques.data import prepare
from ringmaster.techniques.processes.order import TRAIN, GangOrder, Slot

GPUS = tuple(Slot(kind="gpu", index=i, uuid=f"GPU-{i}") for i in (2, 5))
CPUS = tuple(Slot(kind="cpu", index=i, cores=(4 * i, 4 * i + 1)) for i in range(2))


def order(slots, command=("torchrun", "--n={num_devices}", "--port", "{port}")):
    model = ModelSpec(command=command)
    job = Job(name="theirs", model=model, data=DataSpec(source="command"), num_steps=4)
    return GangOrder(
        purpose=TRAIN, job=job, technique="", config={}, slots=slots, folder="/gang", cache_dir="/cache", last_step=4
    )


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("loss 3.1", "is not JSON"),
        ("[1]", "To fix: give `event` one of start, step"),
        ('{"event": "stop"}', "To fix: give `event` one of"),
        ('{"event": "step", "step": 3, "loss": 1.0}', "without 'seconds'"),
        ('{"event": "step", "step": "3", "loss": 1.0, "seconds": 1}', "'step' is not an int"),
        ('{"event": "step", "step": true, "loss": 1.0, "seconds": 1}', "'step' is not an int"),
        ('{"event": "done"}', "without 'step'"),
        ('{"event": "model", "seconds": "long"}', "'seconds' is not an int or float"),
        ('{"event": ["step"]}', "To fix: give `event` one of"),
        ("[" * 100_000, "is not JSON"),
        ('{"event": "step", "step": -3, "loss": 1.0, "seconds": 1}', "'step' is not a number from 0"),
        ('{"event": "step", "step": 3.0, "loss": 1.0, "seconds": 1}', "'step' is not an int"),
        (f'{{"event": "done", "step": 1{"0" * 400}}}', "'step' is not a number from 0"),
        ('{"event": "step", "step": 3, "loss": 1.0, "seconds": NaN}', "'seconds' is not a number from 0"),
        ('{"event": "step", "step": 3, "loss": 1.0, "seconds": -1}', "'seconds' is not a number from 0"),
        ('{"event": "phase", "phase": "p", "patience_s": Infinity}', "'patience_s' is not a number from 0"),
        ('{"event": "memory", "peak_bytes": -1}', "'peak_bytes' is not a number from 0"),
        ('{"event": "checkpoint", "step": 1, "folder": "a\\u0000b"}', "'folder' has control characters"),
        ('{"event": "phase", "phase": "\\ud800", "patience_s": 1}', "'phase' has control characters"),
        (f'{{"event": "phase", "phase": "{"p" * 100_000}", "patience_s": 1}}', "'phase' has 100000 characters"),
        (f'{{"event": "failed", "message": "{"m" * 1_000_000}"}}', "To fix: at most 1000000"),
    ],
)
def test_a_line_that_is_not_of_the_protocol_says_so(line, complaint):
    with pytest.raises(ValueError, match="the command sent") as caught:
        parse_event(line.encode())
    assert complaint in str(caught.value)


UNRECORDABLE = [
    "acc[/top5]",
    "",
    "a//b",
    "../x",
    "..",
    ".",
    "/a",
    "a/",
    "./a",
    "a\n",
    "\x1b[2J",
    "a" * 246,
    "\ud800",
    "a%",
    "{b}",
]


@pytest.mark.parametrize("name", UNRECORDABLE, ids=ascii)
def test_a_metric_that_would_not_be_recorded_is_refused_with_its_name(name):
    line = json.dumps({"event": "metrics", "step": 1, "metrics": {name: 1.0, "loss": 1.0}})
    with pytest.raises(ValueError, match="cannot have this name") as caught:
        parse_event(line.encode())
    assert f"{name!r:.100}" in str(caught.value)
    assert "'loss'" not in str(caught.value).partition("where")[2]


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", "1" + "0" * 400, "true", "null", '"1.0"', "[1]"])
def test_a_metric_without_a_finite_number_is_refused_with_its_name(value):
    with pytest.raises(ValueError, match="metric 'acc' is") as caught:
        parse_event(f'{{"event": "metrics", "step": 1, "metrics": {{"acc": {value}}}}}'.encode())
    assert "To fix: give a" in str(caught.value)


def test_metrics_have_the_names_that_mlflow_records():
    names = ["loss", "eval loss", "top-1:top-5", "val/acc_1.0", "précision", "a" * 245]
    event = parse_event(json.dumps({"event": "metrics", "step": 1, "metrics": dict.fromkeys(names, 1)}).encode())
    assert event.metrics == dict.fromkeys(names, 1.0)
    for name in names:
        validation._validate_metric(f"eval/{name}", 1.0, 0, 1)


def test_the_message_of_a_failure_keeps_its_ends():
    event = parse_event(json.dumps({"event": "failed", "message": "a" * 50_000 + "\0\ud800" + "z" * 50_000}).encode())
    assert len(event.message) <= 20_000
    assert (event.message[0], event.message[-1]) == ("a", "z")
    assert "(100,002 characters in all)" in event.message


def test_a_line_without_an_end_is_refused_before_it_fills_the_memory(tmp_path):
    report = Report(tmp_path / "report")
    with (tmp_path / "report").open("wb", buffering=0) as writer, pytest.raises(ValueError, match="To fix: at most"):
        for _ in range(100):
            writer.write(b"x" * 60_000)
            assert list(report.events()) == []
    report.close()


def test_lines_come_whole_however_they_are_written(tmp_path):
    report = Report(tmp_path / "report")
    with (tmp_path / "report").open("wb", buffering=0) as writer:
        writer.write(b'{"event": "be')
        assert list(report.events()) == []
        writer.write(b'at"}\n\n{"event": "done", "step": 4}\n')
        assert list(report.events()) == [CommandHeartbeat(), CommandFinished(step=4)]
    assert list(report.events()) == []  # a writer that closes the report does not end it
    report.close()


def test_a_command_sees_the_devices_of_its_gang_and_our_interpreter_first(monkeypatch, tmp_path):
    ours = str(Path(__file__).parents[3] / "src")
    (tmp_path / "ringmaster").mkdir()
    monkeypatch.setattr(protocol, "getsitepackages", lambda: [str(tmp_path)])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), ours, "/their/own"]))
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # as in the services of a pool
    on_gpus, on_cpus = (
        environment(order(slots), port=7, order_file=tmp_path / "o", report_file=tmp_path / "r")
        for slots in (GPUS, CPUS)
    )
    assert on_gpus["CUDA_VISIBLE_DEVICES"] == "GPU-2,GPU-5"
    assert (on_cpus["CUDA_VISIBLE_DEVICES"], on_cpus["OMP_NUM_THREADS"]) == ("", "2")
    assert on_cpus["PYTHONPATH"] == f"{ours}:/their/own"  # a checkout, and nothing of what is installed with us
    assert "PYTHONSAFEPATH" not in on_cpus  # a script finds the modules in its folder
    assert on_cpus["MASTER_PORT"] == "7"
    assert words_of(order(GPUS), port=7) == ["torchrun", "--n=2", "--port", "7"]


def test_only_what_was_written_below_save_to_becomes_a_checkpoint(tmp_path):
    root = tmp_path / "checkpoints"
    folder = incoming(root) / "mine"
    folder.mkdir()
    with pytest.raises(ValueError, match="is empty"):
        adopt(root, folder, step=1, meta={})
    with pytest.raises(ValueError, match="write it into a folder below save_to"):
        adopt(root, tmp_path, step=1, meta={})
    folder = incoming(root) / "again"
    folder.mkdir()
    (folder / "weights").write_bytes(b"1234")
    adopt(root, folder, step=3, meta={"job": "theirs"})
    newest = CheckpointStore(root).newest()
    assert (newest.manifest.step, dict(newest.manifest.meta)) == (3, {"job": "theirs"})
    assert not folder.exists()


def write_batch(folder, model, **job):
    (folder / "train.py").write_text("print('training')")
    entry = {"name": "theirs", "model": model, "data": {"source": "command"}, "num_steps": 3, **job}
    (folder / "batch.yaml").write_text(json.dumps({"jobs": [entry]}))
    return folder / "batch.yaml"


@pytest.mark.parametrize("command", ["python train.py --rate 0.1", ["python", "train.py", "--rate", "0.1"]])
def test_a_batch_file_names_a_command(tmp_path, command):
    (job,) = load_batch(write_batch(tmp_path, {"command": command, "configs": [{"a": 1}]})).jobs
    assert job.model.command == ("python", str(tmp_path / "train.py"), "--rate", "0.1")
    assert job.model.configs == ({"a": 1},)


@pytest.mark.parametrize(
    ("model", "changes", "complaint"),
    [
        ({"command": "no-such-program-at-all"}, {}, "there is no program 'no-such-program-at-all'"),
        ({"command": "python absent.py"}, {}, "there is no file 'absent.py'"),
        ({"command": "python 'open"}, {}, "cannot be divided into words"),
        ({"command": []}, {}, "must be a command line or a list of words"),
        ({"command": "python train.py", "config": {"a": 1}}, {}, "does not go with a command"),
        ({"command": "python train.py"}, {"num_steps": None, "num_epochs": 2}, "only the command knows"),
        ({"architecture": "LlamaForCausalLM"}, {}, "is not a built-in kind of data"),
        ({"architecture": "LlamaForCausalLM", "configs": [{}]}, {"data": {"source": "digits"}}, "are for a command"),
    ],
)
def test_what_is_wrong_with_a_command_is_told(tmp_path, model, changes, complaint):
    with pytest.raises(BatchFileError) as caught:
        load_batch(write_batch(tmp_path, model, **changes))
    assert complaint in str(caught.value)


def test_another_trainer_has_another_speed(tmp_path):
    (job,) = load_batch(write_batch(tmp_path, {"command": "python train.py"})).jobs
    data = to_json(prepare(job.data, cache_dir=tmp_path / "cache"))
    before = speed_key(job, data)
    (tmp_path / "train.py").write_text("print('training slowly')")
    assert speed_key(job, data) != before

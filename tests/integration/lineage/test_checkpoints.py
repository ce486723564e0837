"""`ringmaster lineage bisect` within the checkpoints of the training run that broke a model."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from ringmaster.flows import cli
from ringmaster.model_lineage import QUIET_ENVIRONMENT, Ledger, Origin
from ringmaster.techniques.checkpoints.checkpoint import CheckpointStore, CheckpointTensor, RankPieces, TensorPiece
from ringmaster.techniques.checkpoints.storage import checkpoint_steps
from ringmaster.techniques.checkpoints.tensor_files import blocks_of
from ringmaster.techniques.models.export import export_checkpoint


def save(root, step):
    """Saves a checkpoint whose fp32 weights equal its step, with an optimizer tensor."""
    tensors = {"model/w": torch.full((2, 3), float(step)), "optimizer/w/exp_avg": torch.zeros(2, 3)}

    def write(file):
        stored = {
            name: CheckpointTensor(
                dtype="F32", shape=(2, 3), pieces=(TensorPiece(file=file, key=name, offset=(0, 0), shape=(2, 3)),)
            )
            for name in tensors
        }
        return RankPieces(tensors=stored, blocks=blocks_of(tensors))

    CheckpointStore(root, keep=10).save(step, write, {})


@pytest.fixture
def trained(tmp_path):
    """(the root of checkpoints after 10 to 50 steps, the folder of the finished model after 60 steps)."""
    for step in (10, 20, 30, 40, 50):
        save(tmp_path / "checkpoints", step)
    finished = tmp_path / "finished"
    finished.mkdir()
    save_file({"w": torch.full((2, 3), 60.0, dtype=torch.bfloat16)}, finished / "model.safetensors")
    (finished / "config.json").write_text('{"a": 1}')
    return str(tmp_path / "checkpoints"), finished


def test_a_checkpoint_becomes_a_model_like_the_finished_one(trained, tmp_path):
    root, finished = trained
    assert sorted(checkpoint_steps(root)) == [10, 20, 30, 40, 50]
    export_checkpoint(root, checkpoint_steps(root)[20], finished=finished, folder=tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_text() == '{"a": 1}'
    (w,) = load_file(tmp_path / "out" / "model.safetensors").values()
    assert torch.equal(w, torch.full((2, 3), 20.0, dtype=torch.bfloat16))


def test_a_checkpoint_that_is_damaged_or_of_another_model_is_told(trained, tmp_path):
    root, finished = trained
    name = checkpoint_steps(root)[30]
    save_file({"other": torch.zeros(1)}, finished / "model.safetensors")
    with pytest.raises(ValueError, match="has no other: it is of another model"):
        export_checkpoint(root, name, finished=finished, folder=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (next(iter((tmp_path / "checkpoints" / name).glob("*.safetensors")))).write_bytes(b"cut off")
    with pytest.raises(ValueError, match="is not whole"):
        export_checkpoint(root, name, finished=finished, folder=tmp_path / "out")


def test_there_are_no_steps_where_there_is_no_folder(tmp_path):
    assert checkpoint_steps(str(tmp_path / "gone")) == {}


def test_bisect_names_the_steps_between_which_a_model_broke(trained, tmp_path, monkeypatch):
    root, finished = trained
    for name, value in {**QUIET_ENVIRONMENT, "RINGMASTER_HOME": str(tmp_path / "here")}.items():
        monkeypatch.setenv(name, value)
    for name in ("MLFLOW_TRACKING_URI", "RINGMASTER_DATABASE", "RINGMASTER_TENSORS"):
        monkeypatch.delenv(name, raising=False)
    ledger = Ledger(f"sqlite:///{tmp_path}/here/mlflow.db", artifact_root=tmp_path / "here" / "mlartifacts")
    run = ledger.start_batch("night", params={})
    origin = Origin(checkpoints=root, num_steps=60)
    ledger.record_model("broken", run_id=run, folder=finished, kind="pretrained", origin=origin)
    # A model is good while its first weight, the upper half of an fp32, is at most 30.
    check = tmp_path / "check.py"
    check.write_text(
        "import pathlib, struct, sys\n"
        "raw = pathlib.Path(sys.argv[1], 'model.safetensors').read_bytes()\n"
        "sys.exit(struct.unpack('<f', b'\\0\\0' + raw[-2:])[0] > 30)\n"
    )
    done = CliRunner().invoke(cli.app, ["lineage", "bisect", "broken", "--test", f"python3 {check}", "--json"])
    (culprit,) = json.loads(done.stdout)["culprits"]
    assert culprit["steps"] == {
        "last_good": 30, "first_bad": 40, "checkpoints": [10, 20, 30, 40, 50], "is_monotone": True,
        "every": [{"last_good": 30, "first_bad": 40}],
    }  # fmt: skip
    # Good, bad, and good again: all are tested, and each change for the worse is reported.
    check.write_text(check.read_text().replace("> 30)", "not in (10, 30, 40))"))
    done = CliRunner().invoke(cli.app, ["lineage", "bisect", "broken", "--test", f"python3 {check}", "--all"])
    assert "between steps 10 and 20, and again between 40 and 50" in done.stdout
    metric = CliRunner().invoke(cli.app, ["lineage", "bisect", "broken", "--test", "loss<1", "--json"])
    assert metric.exit_code != 0

"""Checkpoints that torchtitan, Megatron-Core and DeepSpeed have written (tests/recorded) are read, and written back."""

import hashlib
import json
import os
import pickle
import shutil
import tarfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import LlamaForCausalLM

from ringmaster.features.foreign_models.conversion import convert, open_model
from ringmaster.features.foreign_models.dcp_folders import DcpFolder
from ringmaster.techniques.checkpoints.chain import StateChain
from ringmaster.techniques.checkpoints.checkpoint import CheckpointStore
from ringmaster.techniques.checkpoints.state import read_whole

RECORDED = Path(__file__).parents[3] / "recorded"
NAMES = sorted(file.name.removesuffix(".tar.xz") for file in RECORDED.glob("*.tar.xz"))
ADAMW = {"name": "adamw", "lr": 0.01, "options": {"betas": [0.9, 0.95], "weight_decay": 0.1}}


def recorded(name, tmp_path):
    with tarfile.open(RECORDED / f"{name}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / name, json.loads((tmp_path / name / "expected.json").read_text())


def values(tensors):
    return {name: tensor.load() for name, tensor in tensors.items()}


def digests(tensors):
    return {
        name: hashlib.sha256(each.float().contiguous().numpy().tobytes()).hexdigest()[:16]
        for name, each in values(tensors).items()
    }


def is_equal(one, other):
    one, other = values(one), values(other)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def logits(folder, expected):
    with torch.no_grad():
        return LlamaForCausalLM.from_pretrained(folder)(torch.tensor(expected["tokens"])).logits


@pytest.mark.parametrize("name", NAMES)
def test_weights_and_states_are_those_that_the_writer_reads_itself(tmp_path, name):
    folder, expected = recorded(name, tmp_path)
    model = open_model(str(folder))
    kinds = {"torchtitan": "dcp", "nemo": "megatron"}
    kind = kinds.get(name, name.split("_")[-1].rstrip("123")).replace("zero", "deepspeed")
    assert model.step == 3 and model.kind == kind
    # Its own merger loses the frozen norm of stage 1.
    assert digests(model.tensors).items() >= expected.get("weights", {}).items()
    assert len(model.tensors) == 21
    for state in ("exp_avg", "exp_avg_sq"):
        assert len(model.states[state]) == (20 if "deepspeed" in name else 21)
        assert state not in expected or digests(model.states[state]) == expected[state]


@pytest.mark.parametrize("name", ["torchtitan", "megatron", "nemo"])
def test_the_model_answers_as_its_trainer_does(tmp_path, name):
    folder, expected = recorded(name, tmp_path)
    convert(str(folder), tmp_path / "hf", to="hf")
    assert torch.allclose(logits(tmp_path / "hf", expected), torch.tensor(expected["logits"]), rtol=0, atol=2e-6)


def test_megatrons_fused_states_are_divided_by_groups(tmp_path):
    folder, _ = recorded("megatron", tmp_path)
    stored = DcpFolder(folder / "iter_0000003").tensors[
        "optimizer.state.exp_avg.decoder.layers.self_attention.linear_qkv.weight"
    ]
    qkv = stored.load()[1]
    named = open_model(str(folder)).states["exp_avg"]
    q, k, v = (named[f"model.layers.1.self_attn.{each}_proj.weight"].load() for each in "qkv")
    first, second = torch.cat([q[:8], k[:4], v[:4]]), torch.cat([q[8:], k[4:], v[4:]])
    assert torch.equal(qkv, torch.cat([first, second]))


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_for_warm_start_has_all_of_it(tmp_path, name):
    folder, _ = recorded(name, tmp_path)
    done = convert(str(folder), tmp_path / "ours", to="checkpoint")
    model = open_model(str(folder))
    assert done["num_states"] == sum(map(len, model.states.values()))
    checkpoint = CheckpointStore(tmp_path / "ours").newest()
    assert checkpoint.manifest.step == 3
    assert is_equal(open_model(str(tmp_path / "ours")).tensors, model.tensors)
    optimizer = read_whole(checkpoint, prefix="optimizer/")
    assert torch.equal(optimizer["lm_head.weight/exp_avg"], model.states["exp_avg"]["lm_head.weight"].load())
    assert optimizer["lm_head.weight/step"] == 3.0


def trained_here(tmp_path):
    """A checkpoint of Ringmaster, with the description of its job next to it."""
    folder, _ = recorded("torchtitan", tmp_path)
    convert(str(folder), tmp_path / "ours", to="checkpoint")
    chain = StateChain(job={"optimizer": ADAMW}, weights="", data="")
    (tmp_path / "ours" / "chain.json").write_text(chain.to_text())
    return folder, tmp_path / "ours"


@pytest.mark.parametrize(("to", "kind"), [("dcp", "dcp"), ("megatron", "megatron")])
def test_what_is_written_is_read_again_bit_by_bit(tmp_path, to, kind):
    _, ours = trained_here(tmp_path)
    assert convert(str(ours), tmp_path / "theirs", to=to)["num_states"] == 42
    before, after = open_model(str(ours)), open_model(str(tmp_path / "theirs"))
    assert (after.kind, after.step) == (kind, 3)
    assert is_equal(before.tensors, after.tensors)
    assert all(is_equal(before.states[state], after.states[state]) for state in ("exp_avg", "exp_avg_sq"))


def test_a_dcp_checkpoint_has_what_torchtitan_wrote(tmp_path):
    folder, ours = trained_here(tmp_path)
    convert(str(ours), tmp_path / "theirs", to="dcp")
    recorded_, written = DcpFolder(folder / "step-3"), DcpFolder(tmp_path / "theirs")
    assert recorded_.tensors.keys() == written.tensors.keys() and recorded_.values <= written.values
    assert is_equal(recorded_.tensors, written.tensors)
    of_ours = {key: written.value(f"optimizer.param_groups.norm.weight.{key}") for key in ("lr", "weight_decay", "eps")}
    assert of_ours == {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-8}


def test_a_megatron_checkpoint_has_the_keys_that_megatron_wrote(tmp_path):
    theirs, _ = recorded("megatron", tmp_path)
    _, ours = trained_here(tmp_path)
    convert(str(ours), tmp_path / "out", to="megatron")
    recorded_, written = (DcpFolder(each / "iter_0000003") for each in (theirs, tmp_path / "out"))
    shapes = [{name: each.shape for name, each in side.tensors.items()} for side in (recorded_, written)]
    assert shapes[0] == shapes[1] and recorded_.values <= written.values
    common = [torch.load(each / "iter_0000003" / "common.pt") for each in (theirs, tmp_path / "out")]
    assert common[0]["optimizer"]["state"] == common[1]["optimizer"]["state"]
    groups = [each["optimizer"]["param_groups"] for each in common]
    assert all(own.items() <= other.items() for own, other in zip(*groups, strict=True))


def test_without_hyperparameters_the_states_are_left_out(tmp_path):
    folder, _ = recorded("torchtitan", tmp_path)
    assert convert(str(folder), tmp_path / "out", to="megatron")["num_states"] == 0
    assert not any("optimizer" in name for name in DcpFolder(tmp_path / "out" / "iter_0000003").tensors)


def test_a_checkpoint_under_hugging_faces_own_names_is_read(tmp_path):
    folder, _ = recorded("torchtitan", tmp_path)
    state = values(open_model(str(folder)).tensors)
    dcp.save({"model": state}, checkpoint_id=tmp_path / "plain", no_dist=True)
    shutil.copyfile(folder / "config.json", tmp_path / "plain" / "config.json")
    assert is_equal(open_model(str(tmp_path / "plain")).tensors, open_model(str(folder)).tensors)


class Bomb:
    """An object that runs code when it is unpickled."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


def plant(name, folder, bomb):
    """Puts a pickle that runs code into a checkpoint."""
    if name == "metadata":
        (folder / "step-3" / ".metadata").write_bytes(pickle.dumps(bomb))
    elif name == "chunk":
        stored = pickle.loads((folder / "step-3" / ".metadata").read_bytes())
        (place,) = [each for index, each in stored.storage_data.items() if index.fqn == "norm.weight"]
        place.relative_path, place.offset = "bomb.distcp", 0
        torch.save(bomb, folder / "step-3" / "bomb.distcp")
        place.length = (folder / "step-3" / "bomb.distcp").stat().st_size
        (folder / "step-3" / ".metadata").write_bytes(pickle.dumps(stored))
    else:
        (file,) = folder.glob(f"global_step3/*{name}")
        torch.save({"optimizer_state_dict": bomb}, file)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("torchtitan", "metadata"),
        ("torchtitan", "chunk"),
        ("deepspeed_zero2", "rank_1_mp_rank_00_optim_states.pt"),
        ("deepspeed_zero3", "rank_0_mp_rank_00_model_states.pt"),
    ],
)
def test_a_pickle_that_would_run_code_is_named_and_not_run(tmp_path, source, name):
    folder, _ = recorded(source, tmp_path)
    plant(name, folder, Bomb(tmp_path / "exploded"))
    with pytest.raises(ValueError, match=r"posix\.mkdir") as error:
        convert(str(folder), tmp_path / "out", to="hf")
    assert "To fix" in str(error.value)
    assert not (tmp_path / "exploded").exists() and not (tmp_path / "out").exists()


def test_all_files_that_are_missing_or_cut_are_named(tmp_path):
    folder, _ = recorded("megatron", tmp_path)
    inner = folder / "iter_0000003"
    (inner / "__1_0.distcp").unlink()
    (inner / "__2_1.distcp").write_bytes((inner / "__2_1.distcp").read_bytes()[:100])
    with pytest.raises(ValueError) as error:
        open_model(str(folder))
    assert "__1_0.distcp is missing" in str(error.value) and "__2_1.distcp is cut" in str(error.value)


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_ranks_of_deepspeed_that_are_missing_or_cut_are_named(tmp_path, damage):
    folder, _ = recorded("deepspeed_zero3", tmp_path)
    for kind in ("optim", "model"):
        file = folder / "global_step3" / f"zero_pp_rank_1_mp_rank_00_{kind}_states.pt"
        file.unlink() if damage == "gone" else file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(ValueError) as error:
        open_model(str(folder))
    text = "lacks the optim_states of rank 1, the model_states of rank 1" if damage == "gone" else "cannot be read"
    assert text in str(error.value) and "To fix" in str(error.value)


@pytest.mark.parametrize("name", NAMES)
def test_a_config_of_another_model_is_refused_with_the_tensors(tmp_path, name):
    folder, _ = recorded(name, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 32, "num_hidden_layers": 1}))
    with pytest.raises(ValueError, match=r"does not fit .*config\.json: .* and \d+ more\. To fix"):
        open_model(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(
        ValueError, match=r"no config\.json next to it .* To fix: put the model's Hugging Face config\.json"
    ):
        open_model(str(folder))


def test_a_pointer_to_a_folder_above_is_not_followed(tmp_path):
    folder, _ = recorded("deepspeed_zero2", tmp_path)
    (folder / "inner").mkdir()
    (folder / "inner" / "latest").write_text("..")
    (folder / "mp_rank_00_model_states.pt").write_bytes(b"")
    with pytest.raises(ValueError, match="holds no model that is known"):
        open_model(str(folder / "inner"))


def test_a_place_outside_of_the_checkpoint_is_refused(tmp_path):
    folder, _ = recorded("torchtitan", tmp_path)
    stored = pickle.loads((folder / "step-3" / ".metadata").read_bytes())
    for place in stored.storage_data.values():
        place.relative_path = "../../secret"
    (folder / "step-3" / ".metadata").write_bytes(pickle.dumps(stored))
    with pytest.raises(ValueError, match="is outside of the checkpoint"):
        open_model(str(folder))

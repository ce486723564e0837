"""A checkpoint of another trainer is imported as the model that it holds."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from ringmaster.features.foreign_models.conversion import open_model
from tests.integration.lineage.family import answer, run
from tests.unit.features.foreign_models.test_foreign_checkpoints import recorded


@pytest.mark.full
@pytest.mark.parametrize("name", ["torchtitan", "megatron", "deepspeed_zero3", "deepspeed_universal1"])
def test_it_is_recorded_and_restored_as_any_imported_model(tmp_path, family_home, name):
    folder, _ = recorded(name, tmp_path)
    first = answer("import", folder, "--name", name)
    assert answer("import", folder, "--name", name)["id"] == first["id"]
    assert answer("show", name)["model"]["origin"]["source"] == str(folder)
    answer("restore", name, tmp_path / "restored")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "restored")
    assert torch.equal(loaded.lm_head.weight, open_model(str(folder)).tensors["lm_head.weight"].load())


def test_a_link_to_elsewhere_is_refused(tmp_path, empty_home):
    folder, _ = recorded("deepspeed_zero2", tmp_path)
    file = folder / "global_step3" / "mp_rank_00_model_states.pt"
    file.rename(tmp_path / "aside.pt")
    file.symlink_to(tmp_path / "aside.pt")
    code, _, message = run("import", folder, "--name", "x")
    assert code == 2 and "lead out of" in message.replace("\n", " ")


def test_what_is_missing_is_asked_for(tmp_path, empty_home):
    folder, _ = recorded("megatron", tmp_path)
    (folder / "config.json").unlink()
    code, _, message = run("import", folder, "--name", "x")
    assert code == 2
    assert "no config.json next to it names its model" in message.replace("\n", " ")

"""Adapters whose base folder has gone get another base, in a copy."""

import json

import pytest

from ringmaster.techniques.models.peft_format import base_of, has_lost_base, on_base


def adapter(folder, base):
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base, "r": 4}))
    return folder


def test_only_a_folder_that_has_gone_is_lost(tmp_path):
    assert has_lost_base(adapter(tmp_path / "lost", str(tmp_path / "gone")))
    assert not has_lost_base(adapter(tmp_path / "there", str(tmp_path)))
    assert not has_lost_base(adapter(tmp_path / "hub", "org/base"))
    assert not has_lost_base(adapter(tmp_path / "seeded", None))
    assert not has_lost_base(tmp_path)


def test_a_base_whose_weights_are_in_the_tensor_store_alone_is_lost(tmp_path):
    (base := tmp_path / "base").mkdir()
    moved = adapter(tmp_path / "moved", str(base))
    (base / "model.safetensors").write_bytes(b"weights")
    assert base_of(moved) == base
    (base / "model.safetensors").rename(base / "model.safetensors.stored")
    assert has_lost_base(moved)
    with pytest.raises(ValueError, match=r"is not there. To fix: .*`ringmaster lineage restore`"):
        base_of(moved)


def test_a_copy_names_the_base_that_there_is_and_is_made_again_when_that_goes_too(tmp_path):
    lost, copy = adapter(tmp_path / "lost", str(tmp_path / "gone")), tmp_path / "cache" / "copy"
    for name in ("first", "second"):
        (base := tmp_path / name).mkdir()
        assert on_base(lost, base, copy=copy) == copy
        said = json.loads((copy / "adapter_config.json").read_text())
        assert said == {"base_model_name_or_path": str(base), "r": 4}
        assert (copy / "adapter_model.safetensors").read_bytes() == b"weights"
        assert on_base(lost, tmp_path / "other", copy=copy) == copy  # the copy has a base, which stays
        base.rmdir()
    assert has_lost_base(lost)  # the adapter itself is unchanged

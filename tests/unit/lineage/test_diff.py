"""Differences between two models' tensors and records."""

import math

import numpy as np
import pytest
from safetensors.numpy import save_file

from ringmaster.model_lineage import DatasetInput, ModelRecord
from ringmaster.model_lineage.snapshot import LineageNode, record_differences
from ringmaster.model_lineage.tensors import TensorStore
from ringmaster.model_lineage.tensors.comparison import (
    WeightTensor,
    tensor_changes,
    tensors_of_folder,
    tensors_of_store,
)


def folder(path, **tensors):
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    return path


def bf16(values):
    """The bytes of values in bfloat16, truncated from float32."""
    raw = np.asarray(values, np.float32).view(np.uint32) >> 16
    return memoryview(raw.astype(np.uint16).tobytes())


def test_each_tensor_is_compared_with_that_of_its_name(tmp_path):
    same, moved = np.ones((2, 3), np.float32), np.array([3.0, 4.0, 0.0, 0.0], np.float32)
    one = folder(tmp_path / "a", same=same, moved=moved, gone=same, other=same)
    two = folder(
        tmp_path / "b", same=same, moved=moved + np.array([0, 0, 0.5, 0], np.float32), new=same, other=same.T.copy()
    )
    changes = {c.name: c for c in tensor_changes(tensors_of_folder(one), tensors_of_folder(two))}
    assert {name: change.what for name, change in changes.items()} == {
        "same": "same", "moved": "changed", "gone": "removed", "new": "added", "other": "reshaped",
    }  # fmt: skip
    assert changes["moved"].relative_l2 == pytest.approx(0.1)
    assert (changes["moved"].largest, changes["moved"].share) == (0.5, 0.25)


def test_bf16_and_another_precision_are_compared_as_numbers():
    one = {"w": WeightTensor(dtype="BF16", shape=(4,), load=lambda: bf16([1.0, 2.0, -2.0, 4.0]))}
    two = {"w": WeightTensor(dtype="BF16", shape=(4,), load=lambda: bf16([1.0, 2.0, -2.0, 4.5]))}
    (change,) = tensor_changes(one, two)
    assert change.relative_l2 == pytest.approx(0.5 / 5)
    assert (change.largest, change.share) == (0.5, 0.25)
    wide = {"w": WeightTensor(dtype="F32", shape=(4,), load=lambda: memoryview(np.float32([1, 2, -2, 4]).tobytes()))}
    (change,) = tensor_changes(one, wide)
    assert (change.what, change.relative_l2, change.share) == ("changed", 0.0, 0.0)


@pytest.mark.parametrize("values", [[0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0]])
def test_odd_numbers_are_told_without_a_warning(values, tmp_path, recwarn):
    one = tensors_of_folder(folder(tmp_path / "a", w=np.array([0.0, 1.0], np.float32)))
    two = tensors_of_folder(folder(tmp_path / "b", w=np.array(values, np.float32)))
    (change,) = tensor_changes(one, two)
    assert (change.what, change.share) == ("changed", 0.5)
    # Other warnings may come from the garbage collector.
    assert RuntimeWarning not in {said.category for said in recwarn}


def test_numbers_that_numpy_does_not_know_are_compared_byte_by_byte():
    pair = [
        {"w": WeightTensor(dtype="F8_E4M3", shape=(4,), load=lambda b=b: memoryview(b))} for b in (b"abcd", b"abcx")
    ]
    (change,) = tensor_changes(*pair)
    assert (change.what, change.share, change.relative_l2) == ("changed", 0.25, None)


def test_the_store_knows_equal_tensors_without_reading_them(tmp_path):
    store = TensorStore(tmp_path / "store")
    a = store.add(folder(tmp_path / "a", same=np.ones(3, np.float32), moved=np.zeros(3, np.float32)))
    b = store.add(folder(tmp_path / "b", same=np.ones(3, np.float32), moved=np.full(3, 2, np.float32)))
    one, two = tensors_of_store(store, a.id), tensors_of_store(store, b.id)
    store.objects.remove(one["same"].digest)
    changes = {c.name: c.what for c in tensor_changes(one, two)}
    assert changes == {"same": "same", "moved": "changed"}


def test_tensors_of_one_name_in_several_files_are_told_apart(tmp_path):
    store, ids = TensorStore(tmp_path / "store"), []
    for name, value in (("a", 1.0), ("b", 2.0)):
        for part, moved in (("unet", value), ("vae", 0.0)):
            (tmp_path / name / part).mkdir(parents=True)
            tensors = {"conv_in.weight": np.full(3, moved, np.float32), f"{part}.bias": np.ones(3, np.float32)}
            save_file(tensors, tmp_path / name / part / "model.safetensors")
        ids.append(store.add(tmp_path / name, parent=ids[0] if ids else None).id)
    pairs = [tensors_of_folder(tmp_path / name) for name in "ab"], [tensors_of_store(store, id) for id in ids]
    for one, two in pairs:
        changes = {change.name: change.what for change in tensor_changes(one, two)}
        assert changes == {
            "unet/model/conv_in.weight": "changed",
            "vae/model/conv_in.weight": "same",
            "unet.bias": "same",
            "vae.bias": "same",
        }
    assert store.model(ids[0]).weight_bytes == 4 * 3 * 4


def test_records_differ_by_section():
    def node(digest, lr, loss):
        data = DatasetInput(name="web", digest=digest, source="/web")
        record = ModelRecord(model_id="m", registered_name="n", version=1, uri="u", datasets=(data,))
        return LineageNode(
            record=record, params={"lr": lr, "steps": "5"}, metrics={"loss": loss, "behaviour/negation": loss}
        )

    assert record_differences(node("d1", "0.1", 1.0), node("d2", "0.2", 1.5)) == {
        "data": {"training: web": ("d1", "d2")},
        "hyperparameters": {"lr": ("0.1", "0.2")},
        "metrics": {"loss": (1.0, 1.5)},
        "behaviour": {"behaviour/negation": (1.0, 1.5)},
    }
    assert record_differences(node("d1", "0.1", 1.0), node("d1", "0.1", 1.0)) == {}

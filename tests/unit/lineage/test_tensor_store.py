"""The tensor store: exact contents, equal tensors stored once, damage detected, and safe concurrent use."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from ringmaster.errors import TensorObjectError, TensorStoreError
from ringmaster.model_lineage.tensors import TensorStore
from ringmaster.model_lineage.tensors.objects import BLOCK_BYTES, pack, unpack
from ringmaster.model_lineage.tensors.references import FileReference
from ringmaster.model_lineage.tensors.store import ARTIFACTS, KEY
from tests.children import in_a_child
from tests.drawing import draws

RANDOM = np.random.default_rng(0)


def weights(num=3, size=5000):
    return {f"layer.{i}.weight": RANDOM.normal(0, 0.02, size).astype(np.float32).reshape(-1, 10) for i in range(num)}


def adapted(parent, scale=1e-4):
    return {name: (w + RANDOM.normal(0, scale, w.shape)).astype(w.dtype) for name, w in parent.items()}


def model(folder, tensors, config="{}"):
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(config)
    return folder


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def store(tmp_path):
    return TensorStore(tmp_path / "store")


@draws(30)
@given(
    content=st.binary(max_size=300),
    repeat=st.integers(1, 40),
    item_bytes=st.sampled_from([1, 2, 4, 8]),
    flips=st.lists(st.integers(0, 10**6), max_size=5),
    has_parent=st.booleans(),
)
def test_whatever_is_packed_comes_back(content, repeat, item_bytes, flips, has_parent):
    content = content * repeat
    content = content[: len(content) // item_bytes * item_bytes]
    parent = bytearray(content)
    for flip in flips:
        if parent:
            parent[flip % len(parent)] ^= 1 << flip % 8

    def related():
        return iter([np.frombuffer(parent, f"<u{item_bytes}")] if parent else []) if has_parent else None

    data = memoryview(b"".join(pack(memoryview(content), item_bytes=item_bytes, parent=related())))
    assert b"".join(bytes(block) for block in unpack(data, parent=related())) == content
    whole = np.zeros(len(content), np.uint8)
    assert len([*unpack(data, parent=related(), into=whole)]) == bool(content)
    assert bytes(whole) == content


def test_large_tensors_are_packed_block_by_block_and_chains_of_them_are_read(store):
    items = BLOCK_BYTES // 2 * 2 + 100
    values = [RANDOM.integers(0, 1 << 16, items, dtype=np.uint16)]
    for _ in range(3):
        values.append(values[-1] + RANDOM.integers(0, 9, items, dtype=np.uint16))
    digests = [None]
    for value in values:
        content = memoryview(value).cast("B")
        digests.append(store.objects.put(content, item_bytes=2, parent=digests[-1]))
    assert [store.objects.depth(digest) for digest in digests[1:]] == [0, 1, 2, 3]
    assert all(store.objects.get(d) == memoryview(v).cast("B") for d, v in zip(digests[1:], values, strict=True))
    store.objects.remove(digests[1])
    with pytest.raises(TensorObjectError, match="cannot be read without another one"):
        store.objects.get(digests[-1])


def test_a_model_comes_back_bit_for_bit_whatever_it_holds(store, tmp_path):
    tensors = {
        "empty": np.zeros((0, 3), np.float32),
        "one": np.array(1.5, np.float64),
        "odd": RANDOM.integers(0, 255, 7).astype(np.uint8),
        "nan": np.array([np.nan, -0.0, np.inf], np.float32),
        "half": RANDOM.normal(size=(3, 5)).astype(np.float16),
        **weights(),
    }
    folder = model(tmp_path / "m", tensors)
    (folder / "empty.txt").write_text("")
    (folder / "sub").mkdir()
    (folder / "sub" / "tokenizer.json").write_text("x" * 3000)
    added = store.add(folder)
    store.restore(added.id, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(folder)
    assert store.add(folder).id == added.id, "an equal model is the same one"
    assert store.fsck() == []


def test_an_adapted_model_is_kept_as_a_difference_and_frozen_layers_cost_nothing(store, tmp_path):
    base = weights(4, 50_000)
    frozen = {**base, "layer.3.weight": adapted(base)["layer.3.weight"]}
    first = store.add(model(tmp_path / "base", base))
    second = store.add(model(tmp_path / "tuned", adapted(base)), parent=first.id)
    third = store.add(model(tmp_path / "head", frozen), parent=first.id)
    plain = sum(w.nbytes for w in base.values())
    alone, tuned = store.size_bytes([first.id]), store.size_bytes([first.id, second.id])
    assert tuned - alone < plain / 1.5
    head = store.size_bytes([first.id, third.id]) - alone
    assert head < plain / 4 / 1.5 + 5000
    for folder, added in (("base", first), ("tuned", second), ("head", third)):
        store.restore(added.id, tmp_path / "out" / folder)
        assert contents(tmp_path / "out" / folder) == contents(tmp_path / folder)


def test_many_on_one_base_keep_it_once(store, tmp_path):
    """Adapters contain none of the base; fine-tunes leave it unchanged and have their own heads."""
    stem = weights(num=6, size=20_000)
    base = model(tmp_path / "base", {**stem, "head.weight": RANDOM.normal(0, 0.02, (100, 10)).astype(np.float32)})
    kept = store.add(base)
    base_bytes, folders = store.size_bytes(), []
    for i in range(16):
        tensors = {
            f"layer.{j}.lora_{x}.weight": RANDOM.normal(size=(4, 10)).astype(np.float32) for j in range(6) for x in "AB"
        }
        adapter = tmp_path / f"adapter-{i}"
        adapter.mkdir()
        save_file(tensors, adapter / "adapter_model.safetensors")
        (adapter / "adapter_config.json").write_text(f'{{"base_model_name_or_path": "{base}", "r": 4}}')
        head = {"head.weight": RANDOM.normal(0, 0.02, (100, 10)).astype(np.float32)}
        folders += [adapter, model(tmp_path / f"tuned-{i}", {**stem, **head})]
    ids = [store.add(folder, parent=kept.id).id for folder in folders]
    new_bytes = sum(path.stat().st_size for folder in folders for path in folder.glob("adapter_model.safetensors"))
    new_bytes += 16 * 100 * 10 * 4
    assert store.size_bytes() - base_bytes < 1.2 * new_bytes + 32 * 4000  # 4 kB of names and digests a model
    plain_bytes = sum(len(content) for folder in [base, *folders] for content in contents(folder).values())
    assert plain_bytes > 10 * store.size_bytes()
    for id, folder in zip(ids, folders, strict=True):
        store.restore(id, tmp_path / "out" / folder.name)
        assert contents(tmp_path / "out" / folder.name) == contents(folder)


def test_a_long_line_of_adaptations_stays_readable(store, tmp_path):
    tensors, parent = weights(1), None
    for generation in range(12):
        folder = model(tmp_path / str(generation), tensors)
        parent = store.add(folder, parent=parent).id
        tensors = adapted(tensors)
    assert max(store.objects.depth(digest) for digest in store.objects) <= 4
    store.restore(parent, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "11")


def test_tensors_of_another_shape_or_kind_are_kept_alone(store, tmp_path):
    base = store.add(model(tmp_path / "base", {"w": np.ones((4, 5), np.float32)}))
    other = {"w": np.ones((5, 4), np.float32), "x": np.ones(3, np.float16)}
    child = store.add(model(tmp_path / "child", other), parent=base.id)
    store.restore(child.id, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "child")


def test_gc_keeps_what_is_needed_and_what_that_differs_from(store, tmp_path):
    base = weights()
    first = store.add(model(tmp_path / "base", base), owner="m-1")
    second = store.add(model(tmp_path / "tuned", adapted(base)), parent=first.id, owner="m-2")
    third = store.add(model(tmp_path / "other", weights()), owner="m-3")
    before = store.size_bytes()
    freed = store.gc(drop=["m-1", "m-3"])
    assert freed > 0
    assert store.ids() == [second.id]
    assert store.size_bytes() < before
    store.restore(second.id, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "tuned")
    with pytest.raises(TensorStoreError, match="there is no model"):
        store.restore(third.id, tmp_path / "gone")
    assert store.fsck() == []
    assert store.owners() == {"m-2"}


def test_an_equal_model_goes_with_the_last_of_its_owners(store, tmp_path):
    folder = model(tmp_path / "m", weights())
    for owner in ("m-1@here", "m-2@there"):
        kept = store.add(folder, owner=owner)
    assert store.gc(drop=["m-1@here"]) == 0
    assert store.ids() == [kept.id] and store.fsck() == []
    assert store.gc(drop=["m-2@there"]) > 0
    assert store.ids() == [] and store.owners() == set()


def test_gc_drops_nothing_where_damage_hides_what_is_needed(store, tmp_path):
    base = weights()
    first = store.add(model(tmp_path / "base", base), owner="m-1")
    second = store.add(model(tmp_path / "tuned", adapted(base)), parent=first.id, owner="m-2")
    digest = second.tensors["layer.1.weight"].digest
    path = store.folder / "objects" / digest[:2] / digest[2:]
    content = path.read_bytes()
    path.write_bytes(content[:3])
    with pytest.raises(TensorStoreError, match=f"{digest} is damaged.* To fix: "):
        store.gc(drop=["m-1"])
    assert len(store.ids()) == len(store.owners()) == 2
    path.write_bytes(content)
    assert store.gc(drop=["m-1"]) > 0
    assert store.fsck() == []


@pytest.fixture
def referred(store, tmp_path):
    """A stored model that is there for a reference among the artifacts."""
    folder, root = model(tmp_path / "m", weights()), tmp_path / "artifacts"
    root.mkdir()
    stored = store.add(folder, owner=ARTIFACTS)
    store.add_artifacts(root)
    num_bytes = (folder / "model.safetensors").stat().st_size
    store.reference_to("model.safetensors", model=stored.id, num_bytes=num_bytes).write(root / "model.safetensors")
    return stored, root / "model.safetensors"


def test_gc_goes_on_where_a_reference_is_damaged_and_keeps_what_it_may_stand_for(store, referred, tmp_path):
    kept, file = referred
    gone = store.add(model(tmp_path / "gone", weights()), owner="m-1")
    reference = Path(f"{file}.stored")
    whole = reference.read_bytes()
    reference.write_bytes(b"[1]")
    assert store.gc(drop=["m-1"]) > 0
    assert store.ids() == [kept.id] != [gone.id]
    (fault,) = store.reference_faults()
    assert fault.startswith(f"the reference {reference} is damaged: ") and "To fix: " in fault
    assert fault in store.fsck()
    reference.write_bytes(whole)
    assert (store.gc(drop=[]), store.reference_faults(), store.ids()) == (0, [], [kept.id])
    reference.unlink()
    assert store.gc(drop=[]) > 0 and store.ids() == []


def test_a_reference_counts_only_with_the_seal_of_its_store(store, referred, tmp_path):
    stored, file = referred
    reference = FileReference.at(file)
    store.check(reference)
    other = TensorStore(tmp_path / "other")
    other.add(tmp_path / "m")
    foreign = other.reference_to(reference.path, model=stored.id, num_bytes=1)
    for wrong in (replace(reference, seal=""), replace(reference, path="config.json"), foreign):
        with pytest.raises(TensorStoreError, match=r"this store did not write the reference\. To fix: "):
            store.check(wrong)
        wrong.write(file)
        (fault,) = store.reference_faults()
        assert f"{file}.stored cannot be read" in fault
        assert store.gc(drop=[]) == 0
    assert stat.S_IMODE((store.folder / KEY).stat().st_mode) & 0o022 == 0


def test_references_of_earlier_releases_are_sealed_once(store, referred):
    _, file = referred
    reference = replace(FileReference.at(file), seal="")
    reference.write(file)
    (store.folder / KEY).unlink()  # earlier releases have none
    store.add_artifacts(file.parent)
    sealed = FileReference.at(file)
    store.check(sealed)
    assert replace(sealed, seal="") == reference
    reference.write(file)
    store.add_artifacts(file.parent)
    with pytest.raises(TensorStoreError, match="this store did not write"):
        store.check(FileReference.at(file))


@pytest.mark.parametrize("harm", ["flipped", "cut", "gone", "empty"])
def test_damage_is_found_named_and_never_restored(store, tmp_path, harm):
    base = store.add(model(tmp_path / "base", weights()))
    digest = base.tensors["layer.1.weight"].digest
    path = store.folder / "objects" / digest[:2] / digest[2:]
    content = bytearray(path.read_bytes())
    if harm == "gone":
        path.unlink()
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes({"flipped": bytes(content), "cut": bytes(content[:-9]), "empty": b""}[harm])
    with pytest.raises(TensorStoreError, match=digest):
        store.restore(base.id, tmp_path / "out")
    assert contents(tmp_path / "out") == {}
    faults = store.fsck()
    assert any(base.id in fault and digest[:12] in fault for fault in faults)


def test_a_damaged_file_is_not_taken_in(store, tmp_path):
    folder = model(tmp_path / "m", weights())
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(TensorStoreError, match=r"model.safetensors is not a whole safetensors file"):
        store.add(folder)
    path.write_bytes(b"\x00" * 20)
    with pytest.raises(TensorStoreError, match=r"model.safetensors is not a whole safetensors file"):
        store.add(folder)
    assert store.ids() == []


def test_many_writers_at_once_keep_each_thing_once(store, tmp_path):
    base = weights()
    folders = [model(tmp_path / f"m{i}", base if i % 2 else adapted(base)) for i in range(6)]
    with ThreadPoolExecutor(6) as pool:
        ids = [added.id for added in pool.map(store.add, folders)]
    assert len(set(ids)) == 4
    for id, folder in zip(ids, folders, strict=True):
        store.restore(id, tmp_path / "out" / folder.name)
        assert contents(tmp_path / "out" / folder.name) == contents(folder)
    assert store.fsck() == []


def add_and_die(root, folder):
    """Adds a model, and exits with 7 once three objects are written."""
    store = TensorStore(root)
    num_kept, put = 0, store.objects.put

    def dies(*args, **kwargs):
        nonlocal num_kept
        kept = put(*args, **kwargs)
        num_kept += 1
        if num_kept == 3:
            os._exit(7)
        return kept

    store.objects.put = dies
    store.add(folder)


def test_a_writer_that_dies_leaves_nothing_half_done(store, tmp_path):
    folder = model(tmp_path / "m", weights())
    assert in_a_child(add_and_die, tmp_path / "store", folder) == 7
    assert store.ids() == []
    added = store.add(folder, owner="m-1")
    store.restore(added.id, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(folder)
    assert store.gc(drop=["m-1"]) > 0
    assert list(store.objects) == []

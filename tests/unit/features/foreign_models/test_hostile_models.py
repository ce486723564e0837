"""Malicious models are refused with a message, and leave no files or records."""

import json
import os
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ringmaster.errors import TensorStoreError
from ringmaster.features.foreign_models.importing import import_model, inspect, staged
from ringmaster.model_lineage.base_models import MAX_BASES, MAX_STUBS
from ringmaster.model_lineage.snapshot import Snapshot
from ringmaster.model_lineage.tensors import TensorStore
from ringmaster.model_lineage.tensors.objects import digest_of

NOBODY = Snapshot([])
DEEP = "[" * 100_000


class Untouched:
    """A ledger that fails the test if anything is recorded in it."""

    def __getattr__(self, name):
        raise AssertionError(f"{name} was asked for before the model was looked into")


@pytest.fixture
def store(tmp_path):
    return TensorStore(tmp_path / "store")


def model(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True)
    save_file({"w": np.ones((4, 5), np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def header(said, body: bytes = b"") -> bytes:
    text = (said if isinstance(said, str) else json.dumps(said)).encode()
    return struct.pack("<Q", len(text)) + text + body


def tensor(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def taken(store, folder, fetch=None):
    def nothing(name, patterns):
        raise OSError(f"{name} could not be fetched")

    return import_model(Untouched(), str(folder), name="m", snapshot=NOBODY, store=store, fetch=fetch or nothing)


def refused(store, folder, says, fetch=None):
    with pytest.raises(ValueError, match=says) as caught:
        taken(store, folder, fetch)
    assert "To fix" in str(caught.value)
    assert not list(store.objects) and not store.ids(), "nothing of it is in the store"


def secret(folder: Path) -> None:
    (folder.parent / "secret").write_text("password")
    (folder / "notes.txt").symlink_to("../secret")


LINKS = {
    "a file elsewhere": (secret, "notes.txt is a link to .*secret, outside of the model"),
    "a folder elsewhere": (lambda f: (f / "more").symlink_to("/etc"), "more is a link to /etc, outside of the model"),
    "a folder of its own": (lambda f: (f / "again").symlink_to("."), "again is a link to a folder"),
    "nowhere": (lambda f: (f / "x.json").symlink_to("gone"), "x.json is a link that leads nowhere"),
    "itself": (lambda f: (f / "x.json").symlink_to("x.json"), "x.json is a link that leads nowhere"),
    "a device": (lambda f: (f / "x.txt").symlink_to("/dev/zero"), "outside of the model"),
    "a pipe": (lambda f: os.mkfifo(f / "pipe.txt"), "pipe.txt is a pipe, a socket or a device"),
    "weights elsewhere": (
        lambda f: (f / "b.safetensors").symlink_to(model(f.parent / "other") / "model.safetensors"),
        "b.safetensors is a link to",
    ),
    "control characters": (lambda f: (f / "a\x1b[2J.txt").write_text("x"), "whose name has control characters"),
    "no UTF-8": (lambda f: Path(os.fsdecode(os.fsencode(f) + b"/\xff.txt")).write_text("x"), "no UTF-8"),
}


@pytest.mark.parametrize("what", LINKS)
def test_what_is_no_file_of_the_model_is_refused(what, store, tmp_path):
    folder = model(tmp_path / "m")
    make, says = LINKS[what]
    make(folder)
    refused(store, folder, says)


DAMAGED = "more.safetensors is not a whole safetensors file"
HEADERS = {
    "a negative shape": (header({"w": tensor(shape=(-1, -2))}, bytes(8)), DAMAGED),
    "a shape of fractions": (header({"w": tensor(shape=(2.0,))}, bytes(8)), DAMAGED),
    "a shape of thousands of dimensions": (header({"w": tensor(shape=(1,) * 5000 + (2,))}, bytes(8)), "dimensions"),
    "an unknown dtype": (header({"w": tensor("XX", (8,))}, bytes(8)), DAMAGED),
    "a dtype that is a list": (header({"w": tensor(["F32"])}, bytes(8)), DAMAGED),
    "another size": (header({"w": tensor(shape=(3,))}, bytes(8)), DAMAGED),
    "an overflowing shape": (header({"w": tensor(shape=(2**62, 4))}, bytes(8)), DAMAGED),
    "offsets beyond the end": (header({"w": tensor(offsets=(8, 16))}, bytes(8)), DAMAGED),
    "offsets backwards": (header({"w": tensor(offsets=(8, 0))}, bytes(8)), DAMAGED),
    "overlapping tensors": (header({"v": tensor(), "w": tensor()}, bytes(8)), DAMAGED),
    "negative offsets": (header({"w": tensor(offsets=(-8, 0))}, bytes(8)), DAMAGED),
    "bytes of no tensor": (header({"w": tensor()}, bytes(16)), DAMAGED),
    "a tensor twice": (header(f'{{"w": {json.dumps(tensor())}, "w": {json.dumps(tensor())}}}', bytes(8)), "twice"),
    "nested brackets": (header(DEEP), DAMAGED),
    "a list": (header("[]"), DAMAGED),
    "a header of petabytes": (struct.pack("<Q", 2**50) + b"{}", DAMAGED),
    "control characters": (header({"\x1b[2J": tensor()}, bytes(8)), "not a parameter's name"),
    "half a character": (header('{"\\ud800": ' + json.dumps(tensor()) + "}", bytes(8)), DAMAGED),
    "modules in modules": (header({"a." * 5000: tensor()}, bytes(8)), "not a parameter's name"),
}


@pytest.mark.parametrize("what", HEADERS)
def test_weights_that_no_program_wrote_are_refused(what, store, tmp_path):
    folder = model(tmp_path / "m")
    content, says = HEADERS[what]
    (folder / "more.safetensors").write_bytes(content)  # the other file is read first
    refused(store, folder, says)


BOMB = "a: &a [x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(9)
)
FILES = {
    "a nested config": ({"config.json": DEEP}, r"config.json cannot be read as JSON"),
    "a config that is a list": ({"config.json": "[]"}, r"config.json cannot be read as JSON: it is not an object"),
    "a nested adapter config": ({"adapter_config.json": DEEP}, r"adapter_config.json cannot be read"),
    "a card with aliases": ({"README.md": f"---\n{BOMB}---\n"}, "begins with no valid YAML .*alias"),
    "a nested card": ({"README.md": f"---\nbase_model: {DEEP}\n---\n"}, "begins with no valid YAML"),
    "a card with an impossible date": ({"README.md": "---\ndate: 2026-99-99\n---\n"}, "begins with no valid YAML"),
    "a card of a book's size": ({"README.md": "x" * 6_000_000}, "README.md has more than 5 MB"),
    "a card with many bases": (
        {"README.md": f"---\nbase_model: {[f'org/m{i}' for i in range(MAX_BASES + 1)]}\n---\n"},
        f"names {MAX_BASES + 1} base models, and {MAX_BASES} are the most",
    ),
}


@pytest.mark.parametrize("what", FILES)
def test_files_that_say_too_much_are_refused(what, store, tmp_path):
    files, says = FILES[what]
    refused(store, model(tmp_path / "m", **files), says)


def hub_of(cards: Path):
    """A `fetch` function whose cards name more and more bases."""

    def fetch(name, patterns):
        folder = cards / name.replace("/", "--")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "README.md").write_text(f"---\nbase_model: {[f'{name}{i}' for i in range(9)]}\n---\n")
        return folder

    return fetch


def test_cards_that_name_ever_more_models_are_refused(store, tmp_path):
    folder = model(tmp_path / "m", **{"README.md": "---\nbase_model: org/m\n---\n"})
    refused(store, folder, f"name more than {MAX_STUBS} models", fetch=hub_of(tmp_path / "cards"))


def in_cache(tmp_path: Path) -> Path:
    """A model in the layout of Hugging Face's cache. Returns its snapshot folder."""
    home = tmp_path / "hub" / "models--org--m"
    files = model(home / "blobs")
    snapshot = home / "snapshots" / "abc123"
    (snapshot / "unet").mkdir(parents=True)
    for name in ("model.safetensors", "config.json"):
        blob = files / digest_of(name.encode())
        (files / name).rename(blob)
        (snapshot / name).symlink_to(f"../../blobs/{blob.name}")
        (snapshot / "unet" / name).symlink_to(f"../../../blobs/{blob.name}")
    return snapshot


def test_a_snapshot_in_the_cache_of_the_hub_is_taken_and_no_link_of_it_leads_further(store, tmp_path):
    snapshot = in_cache(tmp_path)
    (tmp_path / "other").symlink_to(snapshot)  # the folder itself may be a link
    for folder in (snapshot, tmp_path / "other"):
        added = store.add(folder)
        assert [file.path for file in added.files] == [
            "config.json", "model.safetensors", "unet/config.json", "unet/model.safetensors",
        ]  # fmt: skip
        assert added.files[1].tensors[0].name == "w"
    assert store.add(snapshot / "unet").files[1].tensors[0].name == "w"
    # The model passed inspection, and was about to be recorded.
    with pytest.raises(AssertionError, match="was asked for"):
        taken(store, snapshot)
    secret(snapshot)
    (snapshot / "notes.txt").unlink()
    (snapshot / "notes.txt").symlink_to("../../../../secret")
    (tmp_path / "secret").write_text("password")
    with pytest.raises(TensorStoreError, match="outside of the model"):
        store.add(snapshot)


def test_links_within_the_folder_and_hard_links_are_files(store, tmp_path):
    folder = model(tmp_path / "m")
    (folder / "again.safetensors").symlink_to("model.safetensors")
    (folder / "hard.json").hardlink_to(folder / "config.json")
    added = store.add(folder)
    assert [file.path for file in added.files] == [
        "again.safetensors", "config.json", "hard.json", "model.safetensors",
    ]  # fmt: skip


def rewritten(store, id: str, **changes) -> str:
    """Forges a model's list of files with a changed first file. Returns the id that matches it."""
    path = store.folder / "models" / f"{id}.json"
    entries = json.loads(path.read_bytes())
    entries[0] |= changes
    content = json.dumps(entries, sort_keys=True).encode()
    forged = digest_of(content)[:32]
    path.with_name(f"{forged}.json").write_bytes(content)
    return forged


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"path": "../../escaped.txt"}, "leads out of the folder"),
        ({"path": "/tmp/escaped.txt"}, "leads out of the folder"),
        ({"path": "a/../../escaped.txt"}, "leads out of the folder"),
        ({"path": "a\x1b.txt"}, "control characters"),
        ({"path": "model.safetensors"}, "names a file twice"),
        ({"path": "model.safetensors/x"}, "names a file twice"),
        ({"path": None}, "a path, a name or a dtype is not text"),
        ({"head": "../../../../secret"}, "a head or a digest is not a SHA-256"),
        (
            {"tensors": [{"name": "w", "dtype": "F32", "shape": ["x"], "digest": "0" * 64}]},
            "not a list of whole numbers",
        ),
        ({"tensors": 3}, "a list is wanted"),
    ],
)
def test_a_list_that_leads_elsewhere_is_not_restored_and_fsck_tells_it(store, tmp_path, changes, says):
    forged = rewritten(store, store.add(model(tmp_path / "m")).id, **changes)
    with pytest.raises(TensorStoreError, match=f"the list of model {forged} is damaged: .*{re.escape(says)}.*To fix"):
        store.restore(forged, tmp_path / "deep" / "er" / "out")
    assert not (tmp_path / "deep").exists() and not (tmp_path / "escaped.txt").exists()
    assert any(forged in fault and says in fault for fault in store.fsck())


def test_a_list_with_another_digest_is_damaged(store, tmp_path):
    id = store.add(model(tmp_path / "m")).id
    path = store.folder / "models" / f"{id}.json"
    path.write_bytes(path.read_bytes().replace(b"config.json", b"conf1g.json"))
    with pytest.raises(TensorStoreError, match=r"its content has another digest\. To fix"):
        store.restore(id, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert store.fsck() == [f"the list of model {id} is damaged: its content has another digest. {store._remedy}"]


@pytest.mark.parametrize("id", ["../../secret", "", "..", "x" * 300, "a\0b"])
def test_an_id_that_is_a_path_names_no_model(store, tmp_path, id):
    store.add(model(tmp_path / "m"))
    with pytest.raises(TensorStoreError, match="there is no model"):
        store.restore(id, tmp_path / "out")


def test_a_restore_does_not_follow_links_in_the_folder_that_it_writes_to(store, tmp_path):
    folder = model(tmp_path / "m")
    (folder / "sub").mkdir()
    (folder / "sub" / "x.txt").write_text("x")
    id = store.add(folder).id
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "sub").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TensorStoreError, match="by a link"):
        store.restore(id, tmp_path / "out")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_an_addition_that_fails_half_way_leaves_no_object(store, tmp_path):
    first = store.add(model(tmp_path / "first"), owner="m-1")
    before = list(store.objects)
    folder = model(tmp_path / "m", **{"tokenizer.json": "t", "z.txt": "z"})
    save_file({"w": np.zeros((4, 5), np.float32)}, folder / "model.safetensors")
    put, kept = store.objects.put, []

    def full(*args, **kwargs):
        if len(kept) == 3:
            raise OSError(28, "No space left on device")
        kept.append(put(*args, **kwargs))
        return kept[-1]

    store.objects.put = full
    with pytest.raises(OSError, match="No space"):
        store.add(folder, owner="m-2")
    assert list(store.objects) == before and store.ids() == [first.id] and store.owners() == {"m-1"}


def test_a_restore_that_fails_leaves_no_folder(store, tmp_path):
    kept = store.add(model(tmp_path / "m"))
    store.objects.remove(kept.tensors["w"].digest)
    with pytest.raises(TensorStoreError):
        store.restore(kept.id, tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()


def index(folder: Path, weight_map, name="model.safetensors.index.json") -> None:
    (folder / name).write_text(json.dumps({"weight_map": weight_map}))


def sharded(folder: Path) -> Path:
    model(folder)
    (folder / "model.safetensors").unlink()
    for number in (1, 2):
        save_file({f"w{number}": np.ones(3, np.float32)}, folder / f"model-0000{number}-of-00002.safetensors")
    index(folder, {f"w{number}": f"model-0000{number}-of-00002.safetensors" for number in (1, 2)})
    return folder


SHARDS = {
    "a missing shard": (lambda f: (f / "model-00002-of-00002.safetensors").unlink(), "which is not there"),
    "another place": (lambda f: index(f, {"w1": "../../etc/passwd"}), "names the file '../../etc/passwd'"),
    "an absolute place": (lambda f: index(f, {"w1": "/etc/x.safetensors"}), "names the file '/etc/x.safetensors'"),
    "a pickle": (lambda f: index(f, {"w1": "pytorch_model.bin"}), "which the model does not have"),
    "a missing tensor": (lambda f: index(f, {"w9": "model-00001-of-00002.safetensors"}), "lacks 'w9'"),
    "no map": (lambda f: index(f, ["w1"]), "has no weight_map"),
    "no index": (lambda f: (f / "model.safetensors.index.json").unlink(), "the index of its weights"),
    "no JSON": (lambda f: (f / "model.safetensors.index.json").write_text(DEEP), "cannot be read as JSON"),
}


@pytest.mark.parametrize("what", SHARDS)
def test_an_index_and_the_shards_agree(what, store, tmp_path):
    folder = sharded(tmp_path / "m")
    with pytest.raises(AssertionError, match="was asked for"):  # it passed inspection
        taken(store, folder)
    store.gc(drop=store.owners(), waits=False)
    change, says = SHARDS[what]
    change(folder)
    refused(store, folder, re.escape(says))


CONFIGS = {
    "an adapter of a base that leads out": (
        {"adapter_config.json": json.dumps({"base_model_name_or_path": "../../secret"})}, "which is not a name",
    ),
    "an adapter of a base that is a list": (
        {"adapter_config.json": json.dumps({"base_model_name_or_path": ["x"]})}, "which is not text",
    ),
    "a tokenizer elsewhere": (
        {"tokenizer_config.json": '{"tokenizer_file": "/etc/passwd"}'}, "has the tokenizer_file '/etc/passwd'",
    ),
    "a card of a base that leads out": ({"README.md": "---\nbase_model: ../../etc\n---\n"}, "names the base_model"),
    "a card of a base with a long name": (
        {"README.md": f"---\nbase_model: org/{'x' * 5000}\n---\n"}, "has more than 200 characters",
    ),
    "a card of a base with odd characters": ({"README.md": "---\nbase_model: 'a;b|c'\n---\n"}, "that no name has"),
    "names that differ in case": ({"Config.json": "{}"}, "differ in case alone"),
}  # fmt: skip


@pytest.mark.parametrize("what", CONFIGS)
def test_what_leads_out_of_the_model_is_refused(what, store, tmp_path):
    files, says = CONFIGS[what]
    refused(store, model(tmp_path / "m", **files), re.escape(says))


def test_all_faults_are_told_at_once(store, tmp_path):
    folder = sharded(tmp_path / "m")
    index(folder, {"w1": "../x.safetensors", "w9": "model-00001-of-00002.safetensors"})
    (folder / "README.md").write_text("---\nbase_model: ../../etc\n---\n")
    (folder / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="To fix") as caught:
        taken(store, folder)
    for says in ("../x.safetensors", "lacks 'w9'", "names the base_model", "config.json cannot be read"):
        assert says in str(caught.value)


def test_weights_that_hold_code_and_modules_are_left_out(tmp_path):
    folder = model(tmp_path / "m", **{"modeling_x.py": "raise SystemExit", "sub.json": "{}"})
    (folder / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "modeling_x.X"}}))
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    found = inspect(folder)
    assert sorted(found) == ["config.json", "model.safetensors", "sub.json"]
    with staged(found, near=tmp_path / "store") as aside:
        assert sorted(path.name for path in aside.iterdir()) == sorted(found)
        assert aside.stat().st_mode & 0o077 == 0
        assert (aside / "model.safetensors").samefile(folder / "model.safetensors")
    assert not list((tmp_path / "store").iterdir())


def test_an_archive_is_no_folder(store, tmp_path):
    (tmp_path / "m.zip").write_bytes(b"PK")
    refused(store, tmp_path / "m.zip", "is a file, and no folder. To fix: unpack it")

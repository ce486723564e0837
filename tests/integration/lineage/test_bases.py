"""Base models from elsewhere that jobs start from: each is one node, recorded once, with its card's ancestors."""

import json
import stat
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from ringmaster.errors import LedgerError
from ringmaster.features.foreign_models.importing import import_model
from ringmaster.flows.lineage.home import LineageHome
from ringmaster.model_lineage import Ledger
from ringmaster.model_lineage.base_models import record_base
from ringmaster.model_lineage.records import Origin
from ringmaster.model_lineage.snapshot import Snapshot
from tests.integration.lineage.test_ledger_models import Crash, Crashing


@pytest.fixture
def home(tmp_path, monkeypatch):
    for name in ("MLFLOW_TRACKING_URI", "RINGMASTER_DATABASE", "RINGMASTER_TENSORS"):
        monkeypatch.delenv(name, raising=False)
    return LineageHome(folder=tmp_path / "home")


@pytest.fixture
def ledger(home):
    return Ledger(f"sqlite:///{home.folder}/mlflow.db", artifact_root=home.folder / "mlartifacts")


def model(folder, value, **head):
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"w": np.full(300, value, np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "x"}')
    if head:
        (folder / "README.md").write_text(f"---\n{yaml.safe_dump(head)}---\n\nA model.\n")
    return folder


class Hub:
    """A model hub in local folders. cached: the names in this machine's cache."""

    def __init__(self, root, *cached):
        self.root, self.names, self.fetched = root, cached, []

    def fetch(self, name, patterns):
        self.fetched.append((name, patterns))
        if not (self.root / name).is_dir():
            raise OSError(f"{name} could not be fetched")
        return self.root / name

    def cached(self, name):
        return self.root / name if name in self.names else None

    def record(self, ledger, source, store):
        return record_base(ledger, source, store=store, fetch=self.fetch, cached=self.cached)


def test_a_folder_is_recorded_once_and_its_weights_are_in_the_store_alone(home, ledger, tmp_path):
    hub, folder = Hub(tmp_path), model(tmp_path / "their model", 1.0)
    id = hub.record(ledger, str(folder), home.store)
    assert hub.record(ledger, str(folder), home.store) == id
    node = home.find("their-model")
    assert (node.id, node.record.kind, node.record.origin.source) == (id, "imported", str(folder))
    files = {path.name for path in (home.folder / "mlartifacts").rglob("*") if path.is_file()}
    assert "config.json" in files and not any(name.endswith(".safetensors") for name in files)
    whole = home.model_dir(node)
    assert (whole / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert hub.fetched == []
    model(folder, 2.0)  # other weights in the same folder: another version
    other = hub.record(ledger, str(folder), home.store)
    assert other != id
    fresh = LineageHome(folder=home.folder)
    assert [fresh.snapshot.nodes[each].record.version for each in (id, other)] == [1, 2]


def test_a_model_of_ours_that_is_named_by_its_folder_is_that_model(home, ledger, tmp_path):
    folder = model(tmp_path / "exported", 3.0)
    run = ledger.start_job(ledger.start_batch("night", params={}), "mine", params={})
    mine = ledger.record_model("night.mine", run_id=run, folder=folder, kind="pretrained")
    ledger.keep_tensors(mine, folder, store=home.store)
    assert Hub(tmp_path).record(ledger, str(folder), home.store) == mine.model_id


def test_a_hub_name_follows_its_card_also_where_its_weights_are_elsewhere(home, ledger, tmp_path):
    model(tmp_path / "org" / "tuned", 1.0, base_model="org/base", base_model_relation="finetune")
    (tmp_path / "org" / "base").mkdir()
    (tmp_path / "org" / "base" / "README.md").write_text("---\nlicense: mit\n---\n")
    hub = Hub(tmp_path)
    id = hub.record(ledger, "org/tuned", home.store)
    assert hub.record(ledger, "org/tuned", home.store) == id
    snapshot = home.snapshot
    (base,) = snapshot.graph.ancestors(id)
    assert snapshot.nodes[id].label == "org--tuned/1" and snapshot.nodes[base].label == "org--base/1"
    assert snapshot.nodes[id].record.origin.relation == "finetune"
    assert all(patterns == ("README.md",) for _, patterns in hub.fetched)  # recording fetches no weights
    with pytest.raises(LedgerError, match="there is no model"):
        ledger.record_model("x", run_id=ledger.start_batch("b", params={}), folder=tmp_path, kind="lora",
                            parents=["m-nowhere"])  # fmt: skip


def test_a_base_that_only_a_card_spoke_of_gets_its_weights_once_it_is_used(home, ledger, tmp_path):
    model(tmp_path / "org" / "base", 1.0)
    model(tmp_path / "org" / "tuned", 2.0, base_model="org/base")
    tuned = Hub(tmp_path, "org/tuned").record(ledger, "org/tuned", home.store)
    (said,) = home.snapshot.graph.ancestors(tuned)
    assert home.snapshot.nodes[said].record.tensors_id is None
    used = Hub(tmp_path, "org/tuned", "org/base")
    assert used.record(ledger, "org/base", home.store) == said
    fresh = LineageHome(folder=home.folder)
    assert [node.label for node in fresh.snapshot.models] == ["org--base/1", "org--tuned/1"]
    whole = fresh.model_dir(fresh.find("org--base"))
    assert (whole / "model.safetensors").read_bytes() == (tmp_path / "org/base/model.safetensors").read_bytes()
    model(tmp_path / "org" / "base", 3.0)  # other weights under the same name, later: another version
    assert used.record(ledger, "org/base", home.store) != said


def test_a_hub_name_that_nothing_is_known_of_is_a_root(home, ledger, tmp_path):
    id = Hub(tmp_path).record(ledger, "org/gone", None)
    assert Hub(tmp_path).record(ledger, "org/gone", None) == id
    assert home.snapshot.graph.ancestors(id) == ()


@pytest.mark.full
def test_whatever_moment_it_died_at_recording_a_base_again_completes_it_once(home, ledger, tmp_path):
    folder = model(tmp_path / "crashes", 1.0, base_model="org/elder")
    at, crashed = 0, True
    while crashed:
        dying = Ledger(ledger.tracking_uri, experiment=f"crash-{at}", artifact_root=home.folder / "mlartifacts")
        dying.warm_up()
        client = dying._opened
        dying._opened = Crashing(client, at)
        try:
            Hub(tmp_path).record(dying, str(folder), home.store)
            crashed = False
        except Crash:
            at += 5
        dying._opened = client
        id = Hub(tmp_path).record(dying, str(folder), home.store)
        snapshot = Snapshot.of(dying, cache=tmp_path)
        assert sorted(node.record.registered_name for node in snapshot.models) == ["crashes", "org--elder"]
        assert [snapshot.nodes[each].record.registered_name for each in snapshot.graph.parents(id)] == ["org--elder"]
        assert all(node.is_ready for node in snapshot.models)
    assert at > 10


def test_cards_that_name_each_other_are_refused(home, ledger, tmp_path):
    model(tmp_path / "a" / "one", 1.0, base_model="a/two")
    model(tmp_path / "a" / "two", 2.0, base_model="a/one")
    with pytest.raises(ValueError, match="a/one -> a/two -> a/one"):
        Hub(tmp_path).record(ledger, "a/one", home.store)


def test_a_base_on_this_machine_is_what_its_children_differ_from(home, ledger, tmp_path):
    """A child is stored as a difference to a hub model in this machine's cache."""
    weights = np.random.default_rng(0).normal(0, 0.02, 100_000).astype(np.float32)
    folder = model(tmp_path / "org" / "base", 1.0)
    save_file({"w": weights}, folder / "model.safetensors")
    base = Hub(tmp_path, "org/base").record(ledger, "org/base", home.store)
    alone_bytes = home.store.size_bytes()
    tuned = model(tmp_path / "tuned", 1.0)
    save_file({"w": weights * np.float32(1 + 1e-6)}, tuned / "model.safetensors")
    run = ledger.start_job(ledger.start_batch("night", params={}), "tuned", params={})
    child = ledger.record_model("night.tuned", run_id=run, folder=tuned, kind="fine-tuned", parents=[base])
    ledger.keep_tensors(child, tuned, store=home.store)
    assert home.store.size_bytes() < 1.6 * alone_bytes
    assert Snapshot.of(ledger, cache=tmp_path).graph.parents(child.model_id) == (base,)
    whole = home.model_dir(home.find(base))
    assert (whole / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_an_adapter_whose_base_has_gone_is_on_the_one_that_the_lineage_knows(home, ledger, tmp_path):
    base = model(tmp_path / "base", 1.0)
    parent = Hub(tmp_path).record(ledger, str(base), home.store)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file({"w.lora_A.weight": np.ones((2, 2), np.float32)}, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    run = ledger.start_job(ledger.start_batch("night", params={}), "tuned", params={})
    record = ledger.record_model("night.tuned", run_id=run, folder=adapter, kind="lora", parents=[parent])
    ledger.keep_tensors(record, adapter, store=home.store)
    node, weights = home.find("night.tuned"), (base / "model.safetensors").read_bytes()
    for path in base.iterdir():
        path.unlink()
    base.rmdir()
    found = home.model_dir(node)
    named = Path(json.loads((found / "adapter_config.json").read_text())["base_model_name_or_path"])
    assert (named / "model.safetensors").read_bytes() == weights
    tensors = (adapter / "adapter_model.safetensors").read_bytes()
    assert (found / "adapter_model.safetensors").read_bytes() == tensors


def test_an_import_that_fails_on_its_way_leaves_nothing_and_goes_well_later(home, ledger, tmp_path, monkeypatch):
    elder = model(tmp_path / "elder", 1.0)
    hub = Hub(tmp_path)
    parent = hub.record(ledger, str(elder), home.store)
    before = (Snapshot.of(ledger, cache=tmp_path).nodes.keys(), list(home.store.objects), home.store.owners())
    folder = model(tmp_path / "child", 2.0, base_model=[str(elder), "org/unknown"])

    def imported():
        snapshot = Snapshot.of(ledger, cache=tmp_path)
        return import_model(ledger, str(folder), name="child", snapshot=snapshot, store=home.store, fetch=hub.fetch)

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "keep_tensors", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "no space")))
        with pytest.raises(OSError, match="no space"):
            imported()
    assert (Snapshot.of(ledger, cache=tmp_path).nodes.keys(), list(home.store.objects), home.store.owners()) == before
    assert [found.name for found in ledger.client.search_registered_models()] == ["elder"]
    assert "child" not in ledger.client.get_model_version("elder", "1").description
    monkeypatch.delenv("RINGMASTER_UMASK", raising=False)
    (folder / "model.safetensors").chmod(0o4777)
    record = imported()
    files = Path(ledger.client.get_logged_model(record.model_id).artifact_location.removeprefix("file://"))
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in (files, *files.iterdir())} == {
        files.name: 0o700, "README.md": 0o600, "config.json": 0o600, "model.safetensors": 0o600,
    }  # fmt: skip
    assert stat.S_IMODE((folder / "model.safetensors").stat().st_mode) == 0o4777
    assert record.version == 1 and parent in record.parents
    assert ledger.owner(record.model_id) in home.store.owners()
    assert not any("importing" in owner for owner in home.store.owners())
    assert home.store.fsck() == []


def test_folders_of_one_name_are_two_models(home, ledger, tmp_path):
    hub = Hub(tmp_path)
    folders = [model(tmp_path / runs / "mood" / "model", value) for value, runs in enumerate(("a", "b"))]
    records = [ledger.resolve_model(hub.record(ledger, str(folder), home.store)) for folder in folders]
    assert [(record.registered_name, record.version) for record in records] == [("mood", 1), ("mood-model", 1)]
    model(folders[0], 7.0)  # trained again, in the same place
    again = ledger.resolve_model(hub.record(ledger, str(folders[0]), home.store))
    assert (again.registered_name, again.version) == ("mood", 2)


def test_a_student_is_initialized_from_its_base_and_distilled_from_its_teacher(ledger, tmp_path):
    folder = model(tmp_path / "files", 1.0)
    batch = ledger.start_batch("b", params={})
    small, large = (
        ledger.record_model(name, run_id=ledger.start_job(batch, name, params={}), folder=folder, kind="pretrained")
        for name in ("small", "large")
    )
    student = ledger.record_model(
        "student",
        run_id=ledger.start_job(batch, "student", params={}),
        folder=folder,
        kind="distilled",
        parents=[small.uri, large.uri],
        origin=Origin(started_from=small.uri),
    )
    card = ledger.client.get_model_version("student", "1").description
    assert "- initialized from [small version 1]" in card
    assert "- distilled from [large version 1]" in card
    for parent, relation in ((small, "initialized"), (large, "distilled")):
        page = ledger.client.get_model_version(parent.registered_name, "1").description
        assert f"- {relation}: [student version 1]" in page
        assert student.relation_to(parent.model_id) == relation


def test_code_beside_a_base_is_left_out_and_what_a_trainer_has_left_there_is_no_other_model(home, ledger, tmp_path):
    folder = model(tmp_path / "theirs", 4.0)
    plain = Hub(tmp_path).record(ledger, str(folder), home.store)
    for name in ("modeling_x.py", "pytorch_model.bin", "notes.md"):
        (folder / name).write_bytes(b"\x80\x04")
    assert Hub(tmp_path).record(ledger, str(folder), home.store) == plain
    other = model(tmp_path / "more", 5.0)
    (other / "training_args.bin").write_bytes(b"\x80\x04")
    id = Hub(tmp_path).record(ledger, str(other), home.store)
    stored = home.store.model(home.snapshot.nodes[id].record.tensors_id)
    assert [file.path for file in stored.files] == ["config.json", "model.safetensors"]
    # The whole folder is the model of a job that has written it.
    written = model(tmp_path / "written", 6.0)
    (written / "training_args.bin").write_bytes(b"\x80\x04")
    run = ledger.start_job(ledger.start_batch("night", params={}), "mine", params={})
    mine = ledger.record_model("night.mine", run_id=run, folder=written, kind="pretrained")
    ledger.keep_tensors(mine, written, store=home.store)
    assert Hub(tmp_path).record(ledger, str(written), home.store) == mine.model_id
    home.store.gc(drop=[ledger.owner(mine.model_id)])
    assert len(home.store.ids()) == 2


def test_a_base_whose_weights_may_be_code_is_recorded_without_them(home, ledger, tmp_path):
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    id = Hub(tmp_path).record(ledger, str(folder), home.store)
    assert Hub(tmp_path).record(ledger, str(folder), home.store) == id
    assert home.snapshot.nodes[id].record.tensors_id is None and home.store.ids() == []

"""Recorded models in the tensor store, and the rows of a ledger, in a real SQLite store."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ringmaster.errors import LedgerError
from ringmaster.model_lineage import COMPONENT, QUIET_ENVIRONMENT, DatasetInput, Ledger, Origin
from ringmaster.model_lineage import snapshot as rows
from ringmaster.model_lineage.ledger.ledger import LEDGER
from ringmaster.model_lineage.snapshot import Snapshot, collect, read_rows
from ringmaster.model_lineage.tensors import TensorStore
from tests.matrix import matrix

RANDOM = np.random.default_rng(0)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def ledger(home):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUIET_ENVIRONMENT.items():
            patch.setenv(name, value)
        yield Ledger(f"sqlite:///{home}/mlflow.db", experiment="tests")


@pytest.fixture(scope="module")
def store(home):
    return TensorStore(home / "tensors")


def weights():
    names = ["stem.0.w", "stem.1.w", "head.w"]
    return {name: RANDOM.normal(0, 0.02, (64, 64)).astype(np.float32) for name in names}


def folder(path, tensors):
    path.mkdir(parents=True)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text("{}")
    return path


class Family:
    """A base and two children that froze its stem, all recorded and stored in the tensor store."""

    def __init__(self, ledger: Ledger, store: TensorStore, home: Path) -> None:
        batch = ledger.start_batch("night", batch="night", params={})
        base = weights()
        self.folders, self.records = {}, {}
        for name, tensors in (("base", base), ("a", self.tuned(base)), ("b", self.tuned(base))):
            self.folders[name] = folder(home / "models" / name, tensors)
            self.records[name] = ledger.record_model(
                f"kept.{name}",
                run_id=ledger.start_job(batch, name, params={}),
                folder=self.folders[name],
                kind="pretrained" if name == "base" else "fine-tuned",
                parents=[] if name == "base" else [self.records["base"].uri],
                datasets=[DatasetInput(name="web", digest=f"digest-{name}", source="/web")],
                params={"optimizer": {"lr": 0.1}},
                metrics={"loss": 1.5},
                origin=Origin(job=name, batch_run_id=batch, plan="plan-1/plan.json", seed=3, num_steps=60),
            )
            ledger.keep_tensors(self.records[name], self.folders[name], store=store)

    @staticmethod
    def tuned(base):
        return {**base, "head.w": base["head.w"] + RANDOM.normal(0, 1e-4, (64, 64)).astype(np.float32)}


@pytest.fixture(scope="module")
def family(ledger, store, home):
    return Family(ledger, store, home)


@pytest.fixture
def snapshot(ledger, family, tmp_path):
    return Snapshot.of(ledger, cache=tmp_path)


def description(ledger, record):
    return ledger.client.get_model_version(record.registered_name, str(record.version)).description


def test_a_kept_model_comes_back_bit_for_bit(family, snapshot, store, tmp_path):
    for name, path in family.folders.items():
        id = snapshot.find(f"kept.{name}").record.tensors_id
        store.restore(id, tmp_path / name)
        for file in path.iterdir():
            assert (tmp_path / name / file.name).read_bytes() == file.read_bytes()


def test_what_relatives_share_is_a_component_that_all_point_to(family, snapshot, ledger):
    (component,) = [node for node in snapshot.nodes.values() if node.record.kind == COMPONENT]
    assert component.record.registered_name == "stem"
    assert {node.label for node in snapshot.users(component.id)} == {"kept.base/1", "kept.a/1", "kept.b/1"}
    note = ledger.client.get_logged_model(component.id).tags["mlflow.note.content"]
    assert note.count("[kept.") == 3
    text = description(ledger, family.records["a"])
    assert f"- shares [stem](#/experiments/{component.record.experiment_id}/models/{component.id}" in text
    assert "times smaller)" in text


def test_keeping_again_changes_nothing(family, ledger, store):
    before = description(ledger, family.records["b"])
    ledger.keep_tensors(family.records["b"], family.folders["b"], store=store)
    assert description(ledger, family.records["b"]) == before
    children = description(ledger, family.records["base"])
    assert children.index("In the tensor store") < children.index("Adapted further into")


def test_rows_read_from_the_file_are_those_that_mlflow_tells(family, ledger, tmp_path):
    ledger.set_alias("kept.a", "champion", 1)
    assert ledger.file is not None
    of_file, of_client = read_rows(ledger, cache=tmp_path), rows._read_client(ledger, tmp_path / "x", is_fresh=True)
    assert of_file == of_client
    assert len(of_file[0]) == 4
    assert of_file[1] == {"kept.a": {"champion": 1}}
    assert not (tmp_path / "rows.json").exists()


def test_what_is_kept_of_a_server_is_brought_up_to_date(family, ledger, tmp_path):
    kept, asked = tmp_path / "rows.json", []
    whole = rows._read_client(ledger, kept, is_fresh=False)
    original = rows._rows_where
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "_rows_where", lambda ledger, where: asked.append(where) or original(ledger, where))
        patch.setattr(rows, "NEW_FOR_MS", -1)  # the family is younger than NEW_FOR_MS
        assert rows._read_client(ledger, kept, is_fresh=False) == whole
        said = json.loads(kept.read_text())
        newest = max(row["creation_timestamp"] for row in said["rows"])
        assert asked == [f"creation_timestamp >= {newest + 1}"]
        kept.write_text(json.dumps({**said, "whole_ms": 0}))  # may still hold deleted rows
        assert rows._read_client(ledger, kept, is_fresh=False) == whole
        kept.write_text("{cut off")
        assert rows._read_client(ledger, kept, is_fresh=False) == whole
    assert asked[1:] == ["creation_timestamp >= 1"] * 2


def test_a_ledger_that_is_not_there_has_no_models(tmp_path):
    snapshot = Snapshot.of(Ledger(f"sqlite:///{tmp_path}/none.db"), cache=tmp_path)
    assert snapshot.models == ()
    assert list(tmp_path.iterdir()) == []


def test_a_record_knows_how_it_was_made_and_its_page_says_it(family, snapshot, ledger):
    node = snapshot.find("kept.a")
    assert node.record.origin.seed == 3
    assert node.params == {"optimizer.lr": "0.1"}
    assert node.metrics == {"loss": 1.5}
    text = description(ledger, node.record)
    assert "- after [this plan](#/experiments/" in text
    assert "- 60 steps, seed 3" in text
    picture = ledger.read_text(node.record.run_id, f"lineage/{node.id}.svg")
    assert all(label in picture for label in ("kept.base v1", "kept.a v1", ">fine-tuned<"))
    # The parent's drawing was updated when its children were recorded.
    assert "kept.b v1" in ledger.read_text(
        family.records["base"].run_id, f"lineage/{family.records['base'].model_id}.svg"
    )
    assert "kept.b v1" in picture, "a sibling that came later"


def test_a_model_cannot_be_its_own_parent(family, ledger):
    record = family.records["a"]
    with pytest.raises(LedgerError, match="cannot be its own parent"):
        ledger.record_model(
            "kept.a", run_id=record.run_id, folder=family.folders["a"], kind="merged", parents=[record.uri]
        )


def test_a_model_whose_files_were_deleted_is_told(family, ledger, tmp_path):
    job = ledger.start_job(ledger.start_batch("lost", params={}), "lost", params={})
    record = ledger.record_model("lost", run_id=job, folder=family.folders["a"], kind="pretrained")
    location = ledger.client.get_logged_model(record.model_id).artifact_location
    for file in Path(location.removeprefix("file://")).iterdir():
        file.unlink()
    Path(location.removeprefix("file://")).rmdir()
    with pytest.raises(LedgerError, match="files of lost version 1 are gone"):
        ledger.download_model(record.uri, tmp_path / "models")
    assert list((tmp_path / "models").iterdir()) == []


def test_two_models_share_a_component_that_people_have_named(ledger, store, tmp_path):
    """Two unrelated models use different module names; equal tensors under the same component name are one node."""
    tower, batch = weights(), ledger.start_batch("towers", params={})
    kept = {}
    for name, prefix in (("one", "vision"), ("two", "left.eye")):
        tensors = {f"{prefix}.{key}": value for key, value in tower.items()} | {"head": weights()["head.w"]}
        made = folder(tmp_path / name, tensors)
        run = ledger.start_job(batch, name, params={})
        kept[name] = ledger.record_model(f"towers.{name}", run_id=run, folder=made, kind="pretrained")
        ledger.keep_tensors(kept[name], made, store=store, components={"tower": prefix})
    ledger.keep_tensors(kept["two"], made, store=store, components={"tower": "left.eye"})  # recorded again: no change
    snapshot = Snapshot.of(ledger, cache=tmp_path)
    (component,) = [node for node in snapshot.nodes.values() if node.record.registered_name == "tower"]
    assert {node.label for node in snapshot.users(component.id)} == {"towers.one/1", "towers.two/1"}
    assert snapshot.find("tower") == component
    text = ledger.client.get_model_version("towers.two", "1").description
    assert f"- has [tower](#/experiments/{component.record.experiment_id}/models/{component.id}" in text
    with pytest.raises(ValueError, match="no parameter is within 'right'"):
        ledger.keep_tensors(kept["one"], tmp_path / "one", store=store, components={"eye": "right"})


def test_a_page_compares_a_fine_tune_and_an_adapter_with_their_base(family, ledger, store, tmp_path):
    tuned = description(ledger, family.records["a"])
    assert "| weights | 49.2 kB | 49.2 kB (1.0 times as large) |" in tuned
    assert "| loss | 1.5 |  |" in tuned  # the base was evaluated on other data
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file({"stem.0.lora_A.weight": np.zeros((4, 64), np.float32)}, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text("{}")
    record = ledger.record_model(
        "kept.adapter",
        run_id=ledger.start_job(ledger.start_batch("later", params={}), "adapter", params={}),
        folder=adapter,
        kind="lora",
        parents=[family.records["base"].uri],
        datasets=[DatasetInput(name="web", digest="digest-base", source="/web")],
        metrics={"loss": 1.25},
    )
    ledger.keep_tensors(record, adapter, store=store)
    text = description(ledger, record)
    assert "|  | this one | `kept.base/1` |" in text
    assert "| weights | 1.0 kB | 49.2 kB (48.0 times as large) |" in text
    assert "| loss | 1.25 | 1.5 |" in text
    ledger.keep_tensors(record, adapter, store=store)
    assert description(ledger, record) == text
    assert description(ledger, family.records["base"]).count("Beside its base") == 0


@pytest.mark.parametrize("is_interrupted", matrix([True, False], quick=[True]))
def test_gc_frees_what_its_own_lineage_has_lost_and_never_what_another_one_has(tmp_path, monkeypatch, is_interrupted):
    shared, path = TensorStore(tmp_path / "tensors"), folder(tmp_path / "model", weights())
    ledgers = {name: Ledger(f"sqlite:///{tmp_path}/{name}.db") for name in ("here", "there")}
    records = {}
    for name, ledger in ledgers.items():
        job = ledger.start_job(ledger.start_batch("night", params={}), "job", params={})
        records[name] = ledger.record_model("writer", run_id=job, folder=path, kind="pretrained")
        kept = ledger.keep_tensors(records[name], path, store=shared)

    def drop(name, nodes=None):
        snapshot = Snapshot.of(ledgers[name], cache=tmp_path)
        return collect(ledgers[name], shared, snapshot, snapshot.models if nodes is None else nodes)

    if is_interrupted:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(shared, "gc", lambda **_: (_ for _ in ()).throw(KeyboardInterrupt))
            drop("here")
    else:  # deleted in MLflow's web interface
        ledgers["here"].client.delete_logged_model(records["here"].model_id)
    assert drop("here") == 0
    assert shared.ids() == [kept.id]
    assert shared.owners() == {ledgers["there"].owner(records["there"].model_id)}
    assert drop("there", []) == 0, "its model is there"
    assert drop("there") > 0
    assert shared.ids() == []


def test_a_copy_of_a_ledger_at_another_address_owns_nothing_of_it(tmp_path):
    store, path = TensorStore(tmp_path / "tensors"), folder(tmp_path / "model", weights())
    ledger = Ledger(f"sqlite:///{tmp_path}/mlflow.db")
    job = ledger.start_job(ledger.start_batch("night", params={}), "job", params={})
    assert ledger.owner("m-1") == ledger.owner("m-1")
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as one, closing(sqlite3.connect(tmp_path / "copy.db")) as two:
        one.backup(two)
    record = ledger.record_model("writer", run_id=job, folder=path, kind="pretrained")
    kept = ledger.keep_tensors(record, path, store=store)
    copy = Ledger(f"sqlite:///{tmp_path}/copy.db")
    assert LEDGER in copy.client.get_experiment_by_name("ringmaster").tags
    assert collect(copy, store, Snapshot.of(copy, cache=tmp_path), []) == 0
    assert store.ids() == [kept.id]

"""The tensor store as MLflow's artifact repository: stock clients get plain files, and the disk holds differences."""

import os
import sqlite3
import subprocess
import sys
import tomllib
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ringmaster.model_lineage import QUIET_ENVIRONMENT, Ledger
from ringmaster.model_lineage.mlflow_calls import tensors_uri
from ringmaster.model_lineage.snapshot import Snapshot, collect, consistency_errors
from ringmaster.model_lineage.tensors import TensorStore
from ringmaster.model_lineage.tensors.artifacts import TensorArtifactRepository
from ringmaster.model_lineage.tensors.references import FileReference
from tests.integration.lineage.test_ledger_server import served

RANDOM = np.random.default_rng(0)
PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"
OWN_SERVER = "ringmaster.model_lineage.mlflow_server"


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    for name, value in QUIET_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def open_ledger(home):
    return Ledger(f"sqlite:///{home}/mlflow.db", tensors=home / "tensors", artifact_root=home / "mlartifacts")


def model(folder, weights):
    folder.mkdir(parents=True)
    save_file({"w": weights}, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text("{}")
    return folder


def record(ledger, name, folder, store, parents=()):
    run = ledger.start_job(ledger.start_batch("night", batch="night", params={}), name, params={})
    kind = "fine-tuned" if parents else "pretrained"
    found = ledger.record_model(name, run_id=run, folder=folder, kind=kind, parents=parents)
    ledger.keep_tensors(found, folder, store=store)
    return found


class Family:
    """A base and two fine-tunes, with a record of each in a home."""

    def __init__(self, place):
        self.home, self.folders, self.records = place / "home", {}, {}
        self.ledger, self.store = open_ledger(self.home), TensorStore(self.home / "tensors")
        weights = RANDOM.normal(0, 0.02, (300, 200)).astype(np.float32)
        for name in ("base", "one", "two"):
            moved = 0 if name == "base" else RANDOM.normal(0, 1e-5, weights.shape).astype(np.float32)
            self.folders[name] = model(place / name, weights + moved)
            parents = [self.records["base"].uri] if self.records else []
            self.records[name] = record(self.ledger, name, self.folders[name], self.store, parents)

    @property
    def snapshot(self):
        return Snapshot.of(self.ledger, cache=self.home / "cache")

    def object_of(self, name):
        """The file of the weights of a model in the store."""
        stored = self.store.model(self.snapshot.find(name).record.tensors_id)
        digest = stored.tensors["w"].digest
        return self.home / "tensors" / "objects" / digest[:2] / digest[2:]


@pytest.fixture
def family(tmp_path):
    return Family(tmp_path)


def are_in(folder, other):
    """Whether the files of a folder are in another one, bit for bit."""
    return all((other / path.name).read_bytes() == path.read_bytes() for path in folder.iterdir())


def test_a_recorded_model_is_once_on_the_disk_and_comes_back_bit_for_bit(family, tmp_path):
    assert list(family.home.rglob("*.safetensors")) == []
    plain = sum((folder / "model.safetensors").stat().st_size for folder in family.folders.values())
    assert family.store.size_bytes() < 0.75 * plain
    for name, folder in family.folders.items():
        found = family.ledger.client.get_logged_model(family.records[name].model_id)
        assert found.artifact_location.startswith("tensors:/")
        assert are_in(folder, family.ledger.download_model(family.records[name].uri, tmp_path / "copies"))
        sizes = {info.path: info.file_size for info in family.ledger.client.list_logged_model_artifacts(found.model_id)}
        assert sizes["model.safetensors"] == (folder / "model.safetensors").stat().st_size


# Two processes of MLflow's command line; other tests use the repository in this process.
@pytest.mark.full
def test_stock_commands_find_the_repository_by_its_entry_point(family, tmp_path):
    """In a process that has imported nothing of this package before MLflow looks for it."""
    installed = tmp_path / "site" / "stock-1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: stock\nVersion: 1\n")
    points = tomllib.loads(PYPROJECT.read_text())["project"]["entry-points"]["mlflow.artifact_repository"]
    lines = "\n".join(f"{name} = {value}" for name, value in points.items())
    (installed / "entry_points.txt").write_text(f"[mlflow.artifact_repository]\n{lines}\n")
    paths = os.pathsep.join([str(installed.parent), os.environ.get("PYTHONPATH", ""), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, "MLFLOW_TRACKING_URI": family.ledger.tracking_uri}
    command = [sys.executable, "-m", "mlflow", "artifacts", "download", "--artifact-uri", "models:/one/1"]
    subprocess.run([*command, "--dst-path", tmp_path / "out"], env=environment, check=True, timeout=600)
    assert are_in(family.folders["one"], tmp_path / "out")

    # MLflow warns of an entry point that it cannot load, as while the module that it names is being imported.
    imported = [sys.executable, "-W", "error:Failure attempting", "-c"]
    module = "import ringmaster.model_lineage.tensors.artifacts"
    subprocess.run([*imported, module], env=environment, check=True, timeout=600)


def test_a_store_that_has_lost_a_parent_tells_which_models_it_affects(family):
    family.object_of("base").unlink()
    faults = "\n".join(consistency_errors(family.snapshot, family.store))
    assert all(f"({name}/1) cannot be restored" in faults for name in ("base", "one", "two"))


def test_gc_frees_what_no_living_model_needs(family, tmp_path):
    snapshot = family.snapshot
    assert collect(family.ledger, family.store, snapshot, []) == 0
    base = family.object_of("base")
    assert collect(family.ledger, family.store, snapshot, [snapshot.find("base"), snapshot.find("two")]) > 0
    assert base.exists(), "what the child is a difference to"
    assert are_in(family.folders["one"], family.ledger.download_model("models:/one/1", tmp_path / "copies"))
    assert [file.name for file, _ in family.store.references()] == ["model.safetensors"]
    (family.home / "mlartifacts").rename(tmp_path / "moved")
    with pytest.raises(ValueError, match=r"are not there, and which models they need is not known. To fix: "):
        family.store.gc(drop=[])


def test_plain_files_that_models_have_too_become_references_and_no_other_ones(family, tmp_path):
    files = {name: folder / "model.safetensors" for name, folder in family.folders.items()}
    contents = {name: file.read_bytes() for name, file in files.items()}
    files["one"].write_bytes(contents["one"][:-1] + bytes([contents["one"][-1] ^ 1]))
    freed = {name: family.store.share(folder) for name, folder in family.folders.items()}
    assert freed == {"base": len(contents["base"]), "one": 0, "two": len(contents["two"])}
    assert files["one"].exists() and not files["base"].exists()
    reference = FileReference.at(files["two"])
    assert reference is not None
    family.store.write_file(reference, tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == contents["two"]
    assert family.store.share(family.folders["two"]) == 0


def test_a_call_that_was_interrupted_between_two_files_is_completed(tmp_path):
    store, folder = TensorStore(tmp_path / "tensors"), model(tmp_path / "model", RANDOM.normal(size=(4, 4)))
    save_file({"v": np.ones(9)}, folder / "vae.safetensors")
    stored = store.add(folder)
    content = (folder / "vae.safetensors").read_bytes()
    FileReference(model=stored.id, path="vae.safetensors", num_bytes=len(content)).write(folder / "vae.safetensors")
    assert store.share(folder) > 0
    assert list(folder.glob("*.safetensors")) == []


def test_no_write_in_one_place_changes_another(family, tmp_path):
    """Files are written aside and renamed, so that whoever has a link to the old content keeps it."""
    client, record, plain = family.ledger.client, family.records["one"], family.folders["one"] / "model.safetensors"
    copy = family.ledger.download_model(record.uri, tmp_path / "copies") / "model.safetensors"
    assert copy.stat().st_ino != plain.stat().st_ino, "a copy that its user may change is not a link to a run's folder"
    kept = {path: path.read_bytes() for path in (family.home / "tensors" / "objects").glob("??/*")}
    links = [tmp_path / path.name for path in kept]
    for link, path in zip(links, kept, strict=True):
        link.hardlink_to(path)
    copy.write_bytes(b"changed")
    client.log_model_artifacts(record.model_id, str(model(tmp_path / "new", np.ones((3, 3), np.float32))))
    family.store.add(family.folders["one"])
    family.store.share(family.folders["one"])
    assert [link.read_bytes() for link in links] == [path.read_bytes() for path in kept] == list(kept.values())
    assert are_in(tmp_path / "new", family.ledger.download_model(record.uri, tmp_path / "later"))


def test_a_home_of_the_release_before_is_read_and_its_new_models_go_to_the_store(tmp_path):
    home, folder = tmp_path / "home", model(tmp_path / "old", np.ones((30, 20), np.float32))
    before = Ledger(f"sqlite:///{home}/mlflow.db", artifact_root=home / "mlartifacts")
    old, store = record(before, "old", folder, TensorStore(home / "tensors")), TensorStore(home / "tensors")
    assert before.client.get_logged_model(old.model_id).artifact_location.startswith("file:///")
    now = open_ledger(home)
    new = record(now, "new", model(tmp_path / "new", np.ones((30, 20), np.float32)), store, [old.uri])
    assert now.client.get_logged_model(new.model_id).artifact_location.startswith("tensors:/")
    with closing(sqlite3.connect(home / "mlflow.db")) as connection:
        locations = connection.execute("SELECT artifact_location FROM experiments WHERE name = 'ringmaster/night'")
        assert next(locations)[0] == f"tensors://{home}/mlartifacts/ringmaster/night"
    for name in ("old", "new"):
        assert are_in(tmp_path / name, now.download_model(f"models:/{name}/1", tmp_path / "copies"))
    assert now.read_text(old.run_id, f"lineage/{old.model_id}.svg")
    assert store.fsck() == []


@pytest.mark.full
def test_a_server_keeps_what_stock_clients_upload_in_the_store_and_gives_it_back_plain(tmp_path):
    from mlflow import MlflowClient

    weights, folders = RANDOM.normal(0, 0.02, (300, 200)).astype(np.float32), {}
    with served(tmp_path, destination=f"tensors://{tmp_path}/files", module=OWN_SERVER) as address:
        client = MlflowClient(address)
        run = client.create_run("0")
        for name, moved in (("base", 0), ("tuned", 1e-6)):
            folders[name] = model(tmp_path / name, weights * np.float32(1 + moved))
            client.log_artifacts(run.info.run_id, str(folders[name]), name)
        (tmp_path / "odd.safetensors").write_bytes(b"no tensors")
        client.log_artifact(run.info.run_id, str(tmp_path / "odd.safetensors"))
        assert [path.name for path in (tmp_path / "files").rglob("*.safetensors")] == ["odd.safetensors"]
        (tmp_path / "out").mkdir()
        copy = Path(client.download_artifacts(run.info.run_id, "", str(tmp_path / "out")))
        assert all(are_in(folder, copy / name) for name, folder in folders.items())
        assert (copy / "odd.safetensors").read_bytes() == b"no tensors"
        listed = {info.path: info.file_size for info in client.list_artifacts(run.info.run_id, "tuned")}
        assert listed["tuned/model.safetensors"] == (folders["tuned"] / "model.safetensors").stat().st_size
    store = TensorStore(tmp_path / "files" / ".tensors")
    assert store.size_bytes() < 1.5 * (folders["base"] / "model.safetensors").stat().st_size, "one differs from another"
    assert store.fsck() == [] and store.gc(drop=[]) == 0


def test_a_store_in_a_folder_below_is_not_listed(tmp_path):
    folder = model(tmp_path / "model", RANDOM.normal(size=(4, 4)).astype(np.float32))
    TensorArtifactRepository(tensors_uri(tmp_path / "files" / "artifacts")).log_artifacts(str(folder))
    above = TensorArtifactRepository(tensors_uri(tmp_path / "files"))
    assert {info.path for info in above.list_artifacts("artifacts")} == {
        "artifacts/config.json",
        "artifacts/model.safetensors",
    }

"""The lineage commands that add and remove models: store, restore, import, fsck and gc."""

import shutil
from contextlib import closing

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from ringmaster.flows.lineage.home import LineageHome
from ringmaster.model_lineage.tensors import TensorStore
from ringmaster.tasks.storage.journal import Journal
from tests.integration.lineage.family import answer, run

pytestmark = pytest.mark.usefixtures("family_home")


def test_store_and_restore_bring_a_model_back(family_home, tmp_path):
    early = tmp_path / "early" / "model.safetensors"
    assert run("restore", "clean", early.parent)[0] == 0, "MLflow has it"
    assert list(answer("store", "clean")["stored"]) == ["base/1", "clean/1"]
    assert answer("restore", "clean", tmp_path / "out")["num_bytes"] > 8000
    same = (family_home / "models" / "clean" / "model.safetensors").read_bytes()
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == same == early.read_bytes()
    assert run("restore", "clean", tmp_path / "out")[0] == 2


def test_restore_names_the_base_of_an_adapter(tmp_path, monkeypatch):
    """An adapter's own files lack the base, which a user of the restored adapter needs too."""
    monkeypatch.setenv("RINGMASTER_HOME", str(tmp_path))
    ledger, store = LineageHome(folder=tmp_path).ledger, TensorStore(tmp_path / "tensors")
    batch, parents = ledger.start_batch("night", params={}), []
    for name, kind, config in (("llama", "pretrained", "config.json"), ("chat", "lora", "adapter_config.json")):
        folder = tmp_path / name
        folder.mkdir()
        save_file({"w": np.ones(9, np.float32)}, folder / "model.safetensors")
        (folder / config).write_text("{}")
        run_id = ledger.start_job(batch, name, params={})
        model = ledger.record_model(name, run_id=run_id, folder=folder, kind=kind, parents=parents)
        ledger.keep_tensors(model, folder, store=store)
        parents = [model.uri]
    code, _, said = run("restore", "chat", tmp_path / "told")
    assert code == 0
    assert said.splitlines()[1:] == ["it is an adapter on llama/1: ringmaster lineage restore llama/1 FOLDER"]
    assert answer("restore", "chat", tmp_path / "adapter")["base"] == "llama/1"
    assert answer("restore", "llama", tmp_path / "whole")["base"] is None


@pytest.mark.full
def test_an_imported_model_follows_its_card(tmp_path, monkeypatch, family_home):
    from ringmaster.model_lineage import base_models

    hub = tmp_path / "hub"
    for name, base in (("org/tuned", "org/base"), ("org/base", None)):
        (hub / name).mkdir(parents=True)
        head = {"base_model": base, "base_model_relation": "adapter"} if base else {"license": "mit"}
        (hub / name / "README.md").write_text(f"---\n{yaml.safe_dump(head)}---\n")
    save_file({"w": np.ones(9, np.float32)}, hub / "org/tuned" / "model.safetensors")

    def fetch(name, patterns):
        if not (hub / name).is_dir():
            raise OSError(f"{name} could not be fetched: no such model. To fix: name a folder")
        return hub / name

    monkeypatch.setattr(base_models, "fetch_from_hub", fetch)
    first = answer("import", "org/tuned", "--name", "theirs")
    said = answer("show", "theirs")
    assert said["model"]["kind"] == "imported"
    theirs = LineageHome(folder=family_home).model_dir(LineageHome(folder=family_home).find("theirs"))
    imported = (hub / "org/tuned/model.safetensors").read_bytes()
    assert (theirs / "model.safetensors").read_bytes() == imported, "restored from the tensor store, bit by bit"
    assert said["model"]["origin"] == {"source": "org/tuned", "relation": "adapter"}
    (base,) = said["ancestors"]
    assert (base["name"], base["origin"]["source"]) == ("org--base", "org/base")
    assert answer("import", "org/tuned", "--name", "theirs")["id"] == first["id"]
    # A local folder that was made from an imported model and from an unknown one.
    folder = tmp_path / "mine"
    folder.mkdir()
    save_file({"w": np.zeros(9, np.float32)}, folder / "model.safetensors")
    (folder / "README.md").write_text("---\nbase_model: [org/tuned, org/gone]\n---\n")
    answer("import", folder, "--name", "mine")
    assert sorted(node["name"] for node in answer("show", "mine")["ancestors"]) == ["org--base", "org--gone", "theirs"]
    code, _, said = run("import", "org/nothing", "--name", "x")
    assert code == 2 and "could not be fetched" in said
    (folder / "model.safetensors").unlink()
    assert "holds no safetensors" in run("import", folder, "--name", "x")[2]


def test_fsck_tells_damage_and_ends_with_1(family_home):
    assert run("fsck")[0] == 0
    victim = max((family_home / "tensors" / "objects").glob("??/*"), key=lambda path: path.stat().st_size)
    whole = victim.read_bytes()
    victim.write_bytes(whole[: len(whole) // 2])
    code, output, _ = run("fsck")
    victim.write_bytes(whole)
    assert code == 1
    assert "is damaged" in output and "cannot be restored" in output


def test_gc_drops_what_nothing_reaches_and_only_when_told_to(family_home):
    assert answer("gc")["would_drop"] == []  # all models are younger than the limit
    would = answer("gc", "--keep-days", "0")["would_drop"]
    assert "merged/1" in would
    assert not {"base/1", "clean/1", "spoilt/1", "tuned/1", "small/1"} & set(would)
    assert answer("show", "merged")["model"]["label"] == "merged/1"
    done = answer("gc", "--keep-days", "0", "--yes")
    assert done["dropped"] == would and done["freed_bytes"] > 0
    assert run("show", "merged")[0] == 2
    assert run("fsck")[0] == 0
    assert answer("gc", "--keep-days", "0")["would_drop"] == []


def test_gc_names_a_damaged_reference_and_goes_on(family_home):
    damaged = family_home / "mlartifacts" / "model.safetensors.stored"
    TensorStore(family_home / "tensors").add_artifacts(damaged.parent)
    damaged.write_text("[1]")
    code, _, said = run("gc", "--keep-days", "0", "--yes")
    damaged.unlink()
    assert code == 0
    assert f"{damaged} is damaged: it is not a JSON object. To fix: log the model again" in said.replace("\n", " ")


def test_gc_says_which_folders_of_runs_lose_their_weights_and_restore_undoes_it(family_home):
    content = (family_home / "models" / "small" / "model.safetensors").read_bytes()
    run_folder = family_home / "batches" / "night" / "20260101-000000"
    model = shutil.copytree(family_home / "models" / "small", run_folder / "models" / "small")
    with closing(Journal.of_file(run_folder / "journal.db")) as journal:
        journal.put_all({"status": "done", "is_recorded": True})
    assert answer("gc", "--keep-days", "0")["would_share"] == [str(model)]
    assert (model / "model.safetensors").exists()
    code, out, said = run("gc", "--keep-days", "0", "--yes")
    assert code == 0 and str(model) in out.replace("\n", "")
    assert f"To undo: `ringmaster lineage restore {model}`" in " ".join(said.split())
    assert not (model / "model.safetensors").exists()
    assert answer("restore", run_folder)["num_bytes"] == len(content)
    assert not list(model.glob("*.stored"))
    assert (model / "model.safetensors").read_bytes() == content
    assert answer("restore", run_folder)["num_bytes"] == 0
    code, _, said = run("restore", "small")
    assert code == 2 and "name a FOLDER to write the model small to" in " ".join(said.split())

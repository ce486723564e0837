"""A home that was copied or moved names its own folders, and leaves those of the original alone."""

import json
import shutil
import sqlite3
from contextlib import closing

import pytest

from ringmaster.flows import settings
from ringmaster.model_lineage.moved_home import rebase
from ringmaster.tasks.storage.journal import JobStatus, Journal


def rebased(home):
    return rebase(home, ledger=home / "mlflow.db", artifacts=home / "mlartifacts")


def record(home, name, *, tag):
    """Records a run with a file in the ledger of a home. Returns its id."""
    ledger = settings.ledger(home)
    experiment = ledger.experiment_id(f"ringmaster/{name}")
    run = ledger.client.create_run(experiment, tags=tag).info
    ledger.write_text(run.run_id, "note.txt", name)
    return run.run_id


def place(home, run):
    return settings.ledger(home).client.get_run(run).info.artifact_uri


@pytest.fixture
def home(tmp_path):
    """A home with a run, in whose folder a job has a model."""
    result = tmp_path / "a home"
    run = result / "batches" / "small" / "20261120-120000"
    run.mkdir(parents=True)
    others = {"other": f"/mnt{result}/x", "éclair": f"{result}/é"}
    with closing(Journal.of_file(run / "journal.db")) as journal:
        journal.write_job("a", status=JobStatus.DONE, model_dir=f"{run}/models/a", others=others)
        journal.put("checkpoint_root", f"{result}/roots")
    return result


def test_a_copy_writes_and_reads_in_its_own_folder_and_says_so_once(home, tmp_path, capsys):
    run = record(home, "small", tag={"ringmaster.origin": json.dumps({"checkpoints": f"{home}/c"}), "w": f"{home}/w"})
    before = place(home, run)
    copy = tmp_path / "the copy"
    shutil.copytree(home, copy, symlinks=True)
    with closing(sqlite3.connect(home / "mlflow.db")) as connection:
        kept = list(connection.iterdump())
    files = sorted(home.rglob("*"))
    assert str(home) in before.replace("%20", " ")
    assert str(copy) in place(copy, run).replace("%20", " ")
    assert "this home was" in capsys.readouterr().err
    other = record(copy, "small", tag={})
    third = record(copy, "third", tag={})
    assert "this home was" not in capsys.readouterr().err
    ledger = settings.ledger(copy)
    assert [ledger.read_text(each, "note.txt") for each in (run, other, third)] == ["small", "small", "third"]
    tags = ledger.client.get_run(run).data.tags
    assert (json.loads(tags["ringmaster.origin"])["checkpoints"], tags["w"]) == (f"{copy}/c", f"{copy}/w")
    with closing(sqlite3.connect(home / "mlflow.db")) as connection:
        assert list(connection.iterdump()) == kept
    assert sorted(home.rglob("*")) == files
    with closing(Journal.of_file(copy / "batches/small/20261120-120000/journal.db")) as journal:
        moved = journal.jobs()["a"]
        assert moved.model_dir == f"{copy}/batches/small/20261120-120000/models/a"
        assert (moved.others["other"], moved.others["éclair"]) == (f"/mnt{home}/x", f"{copy}/é")
        assert journal.get("checkpoint_root") == f"{copy}/roots"


def test_a_home_that_was_renamed_makes_nothing_at_its_old_place(home, tmp_path):
    run = record(home, "small", tag={})
    new = home.rename(tmp_path / "renamed")
    later = record(new, "small", tag={})
    assert [settings.ledger(new).read_text(each, "note.txt") for each in (run, later)] == ["small", "small"]
    assert not home.exists()


def test_another_path_to_the_same_home_is_no_move(home, tmp_path):
    run = record(home, "small", tag={})
    (tmp_path / "link").symlink_to(home)
    assert rebased(tmp_path / "link") == rebased(home) == ()
    assert str(home) in place(home, run).replace("%20", " ")


def test_files_that_only_the_original_has_stay_recorded_there(home, tmp_path):
    run = record(home, "small", tag={})
    copy = tmp_path / "copy"
    shutil.copytree(home, copy, symlinks=True)
    for folder in (copy / "mlartifacts" / "ringmaster" / "small").iterdir():
        shutil.rmtree(folder)  # as an earlier release wrote them into the original
    assert rebased(copy) == (home,)
    assert str(home) in place(copy, run).replace("%20", " ")
    assert rebased(copy) == ()


def test_a_home_without_records_has_not_moved(tmp_path):
    assert rebased(tmp_path) == ()
    (tmp_path / "mlflow.db").touch()
    assert rebased(tmp_path) == ()


def test_a_file_that_is_no_database_is_left_to_whoever_opens_it(tmp_path):
    (tmp_path / "mlflow.db").write_bytes(b"this is not a database, and never was one")
    assert rebase(tmp_path, ledger=tmp_path / "mlflow.db", artifacts=tmp_path / "mlartifacts") == ()

"""The checkpoint folder of a run, and the interval between checkpoints."""

from pathlib import Path

import pytest

from ringmaster.errors import InputError
from ringmaster.flows import settings
from ringmaster.flows.batch.run_folder import checkpoint_root_of
from ringmaster.tasks.execution.run_paths import RunPaths
from ringmaster.tasks.execution.starter import checkpoint_interval_s
from ringmaster.tasks.storage.journal import Journal


@pytest.fixture
def journal(tmp_path):
    journal = Journal.of_file(tmp_path / "journal.db")
    yield journal
    journal.close()


def test_a_run_keeps_to_its_root_when_it_is_resumed(journal, monkeypatch):
    monkeypatch.setenv("RINGMASTER_CHECKPOINTS", "memory://there")
    assert checkpoint_root_of(journal, resume=False) == "memory://there"
    monkeypatch.delenv("RINGMASTER_CHECKPOINTS")
    assert checkpoint_root_of(journal, resume=True) == "memory://there"
    assert checkpoint_root_of(journal, resume=False) is None


def test_a_folder_is_meant_from_where_the_run_is_started(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RINGMASTER_CHECKPOINTS", "here")
    assert settings.checkpoint_root() == str(tmp_path / "here")


def test_a_store_without_its_library_ends_a_run_before_it_starts(journal, monkeypatch):
    monkeypatch.setenv("RINGMASTER_CHECKPOINTS", "nowhere://there")
    with pytest.raises(InputError, match="RINGMASTER_CHECKPOINTS: checkpoints cannot be stored at nowhere://there"):
        checkpoint_root_of(journal, resume=False)


def test_a_folder_that_cannot_be_written_ends_a_run_before_it_starts(journal, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("RINGMASTER_CHECKPOINTS", str(tmp_path / "file" / "below"))
    with pytest.raises(InputError, match=r"cannot be stored at .*below: .* To fix: check the folder"):
        checkpoint_root_of(journal, resume=False)


def test_the_check_of_a_folder_leaves_it_empty(journal, monkeypatch, tmp_path):
    monkeypatch.setenv("RINGMASTER_CHECKPOINTS", str(tmp_path / "root"))
    assert checkpoint_root_of(journal, resume=False) == str(tmp_path / "root")
    assert list((tmp_path / "root").iterdir()) == []


def test_finished_models_are_stored_where_checkpoints_have_a_url():
    def paths(root):
        return RunPaths(folder=Path("/somewhere/reviews/now"), cache_dir=Path(), checkpoint_root=root)

    assert paths("s3://bucket/x").model_url("bert") == "s3://bucket/x/reviews/now/bert/model"
    assert paths("s3://bucket/x").weights_url(Path("/a")) != paths("s3://bucket/x").weights_url(Path("/b"))
    assert {paths(root).model_url("bert") for root in (None, "/shared")} == {None}
    assert {paths(root).weights_url(Path("/a")) for root in (None, "/shared")} == {None}


def test_the_interval_follows_from_the_stall():
    assert checkpoint_interval_s(0.02, num_devices=1) == pytest.approx((2 * 0.02 * 86400) ** 0.5)
    assert checkpoint_interval_s(0.02, num_devices=4) == pytest.approx((2 * 0.02 * 21600) ** 0.5)
    assert checkpoint_interval_s(100.0, num_devices=1) == pytest.approx(5000.0)  # the limit: 2 % of the time

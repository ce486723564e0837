"""Code that libraries compile lies where no other user can place any, and models stay where they are."""

import os
from pathlib import Path

import pytest

from ringmaster.errors import InputError
from ringmaster.flows import settings
from ringmaster.techniques.processes import caches
from ringmaster.techniques.processes.caches import CODE_CACHES, own_caches
from ringmaster.techniques.processes.rank_environment import rank_environment


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    for name in (*CODE_CACHES, "XDG_CACHE_HOME", "HF_HOME", "RINGMASTER_UMASK"):
        monkeypatch.delenv(name, raising=False)
    for name, variable in (("home", "RINGMASTER_HOME"), ("me", "HOME")):
        (tmp_path / name).mkdir(mode=0o700)
        monkeypatch.setenv(variable, str(tmp_path / name))
    return tmp_path


def another_users(path, monkeypatch):
    """Makes it look as if a folder belonged to another user."""
    found, lstat = path.lstat(), Path.lstat
    other = os.stat_result((*found[:4], os.geteuid() + 1, *found[5:10]))
    monkeypatch.setattr(caches.Path, "lstat", lambda self: other if self == path else lstat(self))


def test_compiled_code_lies_in_the_home(folders):
    found = own_caches()
    assert found.keys() == {*CODE_CACHES, caches.HEADERS}
    for path in (Path(found[name]) for name in CODE_CACHES):
        assert path.is_relative_to(folders / "home")
        assert path.stat().st_mode & 0o777 == 0o700
    assert rank_environment().items() >= found.items()


def test_what_the_user_has_set_stays(folders, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folders / "mine"))
    assert own_caches()["TORCHINDUCTOR_CACHE_DIR"] == str(folders / "mine")


def test_a_folder_of_another_user_is_refused_with_all_others(folders, monkeypatch):
    (folders / "theirs").mkdir()
    (folders / "open").mkdir()
    (folders / "open").chmod(0o777)
    (folders / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folders / "theirs"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folders / "open"))
    monkeypatch.setenv("MPLCONFIGDIR", str(folders / "file" / "x"))
    another_users(folders / "theirs", monkeypatch)
    with pytest.raises(InputError) as caught:
        settings.prepare_environment(folders / "home")
    said = str(caught.value)
    assert f"TORCHINDUCTOR_CACHE_DIR: {folders / 'theirs'} belongs to another user" in said
    assert f"TRITON_CACHE_DIR: {folders / 'open'} can be written by others" in said
    assert f"MPLCONFIGDIR: the folder {folders / 'file' / 'x'} cannot be created" in said
    assert said.count("To fix: ") == 3


def test_a_folder_on_the_way_that_everybody_may_change_is_refused(folders, monkeypatch):
    (folders / "open" / "mine").mkdir(parents=True)
    (folders / "open").chmod(0o777)
    (folders / "link").symlink_to(folders / "open" / "mine")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folders / "link"))
    with pytest.raises(ValueError, match=f"TRITON_CACHE_DIR: {folders / 'open'} can be changed by everybody"):
        own_caches()
    (folders / "open").chmod(0o1777)  # as /tmp
    assert own_caches()


def test_a_link_of_another_user_is_refused(folders, monkeypatch):
    cache = folders / "home" / "cache"
    (folders / "elsewhere").mkdir()
    cache.symlink_to(folders / "elsewhere")
    another_users(cache, monkeypatch)
    with pytest.raises(ValueError, match=f"{cache} belongs to another user"):
        own_caches()


def test_a_group_that_shares_a_home_shares_no_compiled_code(folders, monkeypatch):
    monkeypatch.setenv("RINGMASTER_UMASK", "007")
    another_users(folders / "home", monkeypatch)
    found = own_caches()
    assert all(str(os.geteuid()) in Path(found[name]).parts for name in CODE_CACHES)


def test_models_stay_in_the_users_own_cache_and_in_no_shared_one(folders, monkeypatch):
    assert "HF_HOME" not in own_caches()
    (folders / "me").chmod(0o1777)  # as where HOME is /tmp
    found = own_caches()
    assert Path(found["HF_HOME"]).is_relative_to(folders / "home")
    assert Path(found["XDG_CACHE_HOME"]).is_relative_to(folders / "home")


@pytest.mark.skipif(os.geteuid() != 0, reason="the files of root are needed")
def test_models_that_root_has_put_into_an_image_are_found(folders, monkeypatch):
    models = folders / "me" / ".cache" / "huggingface"
    models.mkdir(parents=True)
    monkeypatch.setattr(caches.os, "geteuid", lambda: 1000)
    assert own_caches()["HF_HOME"] == str(models)

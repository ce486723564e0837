"""Permissions of the files of a home: its owner's alone, and its group's where a setting says so."""

import os
import stat
import sys

import pytest

from ringmaster.errors import InputError
from ringmaster.flows import entry, file_permissions, settings


@pytest.fixture(autouse=True)
def usual(monkeypatch):
    """The usual case: a umask that lets others read, and no setting."""
    monkeypatch.delenv(file_permissions.UMASK, raising=False)
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_what_is_written_is_its_owners_alone(tmp_path):
    home = tmp_path / "home"
    file_permissions.keep_to_owner(home)
    home.mkdir()
    (home / "file").touch()
    assert (mode(home), mode(home / "file")) == (0o700, 0o600)


def test_a_home_of_an_earlier_release_is_closed_once_and_told(tmp_path, capsys):
    home = tmp_path / "home"
    (home / "batches").mkdir(parents=True)
    home.chmod(0o755)
    file_permissions.keep_to_owner(home)
    assert mode(home) == 0o700
    assert f"{home}: only you may look into it from now on (0700, was 0755)" in capsys.readouterr().err
    file_permissions.keep_to_owner(home)
    assert capsys.readouterr().err == ""


def test_a_group_is_let_in_where_a_setting_says_so(tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    home.chmod(0o2700)
    monkeypatch.setenv(file_permissions.UMASK, "007")
    file_permissions.keep_to_owner(home)
    (home / "file").touch()
    assert (mode(home), mode(home / "file")) == (0o2770, 0o660)  # the group of new files is unchanged


@pytest.mark.parametrize("name", ["sticky", "of something else"])
def test_what_is_no_home_stays_as_it_is(tmp_path, name, capsys):
    folder = tmp_path / name
    folder.mkdir()
    (folder / "letters.txt").touch()
    if name == "sticky":
        (folder / "batches").mkdir()
    before = 0o1777 if name == "sticky" else 0o755
    folder.chmod(before)
    file_permissions.keep_to_owner(folder)
    assert mode(folder) == before
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("said", ["7", "8888", "0o077", "all", "700", "-1"])
def test_what_is_no_umask_is_told(tmp_path, monkeypatch, said):
    monkeypatch.setenv(file_permissions.UMASK, said)
    with pytest.raises(InputError, match="To fix: 077"):
        file_permissions.keep_to_owner(tmp_path)


@pytest.mark.parametrize("said", ["077", "0077", "027", "007"])
def test_a_umask_is_told_as_usual(tmp_path, monkeypatch, said):
    monkeypatch.setenv(file_permissions.UMASK, said)
    file_permissions.set_umask()
    assert os.umask(0o022) == int(said, 8)


def test_a_run_without_the_command_line_keeps_to_its_owner_too(tmp_path, monkeypatch):
    for name in ("RINGMASTER_DATABASE", "PREFECT_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))  # `prepare_environment` sets many variables
    settings.prepare_environment(tmp_path / "home")
    assert {mode(path) for path in (tmp_path / "home", tmp_path / "home" / "prefect")} == {0o700}


@pytest.mark.parametrize("command", ["run", "up", "sweep", "retrain", "pool worker", "pool controller", "submit"])
def test_every_command_keeps_to_its_owner_before_it_does_anything(tmp_path, monkeypatch, command):
    home = tmp_path / "home"
    (home / "batches").mkdir(parents=True)
    home.chmod(0o755)
    monkeypatch.setenv("RINGMASTER_HOME", str(home))
    monkeypatch.setattr(sys, "argv", ["ringmaster", *command.split(), "--help"])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert (ended.value.code, mode(home), os.umask(0o022)) == (0, 0o700, 0o077)

"""Which later commands may use what an earlier one has left: those of the same environment alone."""

import os
import sys

import pytest

from ringmaster.errors import InputError
from ringmaster.features.daemon.environment import digest_of
from ringmaster.features.daemon.resident import stay_seconds

VARIABLES = {"PATH": "/bin", "HOME": "/home/me", "TERM": "xterm"}


@pytest.fixture
def site(tmp_path):
    folder = tmp_path / "site-packages"
    (folder / "torch-2.13.0.dist-info").mkdir(parents=True)
    return folder


@pytest.fixture
def digest(tmp_path, site):
    def digest(*, folder=tmp_path, path=(), **variables):
        return digest_of(VARIABLES | variables, folder=folder, path=[*path, str(site)])

    return digest


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "HF_HOME", "PREFECT_API_URL", "OMP_NUM_THREADS", "MINE"])
def test_another_variable_is_another_environment(digest, name):
    assert digest(**{name: "1"}) != digest() != digest(**{name: "2"})


@pytest.mark.parametrize("name", ["TERM", "SSH_TTY", "PWD", "COLUMNS", "TERM_PROGRAM", "RINGMASTER_STAY_S", "_"])
def test_another_terminal_of_the_same_person_is_the_same_environment(digest, name):
    assert digest(**{name: "other"}) == digest()


def test_what_is_installed_belongs_to_the_environment(digest, site):
    before = digest()
    (site / "torch-2.13.0.dist-info").rename(site / "torch-2.14.0.dist-info")
    upgraded = digest()
    (site / "a_technique-1.0.dist-info").mkdir()
    assert len({before, upgraded, digest()}) == 3


def test_a_folder_of_scripts_on_the_import_path_changes_nothing(digest, tmp_path):
    assert digest(path=[str(tmp_path / "bin")]) == digest()


def test_the_working_folder_matters_where_it_has_settings_or_sources_alone(digest, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    assert digest(folder=other) == digest()
    assert digest(folder=other, PYTHONPATH="src") != digest(PYTHONPATH="src")
    assert digest(folder=other, PYTHONPATH="/src") == digest(PYTHONPATH="/src")
    (other / "prefect.toml").write_text("[logging]\n")
    assert digest(folder=other) != digest()


def test_the_processors_of_a_command_belong_to_its_environment(digest, monkeypatch):
    before = digest()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {97})
    assert digest() != before


class Terminal:
    """A stderr that is a terminal, or not."""

    def __init__(self, is_terminal=True):
        self._is_terminal = is_terminal

    def isatty(self):
        return self._is_terminal


@pytest.mark.parametrize(
    ("variables", "seconds"),
    [
        ({}, 600.0),
        ({"RINGMASTER_STAY_S": "5.5"}, 5.5),
        ({"RINGMASTER_STAY_S": "0"}, 0.0),
        ({"CI": "true"}, 0.0),
        ({"CI": "true", "RINGMASTER_STAY_S": "9"}, 0.0),
        ({"CI": "false"}, 600.0),
    ],
)
def test_processes_stay_after_commands_of_terminals(monkeypatch, variables, seconds):
    for name in ("CI", "RINGMASTER_STAY_S"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert stay_seconds() == seconds
    monkeypatch.setattr(sys, "stderr", Terminal(is_terminal=False))
    assert stay_seconds() == 0.0


@pytest.mark.parametrize("value", ["soon", "-1", "nan", "inf"])
def test_a_time_that_is_none_is_refused(monkeypatch, value):
    monkeypatch.setenv("RINGMASTER_STAY_S", value)
    with pytest.raises(InputError, match=r"RINGMASTER_STAY_S=.* must be a number of seconds"):
        stay_seconds()

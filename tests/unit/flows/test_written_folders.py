"""A home or a temporary folder into which nothing can be written ends a command before anything starts."""

import shutil
import tempfile
from types import SimpleNamespace

import httpx
import pytest
from prefect.exceptions import PrefectHTTPStatusError

from ringmaster.errors import InputError, ServerStartError
from ringmaster.flows import settings
from ringmaster.flows.batch.flow_runs import result_of


def faults_of(home):
    with pytest.raises(InputError) as caught:
        settings.check_folders(home)
    return caught.value.faults


def test_a_home_that_is_a_file_is_named_by_its_variable(tmp_path):
    (tmp_path / "home").write_text("")
    (fault,) = faults_of(tmp_path / "home" / "inner")
    assert fault.startswith("RINGMASTER_HOME: nothing can be written in ")
    assert fault.endswith("name another folder in RINGMASTER_HOME")


def test_full_disks_are_refused_together(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=3 << 20))
    home, temporary = faults_of(tmp_path / "home")
    assert home.startswith(f"RINGMASTER_HOME: {tmp_path / 'home'} has 3 MiB free, and at least 32 are needed")
    assert temporary.startswith("TMPDIR: ")


def test_a_temporary_folder_that_no_one_can_write_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    (fault,) = faults_of(tmp_path / "home")
    assert fault.startswith("TMPDIR: nothing can be written in ")


def test_a_fault_of_prefects_server_has_a_remedy():
    def call():
        request = httpx.Request("POST", "http://127.0.0.1/api/flows")
        response = httpx.Response(500, request=request, text="database or disk is full")
        raise PrefectHTTPStatusError("500", request=request, response=response)

    with pytest.raises(ServerStartError, match=r"answered 500: database or disk is full\. To fix: see that the disk"):
        result_of(call)

"""A fork server that does not start is told in one sentence, with what to do, wherever it is needed."""

import sys
from contextlib import closing

import pytest

from ringmaster.errors import ForkServerError
from ringmaster.flows import cli, entry
from ringmaster.flows.services.first_processes import fork_server_for
from ringmaster.techniques.processes import forkserver_client


def test_a_server_that_fails_names_the_end_of_its_log(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with closing(fork_server_for([])) as server:
        server._log.write_text("one\nImportError: no torch\n\n")
        with pytest.raises(
            ForkServerError, match=r"ends with: ImportError: no torch\. To fix: resolve the error in its log"
        ) as told:
            server.start()
    assert "\n" not in str(told.value)


def test_a_command_whose_server_is_late_ends_with_a_sentence_and_no_traceback(monkeypatch, capsys, tmp_path):
    def app(obj):
        with closing(fork_server_for([])) as server:
            server.start()

    monkeypatch.setenv("RINGMASTER_HOME", str(tmp_path))
    monkeypatch.setattr(forkserver_client, "START_TIMEOUT_S", 0.0)
    monkeypatch.setattr(cli, "app", app)
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 1
    told = " ".join(capsys.readouterr().err.split())
    assert "did not start within 0 s" in told
    assert "To fix: try again once this machine is less busy" in told
    assert "Traceback" not in told


def test_what_a_library_prints_at_its_import_belongs_to_the_log(monkeypatch, tmp_path):
    (tmp_path / "chatty.py").write_text("print('hello')\nvalue = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(forkserver_client, "PRELOAD", ())  # torch prints nothing
    log = tmp_path / "log"
    with forkserver_client.ForkServer(preload=("chatty:value",), log=log):
        assert log.read_text() == "hello\n"

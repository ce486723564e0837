"""What looks for known vulnerabilities and for secrets fails where it finds one."""

import json
import os
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BIN = Path(sys.executable).parent
ADVISORY = {
    "id": "PYSEC-2026-1",
    "summary": "Code of others is run.",
    "aliases": [],
    "affected": [
        {
            "package": {"name": "pyyaml", "ecosystem": "PyPI"},
            "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "999"}]}],
        }
    ],
}


@contextmanager
def advisories(*, status=200, found=()):
    """Serves OSV's interface: the advisories of each package. Yields its URL."""

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self):
            query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            vulnerabilities = [each for each in found if each["affected"][0]["package"] == query["package"]]
            content = json.dumps({"vulns": vulnerabilities} if vulnerabilities else {}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def audit(url, folder):
    """Runs `make audit` with an advisory service, on a lock of one package."""
    pytest.importorskip("pip_audit")
    lines = (ROOT / "requirements.txt").read_text().splitlines(keepends=True)
    first = next(number for number, line in enumerate(lines) if line.lower().startswith("pyyaml=="))
    rest = (number for number, line in enumerate(lines) if number > first and not line.startswith(" "))
    (folder / "requirements.txt").write_text("".join(lines[first : next(rest)]))
    shutil.copy(ROOT / "Makefile", folder)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "--old-file=requirements.txt", "audit", f"BIN={BIN}", "READY=requirements.txt", f"OSV_URL={url}"]
    environment["NO_PROXY"] = "127.0.0.1"
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_a_known_vulnerability_fails_with_its_name(tmp_path):
    with advisories(found=[ADVISORY]) as url:
        done = audit(url, tmp_path)
    assert done.returncode != 0
    assert "PYSEC-2026-1" in done.stdout
    assert "pyyaml" in done.stdout.lower()


def test_a_lock_without_known_vulnerabilities_passes(tmp_path):
    with advisories() as url:
        done = audit(url, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "No known vulnerabilities found" in done.stderr


def test_a_service_that_does_not_answer_is_no_success(tmp_path):
    with advisories(status=404) as url:
        done = audit(url, tmp_path)
    assert done.returncode != 0
    assert "404" in done.stderr


def find_secrets(folder, text):
    """Runs the search for secrets on a file of a copy of the project."""
    pytest.importorskip("detect_secrets")
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "find_secrets", folder / ".ci")
    (folder / ".venv").mkdir()
    (folder / ".venv" / "bin").symlink_to(BIN)
    (folder / "settings.py").write_text(text)
    command = [folder / ".ci" / "find_secrets", "settings.py"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "line",
    [
        'password = "hunter2hunter2"',  # pragma: allowlist secret
        'key = "AKIAIOSFODNN7EXAMPLF"',  # pragma: allowlist secret
        'uri = "postgresql://me:Xy7pQ@db/x"',  # pragma: allowlist secret
    ],
)
def test_a_secret_fails_with_its_line(line, tmp_path):
    done = find_secrets(tmp_path, f"\n{line}\n")
    assert done.returncode != 0
    assert "settings.py:2" in done.stdout


def test_examples_and_digests_are_no_secrets(tmp_path):
    text = 'password = "correct horse battery"\ndigest = "68ba7694e23014788dcc8ab5afe613824f45a05c"\n'
    done = find_secrets(tmp_path, text)
    assert done.returncode == 0, done.stdout

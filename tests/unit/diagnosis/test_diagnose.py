"""The bundle of `ringmaster diagnose`: what is in it, with servers and databases down, and that no secret is."""

import json
import os
import stat
import sys
import tarfile

import pytest
from typer.testing import CliRunner

from ringmaster.codec import to_json
from ringmaster.distribution import DISTRIBUTION, own_release
from ringmaster.features.diagnosis import diagnose
from ringmaster.features.diagnosis.bundle import BundleFile, Redactor, collect
from ringmaster.features.diagnosis.diagnose import MAX_BYTES, logs
from ringmaster.flows import cli, entry
from ringmaster.flows.services.service_definitions import PoolOptions, compose, databases
from ringmaster.flows.services.service_files import ServiceFiles, keep_password
from ringmaster.flows.settings import pool_file
from ringmaster.tasks.control.requests import RequestKind, Requests
from ringmaster.tasks.pool.submissions import Submissions
from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.tasks.storage.journal import Journal, SegmentSpec
from ringmaster.techniques.processes.gang_events import JobResult
from tests.ports import free_port
from tests.unit.pool.bench import submission, worker_of

PASSWORD = "correct horse: 100% battery"
SECRETS = {
    "password": PASSWORD,
    "database": "s3cr%2Ft-of-db",
    "token": "hf_" + "q" * 34,
    "variable": "value-of-a-variable-that-nobody-knows",
    "notify": "https://hooks.slack.com/services/T00/B00/zzzzzzzz",
    "log": "logged-but-known-nowhere",
    "proxy": "proxy-password",
    "job": "given-in-a-batch-file",
}


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home whose pool is down, with secrets wherever they may be."""
    for name in list(os.environ):
        if name.startswith(("RINGMASTER_", "PREFECT_", "MLFLOW_")):
            monkeypatch.delenv(name)
    home = tmp_path / "home"
    (home / "pool").mkdir(parents=True)
    (home / "prefect").mkdir()
    monkeypatch.setenv("RINGMASTER_HOME", str(home))
    monkeypatch.chdir(tmp_path)
    return home


def options_of(home, database=None):
    ports = [free_port() for _ in range(3)]
    return PoolOptions(
        home=home,
        databases=databases(database, home=home),
        password=PASSWORD,
        port_prefect=ports[0],
        port_mlflow=ports[1],
        port_metrics=ports[2],
        notify=SECRETS["notify"],
    )


def with_pool(home, database=None):
    """Writes the files of a pool that is down."""
    options = options_of(home, database)
    files = ServiceFiles(home / "pool")
    files.write_services(compose(options), address=options.address())
    keep_password(home / "pool", username="ringmaster", password=PASSWORD)
    pool_file(home).write_text(json.dumps(to_json(options.address())))


def diagnosed(*arguments):
    """Runs the command; returns the files of its bundle by name, the contents, and its output."""
    done = CliRunner().invoke(cli.app, ("diagnose", *arguments))
    assert done.exit_code == 0, done.output
    file = json.loads(done.stdout)["file"] if "--json" in arguments else done.stdout.strip()
    with tarfile.open(file) as archive:
        members = archive.getmembers()
        texts = {m.name.partition("/")[2]: archive.extractfile(m).read().decode() for m in members}
    assert len({member.name.partition("/")[0] for member in members}) == 1
    return texts, json.loads(texts["contents.json"]), done


def test_no_secret_of_environment_urls_files_and_logs_is_in_the_bundle(home, monkeypatch):
    with_pool(home, f"postgresql://ringmaster:{SECRETS['database']}@127.0.0.1:{free_port()}/x")
    monkeypatch.setenv("HF_TOKEN", SECRETS["token"])
    monkeypatch.setenv("MY_SETTING", SECRETS["variable"])
    monkeypatch.setenv("HTTPS_PROXY", f"http://me:{SECRETS['proxy']}@proxy:3128")
    monkeypatch.setenv("RINGMASTER_NOTIFY", SECRETS["notify"])
    monkeypatch.setenv("RINGMASTER_CHECKPOINTS", f"s3://key:{SECRETS['log']}@bucket/x")
    said = [
        *(SECRETS[known] for known in ("password", "database", "token", "variable", "notify", "proxy")),
        f"password={SECRETS['log']}",
        f"postgresql://u:{SECRETS['log']}@host/x",
        f'{{"api_key": "{SECRETS["log"]}"}}',
        f"model.kwargs: token={SECRETS['job']}",
    ]
    (home / "pool" / "controller.log").write_text("\n".join(f"12:00:00 sent {each}" for each in said))
    gang = home / "batches" / "b" / "1" / "gangs" / "1-a"
    gang.mkdir(parents=True)
    (gang / "rank-0.log").write_text("\n".join(reversed(said)))
    texts, contents, done = diagnosed()
    assert {"logs/pool/controller.log", "logs/batches/b/1/gangs/1-a/rank-0.log"} <= set(texts)
    assert "pool" in contents["failures"]  # its database is down
    for what, secret in SECRETS.items():
        for name, text in {**texts, "the terminal": done.output}.items():
            assert secret not in text, f"{what} is in {name}"
            assert secret.split("/")[-1] not in text, f"{what} is in {name}"
    assert "12:00:00 sent" in texts["logs/pool/controller.log"]


def test_what_is_in_it_of_a_pool_whose_servers_are_down(home):
    with_pool(home)
    database = Database(file_url(home / "pool" / "pool.db"))
    worker_of(database, "n1")
    Submissions(database).submit(submission(), failed={"z": "it has no model"})
    content = {"batch": {"name": "queued", "jobs": [{"name": "a", "model": {"kwargs": {"key": SECRETS["job"]}}}]}}
    Requests(database).ask(RequestKind.TRAIN, content)
    database.close()
    texts, contents, _ = diagnosed("--json")
    assert contents["failures"] == {}
    assert set(contents["parts"]) | {"contents.json"} == set(texts)
    pool = json.loads(texts["pool.json"])
    assert [node["name"] for node in pool["nodes"]] == ["n1"]
    assert {(job["name"], job["status"]) for job in pool["jobs"]} == {
        ("a", "waiting"),
        ("b", "waiting"),
        ("z", "failed"),
    }
    assert pool["requests"][0]["batch"] == "queued"
    assert SECRETS["job"] not in texts["pool.json"]
    answers = json.loads(texts["servers.json"])
    assert {"prefect", "mlflow", "metrics"} <= set(answers)
    assert all(answer["error"].startswith("ConnectError") for answer in answers.values())
    settings = json.loads(texts["settings.json"])
    assert settings["pool"]["database"]["driver"] == "sqlite"
    assert json.loads(texts["versions.json"])[DISTRIBUTION] == own_release()
    assert "prefect==" in texts["packages.txt"]
    assert json.loads(texts["machine.json"])["cores"]["logical"] >= 1
    processes = json.loads(texts["processes.json"])
    assert processes["supervisor"] is None


def test_an_empty_home_has_a_bundle_too(home):
    texts, contents, done = diagnosed()
    assert contents["failures"] == {}
    assert "pool.json" not in texts
    assert "read it before you send it" in " ".join(done.stderr.split())


def test_runs_of_this_machine_are_in_it(home):
    folder = home / "batches" / "nightly" / "20260101-000000"
    folder.mkdir(parents=True)
    journal = Journal.of_file(folder / "journal.db")
    journal.write_job("llama", status="failed", message="it ran out of memory")
    spec = SegmentSpec(technique="ddp", config={"key": SECRETS["job"]}, devices=("m:cpu:0",))
    number = journal.start_segments([("llama", spec)])[0]
    journal.end_segment(number, JobResult(status="crashed", message="rank 0 died"))
    journal.close()
    texts, _, _ = diagnosed()
    (run,) = json.loads(texts["runs.json"]).values()
    assert run["jobs"] == {"llama": ["failed", 0, "it ran out of memory"]}
    assert (run["segments"][0]["technique"], run["segments"][0]["message"]) == ("ddp", "rank 0 died")
    assert SECRETS["job"] not in texts["runs.json"]


@pytest.mark.parametrize("broken", ["pool.json", "pool/services.json", "pool/state.json", "pool/mlflow-auth.ini"])
def test_a_broken_file_is_noted_and_the_rest_is_there(home, broken):
    with_pool(home)
    (home / broken).write_text("{this is no")
    texts, contents, done = diagnosed()
    assert contents["failures"]
    assert {"versions.json", "machine.json", "packages.txt"} <= set(texts)
    for name in contents["failures"]:
        assert f"without {name}: " in done.stderr


def test_a_database_that_is_not_there_is_not_made(home):
    with_pool(home)
    _, contents, _ = diagnosed()
    assert "FileNotFoundError" in contents["failures"]["pool"]
    assert not (home / "pool" / "pool.db").exists()


def test_only_its_owner_can_read_it(home, tmp_path):
    file = tmp_path / "report.tar.gz"
    file.write_text("an older one")
    file.chmod(0o644)
    diagnosed("-o", str(file))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_file_that_cannot_be_written_is_refused(home, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ringmaster", "diagnose", "-o", str(tmp_path / "no" / "such" / "x.tar.gz")])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 2
    assert "cannot be written. To fix: name a file in a folder that is there" in capsys.readouterr().err


def test_an_error_is_noted_without_its_secrets():
    def fails():
        raise OSError("cannot reach postgresql://u:verysecret@host/x")

    bundle = collect({"a": fails, "b": lambda: [BundleFile(name="b.txt", text="b")]}, redact=Redactor([]))
    assert [part.name for part in bundle.parts] == ["b.txt"]
    assert next(iter(bundle.failures.values())) == "OSError: cannot reach postgresql://[redacted]@host/x"


def test_of_a_long_log_the_last_whole_lines_are_taken(home):
    (home / "pool" / "worker.log").write_text("".join(f"line {number:06}\n" for number in range(MAX_BYTES // 10)))
    (part,) = logs(home)
    assert len(part.text) <= MAX_BYTES
    assert part.text.startswith("line ")
    assert part.text.endswith(f"line {MAX_BYTES // 10 - 1:06}\n")


def test_nvidia_smi_is_asked_where_there_is_one(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho H200\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [part.text for part in diagnose.nvidia()] == ["exit status 0\nH200\n"]
    monkeypatch.setenv("PATH", "")
    assert "not installed" in next(iter(diagnose.nvidia())).text

"""`ringmaster logs BATCH JOB`, and the columns of `ringmaster status` for jobs that run."""

import json

import pytest
from typer.testing import CliRunner

from ringmaster.errors import DatabaseFileError, InputError
from ringmaster.flows import cli
from ringmaster.flows.commands import observing
from ringmaster.tasks.planning import Option, PlanningJob, PlanningNode, Problem, solve
from ringmaster.tasks.storage.journal import JobStatus, Journal, SegmentSpec
from ringmaster.tasks.storage.message_store import MessageStore
from ringmaster.techniques.processes.gang_events import PhaseStarted, Steps


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The folder of a run of batch "nightly" whose job "a" runs."""
    for variable in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "RINGMASTER_DATABASE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("RINGMASTER_HOME", str(tmp_path))
    folder = tmp_path / "batches" / "nightly" / "20261101-120000"
    journal = Journal.of_file(folder / "journal.db")
    problem = Problem("nightly", (PlanningNode("n", 2),), (PlanningJob("a", (Option("ddp", 2, 9.0),)),))
    journal.write_plan({"problem": problem.to_json(), "plan": solve(problem).to_json()}, why="start")
    spec = SegmentSpec(
        technique="ddp",
        num_devices=2,
        devices=("n:cpu:0", "n:cpu:1"),
        last_step=40,
        planned_s=(0.0, 9.0),
        predicted_bytes=2**30,
    )
    (number,) = journal.start_segments([("a", spec)])
    journal.put("batch", {"jobs": [{"name": "a", "num_steps": 40}, {"name": "b", "num_steps": 40}]})
    journal.write_job("a", status=JobStatus.RUNNING)
    journal.write_job("b", status=JobStatus.FAILED, message="no such file")
    report = Steps(
        first_step=0, seconds=(0.5,) * 4, losses=(2.5,) * 4, num_samples=32, num_tokens=400, peak_bytes=2**29
    )
    MessageStore(journal.database).store(number, "", events=[(0, report), (1, PhaseStarted(phase="saving"))])
    log(folder, 1, "a", "12:00:01 step 4, loss 2.5\n")
    yield folder
    journal.close()


def log(folder, number, job, text):
    file = folder / "gangs" / f"{number:04d}-{job}" / "rank-0.log"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    return file


def invoke(*arguments):
    return CliRunner().invoke(cli.app, arguments)


@pytest.mark.parametrize("arguments", [("a",), ("nightly", "a"), ("a", "--batch", "nightly")])
def test_the_log_of_a_job_is_shown_by_batch_and_job(run, arguments):
    assert invoke("logs", *arguments).stdout == "12:00:01 step 4, loss 2.5\n"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("c",), "there is no job 'c'; there are a, b"),
        (("nightly", "c"), "there is no job 'c'; there are a, b"),
        (("weekly", "a"), "there is no batch 'weekly'"),
        (("b",), "b of nightly has no log here, as no gang has trained it; it is failed: no such file"),
        (("nightly", "a", "--rank", "3"), "a has no rank 3; it has 0"),
        (("nightly", "a", "b"), "To fix: ringmaster logs BATCH JOB"),
    ],
)
def test_names_that_are_unknown_lead_to_those_that_are_known(run, arguments, told):
    result = invoke("logs", *arguments)
    assert isinstance(result.exception, InputError)
    assert told in str(result.exception)


def test_a_log_is_followed_to_the_job_s_next_gang_and_to_its_end(run, monkeypatch):
    monkeypatch.setattr(observing, "FOLLOW_EVERY_S", 0.0)
    journal = Journal.of_file(run / "journal.db")
    texts = observing._followed(observing._last_gang("nightly", "a"), batch="nightly", rank=0)
    shown = [next(texts), next(texts)]
    log(run, 2, "a", "step 8\n")
    shown += [next(texts), next(texts)]
    journal.write_job("a", status=JobStatus.DONE)
    shown += list(texts)
    assert "".join(shown) == "12:00:01 step 4, loss 2.5\nstep 8\n"
    journal.close()


def test_the_newest_gang_is_that_of_the_highest_number(run):
    log(run, 9999, "a", "older\n")
    log(run, 10000, "a", "newest\n")
    assert invoke("logs", "a").stdout == "newest\n"


def test_a_long_log_is_read_in_parts(run, monkeypatch):
    monkeypatch.setattr(observing, "MAX_CHARACTERS", 5)
    assert invoke("logs", "a").stdout == "12:00:01 step 4, loss 2.5\n"


def test_logs_read_no_figures(run, monkeypatch):
    monkeypatch.setattr("ringmaster.flows.reports.watch.TimelineReader", None)
    assert invoke("logs", "a").exit_code == 0


def test_status_needs_no_write_access_to_a_journal(run, monkeypatch):
    def refuse(url, **options):
        raise DatabaseFileError(["it cannot be written"])

    monkeypatch.setattr("ringmaster.flows.reports.watch.Database", refuse)
    rows = json.loads(invoke("status", "--json").stdout)
    assert [(row["job"], row["status"], row["option"]) for row in rows] == [
        ("a", "running", "ddp on n:cpu:0,1"),
        ("b", "failed", ""),
    ]


def test_status_says_what_runs_with_which_technique_and_how_fast(run):
    rows = json.loads(invoke("status", "--json").stdout)
    assert rows[0]["option"] == "ddp on n:cpu:0,1"
    assert rows[0]["step"] == 4
    figures = rows[0]["figures"]
    assert (figures["samples_per_s"], figures["tokens_per_s"], figures["phase"]) == (16.0, 200.0, "saving")
    header, first, second = invoke("status").stdout.splitlines()
    assert header.split() == [
        *("batch", "run", "job", "status", "step", "loss", "samples/s", "tokens/s", "memory", "message"),
        *("trained", "with"),
    ]
    assert first.split()[3:] == [
        "running",
        "4/40",
        "2.5",
        "16",
        "200",
        "0.5",
        "of",
        "1",
        "GiB",
        "saving",
        "ddp",
        "on",
        "n:cpu:0,1",
    ]
    assert second.split()[3:] == ["failed", "0/40", "no", "such", "file"]


def test_watch_shows_the_same_figures(run):
    shown = invoke("watch", "nightly", "--once").stdout
    for text in ("samples/s", "tokens/s", "saving", "4/40", "2.5", "200"):
        assert text in shown

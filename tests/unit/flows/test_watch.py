"""The command `ringmaster watch`: which batch it finds, what it prints, and when it ends."""

import json

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from ringmaster.errors import InputError
from ringmaster.flows.commands import observing
from ringmaster.flows.reports import watch
from ringmaster.flows.reports.watch import LineBudget, picture
from ringmaster.tasks.cluster import Device
from ringmaster.tasks.execution.execution_events import PredictedEnd
from ringmaster.tasks.execution.job_progress import JobFigures
from ringmaster.tasks.pool.nodes import NodeRecord, NodeRegistry
from ringmaster.tasks.pool.submissions import Submission, Submissions
from ringmaster.tasks.storage.journal import Journal
from ringmaster.tasks.timeline.run_timeline import JobLine, RunTimeline, TimelineSpan
from tests.unit.execution.fakes import job, profile
from tests.unit.timeline.stories import Story, planned

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(observing.watch)


@pytest.fixture
def home(tmp_path, monkeypatch):
    for name in ("RINGMASTER_DATABASE", "PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RINGMASTER_HOME", str(tmp_path))
    return tmp_path


def batch(home, name, run="20260101-000000", *, status="waiting"):
    """The database of a run of a batch with one job, which has not started."""
    story = Story(home / "batches" / name / run)
    story.plan(planned("a", 0, 10, 0, 1))
    story.journal.write_job("a", status=status, message="its loss is not a number" if status == "failed" else "")
    return story


def run(*arguments):
    done = CliRunner().invoke(app, list(arguments))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.stdout


def test_the_newest_batch_is_shown_or_the_one_that_is_named(home):
    batch(home, "older", "20260101-000000")
    batch(home, "newer", "20260102-000000")
    batch(home, "older", "20251231-000000")
    assert run("--once").startswith("newer  1 waiting")
    text = run("older", "--once")
    assert text.startswith("older  1 waiting")
    for word in ("n0:0", "n0:1", "planned", "░", "ddp x2", "planned (start): 10 s from then on"):
        assert word in text
    assert max(map(len, text.splitlines())) <= 140
    told = json.loads(run("older", "--once", "--json"))
    assert told["jobs"][0]["name"] == "a" and told["coming"][0]["devices"] == [["n0", 0], ["n0", 1]]
    assert told["planned_end_s"] == 10.0


def test_what_is_not_there_is_told_with_what_there_is(home):
    batch(home, "mixed")
    with pytest.raises(InputError, match=r"no batch 'mixd' .* there are mixed"):
        run("mixd", "--once")


def test_watching_ends_with_the_batch(home):
    batch(home, "mixed", status="failed")
    text = run("mixed")
    assert text.count("mixed  1 failed") == 1 and "its loss is not a number" in text


def test_each_change_is_shown_until_the_end(home):
    story = batch(home, "mixed")
    with watch.opened("mixed") as watched:
        steps = iter([lambda: None, lambda: story.journal.write_job("a", step=5), lambda: _end(story)])
        seen = [c.jobs[0] for c in watch.changes(watched, every_s=1e9, wait=lambda _: next(steps)())]
    assert [(line.status, line.step) for line in seen] == [("waiting", 0), ("waiting", 5), ("done", 10)]


def _end(story):
    story.journal.write_job("a", status="done", step=10)


def test_a_pool_is_shown_with_the_health_of_its_nodes(home, monkeypatch):
    story = Story(home)
    database = story.database
    jobs = (job("a"),)
    profiles = {"a": (profile(),)}
    for name in ("nightly-1", "nightly-2"):
        made = Submission(id=name, name="nightly", jobs=jobs, profiles=profiles, folder="f", cache_dir="c")
        Submissions(database).submit(made)
    devices = tuple(Device(kind="cpu", index=i, name="cpu", memory_bytes=1, cores=(i,)) for i in range(2))
    NodeRegistry(database).register(
        NodeRecord(name="n7", incarnation="i", address="h", devices=devices, health={"1": "has fallen off the bus"})
    )
    monkeypatch.setenv("RINGMASTER_DATABASE", database.url)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:2")
    text = run("--once")
    assert text.startswith("the pool  2 waiting")
    for word in ("nothing is planned yet", "nightly-1/a", "nightly-2/a", "device 1 has fallen off the bus"):
        assert word in text
    assert run("nightly", "--once").startswith("nightly-2  1 waiting")
    assert run("nightly-1", "--once").startswith("nightly-1  1 waiting")
    Journal(database, batch="nightly-1").write_job("a", status="done", step=10)
    assert "1 done" in run("nightly-1")  # the command returns, as the batch has ended
    batch(home, "mixed", status="done")
    assert run("mixed").startswith("mixed  1 done")  # a batch that ran here without a pool


def test_a_screen_holds_what_fits_and_says_what_does_not():
    lines = tuple(JobLine(name=f"job-{i}", status="waiting", step=0) for i in range(1000))
    rows = tuple((f"n{i}", 8) for i in range(16))
    span = TimelineSpan(job="job-0", technique="single", devices=(("n0", 0),), start_s=0.0, end_s=9.0, status="to come")
    run_timeline = RunTimeline(name="big", zero_s=0.0, now_s=1.0, rows=rows, jobs=lines, coming=(span,))
    console = Console(width=100)
    with console.capture() as captured:
        console.print(picture(run_timeline, width=100, room=LineBudget.of_screen(run_timeline, 40)))
    text = captured.get()
    assert len(text.splitlines()) <= 40
    assert "and 108 more devices" in text and "and 991 more" in text


@pytest.mark.parametrize(("width", "height"), [(40, 24), (80, 24), (140, 40)])
def test_a_running_job_has_one_line_with_its_name_and_its_whole_end(width, height):
    figures = JobFigures(loss=2.1, samples_per_s=512.0, tokens_per_s=65_500.0, peak_bytes=2**30, predicted_bytes=2**31)
    end = PredictedEnd(end_s=4000.0, low_s=3000.0, high_s=5000.0)
    jobs = tuple(
        JobLine(
            name=f"job-{k}",
            status="running",
            step=240,
            num_steps=1000,
            technique="fsdp",
            num_devices=1,
            message="" if k else "loading data and model",
            figures=figures,
            predicted=end,
        )
        for k in range(30)
    )
    running = (
        TimelineSpan(job="job-0", technique="fsdp", devices=(("vm", 0),), start_s=0.0, end_s=4000.0, status="running"),
    )
    shown = RunTimeline(name="night", zero_s=0.0, now_s=100.0, rows=(("vm", 1),), running=running, jobs=jobs)
    console = Console(width=width, height=height)
    with console.capture() as capture:
        console.print(picture(shown, width=width, room=LineBudget.of_screen(shown, height)))
    lines = capture.get().splitlines()
    assert len(lines) <= height
    (line,) = (line for line in lines if "job-1 " in line)
    assert line.startswith("B  job-1 ")
    assert "66.7 min (50.0 to 83.3 min)" in line

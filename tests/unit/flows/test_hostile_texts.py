"""Any text as the name or the message of anything, through everything that people look at.

No view raises, none lets a control character through, and each shows what is visible of the text.
"""

import io
import json
import logging
import re
import sys
import threading
import unicodedata
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from pythonjsonlogger.json import JsonFormatter
from rich.live import Live
from rich.table import Table
from rich.tree import Tree

from ringmaster.features.bisection.bisecting import with_culprit
from ringmaster.flows.batch.artifacts import DecisionArtifact, cost_markdown, plan_markdown, records_markdown
from ringmaster.flows.batch.dry_run import DryRun
from ringmaster.flows.batch.result import BatchResult, job_rows
from ringmaster.flows.commands import planning
from ringmaster.flows.lineage.views import diff_view, impact_view, print_view, show_view
from ringmaster.flows.output import (
    TextConsole,
    TextFormatter,
    prepare_streams,
    report_faults,
    write_document,
    write_uncaught,
)
from ringmaster.flows.reports.plan_report import print_plan, print_report
from ringmaster.flows.reports.progress import LinesView, LiveView
from ringmaster.flows.reports.watch import LineBudget, picture, status_table
from ringmaster.model_lineage import model_pages
from ringmaster.model_lineage.exporting import card_of, drawing, graphml
from ringmaster.model_lineage.ledger.ledger import compared_with_base
from ringmaster.model_lineage.records import Origin
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.execution.dispatch import PlannedSegment
from ringmaster.tasks.execution.execution_events import (
    DeviceWait,
    GangReport,
    JobEnded,
    PlanUpdate,
    SegmentEnded,
    SegmentStarted,
)
from ringmaster.tasks.planning import Option, Plan, PlanningJob, PlanningNode, Problem, gantt, solve
from ringmaster.tasks.retraining.report import FAILED, ModelResult, RetrainingReport
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.journal import JobRecord, Journal, SegmentSpec
from ringmaster.tasks.timeline.drawing import render_svg
from ringmaster.tasks.timeline.prefect_artifacts import markdown as timeline_markdown
from ringmaster.tasks.timeline.run_timeline import JobLine, NodeLine, RunTimeline, TimelineNote, TimelineSpan
from ringmaster.techniques.processes.gang_events import CheckpointFailed, JobResult, Outcome, OutcomeStatus, Steps
from ringmaster.text import printable
from tests.unit.lineage.families import data, node, snapshot

MARKUP = (
    "[bold]",
    "[/]",
    "acc[/top5]",
    "[/data/a.txt]",
    ":smile:",
    "<script>x</script>",
    "| a |",
    "![a](http://b)",
    "`",
)
CODES = (
    "\x1b]0;title\x07",
    "\x1b[2J",
    "\x1b[31m",
    "\x9b2J",
    "\r\nOK: proved",
    "\0",
    "\u202e",
    "\u2067",
    "\ud800",
    "\u2028",
)
TEXTS = st.one_of(
    st.text(st.characters() | st.characters(categories=["Cc", "Cf", "Cs", "Zl", "Zp"]), min_size=1, max_size=60),
    st.lists(st.sampled_from([*MARKUP, *CODES, "word"]), min_size=1, max_size=8).map("".join),
)
PROBLEM = Problem(
    "p",
    (PlanningNode("n0", 2),),
    (PlanningJob("a", (Option("ddp", 2, 9.0),)), PlanningJob("b", (Option("ddp", 2, 5.0),))),
)
PLAN = solve(PROBLEM, work_s=0.1)
CURSOR = re.compile(r"\x1b\[(\?25[lh]|\d*[A-GK]|[\d;]*m)|\r")  # what rich writes to move its live bars, and its colours


def any_text(test):
    """Runs a test with many texts, among them those of MARKUP and CODES and one of 100 kB."""
    for text in ("".join([*MARKUP, *CODES]), 20_000 * "[/x] ", "\x1b" * 100_000, "\n" * 1000, *MARKUP, *CODES):
        test = example(text=text)(test)
    return settings(max_examples=40, deadline=None)(given(text=TEXTS)(test))


def without_layout(text: str) -> str:
    return re.sub(r"[\s│┃]", "", text)


def check(shown: str, text: str, *, is_whole: bool = True) -> None:
    """Checks what a view shows. is_whole: whether it shows all of a short text."""
    harmful = {c for c in shown if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")} - set("\n\t\u200c\u200d")
    assert not harmful
    shown.encode()
    assert len(shown) < 150_000
    if is_whole and len(text) < 400:
        for word in filter(None, map(without_layout, re.split(r"[^\x21-\x7e]+", text))):
            assert word in without_layout(shown)


def console() -> TextConsole:
    return TextConsole(file=io.StringIO(), width=9000, force_terminal=False)


def printed(made: TextConsole) -> str:
    return made.file.getvalue()


def events(text: str):
    segment = PlannedSegment(job=text, option=0, last_step=5, devices=(("n0", 0),), start_s=0.0, end_s=9.0)
    yield PlanUpdate(problem=PROBLEM, plan=PLAN, why=text)
    yield SegmentStarted(
        number=1, segment=segment, technique=text, num_devices=1, first_step=0, attempt=2, members=(text,)
    )
    yield GangReport(number=1, job=text, event=Steps(first_step=0, losses=(1.0,), seconds=(1.0,), wall_s=0.0))
    yield GangReport(number=1, job=text, event=CheckpointFailed(step=1, message=text))
    outcome = Outcome(status=OutcomeStatus.CRASHED, message=text)
    yield SegmentEnded(number=1, segment=segment, outcome=outcome, decision=text)
    for status in ("failed", "cancelled", "stopped"):
        yield JobEnded(record=JobRecord(name=text, status=status, message=text))
    yield JobEnded(record=JobRecord(name=text, status="done", metrics={text: 0.5}))
    yield DeviceWait(holders=(text,))


@any_text
def test_lines_of_progress(text: str):
    for event in events(text):
        made = console()
        view = LinesView(made, is_verbose=True)
        view.listen(event)
        check(printed(made), text, is_whole=not isinstance(event, GangReport) or "Failed" in str(event))
        assert printed(made).count("\n") <= 1
    made = console()
    for show in (LinesView(made).notice, LinesView(made).say, LinesView(made, is_verbose=True).detail):
        show(text)
    check(printed(made), text)


@any_text
def test_live_bars(text: str):
    made = TextConsole(file=io.StringIO(), width=9000, height=50, force_terminal=True, color_system="truecolor")
    live = LiveView(made, is_verbose=True)
    live._live.auto_refresh = False  # a slow machine would show the bars more often than the test does
    with live as view:
        view.notice(text)
        for event in events(text):
            view.listen(event)
            view._live.refresh()
        view.say(text)
    check(CURSOR.sub("", printed(made)), text)


def result(text: str) -> BatchResult:
    segment = {"technique": text, "devices": [text], "seconds": 1.0, "num_devices": 1, "device_s": 1.0}
    job = {"name": text, "status": "failed", "segments": [segment], "num_steps": 3, "metrics": {text: 0.5}}
    job |= {"message": text, "model_uri": "models:/a/1", "deadline_s": 1.0, "ended_s": 2.0}
    plan = {"makespan_s": 1.0, "lower_bound_s": 1.0, "gap": 0.0, "objective": text, "value": 1.0}
    return BatchResult(
        batch=text, status="failed", plan=plan, makespan_s=1.0, objective="makespan", value=1.0, idle_s=0.0,
        current_practice_s=2.0, num_trials=1, profiling_s=1.0, jobs=(job,), faults=(text,),
    )  # fmt: skip


@any_text
def test_the_report_of_a_batch(text: str):
    made = console()
    print_report(result(text), made, home=Path("/srv/x"))
    check(printed(made), text)
    check(result(text).summary(), text)


@any_text
def test_status(text: str):
    row = {"batch": text, "run": text, "job": text, "status": "failed", "step": 1, "message": text, "leader": text}
    made = console()
    made.print(status_table([row]))
    check(printed(made), text)


def timeline(text: str) -> RunTimeline:
    span = TimelineSpan(
        job=text, technique=text, devices=((text, 0),), start_s=0.0, end_s=9.0, status="crashed", message=text
    )
    return RunTimeline(
        name=text, zero_s=0.0, now_s=5.0, rows=((text, 1),), first=(span,), past=(span,),
        jobs=(JobLine(name=text, status="failed", step=1, technique=text, num_devices=1, message=text),),
        notes=(TimelineNote(at_s=1.0, text=text),),
        nodes=(NodeLine(name=text, num_devices=1, status=text, health=(("0", text),)),),
    )  # fmt: skip


@any_text
def test_watch(text: str):
    made = console()
    made.print(picture(timeline(text), width=300, room=LineBudget()))
    check(printed(made), text)
    screen = TextConsole(file=io.StringIO(), width=200, height=50, force_terminal=True, color_system="truecolor")
    with Live(console=screen, auto_refresh=False) as live:
        live.update(picture(timeline(text), width=200, room=LineBudget()), refresh=True)
    check(CURSOR.sub("", printed(screen)), text, is_whole=False)


@any_text
def test_pictures(text: str):
    for svg in (render_svg(timeline(text)), gantt.render_svg(plan_of(text), PROBLEM)):
        check(svg, text, is_whole=False)
        shown = "".join(ElementTree.fromstring(svg).itertext())
        assert printable(text, limit=80)[:70].strip() in shown
    ElementTree.fromstring(drawing(snapshot(model(text))))


def problem_of(text: str) -> Problem:
    """A problem with a name that no file could give it."""
    made = Problem("p", PROBLEM.nodes, PROBLEM.jobs)
    object.__setattr__(made, "name", text)
    return made


def plan_of(text: str) -> Plan:
    return replace(PLAN, problem_name=text, proof=text, certificate=None, method=text)


@any_text
def test_a_plan_and_its_check(text: str, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plans")
    made = console()
    print_plan(plan_of(text), PROBLEM, {text: 3.0}, made, fused=text)
    check(printed(made), text)
    (folder / "problem.json").write_text(json.dumps(PROBLEM.to_json()))
    (folder / "plan.json").write_text(json.dumps(plan_of(text).to_json()))
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        planning.check(folder / "problem.json", folder / "plan.json")
    check(out.getvalue() + err.getvalue(), text, is_whole=False)  # a claim that arithmetic needs not is not shown
    assert not any(line.startswith("OK: proved") for line in out.getvalue().splitlines())


def model(text: str):
    """A node of the lineage. Only its id is not foreign."""
    origin = Origin(job=text, technique=text, code_version=text, source=text)
    made = node("x", kind="fine-tuned", aliases=[text], datasets=[data(text)], metrics={text: 1.0}, origin=origin)
    return replace(made, record=replace(made.record, registered_name=text), params={text: text})


def pages(text: str):
    batch = Batch(name=text, jobs=(), folder=Path(), text="")
    yield "plan", plan_markdown(plan_of(text), problem_of(text), gains=[text])
    yield "cost", cost_markdown(batch, result(text))
    yield "records", records_markdown(result(text), server="http://x", run_path="#/a")
    run = DryRun(
        batch=text, made_s=0.0, num_trials=0, price_per_device_hour=1.0, folder=Path("/x"), faults={text: text}
    )
    yield "dry run", run.markdown()
    outcome = ModelResult(model=text, is_due=True, why_due=text, metric=text, outcome=FAILED, why=text, notes=(text,))
    yield "retraining", RetrainingReport(name=text, run_date="2026-11-20", model_results=(outcome,)).markdown()
    yield "timeline", timeline_markdown(timeline(text))
    record = model(text[:500]).record
    page = model_pages.card(record, text="", parents=[record], run_name=text[:100], batch=(text[:100], "r"))
    yield "card", page
    yield "culprit", with_culprit(page, text)
    yield "base", compared_with_base(record, record, weight_bytes=(1, 1), metrics={text: 1.0}, base_metrics={text: 1.0})


@any_text
def test_pages_of_prefect_and_mlflow(text: str):
    for name, page in pages(text):
        check(re.sub(r"data:image[^)]*", "", page), text, is_whole=False)
        tokens = MarkdownIt("gfm-like", {"linkify": False, "html": True}).parse(page)
        flat = [each for token in tokens for each in (token, *(token.children or ()))]
        assert not [each for each in flat if each.type.startswith("html")], name
        links = [
            str(each.attrs.get("href", each.attrs.get("src"))) for each in flat if each.type in ("link_open", "image")
        ]
        assert all(link.startswith(("#/", "http://x/", "data:image", "get-artifact")) for link in links), (name, links)
        widths = {len(row) for row in rows_of(tokens)}
        assert len(widths) <= 1 or name == "retraining", (name, widths)
        if len(text) < 200 and name not in ("card", "culprit", "timeline"):
            shown = without_layout(
                "".join(each.content for each in flat if each.type in ("text", "text_special", "code_inline"))
            )
            assert without_layout(printable(text)) in shown, name


def rows_of(tokens):
    rows = []
    for token in tokens:
        if token.type == "tr_open":
            rows.append([])
        elif token.type in ("td_open", "th_open"):
            rows[-1].append(token)
    return rows


@any_text
def test_tables_of_prefect(text: str):
    (row,) = job_rows(result(text))
    check(row["reason"], text)
    json.dumps(row).encode()
    tables = []
    decisions = DecisionArtifact(
        clock=lambda: 0.0,
        write=lambda artifact, rows: tables.append(list(rows)),
        in_background=lambda act: SimpleNamespace(ask=act, close=lambda: None),
    )
    for event in events(text):
        decisions.listen(event)
    decisions.close()
    for row in tables[-1]:
        check(row["what"], text)


@any_text
def test_lineage(text: str):
    name = text[:200]
    family = snapshot(model(name), node("child", "m-x", name, kind=name, datasets=[data(name)]))
    one, other = family.models
    made = console()
    for view in (
        show_view(family, other),
        show_view(family, one),
        impact_view(family, name, [one, other], alias=name),
        diff_view(one, other, None, {name: {name: (name, name)}}, most=5),
    ):
        print_view(view, made)
    check(printed(made), name)
    ElementTree.fromstring(graphml(family))
    check(card_of(family, one), name, is_whole=False)


@any_text
def test_logs(text: str):
    record = logging.LogRecord("ringmaster", logging.INFO, "a.py", 1, "%s", (text,), None)
    try:
        raise ValueError(text)
    except ValueError:
        record.exc_info = sys.exc_info()
        with redirect_stderr(io.StringIO()) as uncaught:
            write_uncaught(*sys.exc_info())
    shown = TextFormatter("%(asctime)s %(message)s").format(record)
    check(shown, text)
    check(uncaught.getvalue(), text)
    assert "\n" not in JsonFormatter("%(message)s").format(record)
    assert JsonFormatter("%(message)s").format(record).isascii()


def test_an_error_that_ends_a_thread_is_text(capsys, monkeypatch):
    def fail() -> None:
        raise ValueError("\x1b[2J[bold]")

    for module in (sys, threading):
        monkeypatch.setattr(module, "excepthook", module.excepthook)
    prepare_streams()
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    assert capsys.readouterr().err.endswith("ValueError: \\x1b[2J[bold]\n")


@any_text
def test_faults_of_the_command_line(text: str):
    with redirect_stderr(io.StringIO()) as err:
        report_faults([text, ValueError(text)])
    check(err.getvalue(), text)
    starts = [line for line in err.getvalue().split("\n") if line.strip() and not line.startswith("    ")]
    assert len(starts) <= 2


@any_text
def test_documents(text: str):
    with redirect_stdout(io.StringIO()) as out:
        write_document(text[:3000])
    check(out.getvalue(), text[:3000])


@any_text
def test_anything_that_rich_draws(text: str):
    made = console()
    table = Table(text, text, title=text, caption=text)
    table.add_row(text, text, style="red")
    tree = Tree(text)
    tree.add(text)
    for each in (text, table, tree, [text], {text: text}):
        made.print(each, style="red")
    made.rule(text)
    check(printed(made)[:50_000], text)


@pytest.fixture(scope="module")
def journal(tmp_path_factory):
    return Journal(Database(f"sqlite:///{tmp_path_factory.mktemp('db')}/j.db", synced=False), batch="")


@any_text
def test_a_message_is_stored(text: str, journal: Journal):
    outcome = Outcome(status=OutcomeStatus.CRASHED, message=text)
    journal.write_job("a", status="failed", message=text, metrics={text: 1.0})
    (number,) = journal.start_segments([("a", SegmentSpec(technique=text))])
    journal.end_segment(number, JobResult(message=outcome.message))
    check(outcome.message, text)
    stored = journal.jobs()["a"].message
    stored.encode()
    assert "\0" not in stored

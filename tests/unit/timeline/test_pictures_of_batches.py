"""Pictures of a batch as SVG, as text and as Prefect artifacts, which a background worker draws during training."""

import contextvars
import threading
from base64 import b64decode
from dataclasses import replace
from uuid import UUID
from xml.etree import ElementTree

import pytest
from prefect.logging import disable_run_logger
from sqlalchemy import insert

from ringmaster.tasks.background_worker import CoalescingWorker
from ringmaster.tasks.execution.execution_events import GangReport, JobEnded
from ringmaster.tasks.planning.gantt import axis
from ringmaster.tasks.planning.series_bands import joined
from ringmaster.tasks.storage.journal import JobRecord
from ringmaster.tasks.storage.message_store import MessageStore
from ringmaster.tasks.storage.schema import JOBS
from ringmaster.tasks.timeline import prefect_artifacts
from ringmaster.tasks.timeline.drawing import (
    FAULT_MARK,
    MAX_TITLED,
    RUNNING_FILL,
    TO_COME_FILL,
    render_svg,
    rows,
)
from ringmaster.tasks.timeline.prefect_artifacts import GanttArtifact, ProgressArtifact
from ringmaster.techniques.processes.gang_events import Steps
from tests.unit.timeline.stories import Story, halfway, phase, planned

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def story(tmp_path):
    story = Story(tmp_path)
    yield story
    story.database.close()


def test_the_svg_tells_past_present_and_plan_apart(story):
    halfway(story)
    text = render_svg(story.timeline_reader().read())
    root = ElementTree.fromstring(text)
    titles = [node.text for node in root.iter(f"{SVG}title")]
    assert "a: single on 1 devices, 0 s to 4 s, crashed: rank 0 was killed" in titles
    assert "b: single on 1 devices, 1 s to 31 s, running" in titles
    assert "now" in titles
    assert sum(node.get("class") == "fault" for node in root.iter(f"{SVG}path")) == 1
    assert "forecast to end after 51 s · 2 % slower than planned (50 s)" in text


def test_a_run_has_the_prices_of_its_first_plan_until_the_newest_one_has_others(tmp_path):
    story = Story(tmp_path, series={"price_steps": ((0.0, 0.001), (10.0, 0.002)), "carbon_steps": ((0.0, 300.0),)})
    story.series["power_w"] = 100.0
    halfway(story)
    story.series["price_steps"] = ((0.0, 0.002), (7.0, 0.003), (9e9, 1.0))
    story.plan(planned("c", 0, 10, 0), planned("d", 12, 32, 0, 1), at_s=18.0)
    reader = story.timeline_reader()
    timeline = reader.read()
    price, carbon = timeline.bands
    assert price.lines == ((("n0",), ((0.0, 3.6), (10.0, 7.2), (25.0, 10.8))),)
    assert (carbon.name, carbon.lines) == ("carbon", ((("n0",), ((0.0, 300.0),)),))
    assert reader.read().bands == timeline.bands
    assert [step for _, step in timeline.later(11.0).bands[0].lines] == [((0.0, 7.2), (14.0, 10.8))]
    drawn = render_svg(timeline)
    assert drawn.count('class="series"') == 2 and "per device-hour on n0: 3.6; 7.2; 10.8" in drawn
    assert timeline.to_json()["bands"][1]["lines"] == [[["n0"], [[0.0, 300.0]]]]
    story.database.close()


def test_nodes_that_join_later_have_series_from_then_on():
    first, newest = {"price_steps": {"a": ((0.0, 1.0),)}}, {"price_steps": {"b": ((0.0, 2.0), (5.0, 3.0))}}
    assert joined(first, newest, at_s=10.0) == {"price_steps": {"a": ((0.0, 1.0),), "b": ((10.0, 2.0), (15.0, 3.0))}}


def test_what_begins_after_the_picture_of_a_batch_has_no_line_there(tmp_path):
    story = Story(tmp_path, series={"price_steps": ((0.0, 0.001),)})
    halfway(story)
    timeline = story.timeline_reader().read()
    late = (("n1",), ((1e6, 1.0),))  # of a node that joined a pool later
    for lines, num in (((*timeline.bands[0].lines, late), 1), ((late,), 0)):
        drawn = render_svg(replace(timeline, bands=(replace(timeline.bands[0], lines=lines),)))
        assert drawn.count('class="series"') == num
    story.database.close()


@pytest.mark.full
def test_pictures_of_many_jobs_stay_small(tmp_path):
    story = Story(tmp_path, nodes=[(f"n{i}", 8) for i in range(4)])
    segments = [planned(f"job{i}", i // 32, i // 32 + 1, i % 8, node=f"n{i // 8 % 4}") for i in range(1000)]
    story.plan(*segments)
    submissions = [{"batch": "", "name": f"job{i}", "status": "waiting", "step": 0} for i in range(1000)]
    rows_ = [{**row, "message": "", "details": {}} for row in submissions]
    story.database.write(lambda connection: connection.execute(insert(JOBS), rows_))
    run_timeline = story.timeline_reader().read()
    text = render_svg(run_timeline)
    assert len(run_timeline.first) == len(run_timeline.coming) == 1000 > MAX_TITLED
    assert "left out" not in text and text.count("h") > 2000  # every box is drawn
    assert len(text) < 200_000
    story.database.close()


def test_text_fills_its_columns_and_says_what_is_what_without_colours(story):
    halfway(story)
    run_timeline = story.timeline_reader().read()
    found, left_out = rows(run_timeline, 60)
    texts = {row.name: "".join(piece.text for piece in row.pieces) for row in found}
    assert left_out == 0 and {len(text) for text in texts.values()} == {60}
    assert FAULT_MARK in texts["n0:0"] and TO_COME_FILL in texts["n0:0"]
    assert RUNNING_FILL in texts["n0:1"]
    line = axis(run_timeline.width_s, 60, now_s=run_timeline.now_s)
    assert "now" in line and len(line) == 61
    assert rows(run_timeline, 60, most=2)[1] == 1


class AtOnce:
    """A background worker that runs its act in the foreground."""

    def __init__(self, act):
        self.ask = act

    def close(self):
        pass


class Artifacts:
    """Prefect's artifacts, without a server."""

    def __init__(self):
        self.texts = []

    def write(self, artifact, text):
        assert artifact == (UUID(int=7) if self.texts else None)
        self.texts.append(text)
        return UUID(int=7)


def test_a_picture_that_is_drawn_after_its_flow_run_has_ended_raises_nothing(story):
    tried = []

    def write(artifact, text):
        if artifact is not None:
            tried.append(text)
            raise RuntimeError("Cannot send a request, as the client has been closed.")  # the message of httpx
        return UUID(int=7)

    with disable_run_logger():
        gantt = GanttArtifact(story.timeline_reader(), write=write, in_background=AtOnce)
        gantt.close()
    assert len(tried) == 1


def test_the_picture_in_prefect_follows_the_batch_but_not_each_step(story):
    halfway(story)
    artifacts, clock = Artifacts(), iter([0.0, 4.0, 11.0, 11.0, 12.0, 13.0, 13.0])
    gantt = GanttArtifact(
        story.timeline_reader(),
        write=artifacts.write,
        in_background=AtOnce,
        clock=lambda: next(clock),
    )
    number = story.journal.segments("b")[0].id
    for i in range(2):
        event = Steps(first_step=0, seconds=(2.0, 2.0))
        MessageStore(story.database).store(number, "n0", events=[(i, event)])
        gantt.listen(GangReport(number=number, job="b", event=event))
    assert len(artifacts.texts) == 2
    first, second = (_picture(text) for text in artifacts.texts)
    assert "forecast to end after 51 s" in first and "forecast to end after 54 s" in second
    ended = JobEnded(record=JobRecord(name="b", status="done"))
    gantt.listen(ended)
    assert len(artifacts.texts) == 2
    for name in "bcd":
        story.journal.write_job(name, status="done")
    gantt.listen(ended)
    assert len(artifacts.texts) == 3
    gantt.close()
    assert len(artifacts.texts) == 4


def test_what_is_done_behind_is_done_once_more_after_it_was_asked_for():
    acts, is_at_it, may_go_on = [], threading.Event(), threading.Event()

    def act():
        acts.append(where.get())
        is_at_it.set()
        may_go_on.wait(120)

    where = contextvars.ContextVar("where")
    where.set("the flow's context")
    behind = CoalescingWorker(act, name="test")
    behind.ask()
    assert is_at_it.wait(120)
    for _ in range(3):
        behind.ask()  # a running act blocks no caller
    behind.close(timeout_s=0.0)
    assert len(acts) == 1
    may_go_on.set()
    behind.close()
    assert acts == ["the flow's context"] * 2


def _picture(text):
    head, _, data = text.partition("(data:image/svg+xml;base64,")
    assert head == "![Gantt chart]"
    return b64decode(data.partition(")")[0]).decode()


def test_the_progress_bar_follows_jobs_whose_steps_have_changed(story, monkeypatch):
    shares = []
    monkeypatch.setattr(
        prefect_artifacts, "create_progress_artifact", lambda progress, **_: shares.append(progress) or UUID(int=1)
    )
    monkeypatch.setattr(prefect_artifacts, "update_progress_artifact", lambda _, *, progress: shares.append(progress))
    monkeypatch.setattr(prefect_artifacts, "CoalescingWorker", lambda act, **_: AtOnce(act))
    story.journal.write_job("a", status="running", step=10)
    story.journal.write_job("b", status="done", step=100)
    progress = ProgressArtifact(story.journal, totals={"a": 100, "b": 100})
    story.journal.write_job("a", phases=(phase(100), phase(40)))
    progress.listen(JobEnded(record=JobRecord(name="b", status="done")))
    assert shares == [pytest.approx(55.0), pytest.approx(100 * 110 / 140)]
